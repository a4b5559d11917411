"""Rates and requests in flight, by a clock that the test holds."""

from __future__ import annotations

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


def test_a_bucket_fills_with_time_up_to_its_burst() -> None:
    clock = Clock()
    rates, limits = Rates(clock), KeyLimits(requests_per_second=2.0, burst=5)
    assert _taken(rates, limits, 9) == 5
    clock.now += 1.4
    assert _taken(rates, limits, 9) == 2
    clock.now += 100.0
    assert _taken(rates, limits, 9) == 5
    assert _taken(rates, limits, 9, "other") == 5


def test_a_refusal_says_when_there_is_one_more() -> None:
    rates, limits = Rates(Clock()), KeyLimits(requests_per_second=0.1)
    assert rates.take("k", limits) is None
    refusal = rates.take("k", limits)
    assert refusal is not None
    assert (refusal.details["resource"], refusal.retry_after_s) == ("requests_per_second", 10)


def test_looking_takes_nothing() -> None:
    rates, limits = Rates(Clock()), KeyLimits(requests_per_second=1.0)
    assert [rates.refusal("k", limits) for _ in range(5)] == [None] * 5
    assert _taken(rates, limits, 5) == 1
    assert rates.refusal("k", limits) is not None


@pytest.mark.parametrize(
    ("key_id", "limits"), [("", KeyLimits(requests_per_second=1.0)), ("k", KeyLimits())]
)
def test_without_a_key_or_a_rate_all_pass(key_id: str, limits: KeyLimits) -> None:
    assert _taken(Rates(Clock()), limits, 100, key_id) == 100


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
