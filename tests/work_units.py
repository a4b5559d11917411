"""How tests are shared out between the workers of `make test` and `make test-more`.

Tests that share the session's service are one unit, so that there is one service, and so are the
tests that share a Ray cluster without it: there are at most two clusters, which end with their
units. So are those whose ranks are forked, as the server that forks them imports all of a rank's
modules, and the tests that take a recorded life apart. The rest goes by file to whichever worker is
free. The units that took longest begin first: `durations.json` has the seconds of every test file,
and `make test ARGS=--write-durations` (and `make test-more` likewise) writes them anew. Within a
file tests keep their order.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.json"
OWN_SERVICES = tuple(f"tests/e2e/test_{name}.py" for name in ("access", "demo", "outages", "tls"))
SHARED_SERVICE = ("tests/compat/", "tests/e2e/", "tests/network/", "tests/page/test_real_run.py")
SHARED_CLUSTER = (
    "tests/test_doctor.py",
    "tests/sampler/test_process.py",
    *(
        f"tests/engine/test_{name}.py"
        for name in (
            *("creation_faults", "engine_ray", "placement", "ranks_memory", "ranks_ray"),
            *("ray_calls", "ray_private"),
        )
    ),
)
FORKED_RANKS = tuple(
    f"tests/train/test_{name}.py"
    for name in (
        *("distillation", "load_balance", "muon", "nodes", "only_backward", "ranks"),
        *("ranks_dropped", "ranks_lost", "route_replay", "router_reports", "sampling_masks"),
        *("sequence_ranks", "value_loss", "warm_up"),
    )
)
RECORDED_LIFE = tuple(f"tests/durability/test_{name}.py" for name in ("power_cut", "torn_files"))
# A file counts as mistaken where its share of a run is this many times the recorded one, and more
# than so much of the run.
_FACTOR, _LEAST_SHARE = 4.0, 0.03


def rows(values: Iterable[Any], now: Collection[Any]) -> list[Any]:
    """Arguments of `parametrize`; `values` that are not in `now` run in `make test-more` alone.

    A value that is a tuple is several arguments.
    """
    made = list[Any]()
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        made.append(pytest.param(*arguments, marks=() if value in now else pytest.mark.more))
    return made


def unit_of(nodeid: str) -> str:
    """The name of the unit that a test is run in: all of a unit are run by one worker."""
    if nodeid.startswith(SHARED_SERVICE) and not nodeid.startswith(OWN_SERVICES):
        return "shared service"
    if nodeid.startswith(SHARED_CLUSTER):
        return "shared cluster"
    if nodeid.startswith(FORKED_RANKS):
        return "forked ranks"
    return "recorded life" if nodeid.startswith(RECORDED_LIFE) else _file_of(nodeid)


def is_last_of_shared(nodeid: str, next_nodeid: str) -> bool:
    """Whether a worker that goes on with `next_nodeid` has no more use of a service or cluster."""
    unit = unit_of(nodeid)
    return unit in ("shared service", "shared cluster") and unit_of(next_nodeid) != unit


class WorkUnits(LoadScopeScheduling):
    """Work units are files, but for those that share what takes long to start or to record."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort in place, by the recorded seconds of each test's unit."""
    seconds = seconds_of_units(items)
    items.sort(key=lambda item: -seconds[unit_of(item.nodeid)])


def seconds_of_units(items: list[pytest.Item]) -> dict[str, float]:
    """Recorded seconds of the units of these tests."""
    recorded = read_durations()
    parts: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for item in items:
        section = "more" if item.get_closest_marker("more") else "test"
        parts[unit_of(item.nodeid)].add((section, _file_of(item.nodeid)))
    return {
        unit: sum(recorded[section].get(file, 0.0) for section, file in files)
        for unit, files in parts.items()
    }


def read_durations() -> dict[str, dict[str, float]]:
    """Seconds by test file: of its tests in `make test`, and of those in `make test-more`."""
    return json.loads(DURATIONS.read_text(encoding="utf-8"))


def part_of(seconds: Mapping[str, float], number: int, num_parts: int) -> set[str]:
    """The files of part `number`, from 1, where files are dealt into parts that take as long. Pure.

    Each file is of one part, whatever else is collected.
    """
    parts = [set[str]() for _ in range(num_parts)]
    loads = [0.0] * num_parts
    for file in sorted(seconds, key=lambda file: (-seconds[file], file)):
        lightest = loads.index(min(loads))
        parts[lightest].add(file)
        loads[lightest] += seconds[file]
    return parts[number - 1]


def keep_part(config: pytest.Config, items: list[pytest.Item], part: str) -> None:
    """Deselect tests marked `more`, but of files of `part`: "2/3" for the second of three."""
    try:
        number, num_parts = map(int, part.split("/"))
    except ValueError:
        number, num_parts = 0, 0
    if not 1 <= number <= num_parts:
        raise pytest.UsageError(f"--part must be as 2/3, got {part!r}")
    recorded = read_durations()["more"]
    files = part_of({file: recorded.get(file, 0.0) for file in all_test_files()}, number, num_parts)
    kept, dropped = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        is_kept = item.get_closest_marker("more") is None or _file_of(item.nodeid) in files
        (kept if is_kept else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def all_test_files() -> set[str]:
    """All test files of this tree, as pytest names them."""
    return {path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py")}


class Durations:
    """Sums up the seconds of a run by test file, where pytest was started.

    `is_written`: they replace the recorded ones. Otherwise the run says which of those are far off.
    """

    def __init__(self, *, is_written: bool) -> None:
        self._is_written = is_written
        self._seconds = {name: defaultdict[str, float](float) for name in ("test", "more")}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "slow" in report.keywords:
            return
        section = "more" if "more" in report.keywords else "test"
        self._seconds[section][_file_of(report.nodeid)] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        recorded = read_durations()
        for section, seconds in self._seconds.items():
            if wrong := mistaken(seconds, recorded[section]):
                text = f"{DURATIONS.name} is out of date (--write-durations): {', '.join(wrong)}"
                terminalreporter.write_line(text, yellow=True)

    def pytest_sessionfinish(self) -> None:
        if not self._is_written:
            return
        files, recorded = sorted(all_test_files()), read_durations()
        for section, seconds in self._seconds.items():
            # Files that were not run keep their seconds; those that are gone lose them.
            known = {**recorded[section], **seconds}
            recorded[section] = {file: round(known.get(file, 0.0), 1) for file in files}
        DURATIONS.write_text(json.dumps(recorded, indent=0) + "\n", encoding="utf-8")


def mistaken(seconds: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """Files that took a far greater share of a run than is recorded. Pure."""
    total = sum(seconds.values()) or 1.0
    known = sum(recorded.get(file, 0.0) for file in seconds) or 1.0
    return [
        file
        for file, took in seconds.items()
        if took / total > max(_FACTOR * recorded.get(file, 0.0) / known, _LEAST_SHARE)
    ]


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]
