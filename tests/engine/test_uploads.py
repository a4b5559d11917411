"""Parts of an upload: never other bytes, never more than there is room for, never damaged ones."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from ratoon.engine.files import uploads as uploads_module
from ratoon.engine.files.paths import PolicyPaths, make_policy_folders, policy_paths
from ratoon.engine.files.uploads import UploadFiles
from ratoon.errors import ErrorCode, RatoonError
from tests.engine.refusals import raises


@pytest.fixture
def paths(tmp_path: Path) -> PolicyPaths:
    paths = policy_paths(tmp_path, "p")
    make_policy_folders(paths)
    return paths


@pytest.fixture
def uploads(paths: PolicyPaths) -> UploadFiles:
    return UploadFiles(paths, ttl_s=60.0, max_upload_bytes=10, max_total_bytes=25)


def test_a_part_may_be_sent_again_with_the_same_bytes_only(uploads: UploadFiles) -> None:
    uploads.put("u", 0, b"abc")
    uploads.put("u", 0, b"abc")
    with raises(ErrorCode.KEY_REUSED):
        uploads.put("u", 0, b"abd")
    assert uploads.get("u", 1) == [b"abc"]


def test_parts_come_back_in_order_or_name_the_missing_one(uploads: UploadFiles) -> None:
    uploads.put("u", 1, b"b")
    with raises(ErrorCode.UPLOAD_NOT_FOUND) as caught:
        uploads.get("u", 2)
    assert caught.value.details == {"missing_part": "0"}
    uploads.put("u", 0, b"a")
    assert uploads.get("u", 2) == [b"a", b"b"]
    with pytest.raises(RatoonError):
        uploads.get("other", 1)


def test_a_part_that_comes_while_its_upload_expires_is_kept(
    uploads: UploadFiles, paths: PolicyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red once: it was acknowledged, and went with the folder that had been found too old."""
    uploads.put("u", 0, b"a")
    for path in (paths.uploads / "u").iterdir():
        os.utime(path, (0, 0))
    os.utime(paths.uploads / "u", (0, 0))
    sent: list[Future[None]] = []

    def rmtree(folder: Path, *, ignore_errors: bool = False) -> None:
        sent.append(pool.submit(uploads.put, "u", 1, b"b"))
        wait(sent, timeout=0.5)
        real_rmtree(folder, ignore_errors=ignore_errors)

    real_rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with ThreadPoolExecutor(1) as pool:
        uploads.drop_expired()
        sent[0].result()
    uploads.put("u", 0, b"a")
    assert uploads.get("u", 2) == [b"a", b"b"]


def test_a_part_that_is_sent_again_is_as_young_as_a_new_one(
    uploads: UploadFiles, paths: PolicyPaths
) -> None:
    uploads.put("u", 0, b"a")
    for path in (paths.uploads / "u" / "000000", paths.uploads / "u"):
        os.utime(path, (0, 0))
    uploads.put("u", 0, b"a")
    os.utime(paths.uploads / "u", (0, 0))
    uploads.drop_expired()
    assert uploads.get("u", 1) == [b"a"]


def test_the_sum_of_parts_is_bounded(uploads: UploadFiles) -> None:
    uploads.put("u", 0, b"123456")
    with raises(ErrorCode.BODY_TOO_LARGE):
        uploads.put("u", 1, b"12345")
    uploads.put("u", 1, b"1234")


@pytest.mark.parametrize("damage", [b"", b"123", b"\0" * 22])
def test_a_damaged_part_is_not_there_until_it_is_sent_again(
    uploads: UploadFiles, paths: PolicyPaths, damage: bytes
) -> None:
    """Without a digest in the file a batch was built from whatever the disk gave back."""
    uploads.put("u", 0, b"123456")
    (paths.uploads / "u" / "000000").write_bytes(damage)
    with raises(ErrorCode.UPLOAD_NOT_FOUND):
        uploads.get("u", 1)
    uploads.put("u", 0, b"1234567890")
    assert uploads.get("u", 1) == [b"1234567890"]


def test_a_part_that_is_there_is_synced_before_it_is_promised(
    uploads: UploadFiles, paths: PolicyPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed between the rename and the fsync left a part that a power cut took."""
    uploads.put("u", 0, b"123456")
    synced: list[Path] = []
    monkeypatch.setattr(uploads_module, "fsync_folder", synced.append)
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


def test_what_a_call_has_named_makes_room(uploads: UploadFiles, paths: PolicyPaths) -> None:
    """It is kept for the call's retries only while nobody wants the room."""
    for number, upload_id in enumerate(("first", "second", "open")):
        uploads.put(upload_id, 0, b"12345678")
        if upload_id != "open":
            uploads.get(upload_id, 1)
            moment = time.time() - 10 + number
            os.utime(paths.uploads / upload_id / "used", (moment, moment))
    assert uploads.get("first", 1) == [b"12345678"]
    os.utime(paths.uploads / "first" / "used", (1.0, 1.0))
    uploads.put("new", 0, b"12")
    assert sorted(path.name for path in paths.uploads.iterdir()) == ["new", "open", "second"]
    uploads.put("new", 1, b"12345678")
    # Sent again, it is one that no call has named yet.
    uploads.put("second", 1, b"1")
    with raises(ErrorCode.RESOURCE_EXHAUSTED):
        uploads.put("more", 0, b"1234567")
    assert uploads.get("open", 1) == [b"12345678"]
    uploads.put("more", 0, b"1234567")
    assert sorted(path.name for path in paths.uploads.iterdir()) == ["more", "new", "second"]


def test_what_is_sent_again_for_another_call_makes_no_room(uploads: UploadFiles) -> None:
    """Though all of it is there already."""
    uploads.put("again", 0, b"1234567890")
    uploads.get("again", 1)
    uploads.put("again", 0, b"1234567890")
    uploads.put("open", 0, b"1234567890")
    with raises(ErrorCode.RESOURCE_EXHAUSTED):
        uploads.put("more", 0, b"1234567890")
    assert uploads.get("again", 1) == [b"1234567890"]


def test_parts_that_are_sent_at_once_do_not_disturb_each_other(paths: PolicyPaths) -> None:
    uploads = UploadFiles(paths, ttl_s=60.0, max_upload_bytes=10**6, max_total_bytes=10**6)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda index: uploads.put("u", index, b"x"), range(200)))
    assert uploads.get("u", 200) == [b"x"] * 200
