"""The command line: what it prints, and what it exits with."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.main import get_command

import ratoon_client
from ratoon_client import EngineError, RatoonClient, VllmAdapter
from ratoon_client.cli.app import cli
from ratoon_client.cli.options import MessageOptions
from ratoon_client.cli.policies import POLICY
from ratoon_client.cli.training import LOSS, OPTIM
from ratoon_client.config import DEFAULT_URL, default_url
from ratoon_proto.v1 import service_pb2
from tests.client.ctl import Ctl
from tests.client.fake_service import FakeService, Fault, LostAnswerError, RefusalError

LINE = json.dumps(
    {
        "group_id": "a",
        "prompt": [1],
        "rollouts": [{"response": [2, 3], "sampler_logprobs": [-0.5, -0.5], "reward": 1.0}],
    }
)
NOBODY = "127.0.0.1:9"


@pytest.fixture
def wire() -> str:
    """Commands are the same over both wires."""
    return "grpc"


@pytest.fixture
def ctl(url: str, capsys: pytest.CaptureFixture[str]) -> Ctl:
    return Ctl(url, capsys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "groups.jsonl"
    path.write_text(LINE + "\n")
    return path


def test_policies_are_made_listed_and_removed(service: FakeService, ctl: Ctl):
    made = ctl.json("policies", "create", "q", "--preset", "tiny", "--seed", "5")
    assert (made["spec"]["policy_id"], made["spec"]["seed"]) == ("q", 5)
    assert [policy["spec"]["policy_id"] for policy in ctl.json("policies", "list")] == ["p", "q"]
    status, out, _ = ctl("policies", "list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["policy", "p", "q"]
    assert ctl.json("policies", "get", "q")["next_seq"] == 1
    assert ctl.json("policies", "delete", "q") == {"policy_id": "q"}
    assert list(service.policies) == ["p"]


def test_options_of_create_reach_the_service(service: FakeService, ctl: Ctl):
    ctl.json(
        *("policies", "create", "q", "--model-folder", "llama", "--lora-rank", "8"),
        *(
            "--lora-target-modules",
            "q_proj,v_proj",
            "--dtype",
            "bfloat16",
            "--sequencing",
            "server",
        ),
    )
    (request,) = [r for name, r in service.requests if name == "CreatePolicy"]
    spec: Any = request.spec  # pyright: ignore[reportAttributeAccessIssue]
    assert (spec.model_folder, spec.lora.rank, spec.lora.alpha) == ("llama", 8, 16.0)
    assert list(spec.lora.target_modules) == ["q_proj", "v_proj"]
    assert (spec.dtype, spec.sequencing) == (2, 2)


def test_update_sends_the_files_groups_and_shows_the_report(
    service: FakeService, ctl: Ctl, file: Path
):
    step = ctl.json("update", "p", str(file), "--lr", "0.001", "--loss", "dapo")
    assert (step["seq"], step["step"]["version"], step["step"]["report"]["loss"]) == (1, 1, 0.5)
    (request,) = [r for name, r in service.requests if name == "Update"]
    sent: Any = request
    assert sent.batch.groups[0].rollouts[0].reward == 1.0
    assert (sent.loss.kind, sent.optim.learning_rate, sent.key.seq) == (3, 0.001, 1)
    status, out, _ = ctl("update", "p", str(file), "--lr", "0.001")
    assert status == 0
    assert "token reduction  2" in " ".join(out.split("\n"))


def test_update_without_waiting_can_be_watched(service: FakeService, ctl: Ctl, file: Path):
    service.polls_until_done = 3
    begun = ctl.json("update", "p", str(file), "--lr", "0.001", "--no-wait")
    assert begun["state"] == "running"
    status, out, err = ctl("--json", "watch", begun["operation_id"])
    assert (status, json.loads(out)["state"]) == (0, "done")
    assert "update running 1/4 micro-batches" in err


def test_weights_are_followed_into_one_engine(ctl: Ctl, tmp_path: Path):
    follow = ("weights", "follow", "p", "--root", str(tmp_path / "mirror"))
    status, _, err = ctl(*follow, "--vllm", "http://localhost:1", "--sglang", "http://localhost:1")
    assert (status, "expected one engine" in err) == (2, True)
    with VllmAdapter("http://localhost:1"):
        status, _, err = ctl(*follow, "--vllm", "http://localhost:1")
    assert (status, "another receiver" in err) == (1, True)


def test_versions_come_into_vllm_by_the_backend_that_is_named(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    follow = ("weights", "follow", "p", "--root", str(tmp_path / "mirror"), "--vllm", "http://v")

    def nccl(url: str, *, device: str) -> VllmAdapter:
        raise EngineError(f"nccl: {url} from {device}")

    monkeypatch.setattr("ratoon_client.cli.weights.VllmNcclAdapter", nccl)
    status, _, err = ctl(*follow, "--vllm-backend", "nccl", "--device", "cuda:1")
    assert (status, "nccl: http://v from cuda:1" in err) == (1, True)
    assert ctl(*follow, "--vllm-backend", "nccI")[0] == 2


def test_versions_of_this_host_are_followed_from_its_folder(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def receiver(client: RatoonClient, *_: object, **__: object) -> Any:
        asked.append(client._async._config.weights_root)
        return SimpleNamespace(follow=lambda: None)

    asked: list[Path | None] = []
    monkeypatch.setattr(RatoonClient, "weight_receiver", receiver)
    follow = ("weights", "follow", "p", "--root", str(tmp_path / "mirror"))
    assert ctl(*follow)[0] == ctl(*follow, "--weights-root", str(tmp_path))[0] == 0
    assert asked == [None, tmp_path]


def test_text_needs_byte_tokens(service: FakeService, ctl: Ctl, tmp_path: Path):
    path = tmp_path / "text.jsonl"
    segments = [{"role": "user", "text": "hi"}, {"role": "assistant", "text": "ho"}]
    record = {"group_id": "t", "rollouts": [{"reward": 1.0, "segments": segments}]}
    path.write_text(json.dumps(record))
    assert ctl("update", "p", str(path), "--lr", "0.001")[0] == 2
    on_policy = ("--lr", "0.001", "--old-logprobs", "on_policy", "--byte-tokens")
    assert ctl("update", "p", str(path), *on_policy)[0] == 0
    (request,) = [r for name, r in service.requests if name == "Update"]
    assert request.loss.old_logprobs.kind == 4  # pyright: ignore[reportAttributeAccessIssue]


def test_a_policy_without_a_model_is_refused_by_the_options_that_name_one(ctl: Ctl):
    """Red before: "spec.base: got nothing", which no option is called."""
    status, out, err = ctl("policies", "create", "p")
    assert (status, out) == (2, "")
    assert "--preset, --model-folder or --send-folder" in err


def test_a_refused_call_exits_1_and_names_the_field(ctl: Ctl, tmp_path: Path):
    path = tmp_path / "empty.jsonl"
    path.write_text('{"group_id": "a", "rollouts": []}\n')
    status, out, err = ctl("update", "p", str(path), "--lr", "0.001")
    assert (status, out) == (1, "")
    assert "INVALID_ARGUMENT" in err
    assert err.count("groups[0].rollouts") == 1
    assert ctl("policies", "get", "nobody")[0] == 1


def test_an_operation_that_fails_exits_1(service: FakeService, ctl: Ctl, file: Path):
    begun = ctl.json("update", "p", str(file), "--lr", "0.001", "--no-wait")
    service.fail(begun["operation_id"], RefusalError("WORKER_LOST"))
    status, out, err = ctl("--json", "watch", begun["operation_id"])
    assert (status, json.loads(out)["state"]) == (1, "failed")
    assert "WORKER_LOST" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["update", "p"],
        ["update", "p", "BAD", "--lr", "0.001"],
        ["policies", "create", "q", "--preset", "tiny", "--model-folder", "x"],
        ["nonsense"],
    ],
)
def test_a_wrong_command_line_or_file_exits_2(
    service: FakeService, ctl: Ctl, file: Path, arguments: list[str]
):
    bad = file.with_name("bad.jsonl")
    bad.write_text("{")
    status, out, err = ctl(*(str(bad) if word == "BAD" else word for word in arguments))
    assert (status, out) == (2, "")
    assert err
    assert service.steps == 0


def _leaves(message: Any, path: str = "") -> Iterator[str]:
    """Paths of a message's fields; of a message without fields its own."""
    for field in message.fields:
        own = f"{path}{field.name}"
        below = field.message_type
        yield from _leaves(below, f"{own}.") if below is not None and below.fields else [own]


SENT = {f"sent_model.files.{name}" for name in ("name", "size_bytes", "digest")}


@pytest.mark.parametrize(
    ("options", "without"),
    [(LOSS, set()), (OPTIM, set()), (POLICY, {"policy_id", "full", *SENT})],
)
def test_every_field_of_a_call_has_an_option(options: MessageOptions, without: set[str]):
    """Only 14 of 60 fields had one. The id is an argument, `full` what there is without LoRA, and a
    folder is sent by its path."""
    names = [option.name for option in options.options()]
    assert len(set(names)) == len(names)
    had = {".".join(option.path) for option in options.options()}
    assert set(_leaves(options.message.DESCRIPTOR)) - had == without


def test_options_of_nested_messages_reach_the_service(service: FakeService, ctl: Ctl, file: Path):
    ctl.json(
        *("update", "p", str(file), "--lr", "0.1", "--kl", "k3", "--kl-coefficient", "0.01"),
        *("--kl-reference", "frozen", "--overlong-filter", "--no-drop-zero-variance-groups"),
        *("--correction-mode", "mask", "--correction-level", "token", "--correction-high", "2"),
        *("--old-logprobs", "from_forward", "--forward-operation-id", "op-9", "--beta1", "0.5"),
    )
    (sent,) = [cast("Any", r) for name, r in service.requests if name == "Update"]
    assert (sent.loss.kl.kind, sent.loss.kl.coefficient, sent.loss.kl.reference) == (3, 0.01, 2)
    assert sent.loss.WhichOneof("overlong") == "overlong_filter"
    assert sent.loss.HasField("drop_zero_variance_groups")
    assert not sent.loss.drop_zero_variance_groups
    assert (sent.loss.correction.mode, sent.loss.correction.high) == (2, 2.0)
    assert sent.loss.old_logprobs.forward_operation_id == "op-9"
    assert (sent.optim.beta1, sent.optim.HasField("beta2")) == (0.5, False)
    create = ("policies", "create", "q", "--preset", "tiny", "--publish", "every_n")
    ctl.json(*create, "--publish-every-n", "4", "--no-deterministic", "--num-workers", "2")
    (spec,) = [cast("Any", r).spec for name, r in service.requests if name == "CreatePolicy"]
    assert (spec.publish.kind, spec.publish.every_n, spec.deterministic) == (2, 4, False)
    assert (spec.parallel.num_workers, spec.WhichOneof("tuning")) == (2, None)


def test_what_a_nested_message_lacks_is_named_by_its_option(
    service: FakeService, ctl: Ctl, file: Path
):
    status, _, err = ctl("update", "p", str(file), "--lr", "0.1", "--kl", "k3")
    assert (status, "--kl-coefficient" in err) == (2, True)
    status, _, err = ctl("update", "p", str(file), "--lr", "0.1", "--staleness-max-versions", "1")
    assert (status, "--staleness-action" in err) == (2, True)
    assert not service.requests


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, (*words, name))


def test_every_command_has_help_and_a_flag_shows_no_type(ctl: Ctl, monkeypatch: pytest.MonkeyPatch):
    """`policies list` and two more had none, and each flag was of type `<bool>`."""
    monkeypatch.setenv("COLUMNS", "160")
    words = [words for words, command in _commands(get_command(cli)) if command.help]
    assert words == [words for words, _ in _commands(get_command(cli))]
    for each in (("--help",), ("policies", "create", "--help"), ("weights", "import", "--help")):
        status, out, _ = ctl(*each)
        assert (status, "<bool>" in out, "<str>" in out) == (0, False, True)


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("update p FILE --lr 0.1", "--loss", "grop"),
        ("update p FILE --lr 0.1", "--advantage", "mean"),
        ("update p FILE --lr 0.1", "--old-logprobs", "mine"),
        ("update p FILE --lr 0.1", "--clip-low", "1.5"),
        ("update p FILE --lr 0.1", "--max-grad-norm", "-1"),
        ("update p FILE --lr 0.1", "--seq", "0"),
        ("update p FILE", "--learning-rate", "-0.1"),
        ("update p", "file", "/nowhere/file.jsonl"),
        ("policies create q", "--dtype", "float8"),
        ("policies create q", "--sequencing", "nobody"),
        ("policies create q", "--lora-rank", "0"),
        ("policies create q", "--seed", "-1"),
        ("weights pull p FOLDER", "--version", "-1"),
        ("weights pull p FOLDER", "--weights-root", "/nowhere"),
        ("weights pull p", "folder", "FILE"),
        ("weights import p x", "--expected-version", "-1"),
        ("weights follow p", "--root", "FILE"),
        ("checkpoints save p", "--seq", "0"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_option(
    service: FakeService, ctl: Ctl, file: Path, command: str, option: str, value: str
):
    """A choice was text, and a number had no range: the service refused them by a field's name."""
    places = {"FILE": str(file), "FOLDER": str(file.parent)}
    words = [*command.split(), *([option] if option.startswith("-") else []), value]
    status, out, err = ctl(*(places.get(word, word) for word in words))
    assert (status, out) == (2, "")
    assert option in err
    assert "Invalid value" in err
    assert not service.requests


def test_the_version_is_said(ctl: Ctl):
    status, out, _ = ctl("--version")
    assert status == 0
    assert re.fullmatch(
        rf"ratoonctl {re.escape(ratoon_client.__version__)} \([0-9a-f]{{12}}.*\)\n", out
    )


def test_a_url_of_no_wire_exits_2(ctl: Ctl):
    assert ctl("health", url="ftp://127.0.0.1")[0] == 2


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_nobody_there_exits_3(capsys: pytest.CaptureFixture[str], scheme: str):
    ctl = Ctl(f"{scheme}://{NOBODY}", capsys)
    for command in (["health"], ["--timeout-s", "0.2", "info"], ["runs"]):
        begun = time.monotonic()
        status, out, err = ctl(*command)
        assert (status, out) == (3, "")
        assert time.monotonic() - begun < 3
        assert f"no answer: {command[-1].capitalize()}" in err or NOBODY in err


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_health_is_0_where_all_is_well_and_1_where_not(service: FakeService, ctl: Ctl):
    status, out, _ = ctl("health")
    assert (status, out.split()) == (0, ["status", "ok"])
    service.faults = [Fault(name="Health", error=RefusalError("UNAVAILABLE", retryable=True))]
    assert ctl("health")[0] == 1
    service.faults = [Fault(name="Health", error=LostAnswerError())]
    assert ctl("health")[0] == 3


def test_info_says_what_the_service_is(ctl: Ctl):
    assert ctl.json("info")["limits"]["max_wait_s"] == 60.0
    assert "with torch" in ctl("info")[1]


def test_weights_are_pulled_and_listed(service: FakeService, ctl: Ctl, tmp_path: Path):
    service.publish(3, {"model.safetensors": b"abc" * 100, "config.json": b"{}"})
    pulled = ctl.json("weights", "pull", "p", str(tmp_path / "w"))
    assert (pulled["version"], pulled["fetched_bytes"]) == (3, 302)
    assert (Path(pulled["folder"]) / "model.safetensors").read_bytes() == b"abc" * 100
    (manifest,) = ctl.json("weights", "manifest", "p", "--version", "3")
    assert [file["name"] for file in manifest["files"]] == ["model.safetensors", "config.json"]
    assert ctl("weights", "pull", "p", str(tmp_path / "w"), "--version", "9")[0] == 1


def test_versions_and_who_serves_them_are_listed(service: FakeService, ctl: Ctl):
    """The help of `weights` promised a list, and there was none."""
    assert ctl.json("weights", "list", "p") == {"versions": [], "receivers": []}
    for version in (3, 7, 8):
        service.publish(version, {"model.safetensors": b"abc" * version, "config.json": b"{}"})
    service.acks.append(service_pb2.AckWeightsRequest(receiver_id="vllm-0", version=7))
    assert [each["version"] for each in ctl.json("weights", "list", "p")["versions"]] == [3, 7, 8]
    rows = [row.split() for row in ctl("weights", "list", "p")[1].splitlines()]
    assert [row[:2] for row in rows[1:4]] == [["8", "26"], ["7", "23"], ["3", "11"]]
    assert rows[5][:2] == ["vllm-0", "7"]
    assert ctl("weights", "list", "nobody")[0] == 1


def test_weights_are_watched(service: FakeService, ctl: Ctl):
    """Until the policy is gone, which is an error as any other."""
    service.publish(3, {"model.safetensors": b"abc" * 100})
    threading.Timer(0.3, service.policies.clear).start()
    status, out, error = ctl("weights", "watch", "p")
    assert status == 1
    assert "300" in out
    assert "POLICY_NOT_FOUND" in error


def test_a_folder_is_imported(service: FakeService, ctl: Ctl):
    imported = ctl.json("weights", "import", "p", "outer/step-1")
    assert (imported["version"], imported["dtypes"]) == (1, ["BF16", "F32"])
    options = ("--delta", "--reset-optimizer", "--expected-version", "1", "--seq", "2")
    status, out, _ = ctl("weights", "import", "p", "outer/step-2", *options)
    assert status == 0
    assert "BF16, F32" in out
    full, delta = (request for name, request in service.requests if name == "ImportWeights")
    assert full == service_pb2.ImportWeightsRequest(
        policy_id="p",
        key=service_pb2.OperationKey(seq=1),
        model_folder="outer/step-1",
        mode=service_pb2.IMPORT_MODE_FULL,
    )
    assert delta == service_pb2.ImportWeightsRequest(
        policy_id="p",
        key=service_pb2.OperationKey(seq=2),
        model_folder="outer/step-2",
        mode=service_pb2.IMPORT_MODE_DELTA,
        reset_optimizer=True,
        expected_version=1,
    )


def test_checkpoints_are_saved_loaded_and_listed(service: FakeService, ctl: Ctl):
    assert ctl.json("checkpoints", "save", "p", "c-1")["checkpoint_id"] == "c-1"
    assert ctl.json("checkpoints", "load", "p", "c-1")["spec"]["policy_id"] == "p"
    assert [c["checkpoint_id"] for c in ctl.json("checkpoints", "list", "p")] == ["c-1"]
    assert ctl("checkpoints", "save", "p", "c-1", "--overwrite", "--keep-last", "2")[0] == 0
    sent: Any = [r for name, r in service.requests if name == "SaveCheckpoint"][-1]
    assert (sent.overwrite, sent.keep_last, sent.HasField("ttl_s")) == (True, 2, False)
    assert ctl.json("checkpoints", "delete", "p", "c-1")["checkpoint_id"] == "c-1"
    assert ctl("checkpoints", "delete", "p", "c-2")[0] == 1
    assert sorted(service.policies["p"].keys) == [1, 2, 3]


def test_versions_are_published_under_a_name_and_deleted(service: FakeService, ctl: Ctl):
    service.publish(3, {"config.json": b"{}"})
    assert ctl.json("weights", "publish", "p", "v-1", "--ttl-s", "60")["version"] == 3
    assert ctl("weights", "publish", "p", "v-1", "--overwrite")[0] == 0
    first, second = [cast("Any", r) for name, r in service.requests if name == "PublishVersion"]
    assert (first.name, first.ttl_s, first.overwrite) == ("v-1", 60.0, False)
    assert (second.overwrite, second.HasField("ttl_s")) == (True, False)
    (manifest,) = ctl.json("weights", "manifest", "p", "--name", "v-1")
    assert manifest["version"] == 3
    asked: Any = [r for name, r in service.requests if name == "GetWeightManifest"][-1]
    assert (asked.name, asked.HasField("version")) == ("v-1", False)
    assert ctl.json("weights", "delete", "p", "v-1")["name"] == "v-1"
    assert ctl("weights", "delete", "p", "v-2")[0] == 1


def test_the_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RATOON_URL", raising=False)
    assert default_url() == DEFAULT_URL
    monkeypatch.setenv("RATOON_URL", "http://example.test:1")
    assert default_url() == "http://example.test:1"


def test_help_shows_the_pattern_of_an_id(ctl: Ctl, monkeypatch: pytest.MonkeyPatch):
    """Only the second pair of brackets of `[a-z0-9][a-z0-9_-]{0,63}` was shown."""
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = ctl("policies", "get", "--help")
    assert status == 0
    assert "[a-z0-9][a-z0-9_-]{0,63}" in out


def test_brackets_of_an_answer_are_no_markup(ctl: Ctl):
    """rich took `[cuda]` of a message for a style and left it out."""
    status, out, _ = ctl("checkpoints", "load", "p", "[red]x[cuda]")
    assert status == 0
    assert "[red]x[cuda]" in out
