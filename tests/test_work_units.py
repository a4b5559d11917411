"""Which worker runs which tests, and in what order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import pytest_runtest_protocol
from tests.work_units import (
    all_test_files,
    keep_part,
    longest_first,
    mistaken,
    part_of,
    read_durations,
    seconds_of_units,
    unit_of,
)

# Share of the test files that are not in the record, or in it and not there.
_MOST_UNKNOWN = 0.25


@pytest.mark.parametrize(
    ("unit", "fixture"), [("shared service", "service"), ("shared cluster", "ray_cluster")]
)
def test_all_that_share_it_are_of_one_worker(
    request: pytest.FixtureRequest, unit: str, fixture: str
) -> None:
    """Checks the tests that were collected with this one. A service brings its cluster along."""
    fixtures = {item.nodeid: getattr(item, "fixturenames", ()) for item in request.session.items}
    on_cluster = {nodeid: names for nodeid, names in fixtures.items() if "ray_cluster" in names}
    sharing = [
        nodeid
        for nodeid, names in on_cluster.items()
        if fixture == ("service" if "service" in names else "ray_cluster")
    ]
    if not sharing:
        pytest.skip("collected without them")
    assert {unit_of(nodeid) for nodeid in sharing} == {unit}


@pytest.mark.parametrize(
    ("unit", "fixture", "function"),
    [("forked ranks", "rank_pair", "ranked"), ("recorded life", "recording", "record_life")],
)
def test_all_that_make_it_are_of_one_worker(
    request: pytest.FixtureRequest, unit: str, fixture: str, function: str
) -> None:
    """By a fixture or a function. Tests of GPUs go to the worker that has one."""
    making = {
        unit_of(item.nodeid)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        if not any(item.get_closest_marker(name) for name in ("gpu", "multigpu"))
        if fixture in item.fixturenames or hasattr(item.module, function)
    }
    if not making:
        pytest.skip("collected without them")
    assert making == {unit}


@pytest.mark.parametrize(
    ("file", "next_file", "ends"),
    [
        ("e2e/test_service.py", "e2e/test_client.py", False),
        ("e2e/test_service.py", "e2e/test_tls.py", True),
        ("e2e/test_service.py", "engine/test_placement.py", True),
        ("engine/test_placement.py", "rollout/test_bad.py", True),
        ("rollout/test_bad.py", "rollout/test_serial.py", False),
    ],
)
def test_a_service_and_a_cluster_end_with_their_tests(
    file: str, next_file: str, ends: bool
) -> None:
    """They took a fifth of a core until all other tests were through."""
    run: list[object] = []
    ihook = SimpleNamespace(pytest_runtest_protocol=lambda **how: not run.append(how))
    item, following = (
        cast("Any", SimpleNamespace(nodeid=f"tests/{name}::test", ihook=ihook, config=config))
        for name, config in (
            (file, SimpleNamespace(workerinput={})),
            (next_file, SimpleNamespace()),
        )
    )
    assert pytest_runtest_protocol(item, following) == (True if ends else None)
    assert run == ([{"item": item, "nextitem": None}] if ends else [])
    # Without workers files of a unit are apart from each other.
    assert pytest_runtest_protocol(following, item) is None


def test_the_longest_units_begin_first(request: pytest.FixtureRequest) -> None:
    """A unit's tests stay together and in order."""
    items = list(request.session.items)
    longest_first(items)
    units = list(dict.fromkeys(unit_of(item.nodeid) for item in items))
    recorded = seconds_of_units(items)
    seconds = [recorded[unit] for unit in units]
    assert seconds == sorted(seconds, reverse=True)
    places = {unit: place for place, unit in enumerate(units)}
    assert items == sorted(items, key=lambda item: places[unit_of(item.nodeid)])
    of_one_file = [item.nodeid for item in items if item.path == request.path]
    assert of_one_file == [
        item.nodeid for item in request.session.items if item.path == request.path
    ]


def test_the_recorded_durations_are_of_these_test_files() -> None:
    files = all_test_files()
    for section, seconds in read_durations().items():
        unknown = files ^ seconds.keys()
        assert len(unknown) <= _MOST_UNKNOWN * len(files), (
            f"{section}: {len(unknown)} of {len(files)} test files are new or gone; "
            "make test ARGS=--write-durations, then make test-more with the same"
        )


def test_parts_have_each_file_once_and_take_as_long() -> None:
    recorded = read_durations()["more"]
    for num_parts in (1, 3, 4):
        parts = [part_of(recorded, number, num_parts) for number in range(1, num_parts + 1)]
        assert sorted(file for part in parts for file in part) == sorted(recorded)
        seconds = [sum(recorded[file] for file in part) for part in parts]
        assert max(seconds) <= min(seconds) + max(recorded.values())
        assert max(seconds) <= 1.1 * sum(recorded.values()) / num_parts


class Item:
    """What `keep_part` looks at."""

    def __init__(self, file: str, marker: str = "") -> None:
        self.nodeid = f"{file}::test"
        self._marker = marker

    def get_closest_marker(self, name: str) -> str | None:
        return self._marker if self._marker == name else None


def test_a_part_leaves_out_tests_marked_more_alone() -> None:
    """A file is of one part, and its other tests are of every part."""
    items: Any = [Item(file, marker) for file in all_test_files() for marker in ("", "more")]
    seen: list[Item] = []
    for number in range(1, 4):
        kept, dropped = list(items), list[Item]()
        hook = SimpleNamespace(pytest_deselected=lambda items, into=dropped: into.extend(items))
        keep_part(cast("Any", SimpleNamespace(hook=hook)), kept, f"{number}/3")
        assert [item for item in items if item in kept or item in dropped] == items
        assert len(kept) + len(dropped) == len(items)
        assert not [item for item in dropped if not item.get_closest_marker("more")]
        assert dropped
        seen += [item for item in kept if item.get_closest_marker("more")]
    assert sorted(map(id, seen)) == sorted(map(id, items[1::2]))


def test_a_file_that_takes_far_longer_than_recorded_is_named() -> None:
    recorded = {"a": 10.0, "b": 10.0, "c": 1.0}
    assert mistaken({"a": 30, "b": 25, "c": 2}, recorded) == []
    assert mistaken({"a": 30, "b": 25, "c": 40}, recorded) == ["c"]
    assert mistaken({"a": 30, "b": 25, "new": 20}, recorded) == ["new"]
    assert mistaken({}, recorded) == []
