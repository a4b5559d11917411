"""A released model's geometry learns the demo's task through the service, on one GPU.

Weights are random and the vocabulary is the demo's bytes: of the released one, a random model would
hardly ever sample a token that is rewarded. The sampler has the same GPU, and only weights that it
pulled. It has learnt once the mean reward of the last updates is that of the demo's first leg.

    python -m benchmarks.families.learns --out benchmarks/results/h200/learns.json
    python -m benchmarks.families.learns --draft --device cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.command import is_for_gpu, make_parser
from benchmarks.common.document import FIGURE_COLUMNS, aligned
from benchmarks.families.models import Case, size_of
from benchmarks.service.run import FULL, MODEL, Plan, worker_settings, write_model
from benchmarks.step import run as step_run
from harness.gpu_results import describe_gpu, write_result
from harness.service import Service
from ratoon.demo.loop import POLICY_ID, Loop
from ratoon.demo.run import SYNCHRONOUS_REWARD, WINDOW
from ratoon.model.presets import VOCAB_SIZE
from ratoon_client import Optim, RatoonClient

CASE = Case(model="Qwen3.5-4B", layers=32, precise_layers=4)
PATIENCE_S = 600.0


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=CASE.layers)
    parser.add_argument("--updates", type=int, default=120, help="at most")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--budget-s", type=float, default=480.0, help="for updates")
    parser.add_argument("--root", type=Path, help="work below this folder: /dev/shm, say")
    args = parser.parse_args(arguments)
    if args.report is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
    else:
        result = _measure(args)
    print("\n".join(format_table(result)))


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    is_gpu = is_for_gpu(args)
    payload: dict[str, Any] = {
        "model": CASE.model,
        "layers": args.layers,
        "vocab_size": VOCAB_SIZE,
        "learning_rate": args.learning_rate,
        "rewards": [],
        "samples": [],
    }
    with tempfile.TemporaryDirectory(prefix="learns-", dir=args.root) as folder, ExitStack() as on:
        root = Path(folder)
        plan = _plan(args, is_gpu=is_gpu)
        write_model(plan, args.device, root / "models" / MODEL, args.seed)
        begin = time.monotonic()
        service = on.enter_context(Service(root, **_settings(plan, args.device, root)))
        client = on.enter_context(RatoonClient(service.grpc, timeout_s=PATIENCE_S))
        client.create_policy(
            POLICY_ID, model_folder=MODEL, dtype=plan.dtype, seed=args.seed
        ).result(PATIENCE_S)
        loop = Loop(
            client=client,
            folder=root / "weights",
            seed=args.seed,
            shuffle_rewards=False,
            optim=Optim(learning_rate=args.learning_rate, max_grad_norm=1.0),
            device=args.device,
        )
        payload |= {"start_s": time.monotonic() - begin, "first_reward": loop.evaluate()}
        for reward, seconds in _updates(loop, args):
            payload["rewards"].append(reward)
            payload["samples"].append(seconds)
            print(f"{len(payload['rewards'])}: {reward:.3f}, {seconds:.1f} s", file=sys.stderr)
            if args.out is not None:
                write_result(args.out, payload, seed=args.seed)
        payload["last_reward"] = loop.evaluate()
        payload["has_learnt"] = _has_learnt(payload["rewards"])
    if args.out is not None:
        write_result(args.out, payload, seed=args.seed)
    return {**describe_gpu(args.seed), **payload}


def _updates(loop: Loop, args: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Reward and seconds of each update, until it has learnt or is out of time."""
    rewards: list[float] = []
    stop_at = time.monotonic() + args.budget_s
    steps = loop.synchronous()
    while len(rewards) < args.updates and time.monotonic() < stop_at:
        begin = time.monotonic()
        rewards.append(next(steps).reward)
        yield rewards[-1], time.monotonic() - begin
        if _has_learnt(rewards):
            return


def _has_learnt(rewards: list[float]) -> bool:
    last = rewards[-WINDOW:]
    return len(last) == WINDOW and statistics.mean(last) >= SYNCHRONOUS_REWARD


def _plan(args: argparse.Namespace, *, is_gpu: bool) -> Plan:
    scale = step_run.FULL if is_gpu else step_run.SMALL
    run = step_run.Run(
        device=torch.device(args.device), scale=scale, num_samples=1, stop_at=0.0, seed=args.seed
    )
    size = size_of(run, CASE, args.layers)
    vars(size.config)["vocab_size"] = VOCAB_SIZE
    dtype = "bfloat16" if is_gpu else "float32"
    return replace(FULL, model=size, dtype=dtype, num_threads=8 if is_gpu else 1)


def _settings(plan: Plan, device: str, root: Path) -> dict[str, Any]:
    return {
        "crash_points": False,
        "worker": worker_settings(plan, device),
        "ray": {"num_cpus": max(2, plan.num_threads), "temp_folder": str(root / "ray")},
    }


def format_table(result: dict[str, Any]) -> list[str]:
    rewards = result["rewards"]
    cells = [
        list(FIGURE_COLUMNS),
        ["reward before", f"{result['first_reward']:.3f}", ""],
        ["reward of the last updates", f"{statistics.mean(rewards[-WINDOW:]):.3f}", ">= 0.6"],
        ["reward after", f"{result['last_reward']:.3f}", ""],
        ["updates", str(len(rewards)), ""],
        ["seconds of an update", f"{statistics.median(result['samples']):.1f}", ""],
    ]
    return aligned(cells)


if __name__ == "__main__":
    main()
