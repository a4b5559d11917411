"""The recorder and the model of a disk that the power cuts are made of."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.durability import recorder
from tests.durability.disk import Disk, Image, read_image
from tests.durability.recorder import Event, Kind, record, require_compiler

CALLS = "tests.durability.calls"


def recorded(shim: Path, ram: Path, case: str) -> tuple[Event, ...]:
    root = ram / case
    root.mkdir()
    return record(shim, CALLS, root, (str(root), case))


def after(events: tuple[Event, ...]) -> Disk:
    disk = Disk()
    for event in events:
        disk.apply(event)
    return disk


def test_every_call_that_writes_is_recorded(shim: Path, ram: Path) -> None:
    disk = after(recorded(shim, ram, "writes"))
    now = disk.now()
    assert now == read_image(ram / "writes", recorder.SHARED_MEMORY)
    assert len(now) == 11
    assert disk.strict() == {}


def test_a_copy_inside_the_kernel_is_made_by_writes(shim: Path, ram: Path) -> None:
    disk = after(recorded(shim, ram, "copies"))
    now = disk.now()
    assert now == read_image(ram / "copies", recorder.SHARED_MEMORY)
    assert {now["copied"], now["sent"]} == {b"content"}


def test_a_write_through_a_mapping_is_refused(shim: Path, ram: Path) -> None:
    with pytest.raises(AssertionError, match=r"cannot be rebuilt.*MAPPED"):
        recorded(shim, ram, "mapping")


def test_calls_of_threads_are_recorded_in_their_order(shim: Path, ram: Path) -> None:
    events = recorded(shim, ram, "threads")
    assert after(events).now() == read_image(ram / "threads", recorder.SHARED_MEMORY)
    assert sum(event.kind is Kind.SYNC for event in events) == 400


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("nothing synced", {}),
        ("content synced", {}),
        ("name synced", {"a": b""}),
        ("both synced", {"a": b"content"}),
        ("written after", {"a": b"content"}),
        ("renamed", {"a": b"content"}),
        ("renamed and synced", {"b": b"content"}),
        ("renamed unsynced content", {"b": b""}),
        ("replaced", {"a": b"content"}),
        ("removed", {"a": b"content"}),
        ("removed and synced", {}),
        ("folder synced inside", {}),
        ("folder synced outside", {"f": None}),
        ("folder synced", {"f": None, "f/a": b"content"}),
    ],
)
def test_a_strict_disk_has_what_was_synced(
    shim: Path, ram: Path, case: str, expected: Image
) -> None:
    assert after(recorded(shim, ram, case)).strict() == expected


def test_a_torn_disk_has_old_or_new_in_every_part(shim: Path, ram: Path) -> None:
    disk = after(recorded(shim, ram, "torn"))
    images = [disk.torn(seed) for seed in range(200)]
    assert {frozenset(image) for image in images} == {frozenset("ab"), frozenset("bc")}
    contents = [image["b"] or b"" for image in images]
    assert {len(content) for content in contents} == {8192, 12288}
    pages = {content[4096:8192] for content in contents}
    assert {b"o" * 4096, b"n" * 4096} < pages
    assert all(page.replace(b"o" * 512, b"").replace(b"n" * 512, b"") == b"" for page in pages)
    assert {content[:4096] for content in contents} == {b"o" * 4096}
    assert b"\0" * 4096 in {content[8192:] for content in contents}


def test_a_missing_compiler_fails_in_continuous_integration_and_skips_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match="a C compiler"):
        require_compiler()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="a C compiler"):
        require_compiler()
