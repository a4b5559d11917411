"""Sections `paper`, `crossover` and `table2`: ours against replicated rollouts and other backends.

`paper` is the recorded group through the whole model; `table2` one decoder layer on long prompts;
`crossover` finds the prompt length from which sharing pays, beside the planner's prediction. The
ways to run a case differ in attention, sharing and streaming only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.common.timing import measure as measure_samples
from benchmarks.common.timing import require_time
from benchmarks.step.run import Row, Run, Scale, Section
from benchmarks.step.subjects import Way, compared_gradients, layer_step
from benchmarks.step.ways import Plan, Ways, compare_each, compare_ways, sample_in_turns
from benchmarks.step.workload import (
    Group,
    ModelSize,
    StepWork,
    make_batch,
    mfu,
    packed_batch,
    packed_work,
    replicated_batches,
    replicated_work,
    sizes_of,
)
from ratoon.planner.costs import CostModel, Work
from ratoon.planner.device_costs import DeviceRates, device_costs
from ratoon.planner.plan import Devices, draft_plan
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import response_tokens
from ratoon.rollout.packed import PackedBatch
from ratoon.rollout.prefixes import sort_sequences
from ratoon.train.micro_batches import DeviceBatch, to_device

# Bounds on sequences and tokens of a replicated micro-batch of one layer; these fill the device.
MAX_CUT, CUT_TOKENS = 4, 65_536
# Vocabulary of the one-layer model, whose embedding and head are not run.
VOCAB_SIZE = 64


def _paper_cases(scale: Scale) -> list[str]:
    return [f"{scale.paper.prompt}x{len(scale.paper.responses)}"]


def _measure_paper(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields the case with its rows: ours, packed and streamed, replicated, and other backends."""
    scale = run.scale
    for case in wanted:
        ways = Ways(run, scale.model)
        batch = make_batch((scale.paper,), scale.model.vocab_size, run.seed)
        others = [Way(backend=name, is_packed=True) for name in scale.packed[1:]]
        order = [scale.ours, *scale.streamed, scale.baseline, *others]
        yield case, compare_ways(ways, batch, order, Plan(cuts=scale.cuts))


def _crossover_cases(scale: Scale) -> list[str]:
    counts, prompts, _ = scale.crossover
    return [f"{prompt}x{count}" for count in counts for prompt in prompts]


def _measure_crossover(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case with its rows: packed, and replicated by the same and by another kernel.

    Replicated groups run in one micro-batch. Ways take turns, as they differ by less than clocks do
    from one minute to the next.
    """
    scale = run.scale
    counts, prompts, length = scale.crossover
    # One sample each, for the check and the memory; the timing is done in turns.
    ways = Ways(replace(run, num_samples=1), scale.crossover_model)
    unshared = Way(backend=scale.ours.backend, is_packed=False)
    order = list(dict.fromkeys([scale.ours, unshared, scale.baseline]))
    costs = costs_of(scale.crossover_model, run.rates)
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


def costs_of(size: ModelSize, rates: DeviceRates) -> CostModel:
    """The planner's cost model for these sizes, in seconds."""
    return device_costs(sizes_of(size), rates)


def predicted(costs: CostModel, batch: RolloutBatch) -> Row:
    """Predicted seconds of one group, shared and unshared, and whether the planner shares it.

    Attention tiles waste work on all responses but the first, which directly follows the prompt.
    """
    packed, replicated = (
        costs.packed(Work(tokens=work.tokens, pairs=work.pairs, rows=work.rows))
        for work in (packed_work(packed_batch(batch)), replicated_work(batch))
    )
    later = len(batch.response_tokens) - int(np.diff(batch.response_offsets)[0])
    packed += costs.pair * costs.fork * later
    kept_S = np.ones(batch.num_sequences, np.bool_)
    devices = Devices(candidates=(replicated_work(batch).tokens,), costs=costs)
    plan = draft_plan(batch, sort_sequences(batch), kept_S, devices).plan
    return {
        "predicted_packed_s": packed,
        "predicted_replicated_s": replicated,
        "predicted_speedup": replicated / packed,
        "is_shared": not plan.unshared,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """One micro-batch: packed index per token, and the layer's input and output gradient."""

    batch: DeviceBatch
    source_T: Tensor
    hidden_TD: Tensor
    dout_TD: Tensor


def _table2_cases(scale: Scale) -> list[str]:
    return [f"{prompt}x{count}" for prompt, count in scale.table2]


def _measure_table2(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case with its rows: ours, replicated, and `flash` if it is among the backends."""
    scale = run.scale
    size = replace(
        scale.model, name=f"{scale.model.name}, 1 layer", num_layers=1, vocab_size=VOCAB_SIZE
    )
    ways = Ways(run, size)
    others = [Way(backend=name, is_packed=True) for name in scale.packed[1:] if name == "flash"]
    for prompt, count in scale.table2:
        case = f"{prompt}x{count}"
        if case not in wanted or run.is_out_of_time:
            continue
        group = Group(prompt=prompt, responses=scale.paper.responses[:count])
        batch = make_batch((group,), VOCAB_SIZE, run.seed)
        yield case, _compare_layers(ways, batch, [scale.ours, scale.baseline, *others])


def _compare_layers(ways: Ways, batch: RolloutBatch, order: Sequence[Way]) -> list[Row]:
    packed = packed_batch(batch)
    generator = torch.Generator(ways.run.device).manual_seed(ways.run.seed)
    shape = (2, packed.forest.num_tokens, ways.size.hidden_size)
    hidden_TD, dout_TD = torch.randn(
        shape, generator=generator, device=ways.run.device, dtype=ways.run.scale.dtype
    )
    return compare_each(
        ways, order, lambda way: _measure_layer(ways, way, batch, packed, hidden_TD, dout_TD)
    )


def _measure_layer(
    ways: Ways,
    way: Way,
    batch: RolloutBatch,
    packed: PackedBatch,
    hidden_TD: Tensor,
    dout_TD: Tensor,
) -> tuple[Row, dict[str, Tensor]]:
    run, policy = ways.run, ways.policy(way)
    require_time(run.stop_at, 0.0)
    row: Row = {"how": way.how, "model": ways.size.name}
    if way.is_packed:
        parts = [packed]
    else:
        cut = _cut(batch)
        parts = replicated_batches(batch, cut)
        row["micro_batch_sequences"] = cut
    inputs = _load(batch, packed, parts, hidden_TD, dout_TD)
    steps = [layer_step(policy, way, part.batch) for part in inputs]

    def run_all() -> list[Tensor]:
        policy.module.zero_grad(set_to_none=True)
        return [
            step(part.hidden_TD, part.dout_TD) for step, part in zip(steps, inputs, strict=True)
        ]

    dhidden_TD = torch.zeros_like(hidden_TD, dtype=torch.float32)
    for part, gradient_TD in zip(inputs, run_all(), strict=True):
        dhidden_TD.index_add_(0, part.source_T, gradient_TD.float())
    values = {"hidden": dhidden_TD, **compared_gradients(policy)}
    measured = measure_samples(
        run_all, run.device, num_samples=run.num_samples, stop_at=run.stop_at
    )
    work, replicated = packed_work(packed), replicated_work(batch)
    return {
        **row,
        "seconds": measured.seconds,
        "hardware_mfu": mfu(ways.size, _without_head(work), measured.seconds),
        "logical_mfu": mfu(ways.size, _without_head(replicated), measured.seconds),
        "peak_gib": measured.peak_gib,
        "packed_tokens": work.tokens,
        "replicated_tokens": replicated.tokens,
        "samples": measured.samples,
    }, values


def _cut(batch: RolloutBatch) -> int:
    longest = int(np.diff(batch.response_offsets).max() + np.diff(batch.prompt_offsets).max())
    return max(1, min(MAX_CUT, CUT_TOKENS // longest, batch.num_sequences))


def _without_head(work: StepWork) -> StepWork:
    return replace(work, rows=0)


def _load(
    batch: RolloutBatch,
    packed: PackedBatch,
    parts: Sequence[PackedBatch],
    hidden_TD: Tensor,
    dout_TD: Tensor,
) -> list[LayerInputs]:
    """Inputs of each micro-batch, gathered from those of the packed one.

    A replica of a token that ran already gets a zero output gradient, so that gradients summed over
    replicas are those of the packed group.
    """
    device = hidden_TD.device
    if parts[0] is packed:
        everything_T = torch.arange(len(hidden_TD), device=device)
        return [
            LayerInputs(
                batch=to_device(packed, device),
                source_T=everything_T,
                hidden_TD=hidden_TD,
                dout_TD=dout_TD,
            )
        ]
    paths = _paths(batch, packed)
    is_run = np.zeros(packed.forest.num_tokens, np.bool_)
    loaded: list[LayerInputs] = []
    for part in parts:
        is_owner: list[NDArray[np.bool_]] = []
        for sequence in part.forest.sequences.tolist():
            is_owner.append(~is_run[paths[sequence]])
            is_run[paths[sequence]] = True
        source = np.concatenate([paths[s] for s in part.forest.sequences.tolist()])
        source_T = torch.from_numpy(source).to(device)
        owner_T1 = torch.from_numpy(np.concatenate(is_owner)).to(device)[:, None]
        loaded.append(
            LayerInputs(
                batch=to_device(part, device),
                source_T=source_T,
                hidden_TD=hidden_TD[source_T],
                dout_TD=dout_TD[source_T].where(owner_T1, 0),
            )
        )
    return loaded


def _paths(batch: RolloutBatch, packed: PackedBatch) -> list[NDArray[np.int64]]:
    """Packed indices of each sequence's tokens; `batch` is one group."""
    tokens = response_tokens(batch, packed.forest)
    packed_of_column = np.empty(len(batch.loss_mask), np.int64)
    packed_of_column[tokens.column] = tokens.packed
    prompt = np.arange(int(batch.prompt_offsets[1]))
    bounds = batch.response_offsets.tolist()
    return [
        np.concatenate([prompt, packed_of_column[start:stop]]) for start, stop in pairwise(bounds)
    ]


PAPER = Section(cases=_paper_cases, measure=_measure_paper)
CROSSOVER = Section(cases=_crossover_cases, measure=_measure_crossover)
TABLE2 = Section(cases=_table2_cases, measure=_measure_table2)
