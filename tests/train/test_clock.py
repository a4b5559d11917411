"""Laps on the host's clock; those of a GPU are in test_gpu_waits."""

from __future__ import annotations

import time

import pytest
import torch

from ratoon.train.clock import DeviceClock


def test_laps_of_a_name_add_up_and_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 13.0, 13.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = DeviceClock(torch.device("cpu"))
    for name in ("forward", "backward", "forward"):
        clock.lap(name)
    seconds = clock.seconds()
    assert seconds["forward"] == 1.5
    assert seconds["backward"] == 2.0
    assert seconds["optimizer"] == 0.0
