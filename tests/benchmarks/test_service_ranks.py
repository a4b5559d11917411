"""Figures of policies on several devices: what they are made of, and which cases they wait for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.service.ranks import (
    ALONE,
    CASES,
    GRADIENTS,
    GROUP,
    GROUPS,
    HALF,
    LONG,
    ONE,
    ROUTED_CASES,
    STATES,
    TOGETHER,
    WANTED,
    WEIGHTS,
    WORKS,
    figures,
    format_tables,
    parallel_of,
    work_batch,
)
from benchmarks.service.run import SMALL


def _row(
    policy: str, work: str, trained_s: float, optimizer_s: float = 0.2, groups: int = 8
) -> dict[str, Any]:
    """A case whose first update, which compiles, took far longer."""
    update = {
        "seconds": trained_s + 1.0,
        "trained_s": trained_s,
        "optimizer_s": optimizer_s,
        "peak_gib": 70.0,
        "planned_gib": 80.0,
        "hardware_mfu": 0.5,
    }
    return {
        "policy": policy,
        "work": work,
        "groups": groups,
        "parallel": {"num_workers": 1 if policy == ONE else 2},
        "updates": [{**update, "trained_s": 99.0}, update],
    }


_ROWS = [
    _row(ONE, GROUPS, 31.0, 0.2),
    _row(ONE, GROUP, 4.0, groups=1),
    _row(ONE, LONG, 53.0, groups=1),
    _row(STATES, GROUPS, 15.5, 0.25),
    _row(STATES, GROUP, 2.5, groups=1),
    _row(GRADIENTS, GROUPS, 18.0, 0.15),
    _row(TOGETHER, GROUP, 2.0, groups=1),
    _row(TOGETHER, LONG, 28.0, groups=1),
]
_ROUTED_ROWS = [_row(WEIGHTS, GROUPS, 10.0, groups=4), _row(WEIGHTS, ALONE, 45.0, groups=4)]


def test_figures_are_of_the_cases_medians() -> None:
    assert figures(_ROWS) == {
        "speedup": 2.0,
        "service_speedup": pytest.approx(32.0 / 16.5),
        "seconds_per_group": pytest.approx(2 * 15.5 / 8),
        "exposed_ms": pytest.approx(150.0),
        "ulysses_speedup": pytest.approx(53.0 / 28.0),
        "group_speedup": 1.6,
        "group_ulysses_speedup": 2.0,
        "hardware_mfu": 0.5,
        "peak_over_planned": 0.875,
    }
    assert {(row["policy"], row["work"]) for row in _ROWS} == {*CASES}


def test_figures_of_experts_are_against_rollouts_that_share_nothing() -> None:
    found = figures(_ROUTED_ROWS)
    assert found["over_replicated"] == 4.5
    assert {(row["policy"], row["work"]) for row in _ROUTED_ROWS} == {*ROUTED_CASES}
    assert {*found, *figures(_ROWS), "half_speedup"} == {*WANTED}


def test_half_the_devices_are_beside_the_fastest_sharing_of_all() -> None:
    found = figures([*_ROWS, _row(HALF, GROUPS, 12.4)])
    assert found == {**figures(_ROWS), "half_speedup": 2.5}


def test_figures_wait_for_their_cases() -> None:
    assert figures(_ROWS[:1]) == {}
    assert "one, groups" in "\n".join(format_tables(_ROWS[:1]))


def test_what_is_alone_has_the_same_responses_and_shares_no_prompt() -> None:
    shared = work_batch(WORKS[GROUPS], SMALL, 2, seed=0)
    alone = work_batch(WORKS[ALONE], SMALL, 2, seed=0)
    rewards = [each.outcome for one in shared for each in one.rollouts]
    assert [[each.outcome for each in one.rollouts] for one in alone] == [[r] for r in rewards]
    assert len({one.prompt.tobytes() for one in alone}) == len(alone)
    assert {len(one.prompt) for one in alone} == {len(one.prompt) for one in shared}


def test_devices_of_a_sequence_are_those_of_its_policy() -> None:
    assert parallel_of(TOGETHER, 4).sequence_ranks == parallel_of(STATES, 4).num_workers == 4
    assert parallel_of(HALF, 4) == parallel_of(STATES, 2)
    assert (parallel_of(ONE, 4).num_workers, parallel_of(WEIGHTS, 4).shard) == (1, "weights")
