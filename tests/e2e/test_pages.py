"""The code of the pages, and an example, run as they stand against the real service."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from examples import grpo
from ratoon.model.tokenizer import EOS_TOKEN
from ratoon_client import RatoonClient
from tests.client.ctl import Ctl
from tests.client.fake_engine import serving_engine
from tests.running_service import Service
from tests.sampling_engine import SamplingEngine

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
README, RECIPES = ROOT / "README.md", ROOT / "docs" / "recipes.md"
NUM_UPDATES = 40
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DIGITS = b"0123456789"
# The second sampler, in the same words. A turn that is cut ends its path; after the other one come
# the tool's answer, framed by the template of the presets, and two turns.
CHECKS = """
assert graded("1+1=?", "2", 0, sglang_samples).rollouts
context = [*b"\\n", 257, *b"tool\\n4", 258, *b"\\n", 257, *b"assistant\\n"]
assert between_turns({"role": "tool", "content": "4"}) == context
rollouts = played("1+1=?", "2", 0).rollouts
assert [[run.trained for run in each.content] for each in rollouts] == [
    [True], [True, False, True], [True, False, True]
]
assert rollouts[1].content[0].tokens.tolist() == rollouts[2].content[0].tokens.tolist()
# The mask is exact, and so is rho: each token of the tree is run once.
paths_of = [
    [token for asked, tokens, _ in calls[-1:] for token in asked + tokens] for calls in records
]
assert report.trained_tokens == sum(len(tokens) for calls in records for _, tokens, _ in calls)
assert report.unshared_tokens == sum(len(path) for path in paths_of)
assert report.packed_tokens == len(
    {tuple(path[: end + 1]) for path in paths_of for end in range(len(path))}
)
assert 1.5 < report.token_reduction == report.unshared_tokens / report.packed_tokens < 2
"""

Run = Callable[[str], str]


@pytest.fixture
def run(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Runs code of a page, which names the service once, in the test's folder; gives its output."""
    monkeypatch.chdir(tmp_path)

    def execute(code: str) -> str:
        assert code.count("grpc://127.0.0.1:8443") == 1
        address = f"grpc://{service.addresses.grpc}"
        exec(code.replace("grpc://127.0.0.1:8443", address), {"__name__": "__main__"})  # noqa: S102
        return capsys.readouterr().out

    return execute


def _blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_readme_example_learns(run: Run, tmp_path: Path) -> None:
    (code,) = _blocks(README)
    assert "next_seq() <= 20" in code
    # Stopped half-way, and run again.
    halves = [run(code.replace("<= 20", "<= 10")), run(code)]
    rewards = [
        [float(text) for text in re.findall(r"^version \d+, reward (\S+),", half, re.MULTILINE)]
        for half in halves
    ]
    assert [len(half) for half in rewards] == [10, 10]
    assert rewards[1][-1] > rewards[0][0] + 0.5
    assert (tmp_path / "weights" / "version-10" / "config.json").is_file()
    # What the sampler said of its tokens is what the trainer says of them.
    gaps = [abs(float(gap)) for half in halves for gap in re.findall(r"sampler KL (\S+),", half)]
    assert len(gaps) == 20
    assert max(gaps) < 1e-5
    # Where all rewards are equal nothing is run, and a figure that was not computed ended the loop
    # in a TypeError.
    code, number = re.subn(r"reward=sum\(.*", "reward=1.0,", code)
    assert number == 1
    for old, new in (("<= 20", "<= 2"), ('"first"', '"equal"'), ('"weights"', '"equal"')):
        code = code.replace(old, new)
    equal = re.findall(r"^version 0, reward 1, .*sampler KL none,", run(code), re.MULTILINE)
    assert len(equal) == 2


@pytest.mark.more
def test_readme_example_runs_on_a_model_folder(run: Run, service: Service, tmp_path: Path) -> None:
    """With merges, a vocabulary and a template of its own, which the published folders keep."""
    assert service.config.models_root is not None
    _save_model(service.config.models_root / "own")
    (code,) = _blocks(README)
    for old, new in (
        ('preset="tiny"', 'model_folder="own"'),
        ('"first"', '"own"'),
        ("<= 20", "<= 2"),
    ):
        assert old in code
        code = code.replace(old, new)
    assert "version 2, reward" in run(code)
    published = tmp_path / "weights" / "latest"
    tokenizer = AutoTokenizer.from_pretrained(published)
    assert tokenizer.chat_template == TEMPLATE
    assert len(tokenizer.encode("two and two")) < len("two and two")


def _save_model(folder: Path) -> None:
    """A small model of random weights, with a tokenizer that is trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["what is two and two? 2+2=4"] * 8, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    assert isinstance(fast.eos_token_id, int)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attention_dropout=0.0,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _commands(*names: str, heading: str = "") -> list[list[str]]:
    """Words of the commands of the page on training that begin with a name, or of one section."""
    text = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    commands = [shlex.split(line) for line in re.findall(r"^    (\S.*)$", text, re.MULTILINE)]
    return [words for words in commands if words[0] in names or not names]


def test_every_command_of_the_page_on_training_is_known() -> None:
    runs = _commands("python")
    assert len([grpo.parse(command[2:]) for command in runs]) >= 7
    others = _commands("ratoon", "ratoonctl", "head", "VLLM_SERVER_DEV_MODE=1")
    assert len(runs) + len(others) == len(_commands())


@pytest.mark.more
def test_the_example_learns_and_goes_on_where_it_was_stopped(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The page's first command, stopped in between, and at the end its commands to go back,
    export and delete."""
    url = f"grpc://{service.addresses.grpc}"
    monkeypatch.chdir(ROOT)

    def runs(*options: str) -> grpo.Run:
        return grpo.main([*_commands("python")[0][2:], "--url", url, *options])

    first = runs("--updates", "20", "--work", str(tmp_path / "work"))
    # Another directory and process state: only the service knows what was done.
    second = runs("--work", str(tmp_path / "again"))
    assert (len(first.reports), len(second.reports)) == (20, NUM_UPDATES - 20)
    assert first.rewards.keys() | second.rewards.keys() == {0, 10, 20, 30, 40}
    assert second.rewards[40] > first.rewards[0] + 0.2
    assert second.reports[0].staleness_max == 0
    # What the sampler said of its tokens is what the trainer says of them.
    gaps = [report.sampler_kl for report in (*first.reports, *second.reports)]
    assert max(abs(gap) for gap in gaps if gap is not None) < 1e-4
    with RatoonClient(url) as client:
        saved = [checkpoint.checkpoint_id for checkpoint in client.list_checkpoints("case")]
        assert [name for name in saved if name.startswith("update-")] == ["update-15", "update-30"]
        # Where all rewards are equal there is no step.
        taken = [report for report in (*first.reports, *second.reports) if not report.skipped]
        assert client.get_policy("case").version == len(taken) > NUM_UPDATES - 10
    renamed = {"grpo": "case", "update-100": "update-30", "update-50": "update-15"}
    listed, loaded, deleted, exported, ended = (
        [renamed.get(word, word) for word in words[1:]]
        for words in _commands("ratoonctl", heading="Stop, resume, export, delete")
    )
    capsys.readouterr()
    ctl = Ctl(url, capsys, 60)
    assert {"update-15", "update-30"} <= {each["checkpoint_id"] for each in ctl.json(*listed)}
    ctl.json(*loaded)
    at_30 = [report for report in (*first.reports, *second.reports)[:30] if not report.skipped]
    with RatoonClient(url) as client:
        assert client.get_policy("case").version == len(at_30)
    # The load took the seq of update 41.
    third = runs("--updates", "43", "--work", str(tmp_path / "again"))
    assert [report.staleness_max for report in third.reports] == [0, 0]
    gaps = [report.sampler_kl for report in third.reports]
    assert max(abs(gap) for gap in gaps if gap is not None) < 1e-4
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    ctl.json(*deleted)
    assert "update-15" not in {each["checkpoint_id"] for each in ctl.json(*listed)}
    with RatoonClient(url) as client:
        assert ctl.json(*exported)["version"] == client.get_policy("case").version
    assert AutoTokenizer.from_pretrained(tmp_path / exported[-1]).eos_token_id == EOS_TOKEN
    ctl.json(*ended)
    assert "case" not in {each["policy_id"] for each in ctl.json("runs")}


@pytest.mark.more
def test_the_example_adapts_a_folder_by_its_own_template_after_a_warm_start(
    service: Service, tmp_path: Path
) -> None:
    assert service.config.models_root is not None
    folder = service.config.models_root / "chat"
    _save_model(folder)
    turns = [{"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": "4"}]
    data, sft = tmp_path / "data.jsonl", tmp_path / "sft.jsonl"
    rewards = ROOT / "examples" / "case" / "reward.py"
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    data.write_text(json.dumps({"messages": turns[:1], "letters": letters}) + "\n")
    sft.write_text(json.dumps({"messages": turns}) + "\n")
    url = f"grpc://{service.addresses.grpc}"
    options = ["--url", url, "--policy", "chat", "--work", str(tmp_path / "work"), "--updates", "2"]
    warm = ["--sft", str(sft), "--sft-updates", "8", "--learning-rate", "1e-2", "--prompts", "1"]
    lora = ["--lora", "4", "--base", str(folder), "--dtype", "float32", "--max-tokens", "4"]
    run = grpo.main(["chat", str(data), str(rewards), *options, *warm, *lora])
    losses = [report.loss for report in run.reports[:8]]
    assert None not in losses
    assert cast("float", losses[-1]) < cast("float", losses[0]) - 0.5
    assert run.version == len(run.reports) == 10
    with RatoonClient(url) as client:
        client.delete_policy("chat").result()


@pytest.mark.more
@pytest.mark.parametrize("loss", ["dapo", "dr_grpo", "gspo"])
def test_the_example_trains_with_the_losses_that_its_help_names(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    """Red before: dr_grpo was refused for want of a divisor, gspo of old log-probs."""
    monkeypatch.chdir(ROOT)
    url, name = f"grpc://{service.addresses.grpc}", f"with-{loss.replace('_', '-')}"
    options = ["--url", url, "--policy", name, "--work", str(tmp_path), "--loss", loss]
    run = grpo.main([*_commands("python")[0][2:], *options, "--updates", "1"])
    assert [report.skipped for report in run.reports] == [False]
    with RatoonClient(url) as client:
        client.delete_policy(name).result()


@pytest.mark.more
def test_the_commands_for_gsm8k_run(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model of that name, which a warm start has taught the one answer of its problems.

    The server is left on version 0 in between: the script, started again, loads what it lacks.
    """
    assert service.config.models_root is not None
    _save_model(service.config.models_root / "qwen3-0.6b")
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    lines = [
        {"question": f"what is {n} and two?", "answer": f"{n}+2=<<{n}+2=4>>4\n#### 4"}
        for n in ("two", "2", "two two", "2 2")
    ]
    for name in ("train.jsonl", "test.jsonl"):
        Path(name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    reward = grpo.read_task(Path("examples/gsm8k/reward.py"))
    assert reward.messages is not None
    turn = {"role": "assistant", "content": "#### 4"}
    taught = [{"messages": [*reward.messages(line), turn]} for line in lines]
    Path("sft.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in taught))

    head, first, serve, then = _commands(heading="Train Qwen3-0.6B on GSM8K")
    subprocess.run(["bash", "-c", shlex.join(head).replace("'>'", ">")], check=True)
    assert Path("held-out.jsonl").read_text() == Path("test.jsonl").read_text()
    url = f"grpc://{service.addresses.grpc}"
    small = ["--url", url, "--dtype", "float32", "--max-tokens", "12", "--responses", "4"]
    grpo.main([*first[2:], *small])
    assert serve[1:3] == ["vllm", "serve"]
    stop = AutoTokenizer.from_pretrained(serve[3]).eos_token_id
    shutil.copytree(serve[3], "left")
    warm = ["--sft", "sft.jsonl", "--sft-updates", "32", "--learning-rate", "1e-2"]
    warm += ["--prompts", "4", "--eval-every", "1"]
    runs: list[grpo.Run] = []
    for updates in ("1", "2"):
        engine = SamplingEngine(Path("left"), stop)
        with serving_engine(engine) as engine.url:
            there = [then[: then.index("--vllm")], then[then.index("--vllm") + 2 :]]
            command = [*there[0][2:], *there[1], "--vllm", engine.url, *small, *warm]
            runs.append(grpo.main([*command, "--updates", updates]))
    assert [len(run.reports) for run in runs] == [33, 1]
    assert runs[0].rewards[0] == runs[1].rewards[1] == 1.0
    for report in (runs[0].reports[-1], runs[1].reports[-1]):
        assert report.num_sequences == 16
        assert (report.reward_mean or 0.0) > 0.2
        assert report.staleness_max == 0
        assert not [each for each in report.warnings if each.kind == "wrong_logprobs"]
    with RatoonClient(url) as client:
        client.delete_policy("gsm8k").result()


@pytest.mark.parametrize(
    ("response", "answer", "points"),
    [
        ("3+4=7\n#### 7", "3+4=<<3+4=7>>7\n#### 7", 1.0),
        ("####7.0", "#### 7", 1.0),
        ("#### $1,234", "#### 1234", 1.0),
        ("#### 1234 pens.", "#### 1,234", 1.0),
        ("#### -3", "#### -3", 1.0),
        ("#### 3", "#### -3", 0.0),
        ("#### 7\nno: #### 8", "#### 7", 0.0),
        ("the answer is 7", "#### 7", 0.0),
        ("#### seven", "#### 7", 0.0),
        ("", "#### 7", 0.0),
        ("#### 77", "#### 7", 0.0),
    ],
)
def test_a_solution_of_gsm8k_is_right_by_its_number(
    response: str, answer: str, points: float
) -> None:
    task = grpo.read_task(ROOT / "examples" / "gsm8k" / "reward.py")
    assert task.reward(response, {"answer": answer}) == points


@pytest.mark.parametrize(
    ("data", "reward", "said"),
    [
        ('{"prompt": "a"}\n\n{"prompt": b}\n', "reward = len", "data.jsonl:3: expected an object"),
        ("[1]", "reward = len", "data.jsonl:1: expected an object"),
        ("\n", "reward = len", "data.jsonl: no line of JSON"),
        (
            '{"prompt": "a"}\n{"question": "b"}\n',
            "reward = len",
            "data.jsonl:2: a line with question",
        ),
        ('{"prompt": "a"}\n', "", "reward.py: no function reward("),
    ],
)
def test_the_example_says_which_line_of_its_files_is_wrong(
    data: str, reward: str, said: str, tmp_path: Path
) -> None:
    """Red before: tracebacks of a parser, some of them after the policy had been created."""
    (tmp_path / "data.jsonl").write_text(data)
    (tmp_path / "reward.py").write_text(reward)
    # Nobody serves here: the files are looked at before anything is sent.
    files = [str(tmp_path / name) for name in ("data.jsonl", "reward.py")]
    with pytest.raises(SystemExit, match=re.escape(said)):
        grpo.main(["tiny", *files, "--url", "grpc://127.0.0.1:9"])


@pytest.mark.parametrize(("sft", "every"), [(0, 0), (3, 0), (0, 4), (5, 2)])
def test_every_seq_is_one_call_of_the_example(sft: int, every: int) -> None:
    calls = [grpo.call_of(seq, sft_updates=sft, save_every=every) for seq in range(1, 40)]
    assert [call.number for call in calls if call.kind == "sft"] == list(range(sft))
    updates = [call.number for call in calls if call.kind == "grpo"]
    assert updates == list(range(len(updates)))
    saves = [place for place, call in enumerate(calls) if call.kind == "save"]
    assert [calls[place].number for place in saves] == [
        every * (index + 1) for index in range(len(saves))
    ]
    assert all(calls[place].number == calls[place - 1].number + 1 for place in saves)
    assert bool(saves) == bool(every)


def test_an_epoch_of_the_example_has_every_prompt_once() -> None:
    examples = [{"n": n} for n in range(12)]
    for epoch in range(3):
        batches = [grpo.batch_of(examples, 4 * epoch + number, 3) for number in range(4)]
        assert sorted(each["n"] for batch in batches for each in batch) == list(range(12))


@pytest.mark.more
def test_the_page_on_custom_losses_runs(run: Run, service: Service) -> None:
    """Its loss goes down."""
    (code,) = _blocks(ROOT / "docs" / "custom-losses.md")
    losses = [float(text) for text in re.findall(r"loss (\S+)", run(code))]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01
    with RatoonClient(service.addresses.grpc) as client:
        client.delete_policy("preferences").result()


@pytest.mark.more
def test_the_example_of_the_clients_readme_runs(run: Run, service: Service, tmp_path: Path) -> None:
    (code,) = _blocks(ROOT / "clients" / "python" / "README.md")
    out = run(code)
    number = r"-?\d\.\d+(e-\d+)?"
    assert re.match(rf"version 1, loss {number}\nverified weights in weights/version-1\n", out)
    assert (tmp_path / "weights" / "latest" / "model.safetensors").is_file()
    with RatoonClient(service.addresses.grpc) as client:
        client.delete_policy("copy").result()


class Samplers(BaseHTTPRequestHandler):
    """Answers as vLLM's completions and SGLang's generate do: digits, then an end of turn.

    A request that is not of token ids, or asks for another distribution, has no answer.
    """

    random = random.Random(0)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body: dict[str, Any] = json.loads(self.rfile.read(length))
        answers = {
            "/v1/completions": self._vllm,
            "/inference/v1/generate": self._vllm_nucleus,
            "/generate": self._sglang,
        }
        data = json.dumps(answers[self.path](body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check(body["prompt"], body)
        assert body["logprobs"] == 0
        assert body["return_token_ids"] is True
        return {
            "choices": [
                {
                    "token_ids": tokens,
                    "logprobs": {"token_logprobs": logprobs},
                    "finish_reason": "stop" if tokens[-1] == EOS_TOKEN else "length",
                }
                for tokens, logprobs in self._samples(body["n"])
            ]
        }

    def _vllm_nucleus(self, body: dict[str, Any]) -> dict[str, Any]:
        """A sample of two tokens each, at most."""
        sampling = body["sampling_params"]
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (1.0, 0.95, 64)
        assert "n" not in sampling
        assert all(isinstance(token, int) for token in body["token_ids"])
        ((tokens, _),) = self._samples(1)
        masks = [[token, DIGITS[0]] if token != DIGITS[0] else [token] for token in tokens]
        return {
            "choices": [
                {
                    "token_ids": tokens,
                    "logprobs": {"content": [{"logprob": -math.log(len(mask))} for mask in masks]},
                    "sampling_mask": masks,
                }
            ]
        }

    def _sglang(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        sampling = body["sampling_params"]
        self._check(body["input_ids"], sampling)
        assert body["return_logprob"] is True
        return [
            {
                "meta_info": {
                    "output_token_logprobs": [
                        [logprob, token, None]
                        for token, logprob in zip(tokens, logprobs, strict=True)
                    ],
                    "finish_reason": {"type": "stop" if tokens[-1] == EOS_TOKEN else "length"},
                }
            }
            for tokens, logprobs in self._samples(sampling["n"])
        ]

    def _check(self, prompt: list[int], sampling: dict[str, Any]) -> None:
        assert prompt
        assert all(isinstance(token, int) for token in prompt)
        assert (sampling["temperature"], sampling["top_p"]) == (1.0, 1.0)
        assert sampling["top_k"] <= 0

    def _samples(self, count: int) -> Iterator[tuple[list[int], list[float]]]:
        for index in range(count):
            last = EOS_TOKEN if index % 4 else self.random.choice(DIGITS)
            tokens = [*self.random.choices(DIGITS, k=3), last]
            yield tokens, [-math.log(260)] * len(tokens)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Not to the tests' output."""


@pytest.fixture
def sampler() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Samplers)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.mark.more
def test_every_recipe_runs(run: Run, sampler: str) -> None:
    blocks = _blocks(RECIPES)
    assert len(blocks) == RECIPES.read_text(encoding="utf-8").count("```") // 2 >= 7
    code = "\n".join(blocks)
    assert code.count("http://127.0.0.1:8100") == 1
    out = run(code.replace("http://127.0.0.1:8100", sampler) + CHECKS)
    losses = [float(text) for text in re.findall(r"sft: loss (\S+) a token", out)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True), "three steps on the same demonstrations"
    for recipe in (
        "grpo",
        "nucleus",
        "sft",
        "turns",
        "asynchronous",
        "dapo",
        "gspo",
        "kl",
        "lora",
        "merged",
        "export",
        "custom",
    ):
        assert f"{recipe}: " in out, out
