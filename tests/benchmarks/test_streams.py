"""What the benchmarks of streams are made of: readers that miss no byte, deltas, their tables."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks.service import floor
from benchmarks.stream import bare_servers, delta, gpu, loop, main
from benchmarks.stream.main import _File, _read_http
from examples import vllm_loop

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# What a document shows: of as many GPUs as were measured.
LOOP = max(RESULTS.glob("h100*/loop.json"))


def test_bare_servers_send_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 5000)
    whole = _File("file", "d", path.stat().st_size, "/", path)
    longer = _File("file", "d", whole.size_bytes + 1, "/", path)
    with bare_servers.serving(path) as (http_port, grpc_port):
        _read_http(http_port, whole)
        bare_servers.read_grpc(grpc_port, "p", whole)
        with pytest.raises(RuntimeError, match="bytes"):
            _read_http(http_port, longer)
        with pytest.raises(RuntimeError, match="bytes"):
            bare_servers.read_grpc(grpc_port, "p", longer)


def test_deltas_are_measured_by_kind_and_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "SHARES", (0.01, 0.5))
    monkeypatch.setattr(delta, "BLOCK_WORDS", 2**16)
    rows = delta.measure(tmp_path, 1, 1, 0)
    assert [(row["kind"], row["share"]) for row in rows] == [
        ("step", 0.01),
        ("step", 0.5),
        ("draw", 0.01),
        ("draw", 0.5),
    ]
    for row in rows:
        assert row["changed_share"] == pytest.approx(row["share"], rel=0.1)
        assert row["bound_percent"] < row["size_percent"] < 60


@pytest.mark.parametrize(
    ("write", "page", "path"),
    [
        (gpu.write_markdown, "performance.md", RESULTS / "h100" / "streams.json"),
        (loop.write_markdown, "vllm_loop.md", LOOP),
        (main.write_markdown, "performance.md", RESULTS / "cpu" / "streams.json"),
        (floor.write_markdown, "performance.md", RESULTS / "cpu" / "floor.json"),
    ],
)
def test_documents_show_the_committed_figures(
    write: Callable[[dict[str, Any], Path, str], None], page: str, path: Path, tmp_path: Path
) -> None:
    document, written = ROOT / "docs" / page, tmp_path / page
    written.write_text(document.read_text(encoding="utf-8"), encoding="utf-8")
    result = json.loads(path.read_text(encoding="utf-8"))
    write(result, written, (Path("..") / path.relative_to(ROOT)).as_posix())
    assert document.read_text(encoding="utf-8") == written.read_text(encoding="utf-8")


def _evaluation(version: int, other: int | None, other_distance: float | None) -> dict[str, Any]:
    fields = {"version": version, "reward": version / 100, "distance": 0.001 * (version + 1)}
    both = {"other_version": other, "other_distance": other_distance}
    return {"event": "evaluation", **fields, **both}


def _served(version: int, seconds: float | None) -> dict[str, Any]:
    names = ("pause_s", "commit_s", "fetch_s", "verify_s")
    fields = dict.fromkeys(names, seconds or 9.0)
    return {"event": "served", "version": version, **fields, "first_token_s": seconds}


def test_figures_of_a_loop_follow_from_its_events() -> None:
    events: list[Mapping[str, Any]] = [
        _served(0, None),
        _evaluation(0, None, None),
        {"event": "update", "version": 1, "entropy": 5.0},
        # Skipped: the version stays.
        {"event": "update", "version": 1},
        _served(1, 1.0),
        {"event": "update", "version": 2},
        {"event": "failure", "version": 2, "error": "no answer"},
        _served(2, 2.0),
        _served(3, 6.0),
        _evaluation(10, 0, 0.5),
        _evaluation(30, 0, 0.9),
    ]
    found = loop.figures([loop.kept(event) for event in events])
    assert (found["versions"], found["failures"]) == (2, 1)
    assert (found["first_reward"], found["last_reward"]) == (0.0, 0.3)
    assert (found["pause_s"], found["pause_s_worst"]) == (2.0, 6.0)
    assert (found["pull_s"], found["first_token_s"]) == (4.0, 2.0)
    assert found["distance"] == pytest.approx(0.043 / 3)
    assert (found["other_distance"], found["versions_apart"]) == (pytest.approx(0.7), 20)


def test_cases_of_one_server_share_it() -> None:
    servers = {name: loop.CASES[name].server for name in loop.CASES}
    assert set(loop.DEFAULT) <= set(servers)
    assert servers["learns"] == servers["control"]
    assert servers["0.6B ratoon"] == servers["0.6B reload"] != servers["0.6B nccl"]


class Stub:
    """A service, a client or a server that does nothing; each keeps what it was made with."""

    made: ClassVar[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
    grpc = "grpc://127.0.0.1:1"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.made.append((arguments, options))

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: self


def test_trainer_and_sampler_have_a_gpu_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot run without GPUs: all commands and environments of the default cases."""
    runs: list[tuple[argparse.Namespace, Mapping[str, str]]] = []

    def run(_: object, command: Sequence[str], environment: Mapping[str, str], __: Path) -> Any:
        runs.append((vllm_loop.parser().parse_args(command[2:]), environment))
        return {}

    monkeypatch.setattr(Stub, "made", [])
    monkeypatch.setattr(loop, "_write_model", lambda *_: None)
    monkeypatch.setattr(loop, "_wait_for", lambda *_: None)
    monkeypatch.setattr(loop, "_run", run)
    monkeypatch.setattr(loop, "Service", Stub)
    monkeypatch.setattr(loop, "RatoonClient", Stub)
    monkeypatch.setattr(subprocess, "Popen", Stub)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    args = argparse.Namespace(
        cases=loop.DEFAULT,
        logs=None,
        seed=0,
        states="auto",
        vllm_python="python",
        vllm_path="site",
    )
    assert len(list(loop.measure(args, tmp_path))) == len(loop.DEFAULT)

    servers = {
        command[command.index("--port") + 1]: (command, options["env"])
        for (command, *_), options in Stub.made
        if "env" in options
    }
    (service,) = (options for _, options in Stub.made if "weights_root" in options)
    assert len(servers) == 4
    for name, (asked, environment) in zip(loop.DEFAULT, runs, strict=True):
        command, of_vllm = servers[asked.vllm.rpartition(":")[2]]
        assert str(tmp_path / "models" / loop.CASES[name].size.name) in command
        assert (asked.vllm_backend == "nccl") == ('{"backend": "nccl"}' in command)
        assert of_vllm["CUDA_VISIBLE_DEVICES"] == "1"
        assert environment["CUDA_VISIBLE_DEVICES"] == "0"
        assert environment["RATOON_WEIGHTS_ROOT"] == service["weights_root"]
    assert service["environment"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert [asked.vllm_backend for asked, _ in runs] == [
        *("reload", "reload", "ratoon", "nccl", "ratoon"),
    ]


def test_a_loop_that_fails_is_told(tmp_path: Path) -> None:
    """Also one that writes nothing."""
    command = [sys.executable, "-c", "import sys; sys.exit(3)"]
    row = loop._run(loop.CASES["learns"], command, {}, tmp_path / "learns")
    assert (row["status"], row["events"]) == (3, [])
    document = tmp_path / "page.md"
    document.write_text(f"{loop.BEGIN}\n{loop.END}\n")
    where = {"gpu": "H100", "num_gpus": 2, "versions": {"torch": "2"}, "commit": "c" * 40}
    loop.write_markdown({**where, "cases": [row]}, document, "loop.json")
    assert "| learns (ended with 3) | 0 | – |" in document.read_text()
    assert "trainer and vLLM have a GPU each" in document.read_text()
