"""A policy's files: names that cannot escape, bodies with holders, parts, results that expire."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ratoon.engine.files.paths import (
    BodyFiles,
    PolicyPaths,
    drop_expired_results,
    make_policy_folders,
    policy_paths,
    read_result,
    remove_policy_files,
    require_known,
)
from ratoon.errors import ErrorCode, RatoonError
from tests.engine.refusals import raises


@pytest.fixture
def paths(tmp_path: Path) -> PolicyPaths:
    paths = policy_paths(tmp_path, "p")
    make_policy_folders(paths)
    return paths


def test_weights_may_be_elsewhere(tmp_path: Path) -> None:
    paths = policy_paths(tmp_path / "data", "p", tmp_path / "memory")
    make_policy_folders(paths)
    assert paths.weights == tmp_path / "memory" / "p"
    assert paths.weights.is_dir()
    assert not (paths.root / "weights").exists()
    neighbour = policy_paths(tmp_path / "data", "q", tmp_path / "memory")
    make_policy_folders(neighbour)
    for _ in range(2):
        remove_policy_files(paths)
        assert [path.name for path in (tmp_path / "memory").iterdir()] == ["q"]
        assert [path.name for path in (tmp_path / "data" / "policies").iterdir()] == ["q"]


@pytest.mark.parametrize("name", ["", ".", "..", "../q", "a/b", ".hidden", "a" * 129, "a\0b"])
def test_a_name_that_is_no_plain_name_is_refused(tmp_path: Path, name: str) -> None:
    for call in (
        lambda: policy_paths(tmp_path, name),
        lambda: policy_paths(tmp_path, "p").checkpoint(name),
        lambda: policy_paths(tmp_path, "p").body(name),
    ):
        with raises(ErrorCode.INVALID_ARGUMENT):
            call()


async def test_a_body_is_there_while_anyone_holds_it(paths: PolicyPaths) -> None:
    bodies = BodyFiles(paths)
    await bodies.hold("a", "d1", b"one")
    await bodies.hold("b", "d1", b"one")
    await bodies.release("a", "d1")
    assert paths.body("d1").read_bytes() == b"one"
    await bodies.release("b", "d1")
    assert not paths.body("d1").exists()
    await bodies.release("b", "d1")


async def test_reconciling_keeps_what_is_needed_and_what_is_in_flight(paths: PolicyPaths) -> None:
    """A retry that was in flight during a restart must not take the first one's body away."""
    bodies = BodyFiles(paths)
    await bodies.hold("queued", "d1", b"one")
    bodies.land("queued")
    await bodies.hold("ended", "d2", b"two")
    bodies.land("ended")
    await bodies.hold("arriving", "d3", b"three")
    await bodies.hold("retry", "d1", b"one")
    paths.body("orphan").write_bytes(b"x")
    listed = await bodies.names()
    paths.body("anothers").write_bytes(b"y")
    await bodies.reconcile({("queued", "d1")}, listed)
    paths.body("anothers").unlink()
    assert {path.name for path in paths.bodies.iterdir()} == {"d1", "d3"}
    await bodies.release("retry", "d1")
    assert paths.body("d1").exists()
    await bodies.release("queued", "d1")
    await bodies.release("arriving", "d3")
    assert list(paths.bodies.iterdir()) == []


async def test_a_controller_that_was_replaced_deletes_no_body_of_its_successor(
    paths: PolicyPaths,
) -> None:
    """It may stand still between what the journal said and the deletion of what that left over."""
    old, new = BodyFiles(paths), BodyFiles(paths)
    await old.hold("first", "d1", b"one")
    paths.body("d2").write_bytes(b"two")
    listed = await old.names()
    for holder, digest, body in (("second", "d1", b"one"), ("third", "d2", b"two")):
        await new.hold(holder, digest, body)
    await old.release("first", "d1")
    await old.reconcile((), listed)
    assert {path.name for path in paths.bodies.iterdir()} == {"d1", "d2"}
    await new.release("second", "d1")
    await new.release("third", "d2")
    assert list(paths.bodies.iterdir()) == []


async def test_a_body_that_came_back_after_the_listing_goes_with_its_holder(
    paths: PolicyPaths,
) -> None:
    """As one from an archive does, which fills a disk that was empty when it was listed."""
    bodies = BodyFiles(paths)
    listed = await bodies.names()
    paths.body("d1").write_bytes(b"one")
    await bodies.reconcile({("queued", "d1")}, listed)
    await bodies.release("queued", "d1")
    assert list(paths.bodies.iterdir()) == []


def test_results_expire_unless_something_open_names_them(paths: PolicyPaths) -> None:
    old, named, fresh = "0" * 32, "1" * 32, "2" * 32
    for digest in (old, named, fresh):
        for name in (digest, f"{digest}.abc"):
            (paths.results / name).write_bytes(b"data")
            if digest != fresh:
                os.utime(paths.results / name, (time.time() - 61, time.time() - 61))
    drop_expired_results(paths, 60.0, frozenset({named}))
    assert {path.stem for path in paths.results.iterdir()} == {named, fresh}
    assert read_result(paths, old, 0, 4) is None


def test_a_result_is_read_in_chunks(paths: PolicyPaths) -> None:
    digest = "a" * 32
    (paths.results / digest).write_bytes(b"0123456789")
    assert read_result(paths, digest, 0, 4) == b"0123"
    assert read_result(paths, digest, 8, 4) == b"89"
    for offset, code in ((10, ErrorCode.RANGE_NOT_SATISFIABLE), (-1, ErrorCode.INVALID_ARGUMENT)):
        with pytest.raises(RatoonError) as caught:
            read_result(paths, digest, offset, 4)
        assert caught.value.code is code
    with pytest.raises(RatoonError) as caught:
        read_result(paths, f"{digest}.abc", 0, 4)
    assert caught.value.field == "digest"


def test_a_removed_policy_leaves_nothing(paths: PolicyPaths, tmp_path: Path) -> None:
    paths.body("d").write_bytes(b"x")
    remove_policy_files(paths)
    remove_policy_files(paths)
    assert list((tmp_path / "policies").iterdir()) == []


def test_files_of_a_policy_that_the_journal_does_not_know_are_refused(
    paths: PolicyPaths, tmp_path: Path
) -> None:
    """A journal cut to nothing is a new one to SQLite: every policy was gone without a word."""
    require_known(tmp_path / "none", [])
    require_known(tmp_path, [paths.root.name])
    (tmp_path / "policies" / ".tmp-removed-1").mkdir()
    require_known(tmp_path, [paths.root.name])
    with pytest.raises(RatoonError, match=f"does not know {paths.root.name}") as caught:
        require_known(tmp_path, ["other"])
    assert caught.value.field == "database_url"
