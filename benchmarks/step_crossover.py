"""Section `crossover`: from which prompt on sharing pays, and what the cost model says of it.

Enters a run, leaves the rows of each (P, N) with responses of one length. Invariant: the replicated
group is run whole, by the same kernel and by FlashAttention-2: the best that it can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.step_rollouts import (
    Group,
    make_batch,
    packed_batch,
    packed_work,
    replicated_work,
)
from benchmarks.step_run import Row, Run, Scale
from benchmarks.step_sizes import ModelSize, StepWork
from benchmarks.step_subjects import Way
from benchmarks.step_ways import Plan, Ways, compare_ways
from ratoon.rollout.costs import DEFAULT_COSTS, CostModel, Work

# Layers of the decoder that the planner's default costs are of.
COST_MODEL_LAYERS = 36


def cases(scale: Scale) -> list[str]:
    counts, prompts, _ = scale.crossover
    return [f"{prompt}x{count}" for count in counts for prompt in prompts]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case and its rows: packed, and replicated by the same and by another kernel."""
    scale = run.scale
    counts, prompts, length = scale.crossover
    ways = Ways(run, scale.crossover_model)
    unshared = Way(backend=scale.ours.backend, is_packed=False)
    order = list(dict.fromkeys([scale.ours, unshared, scale.baseline]))
    costs = costs_of(scale.crossover_model)
    for count in counts:
        for prompt in prompts:
            case = f"{prompt}x{count}"
            if case not in wanted or run.is_out_of_time:
                continue
            group = Group(prompt=prompt, responses=(length,) * count)
            batch = make_batch((group,), ways.size.vocab_size, run.seed)
            packed, replicated = packed_work(packed_batch(batch)), replicated_work(batch)
            shape: Row = {
                "prompt": prompt,
                "responses": count,
                "response_tokens": length,
                "predicted_speedup": predicted_speedup(costs, packed, replicated),
            }
            rows = compare_ways(ways, batch, order, Plan(cuts=(count,)))
            yield case, [{**shape, **row} for row in rows]


def costs_of(size: ModelSize) -> CostModel:
    """The planner's costs for a model of fewer layers: its head weighs more against them."""
    return replace(DEFAULT_COSTS, row=DEFAULT_COSTS.row * COST_MODEL_LAYERS / size.num_layers)


def predicted_speedup(costs: CostModel, packed: StepWork, replicated: StepWork) -> float:
    """Cost of the replicated group, run at once, over that of the packed one."""
    of_packed, of_replicated = (
        costs.packed(Work(tokens=work.tokens, pairs=work.pairs, rows=work.rows))
        for work in (packed, replicated)
    )
    return of_replicated / of_packed
