"""What counts as flat, and what a result says of its samples."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.service.hostile_attacks import ATTACKS, Ground
from benchmarks.service.hostile_callers import (
    AFTER_P99_MS,
    P99_MS,
    SLACK,
    WINDOW_S,
    Samples,
    flatness,
    judged,
)


@pytest.mark.parametrize(
    ("values", "is_flat"),
    [
        ([100.0] * 300, True),
        ([100.0] * 60 + [300.0] * 180 + [140.0] * 60, True),
        ([100.0] * 60 + [100.0 + second for second in range(240)], False),
        ([0.0] * 299 + [500.0], False),
        ([100.0, 100.0, 200.0], False),
        ([5.0], True),
    ],
)
def test_flat_is_the_last_window_against_the_first(values: list[float], is_flat: bool) -> None:
    found = flatness(values, SLACK["memory_mib"])
    assert found["flat"] is is_flat
    assert found["first"] == max(values[: min(WINDOW_S, max(len(values) // 2, 1))])


def test_one_role_that_grows_makes_an_attack_not_flat() -> None:
    samples = Samples(
        memory_mib={"gateway": [100.0] * 100, "proxy": [float(second) for second in range(100)]},
        connections={"gateway": [1] * 100, "proxy": [1] * 100},
        latencies_ms={"grpc": [1.0] * 99 + [900.0] * 9, "http": [2.0] * 100},
    )
    after = Samples(latencies_ms={"grpc": [3.0] * 9, "http": [4.0] * 9})
    found = judged(samples, after)
    assert found["flat"] is False
    assert found["memory_mib"]["gateway"]["flat"] is True
    assert found["p99_ms"] == 900.0 > P99_MS
    assert found["after_p99_ms"] == 4.0 < AFTER_P99_MS
    assert found["get_operation"]["http"]["p99_ms"] == 2.0
    assert found["samples"]["memory_mib"]["proxy"] == samples.memory_mib["proxy"]


@pytest.mark.parametrize("name", sorted(ATTACKS))
async def test_an_attack_on_nobody_ends_by_itself(name: str, unused_tcp_port: int) -> None:
    ground = Ground(http_port=unused_tcp_port, grpc_port=unused_tcp_port, key="k", seconds=0.3)
    begin = time.monotonic()
    await asyncio.wait_for(ATTACKS[name](ground), 20.0)
    assert time.monotonic() - begin >= 0.2
