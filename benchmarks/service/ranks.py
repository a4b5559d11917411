"""Times updates of one policy on one device and on several, through the service on one machine.

The model has random weights, made here; all policies start from the same, and get the same
rollouts. Policies can be measured in several runs into one file, on the same commit and GPUs.

    python -m benchmarks.service.ranks --out benchmarks/results/h200x2/ranks.json --root /dev/shm
    python -m benchmarks.service.ranks --model Qwen3-30B-A3B --layers 36 \\
        --out benchmarks/results/h200x2/experts.json --root /dev/shm
    python -m benchmarks.service.ranks --draft --device cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import is_for_gpu, make_parser, names
from benchmarks.common.document import (
    FIGURE_COLUMNS,
    aligned,
    link,
    markdown_table,
    write_section,
)
from benchmarks.common.forests import PAPER_LENGTHS
from benchmarks.service.run import MODEL, SMALL, Plan, rollouts, write_model
from benchmarks.service.start import FULL, PATIENCE_S, POLICY, settings_of
from benchmarks.step.workload import (
    QWEN3_8B,
    QWEN3_30B_A3B,
    TINY,
    TINY_ROUTED,
    Group,
    ModelSize,
    RoutedSize,
)
from harness.gpu_results import describe_gpu, write_result
from harness.service import Service
from ratoon_client import Group as Rollouts
from ratoon_client import Loss, Optim, Parallel, PolicySession, RatoonClient
from ratoon_client import group as make_group
from ratoon_proto.types import ShardName

# The first update of each kind compiles.
NUM_LEFT_OUT = 1
GIB = 2**30
# Rewards are the advantages, also in a group of one rollout.
_LOSS = Loss("grpo", advantage="none")
SIZES = {size.name: size for size in (QWEN3_8B, QWEN3_30B_A3B, TINY, TINY_ROUTED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of updates: groups of these rollouts.

    Attributes:
        num_groups: None: as many as the command says.
        is_alone: Each rollout is a group of its own, with a prompt of its own: nothing is shared.
        num_updates: Besides the first; 0: figures are the first one's, and what compiles counts.
    """

    group: Group
    num_groups: int | None = None
    is_alone: bool = False
    num_updates: int = 2


def _long(prompt: int, num_updates: int = 1) -> Work:
    group = Group(prompt=prompt, responses=(1024,) * 8)
    return Work(group=group, num_groups=1, num_updates=num_updates)


_PAPER = Group(prompt=5059, responses=PAPER_LENGTHS)
GROUPS, GROUP, ALONE, LONG = "groups", "group", "replicated", "131072x8"
WORKS = {
    GROUPS: Work(group=_PAPER),
    GROUP: Work(group=_PAPER, num_groups=1),
    ALONE: Work(group=_PAPER, is_alone=True),
    LONG: _long(131_072),
    "262144x8": _long(262_144),
    "524288x8": _long(524_288, num_updates=0),
}
ONE, STATES, GRADIENTS, WEIGHTS, TOGETHER = "one", "states", "gradients", "weights", "together"
# Case `states` with half of the devices.
HALF = "half"
_SHARDS: dict[str, ShardName] = {STATES: "states", GRADIENTS: "gradients", WEIGHTS: "weights"}
# Cases of a dense model; those of a model with experts shard more, and have no long prompts.
CASES = (
    *((ONE, work) for work in (GROUPS, GROUP, LONG)),
    *((STATES, work) for work in (GROUPS, GROUP)),
    (GRADIENTS, GROUPS),
    *((TOGETHER, work) for work in (GROUP, LONG)),
)
ROUTED_CASES = tuple((WEIGHTS, work) for work in (GROUPS, ALONE))
# Headline figures of a result, and their targets.
WANTED = {
    "speedup": ">= 0.97 of the GPUs (two), 0.95 (four)",
    "service_speedup": ">= 0.925 of the GPUs (two), 0.9 (four)",
    "half_speedup": "",
    "seconds_per_group": "Qwen3-8B, two H100: <= 4.9",
    "exposed_ms": "",
    "ulysses_speedup": "two GPUs: >= 1.85",
    "group_speedup": "",
    "group_ulysses_speedup": "",
    "hardware_mfu": "",
    "over_replicated": "Qwen3-30B-A3B: > 3.82",
    "peak_over_planned": "0.9 to 1.1",
}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--root", type=Path, help="work below this folder: /dev/shm, say")
    parser.add_argument("--model", choices=SIZES, help="Qwen3-8B on a GPU")
    parser.add_argument("--layers", type=int, help="of the model, instead of its own number")
    parser.add_argument("--workers", type=int, default=2, help="devices of what has several")
    parser.add_argument("--groups", type=int, default=8, help="of an update with several")
    parser.add_argument("--updates", type=int, help="besides the first, instead of a work's own")
    parser.add_argument(
        "--states", default="auto", help="`worker.optimizer_states`; one GPU of 80 GB: bf16_8bit"
    )
    parser.add_argument(
        "--host-gib", type=int, default=64, help="of the host, lent to each device's activations"
    )
    parser.add_argument(
        "--free-order",
        action="store_true",
        help="policies that need not repeat their bits, as other trainers' need not",
    )
    parser.add_argument("--cases", type=_cases, help="`POLICY:WORK,...`, both by name")
    args = parser.parse_args(arguments)
    if args.report is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
    else:
        result = _measure(args)
    print("\n".join(format_tables(result["cases"])))
    if args.report is not None and args.markdown is not None:
        name = f"{args.report.parent.name}/{args.report.stem}"
        begin = f"<!-- {name}: written by benchmarks/service/ranks.py -->"
        lines = markdown(result, link(args.report, args.markdown))
        write_section(args.markdown, begin, f"<!-- end of {name} -->", lines)


def _cases(text: str) -> tuple[tuple[str, str], ...]:
    """Raises ValueError where one is none."""
    pairs = [case.partition(":") for case in names(text)]
    cases = tuple((policy, work) for policy, _, work in pairs)
    known = {ONE, HALF, TOGETHER, *_SHARDS}
    if not all(policy in known and work in WORKS for policy, work in cases):
        raise ValueError(f"not of {sorted(known)} and {[*WORKS]}")
    return cases


def parallel_of(policy: str, num_workers: int) -> Parallel:
    """Parallel layout of the policy with that name."""
    if policy == ONE:
        return Parallel(num_workers=1)
    if policy == HALF:
        return parallel_of(STATES, num_workers // 2)
    if policy == TOGETHER:
        return Parallel(num_workers=num_workers, sequence_ranks=num_workers)
    return Parallel(num_workers=num_workers, shard=_SHARDS[policy], sequence_ranks=1)


def _plan_of(args: argparse.Namespace) -> Plan:
    plan = FULL if is_for_gpu(args) else SMALL
    size = plan.model if args.model is None else SIZES[args.model]
    assert isinstance(size, ModelSize), "its sizes are those of Qwen3 models"
    layers = size.num_layers if args.layers is None else args.layers
    model = replace(size, num_layers=layers)
    return replace(plan, model=model, host_gib=args.host_gib if plan is FULL else 0)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """The file's cases, and those that are measured now."""
    plan = _plan_of(args)
    cases = args.cases or (ROUTED_CASES if isinstance(plan.model, RoutedSize) else CASES)
    rows = {(row["policy"], row["work"]): row for row in _measured_before(args)}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rt-", dir=args.root) as folder:
        root = Path(folder)
        write_model(plan, args.device, root / "models" / MODEL, args.seed)
        settings = settings_of(plan, args.device, root)
        # Only the updates after the first are measured, and they have no self-check.
        settings["worker"] |= {"optimizer_states": args.states, "self_check_every": 0}
        settings["limits"] = {"max_tokens": 10**7, "max_body_bytes": 2 * 10**9}
        with (
            Service(root, **settings) as service,
            RatoonClient(service.grpc, timeout_s=PATIENCE_S) as client,
        ):
            for policy in dict.fromkeys(policy for policy, _ in cases):
                parallel = parallel_of(policy, args.workers)
                created = _create(client, plan, parallel, args)
                for work in (work for each, work in cases if each == policy):
                    row = {"policy": policy, "work": work, **created}
                    row |= _run(client.policy(POLICY), WORKS[work], plan, args)
                    rows[policy, work] = row
                    found = list(rows.values())
                    result = {**figures(found), "plan": asdict(plan), "cases": found}
                    if args.out is not None:
                        write_result(args.out, result, seed=args.seed)
                client.delete_policy(POLICY).result(PATIENCE_S)
    return result


def _measured_before(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Cases in the file that is to be written, unless it is of another commit or other GPUs."""
    if args.out is None or not args.out.exists():
        return []
    before, now = json.loads(args.out.read_text(encoding="utf-8")), describe_gpu(args.seed)
    same = ("commit", "gpu", "num_gpus", "seed")
    return before["cases"] if all(before[name] == now[name] for name in same) else []


def _create(
    client: RatoonClient, plan: Plan, parallel: Parallel, args: argparse.Namespace
) -> dict[str, Any]:
    begin, is_deterministic = time.monotonic(), not args.free_order
    client.create_policy(
        POLICY,
        model_folder=MODEL,
        dtype=plan.dtype,
        seed=args.seed,
        deterministic=is_deterministic,
        parallel=parallel,
        recovery="fail",
    ).result(PATIENCE_S)
    create_s = time.monotonic() - begin
    states = client.get_policy(POLICY).optimizer_states
    return {
        "parallel": asdict(parallel),
        "deterministic": is_deterministic,
        "optimizer_states": states,
        "create_s": create_s,
    }


def _run(
    session: PolicySession, work: Work, plan: Plan, args: argparse.Namespace
) -> dict[str, Any]:
    num_groups = work.num_groups or args.groups
    batch = work_batch(work, plan, num_groups, args.seed)
    updates: list[dict[str, Any]] = []
    for _ in range(NUM_LEFT_OUT + (args.updates or work.num_updates)):
        begin = time.monotonic()
        update = session.update(batch, loss=_LOSS, optim=Optim(learning_rate=1e-6))
        report = update.result(PATIENCE_S).report
        seconds = time.monotonic() - begin
        phases = asdict(report.seconds)
        updates.append(
            {
                "seconds": seconds,
                "trained_s": phases["forward"] + phases["backward"] + phases["optimizer"],
                **{f"{name}_s": value for name, value in phases.items()},
                "rank_seconds": report.rank_seconds,
                "rank_gap": report.rank_gap,
                "micro_batches": report.num_micro_batches,
                "packed_tokens": report.packed_tokens,
                "hardware_mfu": report.hardware_mfu,
                "peak_gib": report.peak_memory_bytes / GIB,
                "planned_gib": (report.planned_memory_bytes or 0) / GIB,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
            }
        )
        print(json.dumps(updates[-1]), file=sys.stderr, flush=True)
    samples = [update["seconds"] for update in _counting(updates)]
    return {"groups": num_groups, "updates": updates, "samples": samples}


def work_batch(work: Work, plan: Plan, num_groups: int, seed: int) -> list[Rollouts]:
    """Groups of the work, one batch per item; a tiny draft gets tiny groups."""
    if plan.model.vocab_size < 1000:
        short = Group(prompt=max(8, work.group.prompt // 4096), responses=(6,) * 4)
        work = replace(work, group=short)
    plan = replace(plan, group=work.group)
    groups = [rollouts(plan, 1, seed + number) for number in range(num_groups)]
    if not work.is_alone:
        return groups
    rng = np.random.default_rng(seed)
    return [
        make_group(
            f"{one.group_id}-{number}",
            rng.integers(0, plan.model.vocab_size, plan.group.prompt),
            [rollout],
        )
        for one in groups
        for number, rollout in enumerate(one.rollouts)
    ]


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures from medians, only those whose cases exist. Several devices count with the fastest
    way of sharing.

    `exposed_ms` is the time that a step of several devices takes beyond its share of one device's
    step: gradients to their owners, and new weights from there. `seconds_per_group` is the time on
    one device.
    """
    cases = {(row["policy"], row["work"]): row for row in rows}
    sharings = [
        cases[each, GROUPS] for each in (STATES, GRADIENTS, WEIGHTS) if (each, GROUPS) in cases
    ]
    best = min(sharings, key=lambda row: median(row, "trained_s"), default=None)
    found: dict[str, Any] = {}

    def ratio(
        name: str, slow: Mapping[str, Any] | None, fast: Mapping[str, Any] | None, of: str
    ) -> None:
        if slow is not None and fast is not None:
            found[name] = median(slow, of) / median(fast, of)

    alone = cases.get((ONE, GROUPS))
    ratio("speedup", alone, best, "trained_s")
    ratio("service_speedup", alone, best, "seconds")
    ratio("half_speedup", alone, cases.get((HALF, GROUPS)), "trained_s")
    if best is not None:
        workers = best["parallel"]["num_workers"]
        found["seconds_per_group"] = workers * median(best, "trained_s") / best["groups"]
        if alone is not None:
            own = median(alone, "optimizer_s") / workers
            found["exposed_ms"] = 1e3 * (median(best, "optimizer_s") - own)
    ratio("ulysses_speedup", cases.get((ONE, LONG)), cases.get((TOGETHER, LONG)), "trained_s")
    group = cases.get((ONE, GROUP))
    ratio("group_speedup", group, cases.get((STATES, GROUP)), "trained_s")
    ratio("group_ulysses_speedup", group, cases.get((TOGETHER, GROUP)), "trained_s")
    if best is not None:
        if all(update["hardware_mfu"] is not None for update in best["updates"]):
            found["hardware_mfu"] = median(best, "hardware_mfu")
        ratio("over_replicated", cases.get((best["policy"], ALONE)), best, "trained_s")
        if planned := median(best, "planned_gib"):
            found["peak_over_planned"] = median(best, "peak_gib") / planned
    return found


def median(row: Mapping[str, Any], name: str) -> float:
    """Median over a case's counted updates."""
    return statistics.median(update[name] for update in _counting(row["updates"]))


def _counting(updates: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return updates[NUM_LEFT_OUT:] or updates


def format_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of text."""
    first, second = (aligned([list(columns), *cells]) for columns, cells in _tables(rows))
    return [*first, "", *second]


def markdown(result: Mapping[str, Any], result_link: str) -> Iterator[str]:
    """Lines of the document's section."""
    model = result["plan"]["model"]
    notes = f" {result['notes']}" if "notes" in result else ""
    stale = f" STALE: {result['stale']}." if "stale" in result else ""
    # Results before the field existed are of policies with default settings.
    is_free = not result["cases"][0].get("deterministic", True)
    order = ", `deterministic: false`" if is_free else ""
    yield (
        f"\n{result['num_gpus']} {result['gpu']}, torch {result['versions']['torch']}, commit "
        f"{result['commit'][:12]}: {model['name']}, {model['num_layers']} layers, in "
        f"{result['plan']['dtype']}, `{result['cases'][0]['optimizer_states']}`{order}."
        f"{notes}{stale} [Raw samples]({result_link}).\n"
    )
    tables = [table for table in _tables(result["cases"]) if table[1]]
    for number, (columns, cells) in enumerate(tables):
        yield from [""] * (number > 0)
        yield from markdown_table(columns, cells)


def _tables(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Sequence[str], list[list[str]]]]:
    """Goals, and the medians of each case: columns and cells."""
    found = figures(rows).items()
    yield FIGURE_COLUMNS, [[name, f"{value:.3g}", WANTED[name]] for name, value in found]
    names = ("seconds", "trained_s", "optimizer_s", "hardware_mfu", "peak_gib", "planned_gib")
    columns = ("policy, its updates", "groups", *names)
    yield (
        columns,
        [
            [
                f"{row['policy']}, {row['work']}",
                str(row["groups"]),
                *(
                    "" if (value := _median_or_none(row, name)) is None else f"{value:.3g}"
                    for name in names
                ),
            ]
            for row in rows
        ],
    )


def _median_or_none(row: Mapping[str, Any], name: str) -> float | None:
    values = [update[name] for update in row["updates"]]
    return None if None in values else median(row, name)


if __name__ == "__main__":
    main()
