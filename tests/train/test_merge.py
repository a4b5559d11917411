"""Figures that add up: whatever the cut and the order, and no NaN is lost on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.train.additive import (
    NUM_BINS,
    Counts,
    Merged,
    Moments,
    count_log_ratios,
    largest,
    quantile,
    smallest,
    total,
)
from ratoon.train.loss.sums import LossSums, pack_sums


@dataclass(frozen=True, slots=True)
class _Figures(Merged):
    number: float = total()
    most: float = largest()
    least: float = smallest()
    spread: Moments = Moments()  # noqa: RUF009 - frozen


def _figures(values: list[float]) -> _Figures:
    found = _Figures()
    for value in values:
        spread = Moments.of(np.array([value]))
        found += _Figures(number=1.0, most=abs(value), least=value, spread=spread)
    return found


_VALUES = st.lists(st.floats(-1e3, 1e3), max_size=20)


@settings(deadline=None)
@given(_VALUES, _VALUES)
def test_a_cut_changes_nothing(first: list[float], second: list[float]) -> None:
    whole, parts = _figures(first + second), _figures(second) + _figures(first)
    values = np.array(first + second)
    assert (whole.number, whole.most, whole.least) == (parts.number, parts.most, parts.least)
    assert whole.number == len(values)
    assert whole.most == np.abs(values).max(initial=0.0)
    assert whole.least == values.min(initial=math.inf)
    for each in (whole, parts):
        assert each.spread.count == len(values)
        if len(values):
            assert each.spread.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-9)
            assert each.spread.std == pytest.approx(values.std(), rel=1e-9, abs=1e-9)


def test_large_means_leave_the_deviations() -> None:
    """Sums of squares would: 1e18 and 1e18 + 1e9 are all that float64 knows of these."""
    values = 1e9 + np.array([0.0, 1.0, 2.0, 3.0])
    parts = Moments.of(values[:1]) + Moments.of(values[1:])
    assert parts.std == pytest.approx(values.std(), rel=1e-6)
    assert (Moments().std, Moments() + parts) == (0.0, parts)


def test_what_is_no_number_stays_one_on_either_side() -> None:
    """max(0.0, nan) is 0.0 in Python."""
    for one, two in ((_Figures(most=math.nan), _Figures()), (_Figures(), _Figures(least=math.nan))):
        for merged in (one + two, two + one):
            assert math.isnan(merged.most) or math.isnan(merged.least)
    row_F = pack_sums({"ratio_max": torch.tensor(math.nan).double()}, None, torch.zeros(1))
    other_F = pack_sums({"ratio_max": torch.tensor(2.0).double()}, None, torch.zeros(1))
    for rows in ([row_F, other_F], [other_F, row_F]):
        assert math.isnan(LossSums.total(rows).ratio_max)


def test_no_terms_change_nothing() -> None:
    nothing = LossSums.total([pack_sums({}, None, torch.zeros(0))])
    assert nothing == LossSums(log_ratios=Counts((0,) * NUM_BINS))
    sums = LossSums(loss=1.5, ratio_min=0.5, ratio_max=2.0)
    assert (sums + LossSums(), LossSums() + sums) == (sums, sums)


_LOG_RATIOS = st.lists(
    st.one_of(
        st.floats(-31.5, 31.5, width=32),
        st.floats(-(2.0**-10), 2.0**-10, width=32),
        st.sampled_from([0.0, -0.0, 2.0**-20, -(2.0**-20), 1.0, -1.0]),
    ),
    min_size=1,
    max_size=60,
)


@settings(deadline=None)
@given(_LOG_RATIOS, st.integers(0, 60), st.sampled_from([0.0, 0.01, 0.25, 0.5, 0.99, 1.0]))
def test_quantile_is_as_near_as_it_says(values: list[float], cut: int, share: float) -> None:
    """float32 and float64 alike, of a whole and of two parts."""
    exact = float(np.quantile(np.array(values), share, method="inverted_cdf"))
    for dtype in (torch.float32, torch.float64):
        log_ratio = torch.tensor(values, dtype=dtype)
        whole = Counts(tuple(map(int, count_log_ratios(log_ratio))))
        parts = Counts()
        for part in (log_ratio[:cut], log_ratio[cut:]):
            parts += Counts(tuple(map(int, count_log_ratios(part))))
        assert parts == whole
        assert sum(whole.bins) == len(values)
        found = quantile(whole, share)
        assert abs(found - exact) <= max(abs(exact) / 16, 2.0**-20)
        assert found * exact >= 0


def test_far_ratios_are_in_the_last_bins() -> None:
    far = [math.inf, 32.0, 1e30, math.nan]
    counts = count_log_ratios(torch.tensor([*far, -math.inf, -32.0]))
    assert (counts[0], counts[-1], counts.sum()) == (2, len(far), len(far) + 2)
