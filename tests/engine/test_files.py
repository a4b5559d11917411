"""A policy's files: names that cannot escape, bodies with holders, parts, results that expire."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ratoon.engine import files
from ratoon.engine.files import (
    BodyFiles,
    PolicyPaths,
    UploadFiles,
    drop_expired_results,
    drop_unknown_checkpoints,
    make_policy_folders,
    policy_paths,
    read_result,
    remove_policy_files,
)
from ratoon.errors import ErrorCode, RatoonError


@pytest.fixture
def paths(tmp_path: Path) -> PolicyPaths:
    paths = policy_paths(tmp_path, "p")
    make_policy_folders(paths)
    return paths


@pytest.fixture
def uploads(paths: PolicyPaths) -> UploadFiles:
    return UploadFiles(paths, ttl_s=60.0, max_upload_bytes=10, max_total_bytes=25)


@pytest.mark.parametrize("name", ["", ".", "..", "../q", "a/b", ".hidden", "a" * 129, "a\0b"])
def test_a_name_that_is_no_plain_name_is_refused(tmp_path: Path, name: str) -> None:
    for call in (
        lambda: policy_paths(tmp_path, name),
        lambda: policy_paths(tmp_path, "p").checkpoint(name),
        lambda: policy_paths(tmp_path, "p").body(name),
    ):
        with pytest.raises(RatoonError) as caught:
            call()
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT


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
    await bodies.reconcile({"queued": "d1"})
    assert {path.name for path in paths.bodies.iterdir()} == {"d1", "d3"}
    await bodies.release("retry", "d1")
    assert paths.body("d1").exists()
    await bodies.release("queued", "d1")
    await bodies.release("arriving", "d3")
    assert list(paths.bodies.iterdir()) == []


def test_a_part_may_be_sent_again_with_the_same_bytes_only(uploads: UploadFiles) -> None:
    uploads.put("u", 0, b"abc")
    uploads.put("u", 0, b"abc")
    with pytest.raises(RatoonError) as caught:
        uploads.put("u", 0, b"abd")
    assert caught.value.code is ErrorCode.KEY_REUSED
    assert uploads.get("u", 1) == [b"abc"]


def test_parts_come_back_in_order_or_name_the_missing_one(uploads: UploadFiles) -> None:
    uploads.put("u", 1, b"b")
    with pytest.raises(RatoonError) as caught:
        uploads.get("u", 2)
    assert caught.value.code is ErrorCode.UPLOAD_NOT_FOUND
    assert caught.value.details == {"missing_part": "0"}
    uploads.put("u", 0, b"a")
    assert uploads.get("u", 2) == [b"a", b"b"]
    with pytest.raises(RatoonError):
        uploads.get("other", 1)


def test_the_sum_of_parts_is_bounded(uploads: UploadFiles) -> None:
    uploads.put("u", 0, b"123456")
    with pytest.raises(RatoonError) as caught:
        uploads.put("u", 1, b"12345")
    assert caught.value.code is ErrorCode.BODY_TOO_LARGE
    uploads.put("u", 1, b"1234")


@pytest.mark.parametrize("damage", [b"", b"123", b"\0" * 22])
def test_a_damaged_part_is_not_there_until_it_is_sent_again(
    uploads: UploadFiles, paths: PolicyPaths, damage: bytes
) -> None:
    """Without a digest in the file a batch was built from whatever the disk gave back."""
    uploads.put("u", 0, b"123456")
    (paths.uploads / "u" / "000000").write_bytes(damage)
    with pytest.raises(RatoonError) as caught:
        uploads.get("u", 1)
    assert caught.value.code is ErrorCode.UPLOAD_NOT_FOUND
    uploads.put("u", 0, b"1234567890")
    assert uploads.get("u", 1) == [b"1234567890"]


def test_a_part_that_is_there_is_synced_before_it_is_promised(
    uploads: UploadFiles, paths: PolicyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed between the rename and the fsync left a part that a power cut took."""
    uploads.put("u", 0, b"123456")
    synced: list[Path] = []
    monkeypatch.setattr(files, "fsync_folder", synced.append)
    uploads.put("u", 0, b"123456")
    assert synced == [paths.uploads / "u", paths.uploads]


def test_an_upload_expires_after_its_newest_part(paths: PolicyPaths) -> None:
    uploads = UploadFiles(paths, ttl_s=60.0, max_upload_bytes=10, max_total_bytes=25)
    for upload_id in ("old", "fresh"):
        uploads.put(upload_id, 0, b"a")
    old = paths.uploads / "old"
    for path in (old / "000000", old):
        os.utime(path, (time.time() - 61, time.time() - 61))
    uploads.drop_expired()
    assert [path.name for path in paths.uploads.iterdir()] == ["fresh"]


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


def test_checkpoints_that_no_record_names_are_dropped(paths: PolicyPaths) -> None:
    for name in ("known", "t-known", "t-torn", "torn"):
        paths.checkpoint(name).mkdir()
    known = frozenset({"known", "t-known"})
    drop_unknown_checkpoints(paths, known, "t-")
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["known", "t-known", "torn"]
    drop_unknown_checkpoints(paths, known, "")
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["known", "t-known"]


def test_a_removed_policy_leaves_nothing(paths: PolicyPaths, tmp_path: Path) -> None:
    paths.body("d").write_bytes(b"x")
    remove_policy_files(paths)
    remove_policy_files(paths)
    assert list((tmp_path / "policies").iterdir()) == []
