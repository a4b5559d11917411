"""What a known device is measured to do, against the rates by which it plans."""

from __future__ import annotations

import time
from dataclasses import asdict

import pytest
import torch

from ratoon.planner.device_costs import KNOWN_RATES
from ratoon.train.numerics import device_model
from ratoon.train.rates import Attention, measure_rates

pytestmark = pytest.mark.gpu

# Rates are of whole steps, and a layer's call is the host's.
FACTOR = {"layer_call_s": 4.0}
USUAL_FACTOR = 2.0
# Beside other tests on the same GPU a measurement finds less of it.
SHARED_FACTOR = 16.0


def test_measured_rates_are_near_the_known_ones_and_take_seconds() -> None:
    device = torch.device("cuda:0")
    known = KNOWN_RATES.get(device_model(device))
    if known is None:
        pytest.skip(f"the rates of {device_model(device)} are not known")
    started = time.monotonic()
    found = asdict(measure_rates(device, Attention(backend="", deterministic=False)))
    assert time.monotonic() - started < 30
    for name, rate in asdict(known).items():
        factor = FACTOR.get(name, USUAL_FACTOR)
        slower = found[name] / rate if name.endswith("_s") else rate / found[name]
        assert 1 / factor < slower < SHARED_FACTOR, (name, found[name], rate)
