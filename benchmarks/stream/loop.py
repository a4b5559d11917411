"""Runs examples/vllm_loop.py with real vLLM servers, service and samplers on one machine.

A small policy learns the demo's task from random weights, and a control of it, whose rewards are
shuffled, does not; the geometry of Qwen3-0.6B, with random weights, is for seconds. One GPU is
enough for a trainer and a sampler of these sizes. vLLM may be another Python's.

    python -m benchmarks.stream.loop --out benchmarks/results/h100/loop.json --vllm-python PYTHON
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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.common.document import aligned
from benchmarks.service.start import PATIENCE_S
from benchmarks.step.subjects import build_module
from benchmarks.step.workload import ModelSize
from harness.gpu_results import ROOT, write_result
from harness.service import Service
from ratoon.model.tokenizer import VOCAB_SIZE, byte_tokenizer
from ratoon.ports import free_port
from ratoon_client import RatoonClient

SMALL = ModelSize(
    name="small", num_layers=8, hidden_size=384, num_heads=6, num_kv_heads=2, head_dim=64,
    intermediate_size=1024, vocab_size=VOCAB_SIZE, ties_embeddings=True,
)  # fmt: skip
QWEN3_0_6B = ModelSize(
    name="Qwen3-0.6B", num_layers=28, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=128,
    intermediate_size=3072, vocab_size=151_936, ties_embeddings=True,
)  # fmt: skip
SIZES = (SMALL, QWEN3_0_6B)
START_S = 400.0
KV_BYTES = 4 * 10**9
VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of the loop, by a new policy."""

    name: str
    size: ModelSize
    backend: str
    versions: int
    options: tuple[str, ...] = ()


# A learning rate of 0.6B that does no harm in so few steps; what it learns is not looked at.
_FOR_SECONDS = ("--learning-rate", "1e-6", "--evaluate-every", "10", "--held-out", "64")
CASES = (
    Case(name="learns", size=SMALL, backend="reload", versions=120),
    Case(
        name="control", size=SMALL, backend="reload", versions=100, options=("--shuffled-rewards",)
    ),
    Case(
        name="0.6B ratoon", size=QWEN3_0_6B, backend="ratoon", versions=50, options=_FOR_SECONDS
    ),
    Case(
        name="0.6B reload", size=QWEN3_0_6B, backend="reload", versions=50, options=_FOR_SECONDS
    ),
)  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--out", type=Path, help="measure into this result file")
    mode.add_argument("--report", type=Path, help="print the table of this result file")
    parser.add_argument("--vllm-python", default=sys.executable, help="that has vLLM")
    parser.add_argument("--vllm-path", default="", help="its PYTHONPATH")
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"), help="work below it")
    parser.add_argument("--logs", type=Path, help="keep the servers' and the loops' output here")
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
    print("\n".join(format_table(cases)))


def measure(args: argparse.Namespace, root: Path) -> Iterator[dict[str, Any]]:
    """The figures of each case, with its raw events."""
    logs = args.logs or root
    for size in SIZES:
        _write_model(size, root / "models" / size.name, args.seed)
    ports = {size.name: free_port() for size in SIZES}
    settings = {
        "crash_points": False,
        "worker": {"device": "cuda", "num_threads": 8},
        "weights_root": str(root / "weights"),
        "ray": {"num_cpus": 8, "temp_folder": str(root / "ray")},
    }
    with (
        Service(root, **settings) as service,
        _vllm(args, SMALL, root, ports[SMALL.name], logs),
        _vllm(args, QWEN3_0_6B, root, ports[QWEN3_0_6B.name], logs) as second,
        RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client,
    ):
        for number, case in enumerate(CASES):
            if second.poll() is not None:
                raise RuntimeError(f"vLLM has ended; {logs} says why")
            policy, port = f"loop-{number}", ports[case.size.name]
            client.create_policy(
                policy, model_folder=case.size.name, dtype="bfloat16", seed=7, recovery="fail"
            ).result(PATIENCE_S)
            _wait_for(port)
            yield _run(case, policy, service.grpc, port, root, logs)
            client.delete_policy(policy).result(PATIENCE_S)


def _write_model(size: ModelSize, folder: Path, seed: int) -> None:
    """Weights of the seed, and a tokenizer of as many tokens, of which the first are bytes."""
    module = build_module(size, torch.device("cuda"), torch.bfloat16, seed)
    module.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"<{token}>": token for token in range(VOCAB_SIZE, size.vocab_size)}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


@contextmanager
def _vllm(
    args: argparse.Namespace, size: ModelSize, root: Path, port: int, logs: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A server of the model, which may not be up yet."""
    command = [
        *(args.vllm_python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(root / "models" / size.name), "--host", "127.0.0.1", "--port", str(port)),
        *("--attention-backend", "TRITON_ATTN", "--enforce-eager", "--max-model-len", "1024"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(KV_BYTES)),
        *("--weight-transfer-config", '{"backend": "ratoon"}'),
    ]
    path = {"PYTHONPATH": args.vllm_path} if args.vllm_path else {}
    with (logs / f"vllm-{size.name}.log").open("wb") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, **VLLM_ENVIRONMENT, **path},
            start_new_session=True,
        )
        try:
            yield server
        finally:
            server.terminate()
            server.wait(60)


def _wait_for(port: int) -> None:
    """Raises `TimeoutError`."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise TimeoutError(f"vLLM at {port} is not up after {START_S:.0f} s")


def _run(
    case: Case, policy: str, service: str, port: int, root: Path, logs: Path
) -> dict[str, Any]:
    out = logs / f"{policy}.jsonl"
    command = [
        *(sys.executable, str(ROOT / "examples" / "vllm_loop.py"), "--url", service),
        *("--vllm", f"http://127.0.0.1:{port}", "--vllm-backend", case.backend),
        *("--policy", policy, "--root", str(root), "--versions", str(case.versions)),
        *("--out", str(out), *case.options),
    ]
    begin = time.monotonic()
    with (logs / f"{policy}.log").open("wb") as log:
        status = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    events = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {
        "name": case.name,
        "model": case.size.name,
        "backend": case.backend,
        "command": " ".join(case.options),
        "status": status,
        "seconds": time.monotonic() - begin,
        **figures(events),
        "events": events,
    }


def figures(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a loop's events. The first version that is served is the one that was there before."""
    by_kind = {
        kind: [event for event in events if event["event"] == kind]
        for kind in ("update", "served", "evaluation", "failure")
    }
    served, evaluations = by_kind["served"][1:], by_kind["evaluation"]
    found: dict[str, Any] = {
        "versions": len({event["version"] for event in by_kind["update"]}),
        "failures": len(by_kind["failure"]),
        "first_reward": evaluations[0]["reward"] if evaluations else None,
        "last_reward": evaluations[-1]["reward"] if evaluations else None,
    }
    for name in ("pause_s", "commit_s", "fetch_s", "first_token_s"):
        values = [event[name] for event in served if event[name] is not None]
        found[name] = statistics.median(values) if values else None
        found[f"{name}_worst"] = max(values, default=None)
    for name in ("distance", "other_distance"):
        values = [event[name] for event in evaluations if event[name] is not None]
        found[name] = statistics.mean(values) if values else None
    return found


COLUMNS = {
    "name": "", "versions": "versions", "first_reward": "reward", "last_reward": "at the end",
    "pause_s": "pause s", "pause_s_worst": "worst", "commit_s": "commit s",
    "first_token_s": "first token s", "distance": "nats", "other_distance": "another version's",
}  # fmt: skip


def format_table(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [[_cell(case[name]) for name in COLUMNS] for case in cases]
    return aligned([[*COLUMNS.values()], *rows])


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "–" if value is None else str(value)


if __name__ == "__main__":
    main()
