"""Rates and requests in flight, by a clock that the test holds."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ratoon.auth.rates import InFlight, Rates
from ratoon.config import KeyLimits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _taken(rates: Rates, limits: KeyLimits, tries: int, key_id: str = "k") -> int:
    return sum(rates.take(key_id, limits) is None for _ in range(tries))


def test_a_bucket_fills_with_time_up_to_its_burst(tmp_path: Path) -> None:
    clock = Clock()
    rates, limits = Rates(tmp_path, clock), KeyLimits(requests_per_second=2.0, burst=5)
    assert _taken(rates, limits, 9) == 5
    clock.now += 1.4
    assert _taken(rates, limits, 9) == 2
    clock.now += 100.0
    assert _taken(rates, limits, 9) == 5
    assert _taken(rates, limits, 9, "other") == 5


def test_a_refusal_says_when_there_is_one_more(tmp_path: Path) -> None:
    rates, limits = Rates(tmp_path, Clock()), KeyLimits(requests_per_second=0.1)
    assert rates.take("k", limits) is None
    refusal = rates.take("k", limits)
    assert refusal is not None
    assert (refusal.details["resource"], refusal.retry_after_s) == ("requests_per_second", 10)


@pytest.mark.parametrize(
    ("key_id", "limits"), [("", KeyLimits(requests_per_second=1.0)), ("k", KeyLimits())]
)
def test_without_a_key_or_a_rate_all_pass(tmp_path: Path, key_id: str, limits: KeyLimits) -> None:
    assert _taken(Rates(tmp_path, Clock()), limits, 100, key_id) == 100
    assert list(tmp_path.iterdir()) == []


def test_processes_that_meet_one_key_share_its_rate(tmp_path: Path) -> None:
    """N replicas and the gateway let a key have N + 1 times its rate."""
    limits = KeyLimits(requests_per_second=1.0, burst=20)

    def now() -> float:
        time.sleep(0.0005)  # Others come in between, if they may.
        return 1000.0

    processes = [Rates(tmp_path, now) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        taken = pool.map(lambda rates: _taken(rates, limits, 30), processes)
        assert sum(taken) == 20


def test_clocks_that_differ_add_nothing(tmp_path: Path) -> None:
    ahead, behind = Clock(), Clock()
    ahead.now += 5.0
    limits = KeyLimits(requests_per_second=1.0, burst=3)
    pair = Rates(tmp_path, ahead), Rates(tmp_path, behind)
    assert [_taken(rates, limits, 1) for rates in pair * 3] == [1, 1, 1, 0, 0, 0]
    ahead.now += 1.0
    behind.now += 1.0
    assert [_taken(rates, limits, 3) for rates in pair] == [1, 0]
    behind.now -= 1000.0
    assert _taken(pair[1], limits, 9) == 3, "the other clock was wrong"


@pytest.mark.parametrize("data", [b"", b"x", b"\xff" * 16, b"\0" * 15 + b"\x7f"])
def test_a_damaged_count_is_a_full_bucket(tmp_path: Path, data: bytes) -> None:
    rates, limits = Rates(tmp_path, Clock()), KeyLimits(requests_per_second=1.0, burst=3)
    assert _taken(rates, limits, 9) == 3
    (tmp_path / "access" / "rates" / "k").write_bytes(data)
    assert _taken(rates, limits, 9) == 3


def test_what_cannot_be_counted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk must not keep callers from hearing of what was accepted."""
    rates, limits = Rates(tmp_path, Clock()), KeyLimits(requests_per_second=1.0)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert _taken(rates, limits, 3) == 3


def test_requests_in_flight_are_bounded_by_caller_and_in_all() -> None:
    in_flight = InFlight(most=3, most_of_caller=2)
    for caller in ("a", "a", "b"):
        assert in_flight.refusal(caller) is None
        in_flight.begin(caller)
    refusal = in_flight.refusal("c")
    assert refusal is not None
    assert refusal.details["limit"] == "3"
    in_flight.end("b")
    assert in_flight.refusal("c") is None
    refusal = in_flight.refusal("a")
    assert refusal is not None
    assert refusal.details["limit"] == "2"
    in_flight.end("a")
    assert in_flight.refusal("a") is None


def test_a_keys_own_limits_win() -> None:
    own = KeyLimits(tokens_per_day=5)
    both = own.or_else(KeyLimits(tokens_per_day=9, requests_per_second=2.0))
    assert (both.tokens_per_day, both.requests_per_second, both.burst) == (5, 2.0, None)
