"""When a whole fault run passes: each reason for which it does not, and what is written then."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratoon.engine.crash_points import CrashPoint
from tests.durability.torn import TornCounts
from tests.faults.judge.history import Verdict
from tests.faults.judge.reference import TOLERANCE
from tests.faults.run import document
from tests.faults.selftest import SCHEDULES, Finding
from tests.faults.summary import MAX_GROWTH_BYTES, Summary
from tests.faults.venues.attacks import ATTACKS
from tests.faults.venues.crashes import Kills
from tests.faults.venues.cut_logs import SHARES, CutResult
from tests.faults.venues.deliveries import ROLES, DeliveryResult
from tests.faults.venues.failover import PLACES, FailoverResult
from tests.faults.venues.live import EVENTS, POINTS, LiveResult
from tests.faults.venues.load import LoadResult, quiet_latencies
from tests.faults.venues.scripts import ROLES as SCRIPT_ROLES
from tests.faults.venues.scripts import ScriptResult
from tests.hostile.fuzz import FuzzCounts

HOSTILE = FuzzCounts(
    inputs=10,
    crashes=0,
    server_errors=0,
    peak_rss_growth_bytes=0,
    slowest_s=0.1,
    accepted=1,
    findings=(),
)
LOST = Verdict(lost=["call 1"])


def findings() -> list[Finding]:
    return [Finding(build=build, broken=LOST, whole=Verdict()) for build in SCHEDULES]


def good() -> Summary:
    """A run just as it has to be."""
    summary = Summary(findings=findings(), hostile=HOSTILE, fp64_difference=TOLERANCE)
    light = [point for point in CrashPoint if point not in POINTS]
    torn = TornCounts(counts=Counter({("body", "refused"): 3}), faults=())
    summary.add_light(Kills(points=set(light), in_window=5), 9, 100, torn)
    seconds = {str(event): 2.0 for event in EVENTS}
    summary.add_live(LiveResult(kills=11, points=set(POINTS), seconds=seconds, operations=10))
    kills = Counter[str](ROLES)
    summary.add_deliveries(
        DeliveryResult(kills=kills, versions=2, operations=10, verdict=Verdict())
    )
    summary.add_scripts(ScriptResult(kills=Counter(SCRIPT_ROLES), operations=10))
    summary.add_failovers(FailoverResult(failovers=2 * len(PLACES), forgotten=1))
    summary.add_cuts(CutResult(cuts=2 * len(SHARES), refused=1))
    summary.attacks = {name: [] for name in ATTACKS}
    summary.add_load(LoadResult(operations=1, p99_s=0.49, pss_growth=0.05, more_descriptors=5.0))
    return summary


def test_what_gets_better_is_no_fault() -> None:
    """Red once: descriptors that had fallen by 14 ended a run that had lost nothing."""
    summary = good()
    summary.load = LoadResult(pss_growth=-0.2, more_descriptors=-14.0)
    assert summary.is_good, list(summary.problems())


def test_latencies_are_those_of_the_time_without_busy_programs_beside() -> None:
    """Red once: six minutes of builds within thirty were 18% of the CPU, and all of the p99."""
    # Two CPUs; from the tenth to the twentieth second others take three quarters of them.
    cpu = [(0.0, 0.0, 0.0), (10.0, 5.0, 5.0), (20.0, 25.0, 10.0), (30.0, 30.0, 15.0)]
    cpu.append((40.0, 35.0, 20.0))
    latencies = [(-1.0, 9.0), (5.0, 0.1), (15.0, 2.0), (25.0, 1.0), (35.0, 0.2), (45.0, 9.0)]
    assert quiet_latencies(latencies, cpu, 2) == ([0.1, 0.2], 0.5)
    assert quiet_latencies(latencies, cpu[1:3], 2) == ([], 0.0)


def test_a_good_run_is_good() -> None:
    summary = good()
    assert list(summary.problems()) == []
    assert summary.is_good
    assert summary.self_test_line() == "self-test: 6/6 faults found"
    assert summary.last_line() == (
        "faults: 28 kills, 0 lost, 0 doubled, 3 torn files, 0 loaded, 10 hostile inputs, 0 crashes"
    )


def _set(**fields: object) -> Callable[[Summary], None]:
    def change(summary: Summary) -> None:
        for name, value in fields.items():
            assert hasattr(summary, name)
            setattr(summary, name, value)

    return change


def _less(field: str, key: object) -> Callable[[Summary], None]:
    """Without one entry of a field that is a set, a list or a dict."""

    def change(summary: Summary) -> None:
        entries: Any = getattr(summary, field)
        if isinstance(entries, set):
            entries.remove(key)
        else:
            del entries[key]

    return change


def _first_finding(**fields: Verdict) -> Callable[[Summary], None]:
    def change(summary: Summary) -> None:
        summary.findings[0] = replace(summary.findings[0], **fields)

    return change


def break_off(summary: Summary) -> None:
    def part() -> None:
        raise TimeoutError("stands still")

    assert summary.part("kills, service", part) is None


NO_DELIVERY = DeliveryResult(kills=Counter(), versions=0, operations=0, verdict=LOST)
DOUBLED = LiveResult(verdict=Verdict(doubled=["call 2 is two operations"]))
SPOILED: dict[str, Callable[[Summary], None]] = {
    "a call is lost": lambda summary: summary.verdict.add(LOST),
    "a call is doubled": lambda summary: summary.add_live(DOUBLED),
    "a call is lost under load": lambda summary: summary.add_load(LoadResult(verdict=LOST)),
    "half a version is served": lambda summary: summary.add_deliveries(NO_DELIVERY),
    "too few kills": _set(kills=19),
    "too few kills in windows": _set(in_window=4),
    "a crash point is missed": _less("points", CrashPoint.WORKER_IN_APPLY),
    "a process is not killed": _less("back_s", "raylet"),
    "no receiver is killed": _less("deliveries", "receiver"),
    "no sampler is killed": _less("scripts", "sampler"),
    "a script's step is lost": lambda summary: summary.add_scripts(ScriptResult(verdict=LOST)),
    "too few failovers": _set(failovers=2 * len(PLACES) - 1),
    "nothing is forgotten": _set(forgotten=0),
    "too few logs are cut": _set(cut_logs=2 * len(SHARES) - 1),
    "no cut log is refused": _set(refused_starts=0),
    "an attack is left out": _less("attacks", "floods of frames"),
    "an attack succeeds": lambda summary: summary.attacks.update({"floods of frames": ["7 s"]}),
    "other weights": _set(fp64_difference=2 * TOLERANCE),
    "no weights": _set(fp64_difference=float("nan")),
    "no file is torn": _set(torn=Counter()),
    "a torn file is loaded": _set(torn_faults=["a body was loaded"]),
    "a broken build is not found": _first_finding(broken=Verdict()),
    "the whole build loses": _first_finding(whole=LOST),
    "a build is left out": _less("findings", -1),
    "no load": _set(load=None),
    "slow under load": _set(load=LoadResult(p99_s=0.61)),
    "memory is kept": _set(load=LoadResult(pss_growth=0.051)),
    "descriptors are kept": _set(load=LoadResult(more_descriptors=5.1)),
    "no hostile input": _set(hostile=None),
    "a crash": _set(hostile=replace(HOSTILE, crashes=1)),
    "a 500": _set(hostile=replace(HOSTILE, server_errors=1, findings=("codec 0.1: 500",))),
    "a leak": _set(hostile=replace(HOSTILE, peak_rss_growth_bytes=MAX_GROWTH_BYTES + 1)),
    "a part breaks off": break_off,
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_each_fault_alone_makes_a_run_bad(spoil: Callable[[Summary], None]) -> None:
    """And says why: one reason, in the result file too."""
    summary = good()
    spoil(summary)
    assert not summary.is_good
    problems = summary.result()["problems"]
    assert isinstance(problems, list)
    assert len(problems) == 1, problems


def test_a_part_that_breaks_off_is_named_and_timed() -> None:
    summary = good()
    break_off(summary)
    (problem,) = summary.problems()
    assert problem == "did not end: kills, service: TimeoutError: stands still"
    assert "kills, service" in summary.seconds


def test_the_longest_time_of_all_rounds_counts() -> None:
    summary = good()
    for seconds in (3.0, 1.0):
        summary.add_live(LiveResult(seconds={"worker": seconds}))
    assert summary.back_s["worker"] == 3.0


@pytest.mark.parametrize("summary", [Summary(), good()])
def test_a_result_is_json_whatever_ended(summary: Summary) -> None:
    result = json.loads(json.dumps(summary.result()))
    assert result["is_good"] is summary.is_good
    assert result["kills"] == summary.num_kills
    assert len(result["crash_points"]) + len(result["missed_crash_points"]) == len(CrashPoint)
    assert result["torn_files"] == sum(result["torn"].values())
    assert result["self_test"] == {finding.build: True for finding in summary.findings}


def test_the_operations_page_lists_the_fields_of_a_result_and_no_others() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    table = text.partition("| field | what |")[2].splitlines()[2:]
    names = [row.split("|")[1] for row in table if row.startswith("|")]
    written = document(good(), Namespace(seed=3, out=None, kills=20))
    assert sorted(re.findall(r"`(\w+)`", " ".join(names))) == sorted(written)
    assert (written["seed"], written["options"]) == (3, {"kills": 20})


def test_what_was_acknowledged_under_load_is_counted_once() -> None:
    result = good().result()
    assert result["operations"] == 131
    assert isinstance(result["load"], dict)
    assert "verdict" not in result["load"]


def test_at_most_a_screen_of_what_was_lost_is_shown() -> None:
    summary = good()
    summary.verdict.lost += [f"call {number}" for number in range(1000)]
    assert len(list(summary.problems())) == 20
    assert summary.result()["lost"] == 1000
