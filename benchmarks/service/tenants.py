"""Times adapters side by side on one base: updates of one policy and of eight, by turns.

The base has random weights, made here. Each policy is a LoRA of rank 32 and gets an update of the
recorded group; alone, then all at once.

    python -m benchmarks.service.tenants --out benchmarks/results/h200/wires.json --root /dev/shm
    python -m benchmarks.service.tenants --draft --device cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.command import is_for_gpu, make_parser
from benchmarks.common.document import FIGURE_COLUMNS, aligned
from benchmarks.service.run import GIB, MODEL, SMALL, Plan, rollouts, write_model
from benchmarks.service.start import FULL, PATIENCE_S, settings_of
from harness.gpu_results import write_result
from harness.service import Service
from ratoon_client import Lora, Loss, Optim, PolicySession, RatoonClient, StepReport

NUM_TENANTS = 8
RANK, SMALL_RANK = 32, 8
WHAT = {
    "alone_s": ("an update of one policy, as its caller waits for it, s", None),
    "together_s": (f"one of {NUM_TENANTS} that are sent at once, a policy's share, s", None),
    "together_over_alone": ("its share over that of one alone", None),
    "turn_ms": ("between the ends of two policies' updates, what is not trained, ms", None),
    "turn_percent": ("the same, % of the time", 5.0),
    "peak_over_planned": ("peak memory over what is planned", 1.0),
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="of all policies")
    parser.add_argument("--root", type=Path, help="work below this folder: /dev/shm, say")
    args = parser.parse_args(arguments)
    if args.report is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
    else:
        result = _measure(args)
    print("\n".join(aligned([list(FIGURE_COLUMNS), *_cells(result)])))


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    plan = FULL if is_for_gpu(args) else SMALL
    with tempfile.TemporaryDirectory(prefix="rt-", dir=args.root) as folder:
        root = Path(folder)
        write_model(plan, args.device, root / "models" / MODEL, args.seed)
        result = measure(plan, args.device, root, args.seed, args.rounds)
    if args.out is not None:
        write_result(args.out, result, seed=args.seed)
    return result


def measure(plan: Plan, device: str, root: Path, seed: int, num_rounds: int) -> dict[str, Any]:
    """The figures of `WHAT`, and their rows. The model is below `root` (`write_model`)."""
    settings = settings_of(plan, device, root)
    settings["worker"] |= {"max_tenants": NUM_TENANTS}
    rank = SMALL_RANK if plan is SMALL else RANK
    with (
        Service(root, **settings) as service,
        RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client,
    ):
        sessions = [_create(client, plan, rank, number) for number in range(NUM_TENANTS)]
        # The first updates compile, and allocate moments.
        _together(sessions, plan, seed)
        alone = [_together(sessions[:1], plan, seed) for _ in range(num_rounds)]
        together = [_together(sessions, plan, seed) for _ in range(num_rounds)]
    rows = [row for each in together for row in each["updates"]]
    alone_s = statistics.median(each["seconds"] for each in alone)
    together_s = statistics.median(each["seconds"] for each in together) / NUM_TENANTS
    turn_s = together_s - statistics.median(row["trained_s"] for row in rows)
    return {
        "alone_s": alone_s,
        "together_s": together_s,
        "together_over_alone": together_s / alone_s,
        "turn_ms": 1000 * turn_s,
        "turn_percent": 100 * turn_s / together_s,
        "peak_over_planned": _ratio(rows, "peak_gib", "planned_gib"),
        "num_tenants": NUM_TENANTS,
        "rank": rank,
        "plan": asdict(plan),
        "alone": alone,
        "together": together,
    }


def _create(client: RatoonClient, plan: Plan, rank: int, number: int) -> PolicySession:
    policy_id = f"tenant-{number}"
    client.create_policy(
        policy_id,
        model_folder=MODEL,
        dtype=plan.dtype,
        lora=Lora(rank=rank, alpha=2.0 * rank),
        seed=number,
        deterministic=False,
        recovery="fail",
    ).result(PATIENCE_S)
    return client.policy(policy_id)


def _together(sessions: Sequence[PolicySession], plan: Plan, seed: int) -> dict[str, Any]:
    """Send an update to each policy, and wait for all."""
    batch, optim = [rollouts(plan, 1, seed)], Optim(learning_rate=1e-5)
    begin = time.perf_counter()
    sent = [session.update(batch, loss=Loss("grpo"), optim=optim) for session in sessions]
    reports = [each.result(PATIENCE_S).report for each in sent]
    return {"seconds": time.perf_counter() - begin, "updates": list(map(_row, reports))}


def _row(report: StepReport) -> dict[str, float]:
    seconds = asdict(report.seconds)
    return {
        "trained_s": sum(seconds[name] for name in ("forward", "backward", "optimizer")),
        **{f"{name}_s": value for name, value in seconds.items()},
        "peak_gib": report.peak_memory_bytes / GIB,
        "planned_gib": (report.planned_memory_bytes or 0) / GIB,
    }


def _ratio(rows: Sequence[dict[str, float]], name: str, planned: str) -> float | None:
    """The most of one figure over the most of the other; None: a CPU, which counts neither."""
    most = max(row[planned] for row in rows)
    return max(row[name] for row in rows) / most if most else None


def _cells(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            what,
            "–" if result[name] is None else f"{result[name]:.3g}",
            "" if wanted is None else f"<= {wanted:g}",
        ]
        for name, (what, wanted) in WHAT.items()
    ]


if __name__ == "__main__":
    main()
