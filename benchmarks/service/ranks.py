"""Times updates of one policy on one device and on several, through the service on one machine.

The model has random weights, made here; the policies of all cases start from the same, and get the
same rollouts. Cases can be measured in several runs into one file, on the same commit and GPUs.

    python -m benchmarks.service.ranks --out benchmarks/results/h200x2/ranks.json --root /dev/shm
    python -m benchmarks.service.ranks --draft --device cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.command import is_for_gpu, make_parser, names
from benchmarks.common.document import aligned
from benchmarks.service.run import MODEL, SMALL, Plan, rollouts, write_model
from benchmarks.service.start import FULL, PATIENCE_S, POLICY, settings_of
from benchmarks.step.workload import Group
from harness.gpu_results import describe_gpu, write_result
from harness.service import Service
from ratoon_client import Loss, Optim, Parallel, RatoonClient

# The first update of a policy compiles.
NUM_LEFT_OUT = 1
GIB = 2**30
LONG = Group(prompt=131_072, responses=(1024,) * 8)
SHORT = Group(prompt=48, responses=(6,) * 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A policy of `parallel`, and what each of its updates has."""

    name: str
    parallel: Parallel
    is_long: bool = False
    num_updates: int = 3


CASES = (
    Case(name="one", parallel=Parallel(num_workers=1), num_updates=2),
    Case(name="states", parallel=Parallel(num_workers=2, shard="states", sequence_ranks=1)),
    Case(name="gradients", parallel=Parallel(num_workers=2, shard="gradients", sequence_ranks=1)),
    Case(name="long one", parallel=Parallel(num_workers=1), is_long=True, num_updates=2),
    Case(
        name="long together",
        parallel=Parallel(num_workers=2, sequence_ranks=2),
        is_long=True,
        num_updates=2,
    ),
)
# What a result says first: of which cases, and what the goal is.
WANTED = {
    "speedup": ">= 1.94",
    "service_speedup": ">= 1.85",
    "seconds_per_group": "<= 4.9",
    "exposed_ms": "",
    "ulysses_speedup": ">= 1.85",
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, help="work below this folder: /dev/shm, say")
    parser.add_argument("--groups", type=int, default=8, help="of an update that is not long")
    parser.add_argument("--updates", type=int, help="of a case, instead of its own number")
    parser.add_argument(
        "--states", default="auto", help="`worker.optimizer_states`; one GPU of 80 GB: bf16_8bit"
    )
    parser.add_argument("--cases", type=names, default=tuple(case.name for case in CASES))
    args = parser.parse_args(arguments)
    if args.report is not None:
        rows = json.loads(args.report.read_text(encoding="utf-8"))["cases"]
    else:
        rows = _measure(args)
    print("\n".join(format_tables(rows)))


def _measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the file's cases, and of those that are measured now."""
    plan = FULL if is_for_gpu(args) else SMALL
    rows = {row["name"]: row for row in _measured_before(args)}
    with tempfile.TemporaryDirectory(prefix="rt-", dir=args.root) as folder:
        root = Path(folder)
        write_model(plan, args.device, root / "models" / MODEL, args.seed)
        settings = settings_of(plan, args.device, root)
        # What is looked at is the updates after the first, which have no self-check.
        settings["worker"] |= {"optimizer_states": args.states, "self_check_every": 0}
        settings["limits"] = {"max_tokens": 10**7, "max_body_bytes": 2 * 10**9}
        with (
            Service(root, **settings) as service,
            RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client,
        ):
            for case in (case for case in CASES if case.name in args.cases):
                rows[case.name] = _run(client, case, plan, args)
                if args.out is not None:
                    cases = list(rows.values())
                    payload = {**figures(cases), "plan": asdict(plan), "cases": cases}
                    write_result(args.out, payload, seed=args.seed)
    return list(rows.values())


def _measured_before(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of the file that is to be written, unless it is of another commit or other GPUs."""
    if args.out is None or not args.out.exists():
        return []
    before, now = json.loads(args.out.read_text(encoding="utf-8")), describe_gpu(args.seed)
    same = ("commit", "gpu", "num_gpus", "seed")
    return before["cases"] if all(before[name] == now[name] for name in same) else []


def _run(client: RatoonClient, case: Case, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    num_groups = 1 if case.is_long else args.groups
    if case.is_long:
        plan = replace(plan, group=LONG if plan is FULL else SHORT)
    begin = time.monotonic()
    client.create_policy(
        POLICY,
        model_folder=MODEL,
        dtype=plan.dtype,
        seed=args.seed,
        parallel=case.parallel,
        recovery="fail",
    ).result(PATIENCE_S)
    row: dict[str, Any] = {
        "name": case.name,
        "parallel": asdict(case.parallel),
        "groups": num_groups,
        "optimizer_states": client.get_policy(POLICY).optimizer_states,
        "create_s": time.monotonic() - begin,
        "updates": [],
    }
    session = client.policy(POLICY)
    batch = [rollouts(plan, 1, args.seed + number) for number in range(num_groups)]
    # What only compiles needs no more groups than there are devices.
    few = batch[: case.parallel.num_workers]
    num_updates = args.updates or case.num_updates
    for groups in (*[few] * NUM_LEFT_OUT, *[batch] * num_updates):
        begin = time.monotonic()
        update = session.update(groups, loss=Loss("grpo"), optim=Optim(learning_rate=1e-6))
        report = update.result(PATIENCE_S).report
        phases = asdict(report.seconds)
        row["updates"].append(
            {
                "seconds": time.monotonic() - begin,
                "trained_s": phases["forward"] + phases["backward"] + phases["optimizer"],
                **{f"{name}_s": value for name, value in phases.items()},
                "rank_seconds": report.rank_seconds,
                "rank_gap": report.rank_gap,
                "micro_batches": report.num_micro_batches,
                "packed_tokens": report.packed_tokens,
                "hardware_mfu": report.hardware_mfu,
                "peak_gib": report.peak_memory_bytes / GIB,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
            }
        )
        print(json.dumps({"case": case.name, **row["updates"][-1]}), file=sys.stderr, flush=True)
    client.delete_policy(POLICY).result(PATIENCE_S)
    return row


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Of medians; None where a case is missing. `exposed_ms` is what the step of two devices takes
    longer than half of one's: gradients to their owners, and new weights from there.
    """
    cases = {row["name"]: row for row in rows}

    def ratio(slow: str, fast: str, name: str) -> float | None:
        if slow not in cases or fast not in cases:
            return None
        return median(cases[slow], name) / median(cases[fast], name)

    exposed_ms = seconds_per_group = None
    # A GPU of 80 GB has little room left where states alone are shared out.
    both = "states" if "states" in cases else "gradients"
    if "one" in cases and both in cases:
        alone, two = (median(cases[name], "optimizer_s") for name in ("one", both))
        exposed_ms = 1e3 * (two - alone / 2)
    if "gradients" in cases:
        two = cases["gradients"]
        # Each of the two devices has half of the groups.
        seconds_per_group = 2 * median(two, "trained_s") / two["groups"]
    return {
        "speedup": ratio("one", both, "trained_s"),
        "service_speedup": ratio("one", both, "seconds"),
        "seconds_per_group": seconds_per_group,
        "exposed_ms": exposed_ms,
        "ulysses_speedup": ratio("long one", "long together", "trained_s"),
    }


def median(row: Mapping[str, Any], name: str) -> float:
    """Of a case's updates, without those that are left out."""
    return statistics.median(update[name] for update in row["updates"][NUM_LEFT_OUT:])


def format_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ("seconds", "trained_s", "optimizer_s", "peak_gib")
    cells = [[row["name"], *(f"{median(row, name):.3g}" for name in columns)] for row in rows]
    first = [
        [name, "–" if value is None else f"{value:.3g}", WANTED[name]]
        for name, value in figures(rows).items()
    ]
    return [*aligned([["", "measured", "wanted"], *first]), "", *aligned([["", *columns], *cells])]


if __name__ == "__main__":
    main()
