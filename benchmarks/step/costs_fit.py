"""The rates of a device by which measured steps take as long as the planner's costs say.

Enters rows of section `costs`, leaves predicted seconds and fitted `DeviceRates`. Invariant: what
is fitted is what plans are made by, `device_costs` and its `CostModel`; nothing else predicts.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.step.rows import Row
from ratoon.model.activation_plan import DecoderSizes
from ratoon.model.device_costs import H200_RATES, DeviceRates, device_costs
from ratoon.rollout.costs import Work
from ratoon.rollout.packed import Stage

# Of fewer tokens at a time the host's launches decide, which the costs know next to nothing of.
MIN_STAGE_TOKENS = 2048
# In the order of the columns. Bandwidth is not among them: what it prices is a few per cent.
FITTED = ("linear_flops", "attention_flops", "head_flops", "layer_call_s")
_SECONDS = ("layer_call_s",)


def predicted_s(row: Row, rates: DeviceRates) -> float:
    """Seconds that the planner counts on for the work of a row."""
    costs = device_costs(DecoderSizes(**row["sizes"]), rates)
    total = 0.0
    for part in row["parts"]:
        work = Work(**part["work"])
        stages = [Stage(start=a, stop=b, parent=parent) for a, b, parent in part["stages"]]
        total += costs.streamed(work, stages) if stages else costs.packed(work)
    return total


def is_launch_bound(row: Row) -> bool:
    """Whether it says little of the device's rates."""
    return row["packed_tokens"] < MIN_STAGE_TOKENS * row["num_stages"]


def fitted_rows(rows: list[Row]) -> list[Row]:
    """Those that rates are fitted to, and predictions are judged by."""
    return [row for row in rows if "error" not in row and not is_launch_bound(row)]


def fit_rates(rows: list[Row], bandwidth: DeviceRates = H200_RATES) -> DeviceRates | None:
    """Rates of the least relative errors; None: too few rows to tell them apart.

    `memory_bytes` is that of `bandwidth`. What none of the rows takes time for has no limit.
    """
    found = fitted_rows(rows)
    if len(found) < len(FITTED):
        return None
    nothing = _only(memory_bytes=bandwidth.memory_bytes)
    fixed_s = np.array([predicted_s(row, nothing) for row in found])
    unit_s = np.array(
        [[predicted_s(row, _only(**{name: 1.0})) for name in FITTED] for row in found]
    )
    seconds = np.array([row["seconds"] for row in found])
    weights = _least_squares(unit_s / seconds[:, None], (seconds - fixed_s) / seconds)
    by_name = dict(zip(FITTED, weights.tolist(), strict=True))
    return replace(nothing, **{name: _rate(name, weight) for name, weight in by_name.items()})


def worst_error(rows: list[Row], rates: DeviceRates) -> float:
    """Greatest relative error of the rates' seconds, over the rows that rates are fitted to."""
    return max(abs(predicted_s(row, rates) / row["seconds"] - 1) for row in fitted_rows(rows))


def _only(**rates: float) -> DeviceRates:
    """A device on which all but these takes no time."""
    names = [field.name for field in fields(DeviceRates)]
    free = {name: 0.0 if name in _SECONDS else math.inf for name in names}
    return DeviceRates(**{**free, **rates})


def _rate(name: str, weight: float) -> float:
    """From the seconds of a unit."""
    if name in _SECONDS:
        return weight
    return 1.0 / weight if weight > 0 else math.inf


def _least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 of the least |a x - b|, where what would be negative is 0 from then on."""
    kept = np.arange(a.shape[1])
    while True:
        x = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        if (x > 0).all():
            break
        kept = kept[x > 0]
    whole = np.zeros(a.shape[1])
    whole[kept] = x
    return whole
