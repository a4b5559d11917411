"""Section `crossover`: from which prompt on sharing pays, and what the planner says of it.

Enters a run, leaves the rows of each (P, N) with responses of one length. Invariants: the
replicated group is run whole, by the same kernel and by FlashAttention-2: the best that it can be;
ways are timed in turns, as they differ by less than clocks do from one minute to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.step.rollouts import (
    Group,
    make_batch,
    packed_batch,
    packed_work,
    replicated_work,
)
from benchmarks.step.run import Row, Run, Scale
from benchmarks.step.sizes import ModelSize
from benchmarks.step.subjects import Way
from benchmarks.step.ways import Plan, Ways, compare_ways, sample_in_turns
from ratoon.model.activation_plan import DecoderSizes
from ratoon.model.device_costs import H200_RATES, device_costs
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.costs import CostModel, Work
from ratoon.rollout.plan import make_plan
from ratoon.rollout.prefixes import sort_sequences


def cases(scale: Scale) -> list[str]:
    counts, prompts, _ = scale.crossover
    return [f"{prompt}x{count}" for count in counts for prompt in prompts]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case and its rows: packed, and replicated by the same and by another kernel."""
    scale = run.scale
    counts, prompts, length = scale.crossover
    # Each way alone is only checked, and its memory measured.
    ways = Ways(replace(run, num_samples=1), scale.crossover_model)
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
            shape: Row = {
                "prompt": prompt,
                "responses": count,
                "response_tokens": length,
                **predicted(costs, batch),
            }
            plan = Plan(cuts=(count,))
            rows = compare_ways(ways, batch, order, plan)
            rows = sample_in_turns(ways, batch, order, plan, rows, run.num_samples)
            yield case, [{**shape, **row} for row in rows]


def costs_of(size: ModelSize) -> CostModel:
    """The planner's costs of a model of these sizes, in seconds of an H200."""
    return device_costs(
        DecoderSizes(
            num_layers=size.num_layers,
            hidden_size=size.hidden_size,
            mlp_size=size.intermediate_size,
            num_heads=size.num_heads,
            num_kv_heads=size.num_kv_heads,
            head_dim=size.head_dim,
            vocab_size=size.vocab_size,
            element_bytes=2,
            head_is_trained=True,
        ),
        H200_RATES,
    )


def predicted(costs: CostModel, batch: RolloutBatch) -> Row:
    """Seconds of one group run at once, all shared and nothing; and whether the planner shares it.

    What tiles of attention hold in vain is of all responses but the first, which is right behind
    the prompt.
    """
    packed, replicated = (
        costs.packed(Work(tokens=work.tokens, pairs=work.pairs, rows=work.rows))
        for work in (packed_work(packed_batch(batch)), replicated_work(batch))
    )
    later = len(batch.response_tokens) - int(np.diff(batch.response_offsets)[0])
    packed += costs.pair * costs.fork * later
    kept_S = np.ones(batch.num_sequences, np.bool_)
    plan = make_plan(batch, sort_sequences(batch), kept_S, replicated_work(batch).tokens, costs)
    return {
        "predicted_packed_s": packed,
        "predicted_replicated_s": replicated,
        "predicted_speedup": replicated / packed,
        "is_shared": not plan.unshared,
    }
