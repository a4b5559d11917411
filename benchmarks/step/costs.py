"""Section `costs`: measured seconds of forwards and backwards against the planner's cost model.

The service's trainer runs them with enough memory that no matrix product is recomputed. A row holds
all that `fit_rates` needs. Predictions and fits use the planner's own `device_costs` and
`CostModel`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.timing import release, require_time
from benchmarks.step.run import Row, Run, Scale, Section, figures_or_refusal
from benchmarks.step.updates import open_trainer
from benchmarks.step.ways import Ways
from benchmarks.step.workload import CutGroup, ModelSize, flat_sizes, make_batch
from harness.decoder_sizes import uniform_sizes
from ratoon.planner.activation_plan import DecoderSizes, Kept, most_tokens
from ratoon.planner.costs import CostModel, Work
from ratoon.planner.costs import measure as measure_sizes
from ratoon.planner.device_costs import H200_RATES, DeviceRates, device_costs
from ratoon.planner.plan import Devices, draft_plan, share_as_planned
from ratoon.planner.waves import peak_tokens
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import Stage, UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss
from ratoon.train.numerics import activation_bytes
from ratoon.train.spec import OptimizerStates
from ratoon.train.trainer import Trainer
from ratoon_proto.types import LossConfig, LossKind, OldLogprobs, OldLogprobsKind

# Stages with fewer tokens are bound by host launches, which the cost model hardly covers.
MIN_STAGE_TOKENS = 2048
# In column order. Bandwidth is not fitted: it accounts for a few per cent.
FITTED = ("linear_flops", "attention_flops", "head_flops", "layer_call_s")
_SECONDS = ("layer_call_s", "exchange_s")
# Costs with which a plan shares and streams whatever it can, or shares nothing.
_SHARED = CostModel(pair=0.0, row=0.0, call=0.0, resident=0.0)
_ALONE = replace(_SHARED, pair=1.0, fork=1e12)
_AT_ONCE = 1 << 30


def cases(scale: Scale) -> list[str]:
    return [shape.name for shape in scale.costs]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case with its row."""
    if not wanted:
        return
    ways = Ways(run, run.scale.cost_model)
    # No optimizer step runs, so the smallest states leave the most memory.
    trainer = open_trainer(ways, OptimizerStates.BF16_8BIT, has_reference=False)
    free_bytes = activation_bytes(run.device)
    assert isinstance(ways.size, ModelSize), "prices are of Qwen3 models"
    for shape in run.scale.costs:
        if shape.name not in wanted or run.is_out_of_time:
            continue
        row: Row = {"how": run.scale.ours.how, "model": ways.size.name}
        row |= figures_or_refusal(
            partial(_measure_shape, run, ways.size, trainer, free_bytes, shape)
        )
        trainer.discard_gradients()
        release(run.device)
        yield shape.name, [row]


def _measure_shape(
    run: Run, size: ModelSize, trainer: Trainer, free_bytes: int | None, shape: CutGroup
) -> Row:
    require_time(run.stop_at, 0.0)
    batch = make_batch((shape.group,), trainer.model.sizes.vocab_size, run.seed)
    request = LossConfig(
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
        "sizes": _flat(size, trainer.model.sizes),
        "parts": parts,
        "packed_tokens": plan.packed_tokens,
        "packed_pairs": sum(part["work"]["pairs"] for part in parts),
        "head_rows": sum(part["work"]["rows"] for part in parts),
        "num_stages": sum(max(1, len(part["stages"])) for part in parts),
        "warm_up_s": warm_up_s,
        "seconds": statistics.median(samples),
        "samples": samples,
    }
    return {**row, "rates": asdict(run.rates), "predicted_s": predicted_s(row, run.rates)}


def _flat(size: ModelSize, sizes: DecoderSizes) -> Row:
    """Sizes of the loaded model in the form of results."""
    flat = {
        **flat_sizes(size),
        "num_layers": sizes.num_layers,
        "element_bytes": sizes.element_bytes,
        "layer_gradient_bytes": sizes.layer_gradient_bytes,
    }
    assert uniform_sizes(**flat) == sizes
    return flat


def plan_of(batch: RolloutBatch, shape: CutGroup) -> UpdatePlan:
    """The plan that cuts the batch as `shape` says."""
    devices = Devices(
        candidates=(shape.budget or _AT_ONCE,), costs=_SHARED if shape.is_shared else _ALONE
    )
    is_run_S = np.ones(batch.num_sequences, np.bool_)
    return draft_plan(batch, sort_sequences(batch), is_run_S, devices).plan


def parts_of(batch: RolloutBatch, plan: UpdatePlan) -> list[Row]:
    """Work and stages [start, stop, parent] per micro-batch."""
    prefixes = share_as_planned(sort_sequences(batch), plan.unshared)
    sizes = measure_sizes(batch, prefixes)
    return [
        {
            "work": asdict(sizes.work(np.sort(prefixes.rank[list(part.sequences)]))),
            "stages": [[stage.start, stage.stop, stage.parent] for stage in part.stages],
        }
        for part in plan.micro_batches
    ]


def _require_all_kept(trainer: Trainer, free_bytes: int | None, plan: UpdatePlan) -> None:
    """Raises RuntimeError if memory is too small to keep the outputs of all products."""
    if free_bytes is None:
        return
    sizes = trainer.model.sizes
    for part in plan.micro_batches:
        is_streamed = len(part.stages) > 0
        held = peak_tokens(part.stages) if is_streamed else plan.packed_tokens
        if held > most_tokens(sizes, free_bytes, Kept.PRODUCTS, is_streamed=is_streamed):
            raise RuntimeError(f"all that {held} tokens keep does not fit {free_bytes} bytes")


def _run_once(trainer: Trainer, batch: RolloutBatch, loss: Loss, plan: UpdatePlan) -> float:
    """Device seconds of a forward and backward that start without gradients."""
    trainer.discard_gradients()
    seconds = trainer.forward_backward(trainer.prepare(batch, loss, plan)).seconds
    return seconds.forward + seconds.backward


def predicted_s(row: Row, rates: DeviceRates) -> float:
    """Seconds that the planner predicts for a row's work."""
    costs = device_costs(uniform_sizes(**row["sizes"]), rates)
    total = 0.0
    for part in row["parts"]:
        work = Work(**part["work"])
        stages = [Stage(start=a, stop=b, parent=parent) for a, b, parent in part["stages"]]
        total += costs.streamed(work, stages) if stages else costs.packed(work)
    return total


def is_launch_bound(row: Row) -> bool:
    """Whether host launches dominate, so that the row says little about the device's rates."""
    return row["packed_tokens"] < MIN_STAGE_TOKENS * row["num_stages"]


def fitted_rows(rows: list[Row]) -> list[Row]:
    """The rows that rates are fitted to and predictions judged by."""
    return [row for row in rows if "error" not in row and not is_launch_bound(row)]


def rates_in_use(rows: list[Row]) -> DeviceRates:
    """Rates by which a result's seconds are predicted; an H200's if its rows have none."""
    return next((DeviceRates(**row["rates"]) for row in rows if "rates" in row), H200_RATES)


def fit_rates(rows: list[Row]) -> DeviceRates | None:
    """Rates of least squared relative error; None if there are too few rows to fit them.

    `memory_bytes` is that in use. A rate that no row spends time on is infinite.
    """
    found = fitted_rows(rows)
    if len(found) < len(FITTED):
        return None
    nothing = _only(memory_bytes=rates_in_use(rows).memory_bytes)
    fixed_s = np.array([predicted_s(row, nothing) for row in found])
    unit_s = np.array(
        [[predicted_s(row, _only(**{name: 1.0})) for name in FITTED] for row in found]
    )
    seconds = np.array([row["seconds"] for row in found])
    weights = _least_squares(unit_s / seconds[:, None], (seconds - fixed_s) / seconds)
    by_name = dict(zip(FITTED, weights.tolist(), strict=True))
    return replace(nothing, **{name: _rate(name, weight) for name, weight in by_name.items()})


def worst_error(rows: list[Row], rates: DeviceRates) -> float:
    """Largest relative error of predictions with these rates, over `fitted_rows`."""
    return max(abs(predicted_s(row, rates) / row["seconds"] - 1) for row in fitted_rows(rows))


def _only(**rates: float) -> DeviceRates:
    """A device that takes no time for anything but these."""
    names = [field.name for field in fields(DeviceRates)]
    free = {name: 0.0 if name in _SECONDS else math.inf for name in names}
    return DeviceRates(**{**free, **rates})


def _rate(name: str, weight: float) -> float:
    """The rate for a fitted weight, which is in seconds per unit."""
    if name in _SECONDS:
        return weight
    return 1.0 / weight if weight > 0 else math.inf


def _least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of a x = b with x >= 0; components that are not positive stay 0 from then
    on."""
    kept = np.arange(a.shape[1])
    while True:
        x = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        if (x > 0).all():
            break
        kept = kept[x > 0]
    whole = np.zeros(a.shape[1])
    whole[kept] = x
    return whole


COSTS = Section(cases=cases, measure=measure)
