"""Measures how evenly plans load the ranks of a data-parallel policy, and how long planning takes.

Costs are modelled: those of Qwen3-8B at the H200's rates, by which the service plans. Milliseconds
are measured, on one thread: a plan with its choice of micro-batch tokens, of sorted sequences.

    python -m benchmarks.step.balance --out benchmarks/results/cpu/balance.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.document import aligned, write_json
from benchmarks.step.workload import QWEN3_8B, Group, make_batch, sizes_of
from harness.environment import describe
from ratoon.planner.costs import CostModel, measure
from ratoon.planner.device_costs import H200_RATES
from ratoon.planner.plan import share_as_planned
from ratoon.planner.planning import Planner, device_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import SortedPrefixes, sort_sequences

NUM_GROUPS = 64
NUM_RANKS = 8
# Bytes that the device of each rank lends to activations.
ACTIVATION_BYTES = 80 * 2**30
# Standard deviations of the logarithms of lengths.
SKEWS = (0.5, 1.0, 1.5)
MAX_TOKENS = 16_384
TARGET_GAP = 0.05
TARGET_MS = 50.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="measure into this result file")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=5, help="batches of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    environment = describe(args.seed)
    rows = [
        {"case": name, **_measure(batch, args.repeats)}
        for name, batch in cases(range(args.seed, args.seed + args.seeds))
    ]
    result = {
        "target_gap": TARGET_GAP,
        "largest_gap": max(row["gap"] for row in rows),
        "target_ms": TARGET_MS,
        "longest_ms": max(row["median_ms"] for row in rows),
        **environment,
        "groups": NUM_GROUPS,
        "ranks": NUM_RANKS,
        "repeats": args.repeats,
        "rows": rows,
    }
    if args.out is not None:
        write_json(args.out, result)
    print("\n".join(aligned([["case", "tokens", "gap", "of ranks", "split", "ms"], *_cells(rows)])))


def cases(seeds: range) -> Iterator[tuple[str, RolloutBatch]]:
    """Batches by name: three skews of lengths, a giant group beside small ones, trees of turns."""
    for seed in seeds:
        for skew in SKEWS:
            yield f"skew {skew}, seed {seed}", _batch(_groups(skew, seed), seed)
        giant = Group(prompt=MAX_TOKENS, responses=(MAX_TOKENS // 2,) * 32)
        yield f"giant, seed {seed}", _batch((giant, *_groups(1.0, seed)[1:]), seed)
        yield f"turns, seed {seed}", _turns(seed)


def _groups(skew: float, seed: int) -> tuple[Group, ...]:
    """Groups of 8 to 32 responses; prompts have a median of 400 tokens, responses of 800."""
    rng = np.random.default_rng(seed)

    def lengths(median: int, count: int) -> list[int]:
        drawn = rng.lognormal(np.log(median), skew, count)
        return np.clip(drawn, 16, MAX_TOKENS).astype(int).tolist()

    return tuple(
        Group(prompt=lengths(400, 1)[0], responses=tuple(lengths(800, int(rng.integers(8, 33)))))
        for _ in range(NUM_GROUPS)
    )


def _batch(groups: tuple[Group, ...], seed: int) -> RolloutBatch:
    return make_batch(groups, QWEN3_8B.vocab_size, seed)


def _turns(seed: int) -> RolloutBatch:
    """All prompts begin with the same 2,048 tokens. Of a group's 16 responses each four share a
    first turn of 600 tokens, and each two a second one."""
    turn, system = 600, 2048
    rng = np.random.default_rng(seed)
    groups = tuple(
        Group(
            prompt=system + int(rng.integers(50, 800)),
            responses=tuple((2 * turn + rng.integers(50, 2000, 16)).tolist()),
        )
        for _ in range(NUM_GROUPS)
    )
    batch = _batch(groups, seed)
    for start in batch.prompt_offsets[:-1].tolist():
        batch.prompt_tokens[start : start + system] = batch.prompt_tokens[:system]
    starts: list[int] = batch.response_offsets[:-1].tolist()
    tokens = batch.response_tokens
    for index, start in enumerate(starts):
        first, second = starts[index // 4 * 4], starts[index // 2 * 2]
        tokens[start : start + turn] = tokens[first : first + turn]
        tokens[start + turn : start + 2 * turn] = tokens[second + turn : second + 2 * turn]
    return batch


def _measure(batch: RolloutBatch, repeats: int) -> dict[str, Any]:
    """`gap`: modelled cost of the longest rank over that of the plan of one rank divided by the
    ranks, less 1. No plan can be below that, as ranks only repeat what one runs once."""
    planner = _planner()
    prefixes = sort_sequences(batch)
    is_run_S = np.ones(batch.num_sequences, np.bool_)
    plans: list[UpdatePlan] = []
    samples: list[float] = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        plans.append(planner.plan(batch, prefixes, is_run_S))
        samples.append(1e3 * (time.perf_counter() - started))
    plan = plans[0]
    assert all(other == plan for other in plans)
    single = replace(planner, num_ranks=1).plan(batch, prefixes, is_run_S)
    costs = planner.devices[0].costs
    bound = sum(_seconds(single, batch, prefixes, costs)) / NUM_RANKS
    ranks = [sum(_seconds(plan.of_rank(rank), batch, prefixes, costs)) for rank in range(NUM_RANKS)]
    return {
        "unshared_tokens": plan.unshared_tokens,
        "packed_tokens": plan.packed_tokens,
        "packed_tokens_of_one_rank": single.packed_tokens,
        "micro_batches": len(plan.micro_batches),
        "split_groups": _split_groups(plan, batch),
        "bound_s": bound,
        "rank_s": ranks,
        "gap": max(ranks) / bound - 1,
        "rank_gap": plan.rank_gap,
        "median_ms": statistics.median(samples[1:]),
        "raw_ms": [round(value, 3) for value in samples[1:]],
    }


def _planner() -> Planner:
    sizes = sizes_of(QWEN3_8B)
    return device_planner(
        None,
        sizes,
        ACTIVATION_BYTES,
        0,
        rates=H200_RATES,
        layers_are_trained=True,
        num_ranks=NUM_RANKS,
    )


def _seconds(
    plan: UpdatePlan, batch: RolloutBatch, prefixes: SortedPrefixes, costs: CostModel
) -> Iterator[float]:
    """Modelled, of each micro-batch."""
    planned = share_as_planned(prefixes, plan.unshared)
    sizes = measure(batch, planned)
    for part in plan.micro_batches:
        work = sizes.work(np.sort(planned.rank[list(part.sequences)]))
        yield costs.streamed(work, part.stages) if part.stages else costs.packed(work)


def _split_groups(plan: UpdatePlan, batch: RolloutBatch) -> int:
    """Groups on more than one rank."""
    ranks: list[set[int]] = [set() for _ in range(batch.num_groups)]
    for part in plan.micro_batches:
        groups = np.searchsorted(batch.group_offsets, part.sequences, side="right") - 1
        for group in groups.tolist():
            ranks[group].add(part.rank)
    return sum(len(found) > 1 for found in ranks)


def _cells(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        yield [
            row["case"],
            f"{row['packed_tokens']:,}",
            f"{row['gap']:.2%}",
            f"{row['rank_gap']:.2%}",
            str(row["split_groups"]),
            f"{row['median_ms']:.1f}",
        ]


if __name__ == "__main__":
    main()
