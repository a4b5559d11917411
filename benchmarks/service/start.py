"""Times `ratoon serve` up to a model's first update, cold and warm, by phase.

The model has random weights, made here. The service is started twice on one folder: the second time
it finds compiled code, and files in the page cache.

    python -m benchmarks.service.start --out benchmarks/results/h200/start.json
    python -m benchmarks.service.start --draft --device cpu
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common.command import is_for_gpu, make_parser
from benchmarks.common.document import aligned
from benchmarks.common.forests import PAPER_LENGTHS
from benchmarks.service.run import MODEL, SMALL, Plan, rollouts, worker_settings, write_model
from benchmarks.step.workload import QWEN3_1_7B, QWEN3_8B, TINY, Group
from harness.gpu_results import write_result
from harness.service import Service
from ratoon_client import Loss, Optim, RatoonClient

POLICY = "start"
PATIENCE_S = 1800.0
# Target for a warm start of Qwen3-8B, all three phases together.
TARGET_S = 75.0
SIZES = {size.name: size for size in (QWEN3_8B, QWEN3_1_7B, TINY)}
# Log events of the worker about its start and a creation.
_EVENT = re.compile(r"\{.*\}")
_EVENTS = ("worker started", "policy loaded")
FULL = Plan(
    model=QWEN3_8B,
    dtype="bfloat16",
    group=Group(prompt=5059, responses=PAPER_LENGTHS),
    num_threads=8,
)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=SIZES, help="another size than the plan's")
    parser.add_argument("--root", type=Path, help="work below this folder: /dev/shm, say")
    args = parser.parse_args(arguments)
    if args.report is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
    else:
        result = _measure(args)
    print("\n".join(format_table(result)))


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    plan = FULL if is_for_gpu(args) else SMALL
    if args.model is not None:
        plan = replace(plan, model=SIZES[args.model])
    with tempfile.TemporaryDirectory(prefix="rt-", dir=args.root) as folder:
        write_model(plan, args.device, Path(folder) / "models" / MODEL, args.seed)
        result = measure(plan, args.device, Path(folder), args.seed)
    if args.out is not None:
        write_result(args.out, result, seed=args.seed)
    return result


def measure(plan: Plan, device: str, root: Path, seed: int) -> dict[str, Any]:
    """Both starts; `total_s` is the warm one's. The model is below `root` (`write_model`).

    Raises errors of the service or its client.
    """
    starts = {name: _start(plan, device, root, seed) for name in ("cold", "warm")}
    return {"total_s": starts["warm"]["total_s"], "plan": asdict(plan), "starts": starts}


def settings_of(plan: Plan, device: str, root: Path) -> dict[str, Any]:
    """Settings of a service below `root`."""
    return {
        "crash_points": False,
        "log_level": "INFO",
        "worker": worker_settings(plan, device),
        "ray": {"num_cpus": max(2, plan.num_threads), "temp_folder": str(root / "ray")},
    }


def _start(plan: Plan, device: str, root: Path, seed: int) -> dict[str, Any]:
    with ExitStack() as opened:
        log = root / "service.log"
        logged = log.stat().st_size if log.exists() else 0
        begin = time.monotonic()
        service = opened.enter_context(Service(root, **settings_of(plan, device, root)))
        serve_s = time.monotonic() - begin
        client = opened.enter_context(RatoonClient(service.grpc, timeout_s=PATIENCE_S))
        begin = time.monotonic()
        client.create_policy(
            POLICY, model_folder=MODEL, dtype=plan.dtype, seed=seed, recovery="replay"
        ).result(PATIENCE_S)
        create_s = time.monotonic() - begin
        # Time for the logs to be written.
        time.sleep(1.0)
        events = _events(log.read_bytes()[logged:].decode("utf-8", "replace"))
        begin = time.monotonic()
        update = client.policy(POLICY).update(
            [rollouts(plan, 1, seed)], loss=Loss("grpo"), optim=Optim(learning_rate=1e-6)
        )
        report = update.result(PATIENCE_S).report
        first_update_s = time.monotonic() - begin
        client.delete_policy(POLICY).result(PATIENCE_S)
    create = {name: value for event in events.values() for name, value in event.items()}
    check = report.self_check
    return {
        "total_s": serve_s + create_s + first_update_s,
        "serve_s": serve_s,
        "create_s": create_s,
        "first_update_s": first_update_s,
        "create": {**create, "other_s": create_s - sum(create.values())},
        "first_update": {
            **{f"{name}_s": value for name, value in asdict(report.seconds).items()},
            "self_check_s": 0.0 if check is None else check.seconds,
        },
    }


def _events(log: str) -> dict[str, Mapping[str, float]]:
    """The seconds in each event's first record, by event name."""
    found: dict[str, Mapping[str, float]] = {}
    for line in log.splitlines():
        matched = _EVENT.search(line)
        if matched is None or not any(name in line for name in _EVENTS):
            continue
        event = json.loads(matched.group())
        seconds = {name: float(value) for name, value in event.items() if name.endswith("_s")}
        found.setdefault(str(event["event"]), seconds)
    return found


def format_table(result: dict[str, Any]) -> list[str]:
    """The table for a terminal."""
    starts = result["starts"]
    names = ("total_s", "serve_s", "create_s", "first_update_s")
    rows = [["", *starts]]
    rows += [[name, *(f"{start[name]:.1f}" for start in starts.values())] for name in names]
    for part in ("create", "first_update"):
        for name in starts["warm"][part]:
            values = [f"{start[part].get(name, 0.0):.2f}" for start in starts.values()]
            rows.append([f"  {part}: {name}", *values])
    plan = result["plan"]
    wanted = f", wanted <= {TARGET_S:g}" if plan["model"]["name"] == QWEN3_8B.name else ""
    return [f"{plan['model']['name']} in {plan['dtype']}{wanted}", *aligned(rows)]


if __name__ == "__main__":
    main()
