"""Runs examples/vllm_loop.py with real vLLM servers, service and samplers on one machine.

A small policy learns the demo's task from random weights, and a control of it, whose rewards are
shuffled, does not; the geometries of Qwen3-0.6B and 8B, with random weights, are for seconds. The
trainer has the first GPU that is visible, vLLM the last. Where that is the same one, it is enough
for all cases but those of 8B and NCCL. vLLM may be another Python's.

    python -m benchmarks.stream.loop --out benchmarks/results/h100x2/loop.json --vllm-python PYTHON
    python -m benchmarks.stream.loop --report FILE --markdown docs/vllm_loop.md
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

from benchmarks.common.command import names
from benchmarks.common.document import aligned, link, markdown_table, write_section
from benchmarks.common.timing import release
from benchmarks.service.start import PATIENCE_S
from benchmarks.step.subjects import build_module
from benchmarks.step.workload import QWEN3_8B, ModelSize
from harness.gpu_results import ROOT, write_result
from harness.service import Service
from ratoon.model.presets import VOCAB_SIZE, write_tokenizer
from ratoon.sole_service import free_port
from ratoon_client import Publish, RatoonClient

BEGIN = "<!-- loop with vLLM: written by benchmarks/stream/loop.py -->"
END = "<!-- end of loop with vLLM -->"
SMALL = ModelSize(
    name="small", num_layers=4, hidden_size=128, num_heads=2, num_kv_heads=2, head_dim=64,
    intermediate_size=512, vocab_size=VOCAB_SIZE, ties_embeddings=True,
)  # fmt: skip
QWEN3_0_6B = ModelSize(
    name="Qwen3-0.6B", num_layers=28, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=128,
    intermediate_size=3072, vocab_size=151_936, ties_embeddings=True,
)  # fmt: skip
START_S = 400.0
KV_BYTES = 4 * 10**9
VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}
# All ranks are of this machine, which may have no network.
NCCL = {"NCCL_SOCKET_IFNAME": "lo"}
# Fields of an event that a result keeps.
KEPT = (
    *("event", "version", "reward", "staleness_max", "dropped_stale", "straddled_prompts"),
    *("update_s", "publish_s", "fetch_s", "verify_s", "commit_s", "pause_s", "first_token_s"),
    *("distance", "other_version", "other_distance", "error"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of the loop, by a new policy."""

    name: str
    size: ModelSize
    backend: str
    versions: int
    options: tuple[str, ...] = ()
    deltas: bool = False

    @property
    def server(self) -> Server:
        """Either kind of weight transfer reloads, too."""
        return Server(self.size, "nccl" if self.backend == "nccl" else "ratoon")


class Server(NamedTuple):
    """A vLLM server that cases may share."""

    size: ModelSize
    transfer: str


# Settings with which so small a model learns more than one constant word, in a few minutes.
_FOR_REWARD = ("--learning-rate", "2e-3")
# A learning rate that does no harm in few steps; the result of learning is not measured.
_FOR_SECONDS = ("--learning-rate", "1e-6", "--evaluate-every", "10", "--held-out", "64")
CASES = {
    case.name: case
    for case in (
        Case(name="learns", size=SMALL, backend="reload", versions=240, options=_FOR_REWARD),
        Case(
            name="control",
            size=SMALL,
            backend="reload",
            versions=120,
            options=(*_FOR_REWARD, "--shuffled-rewards"),
        ),
        *(
            Case(
                name=f"0.6B {backend}",
                size=QWEN3_0_6B,
                backend=backend,
                versions=50,
                options=_FOR_SECONDS,
            )
            for backend in ("ratoon", "nccl", "reload")
        ),
        *(
            Case(
                name=name,
                size=QWEN3_8B,
                backend="ratoon",
                versions=10,
                options=_FOR_SECONDS,
                deltas=name == "8B delta",
            )
            for name in ("8B ratoon", "8B delta")
        ),
    )
}
# In ten minutes.
DEFAULT = ("learns", "control", "0.6B ratoon", "0.6B nccl", "8B ratoon")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--out", type=Path, help="measure into this result file")
    mode.add_argument("--report", type=Path, help="print the table of this result file")
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--cases", type=names, default=DEFAULT, help=f"of {', '.join(CASES)}")
    parser.add_argument("--vllm-python", default=sys.executable, help="that has vLLM")
    parser.add_argument("--vllm-path", default="", help="its PYTHONPATH")
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"), help="work below it")
    parser.add_argument("--logs", type=Path, help="keep the servers' and the loops' output here")
    parser.add_argument(
        "--states", default="auto", help="`worker.optimizer_states`; 8B on 80 GB: bf16_8bit"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.report is not None:
        cases = json.loads(args.report.read_text(encoding="utf-8"))["cases"]
    else:
        cases: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="rt-", dir=args.root) as folder:
            for case in measure(args, Path(folder)):
                cases.append(case)
                write_result(args.out, {"cases": cases}, seed=args.seed)
    print("\n".join(aligned([[*COLUMNS.values()], *map(_cells, cases)])))
    if args.report is not None and args.markdown is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
        write_markdown(result, args.markdown, link(args.report, args.markdown))


def measure(args: argparse.Namespace, root: Path) -> Iterator[dict[str, Any]]:
    """Yields each case, with its raw events."""
    logs = args.logs or root
    cases = [CASES[name] for name in args.cases]
    for size in {case.size: None for case in cases}:
        _write_model(size, root / "models" / size.name, args.seed)
    trainer = {
        "CUDA_VISIBLE_DEVICES": _gpus()[0],
        "RATOON_WEIGHTS_ROOT": str(root / "weights"),
        **NCCL,
    }
    settings = {
        "crash_points": False,
        "worker": {"device": "cuda", "num_threads": 8, "optimizer_states": args.states},
        "weights_root": str(root / "weights"),
        "ray": {"num_cpus": 8, "temp_folder": str(root / "ray")},
    }
    with ExitStack() as opened:
        servers = {
            server: opened.enter_context(_vllm(args, server, root, logs))
            for server in dict.fromkeys(case.server for case in cases)
        }
        service = opened.enter_context(Service(root, environment=trainer, **settings))
        client = opened.enter_context(RatoonClient(service.grpc, timeout_s=PATIENCE_S))
        for number, case in enumerate(cases):
            policy, (process, port) = f"loop-{number}", servers[case.server]
            client.create_policy(
                policy,
                model_folder=case.size.name,
                dtype="bfloat16",
                seed=7,
                publish=Publish("every", deltas=case.deltas),
                recovery="fail",
            ).result(PATIENCE_S)
            _wait_for(process, port)
            command = [
                *(sys.executable, str(ROOT / "examples" / "vllm_loop.py"), "--url", service.grpc),
                *("--vllm", f"http://127.0.0.1:{port}", "--vllm-backend", case.backend),
                *("--policy", policy, "--root", str(root), "--versions", str(case.versions)),
                *case.options,
            ]
            yield _run(case, command, {**os.environ, **trainer}, logs / policy)
            client.delete_policy(policy).result(PATIENCE_S)


def _gpus() -> list[str]:
    """GPUs that this process sees, by CUDA's names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [*map(str, range(torch.cuda.device_count()))]


def _write_model(size: ModelSize, folder: Path, seed: int) -> None:
    """Write weights of the seed, and a tokenizer with as many tokens, the first of which are
    bytes."""
    module = build_module(size, torch.device("cuda"), torch.bfloat16, seed)
    module.save_pretrained(folder)
    del module
    release(torch.device("cuda"))
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"<{token}>": token for token in range(VOCAB_SIZE, size.vocab_size)}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


@contextmanager
def _vllm(
    args: argparse.Namespace, server: Server, root: Path, logs: Path
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server's process, which may not be up yet, and its port."""
    size, transfer = server
    port = free_port()
    command = [
        *(args.vllm_python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(root / "models" / size.name), "--host", "127.0.0.1", "--port", str(port)),
        *("--attention-backend", "TRITON_ATTN", "--enforce-eager", "--max-model-len", "1024"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(KV_BYTES)),
        *("--weight-transfer-config", json.dumps({"backend": transfer})),
    ]
    path = {"PYTHONPATH": args.vllm_path} if args.vllm_path else {}
    device = {"CUDA_VISIBLE_DEVICES": _gpus()[-1]}
    with (logs / f"vllm-{size.name}-{transfer}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, **VLLM_ENVIRONMENT, **NCCL, **device, **path},
            start_new_session=True,
        )
        try:
            yield process, port
        finally:
            process.terminate()
            process.wait(60)


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    """Raises `TimeoutError`, where vLLM does not come up."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise TimeoutError(f"vLLM at {port} has ended or is not up after {START_S:.0f} s")


def _run(
    case: Case, command: Sequence[str], environment: Mapping[str, str], out: Path
) -> dict[str, Any]:
    """`out` gets the endings .log and .jsonl."""
    events = out.with_suffix(".jsonl")
    begin = time.monotonic()
    with out.with_suffix(".log").open("wb") as log:
        status = subprocess.run(
            [*command, "--out", str(events)], stdout=log, stderr=log, env=environment, check=False
        ).returncode
    lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
    return {
        "name": case.name,
        "model": case.size.name,
        "backend": case.backend,
        "command": " ".join(case.options),
        "status": status,
        "seconds": time.monotonic() - begin,
        "events": [kept(json.loads(line)) for line in lines],
    }


def kept(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: event[name] for name in KEPT if name in event}


def figures(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of a loop's events. The first served version existed before, and is left out."""
    by_kind = {
        kind: [{**event} for event in events if event["event"] == kind]
        for kind in ("update", "served", "evaluation", "failure")
    }
    evaluations = by_kind["evaluation"]
    served = [e | {"pull_s": e["fetch_s"] + e["verify_s"]} for e in by_kind["served"][1:]]
    found: dict[str, Any] = {
        "versions": len({event["version"] for event in by_kind["update"]}),
        "versions_apart": None,
        "failures": len(by_kind["failure"]),
        "first_reward": evaluations[0]["reward"] if evaluations else None,
        "last_reward": evaluations[-1]["reward"] if evaluations else None,
    }
    for name in ("pause_s", "commit_s", "pull_s", "first_token_s"):
        values = [event[name] for event in served if event[name] is not None]
        found[name] = statistics.median(values) if values else None
        found[f"{name}_worst"] = max(values, default=None)
    for name in ("distance", "other_distance"):
        values = [event[name] for event in evaluations if event[name] is not None]
        found[name] = statistics.mean(values) if values else None
    others = [e for e in evaluations if e["other_version"] is not None]
    if others:
        found["versions_apart"] = statistics.mean(e["version"] - e["other_version"] for e in others)
    return found


COLUMNS = {
    "name": "", "versions": "versions", "first_reward": "reward", "last_reward": "at the end",
    "pause_s": "pause s", "pause_s_worst": "worst", "pull_s": "pull s", "commit_s": "commit s",
    "first_token_s": "first token s", "first_token_s_worst": "worst", "distance": "nats",
    "other_distance": "another version's", "versions_apart": "versions apart",
}  # fmt: skip


def write_markdown(result: Mapping[str, Any], path: Path, result_link: str) -> None:
    """Replaces the section between a document's two markers. Raises `ValueError`."""
    share = "share one GPU" if result["num_gpus"] == 1 else "have a GPU each"
    notes = f" {result['notes']}" if "notes" in result else ""
    where = (
        f"{result['gpu']}, trainer and vLLM {share}, torch {result['versions']['torch']}, "
        f"commit {result['commit'][:12]}.{notes} [Raw events]({result_link})."
    )
    cells = map(_cells, result["cases"])
    write_section(path, BEGIN, END, [f"\n{where}\n", *markdown_table([*COLUMNS.values()], cells)])


def _cells(case: Mapping[str, Any]) -> list[str]:
    """A row; a loop that ended with an error is marked."""
    found = figures(case["events"])
    name = case["name"] if case["status"] == 0 else f"{case['name']} (ended with {case['status']})"
    return [name, *(_cell(found[column]) for column in COLUMNS if column != "name")]


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "–" if value is None else str(value)


if __name__ == "__main__":
    main()
