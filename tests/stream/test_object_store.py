"""Bytes and folders by key in an object store, whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.stream import files
from ratoon.stream.object_store import FOLDER_MANIFEST, ObjectStore, decode_manifest
from tests.network.proxy import Fault
from tests.stream.local_store import LocalStore
from tests.stream.s3 import BUCKET, S3Server, running_s3

DATA = b"a body " * 1000
SHA256 = hashlib.sha256(DATA).hexdigest()
KEY = "policies/p-1/bodies/" + SHA256


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def store(s3: S3Server) -> ObjectStore:
    return ObjectStore(s3.url(), timeout_s=10.0)


@pytest.fixture
def hasty(s3: S3Server) -> ObjectStore:
    """One attempt a call."""
    return ObjectStore(s3.url(), timeout_s=0.0)


def folder(path: Path, **contents: bytes) -> Path:
    path.mkdir()
    for name, data in contents.items():
        (path / name).write_bytes(data)
    return path


def refused(code: ErrorCode, call: Callable[[], Any]) -> RatoonError:
    with pytest.raises(RatoonError) as caught:
        call()
    assert caught.value.code is code, caught.value
    return caught.value


def test_bytes_come_back_by_their_digest(store: ObjectStore):
    store.put(KEY, DATA)
    assert store.get(KEY, SHA256) == DATA
    assert store.names("policies/p-1/bodies") == (SHA256,)
    assert store.names("policies/p-1") == ()


def test_bytes_of_another_digest_are_refused(store: ObjectStore):
    store.put(KEY, DATA[:-1] + b"?")
    error = refused(ErrorCode.INTERNAL, lambda: store.get(KEY, SHA256))
    assert error.field == KEY


def test_what_was_deleted_is_gone(store: ObjectStore):
    store.put(KEY, DATA)
    store.delete(KEY)
    store.delete(KEY)
    assert store.names("policies/p-1/bodies") == ()
    with pytest.raises(FileNotFoundError):
        store.get(KEY, SHA256)
    assert store.names("policies/nobody") == store.folder_names("policies/nobody") == ()


def test_a_folder_comes_back_verified(store: ObjectStore, tmp_path: Path):
    source = folder(tmp_path / "scratch", weights=DATA, empty=b"")
    (source / "within").mkdir()
    (source / "within/file").write_bytes(DATA)
    store.put_folder("p/checkpoints/c-1", source)
    assert source.exists()
    assert store.folder_names("p/checkpoints") == ("c-1",)
    store.get_folder("p/checkpoints/c-1", tmp_path / "cache" / "c-1")
    copy = tmp_path / "cache" / "c-1"
    assert (copy / "within/file").read_bytes() == DATA
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.is_file()} == {
        "weights": DATA,
        "empty": b"",
    }
    with pytest.raises(FileExistsError):
        store.put_folder("p/checkpoints/c-1", folder(tmp_path / "again", weights=b"other"))
    with pytest.raises(FileNotFoundError):
        store.get_folder("p/checkpoints/c-2", tmp_path / "c-2")
    store.delete_folder("p/checkpoints/c-1")
    store.delete_folder("p/checkpoints/c-1")
    assert store.folder_names("p/checkpoints") == ()
    assert store.names("p/checkpoints/c-1") == ()


@pytest.mark.parametrize("damage", ["flipped", "cut", "manifest"])
def test_a_damaged_folder_is_refused_by_name(
    store: ObjectStore, s3: S3Server, tmp_path: Path, damage: str
):
    key = f"p/c-{damage}"
    store.put_folder(key, folder(tmp_path / "scratch", weights=DATA))
    name = FOLDER_MANIFEST if damage == "manifest" else "weights"
    change = {"flipped": b"?" + DATA[1:], "cut": DATA[:-1], "manifest": b"{}"}[damage]
    objects = s3.store()
    (path,) = [path for path in objects.find(BUCKET) if path.endswith(f"{key}/{name}")]
    objects.pipe_file(path, change)
    error = refused(ErrorCode.INTERNAL, lambda: store.get_folder(key, tmp_path / "copy"))
    assert error.field == f"{key}/{name}"
    assert not (tmp_path / "copy").exists()
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    "key", ["", "/", "/a", "a/", "a//b", "..", "a/../b", "a/.b", "a\x00b", "a\\b", "a b", "a\nb"]
)
def test_a_key_that_could_lead_out_is_refused(store: ObjectStore, tmp_path: Path, key: str):
    calls: list[Callable[[], object]] = [
        lambda: store.put(key, b"x"),
        lambda: store.get(key, SHA256),
        lambda: store.delete(key),
        lambda: store.names(key),
        lambda: store.folder_names(key),
        lambda: store.delete_folder(key),
        lambda: store.remove_leftovers(key),
        lambda: store.put_folder(key, folder(tmp_path / "scratch", x=b"x")),
        lambda: store.get_folder(key, tmp_path / "copy"),
    ]
    for call in calls:
        assert refused(ErrorCode.INVALID_ARGUMENT, call).field == "key"


def test_a_copy_is_on_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = LocalStore(tmp_path / "store")
    store.put_folder("c-1", folder(tmp_path / "scratch", weights=DATA, more=DATA))
    target = tmp_path / "root" / "c-1"
    target.parent.mkdir()
    seen: list[tuple[str, bool]] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        seen.append((name, target.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    store.get_folder("c-1", target)
    names = [".tmp" if name.startswith(".tmp") else name for name, _ in seen]
    assert sorted(names[:2]) == ["more", "weights"]
    assert names[2:] == [".tmp", "root"]
    assert [there for _, there in seen] == [False] * 3 + [True]


def test_a_put_cut_in_the_middle_is_not_there(s3: S3Server, hasty: ObjectStore):
    body = os.urandom(300_000)
    digest = hashlib.sha256(body).hexdigest()
    for seed in range(4):
        with s3.outage_at(random.Random(seed).randrange(200, 300_000)):
            refused(ErrorCode.UNAVAILABLE, lambda: hasty.put("p/body", body))
        assert hasty.names("p") == ()
    hasty.put("p/body", body)
    assert hasty.get("p/body", digest) == body


def test_a_folder_cut_off_anywhere_does_not_exist(s3: S3Server, hasty: ObjectStore, tmp_path: Path):
    """Three files of 20 kB and their manifest; no byte of them is the one too many."""
    contents = {name: os.urandom(20_000) for name in ("a", "b", "c")}
    for seed in range(6):
        source = folder(tmp_path / f"scratch-{seed}", **contents)
        with s3.outage_at(random.Random(seed).randrange(200, 60_000)):
            refused(ErrorCode.UNAVAILABLE, lambda source=source: hasty.put_folder("p/c", source))
        assert source.exists()
        assert hasty.folder_names("p") == ()
        with pytest.raises(FileNotFoundError):
            hasty.get_folder("p/c", tmp_path / "copy")
    assert hasty.names("p/c") != ()
    hasty.remove_leftovers("p")
    assert hasty.names("p/c") == ()
    hasty.put_folder("p/c", folder(tmp_path / "last", **contents))
    hasty.remove_leftovers("p")
    hasty.get_folder("p/c", tmp_path / "copy")
    assert (tmp_path / "copy" / "c").read_bytes() == contents["c"]


def test_cuts_are_tried_again_within_the_time(s3: S3Server, tmp_path: Path):
    store = ObjectStore(s3.url(), timeout_s=10.0)
    for seed in range(4):
        at_byte = random.Random(seed).randrange(200, 40_000)
        hits = s3.num_hits
        s3.arm(Fault(kind="reset", direction="up", at_byte=at_byte))
        store.put_folder(f"p/c-{seed}", folder(tmp_path / f"scratch-{seed}", a=os.urandom(40_000)))
        assert s3.num_hits == hits + 1
        store.get_folder(f"p/c-{seed}", tmp_path / f"copy-{seed}")


def test_a_store_that_is_away_is_unavailable_in_time(s3: S3Server):
    store = ObjectStore(s3.url(), timeout_s=1.0)
    with s3.outage_at(0):
        start = time.monotonic()
        error = refused(ErrorCode.UNAVAILABLE, lambda: store.put(KEY, DATA))
        assert time.monotonic() - start >= 1.0
        assert error.retryable
    store.put(KEY, DATA)
    assert store.get(KEY, SHA256) == DATA


def test_uploads_in_parts_that_were_never_completed_are_removed(s3: S3Server):
    url = s3.url()
    store, objects = ObjectStore(url, timeout_s=10.0), s3.store()
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    for name in ("p/c-1/weights", "other/c-1/weights"):
        objects.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{name}")
    store.remove_leftovers("p")
    left = objects.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
    assert [upload["Key"] for upload in left["Uploads"]] == [f"{prefix}/other/c-1/weights"]


def test_a_bucket_that_is_not_there_is_refused_at_the_start(s3: S3Server):
    ObjectStore(s3.url(), timeout_s=5.0).check()
    absent = ObjectStore("s3://no-such-bucket/prefix", timeout_s=5.0)
    assert refused(ErrorCode.INVALID_ARGUMENT, absent.check).field == "storage_url"
    for url in ("s3://", "file:///tmp", "bucket/prefix", "s3://bucket/../other"):
        refused(ErrorCode.INVALID_ARGUMENT, lambda url=url: ObjectStore(url, timeout_s=5.0))


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"format": 1},
        {"format": 2, "files": []},
        {"format": 1, "files": 3},
        {"format": 1, "files": [3]},
        {"format": 1, "files": [{"name": "a"}]},
        {"format": 1, "files": [{"name": "a", "size_bytes": "x", "digest": ""}]},
        {"format": 1, "files": [{"name": "../a", "size_bytes": 1, "digest": ""}]},
        {"format": 1, "files": [{"name": "/etc/passwd", "size_bytes": 1, "digest": ""}]},
    ],
)
def test_a_sealed_manifest_that_is_none_is_damage(document: Any) -> None:
    """Whoever writes to the store can seal anything."""
    sealed = files.seal_bytes(json.dumps(document).encode())
    error = refused(ErrorCode.INTERNAL, lambda: decode_manifest("key", sealed))
    assert error.field == f"key/{FOLDER_MANIFEST}"
