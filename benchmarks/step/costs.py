"""Section `costs`: seconds of forwards and backwards beside those that planning counts on.

Enters a run, leaves a row of each group and way to cut it, run by the service's trainer. Invariant:
layers keep all that they can, so that no product runs twice; a row has all that rates are fitted to
(`step_costs_fit.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np

from benchmarks.step.costs_fit import predicted_s
from benchmarks.step.rollouts import CutGroup, make_batch
from benchmarks.step.run import Row, Run, Scale, refusal
from benchmarks.step.timing import release, require_time
from benchmarks.step.updates import open_trainer
from benchmarks.step.ways import Ways
from ratoon.model.activation_plan import Kept, most_tokens
from ratoon.model.device_costs import H200_RATES
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.costs import CostModel
from ratoon.rollout.costs import measure as measure_sizes
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.plan import make_plan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.sharing import planned_prefixes
from ratoon.rollout.waves import peak_tokens
from ratoon.train.config import (
    LossKind,
    LossRequest,
    OldLogprobs,
    OldLogprobsKind,
    OptimizerStates,
)
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss
from ratoon.train.numerics import activation_bytes
from ratoon.train.trainer import Trainer

# With these a plan shares and streams whatever it can, or nothing.
_SHARED = CostModel(pair=0.0, row=0.0, call=0.0, resident=0.0)
_ALONE = replace(_SHARED, pair=1.0, fork=1e12)
_AT_ONCE = 1 << 30


def cases(scale: Scale) -> list[str]:
    return [shape.name for shape in scale.costs]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case and its row."""
    if not wanted:
        return
    ways = Ways(run, run.scale.cost_model)
    # No optimizer step is run: the narrowest states leave the most memory.
    trainer = open_trainer(ways, OptimizerStates.BF16_8BIT, has_reference=False)
    free_bytes = activation_bytes(run.device)
    for shape in run.scale.costs:
        if shape.name not in wanted or run.is_out_of_time:
            continue
        row: Row = {"how": run.scale.ours.how, "model": ways.size.name}
        try:
            row |= _measure_shape(run, trainer, free_bytes, shape)
        except Exception as error:  # noqa: BLE001  what the device says is the row's content
            row |= refusal(error)
        trainer.discard_gradients()
        release(run.device)
        yield shape.name, [row]


def _measure_shape(run: Run, trainer: Trainer, free_bytes: int | None, shape: CutGroup) -> Row:
    require_time(run.stop_at, 0.0)
    batch = make_batch((shape.group,), trainer.model.sizes.vocab_size, run.seed)
    request = LossRequest(
        kind=LossKind.GRPO, old_logprobs=OldLogprobs(kind=OldLogprobsKind.ON_POLICY)
    )
    loss = resolve_loss(request, batch, has_frozen_reference=False)
    plan = plan_of(batch, shape)
    _require_all_kept(trainer, free_bytes, plan)
    warm_up_s = _run_once(trainer, batch, loss, plan)
    samples = [_run_once(trainer, batch, loss, plan)]
    while len(samples) < run.num_samples and time.monotonic() + samples[-1] < run.stop_at:
        samples.append(_run_once(trainer, batch, loss, plan))
    parts = parts_of(batch, plan)
    row: Row = {
        "sizes": asdict(trainer.model.sizes),
        "parts": parts,
        "packed_tokens": plan.packed_tokens,
        "packed_pairs": sum(part["work"]["pairs"] for part in parts),
        "head_rows": sum(part["work"]["rows"] for part in parts),
        "num_stages": sum(max(1, len(part["stages"])) for part in parts),
        "warm_up_s": warm_up_s,
        "seconds": statistics.median(samples),
        "samples": samples,
    }
    return {**row, "predicted_s": predicted_s(row, H200_RATES)}


def plan_of(batch: RolloutBatch, shape: CutGroup) -> UpdatePlan:
    """The plan that cuts it as the shape says."""
    return make_plan(
        batch,
        sort_sequences(batch),
        np.ones(batch.num_sequences, np.bool_),
        shape.budget or _AT_ONCE,
        _SHARED if shape.is_shared else _ALONE,
    )


def parts_of(batch: RolloutBatch, plan: UpdatePlan) -> list[Row]:
    """Work and stages (start, stop, parent) of each micro-batch."""
    prefixes = planned_prefixes(sort_sequences(batch), plan)
    sizes = measure_sizes(batch, prefixes)
    return [
        {
            "work": asdict(sizes.work(np.sort(prefixes.rank[list(part.sequences)]))),
            "stages": [[stage.start, stage.stop, stage.parent] for stage in part.stages],
        }
        for part in plan.micro_batches
    ]


def _require_all_kept(trainer: Trainer, free_bytes: int | None, plan: UpdatePlan) -> None:
    """Raises RuntimeError where some of it would run again, for want of memory."""
    if free_bytes is None:
        return
    sizes = trainer.model.sizes
    for part in plan.micro_batches:
        is_streamed = len(part.stages) > 0
        held = peak_tokens(part.stages) if is_streamed else plan.packed_tokens
        if held > most_tokens(sizes, free_bytes, Kept.PRODUCTS, is_streamed=is_streamed):
            raise RuntimeError(f"all that {held} tokens keep does not fit {free_bytes} bytes")


def _run_once(trainer: Trainer, batch: RolloutBatch, loss: Loss, plan: UpdatePlan) -> float:
    """Seconds of a forward and backward on the device's clock; gradients start from none."""
    trainer.discard_gradients()
    seconds = trainer.forward_backward(batch, loss, plan).seconds
    return seconds.forward + seconds.backward
