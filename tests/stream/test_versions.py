"""Versions of weights as folders."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.errors import ErrorCode, RatoonError
from ratoon.stream import files, versions
from ratoon.stream.files import digest_file
from ratoon.stream.manifest import WeightManifest
from ratoon.stream.versions import (
    announce_version,
    find_file,
    find_named,
    list_versions,
    open_chunk,
    prune_versions,
    publish_version,
    read_manifest,
    version_folder,
    whole_version,
)
from ratoon_client.weights.deltas import read_delta, rebuild
from ratoon_proto.types import WeightFile, WeightKind
from tests.stream.samples import NAME, HeldFiles, flipped, safetensors


def writer(contents: dict[str, bytes]) -> Callable[[Path], dict[str, str]]:
    def write(folder: Path) -> dict[str, str]:
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        return {}

    return write


def publish(root: Path, version: int, contents: dict[str, bytes]) -> WeightManifest:
    return publish_version(root, "p", version, WeightKind.FULL, writer(contents), 12.5)


def code_of(call: Callable[[], object]) -> ErrorCode:
    with pytest.raises(RatoonError) as caught:
        call()
    return caught.value.code


def test_publish_names_every_file_with_size_and_digest(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "deep" / "root", 3, {"b": b"bytes", "a": b""})
    assert manifest == WeightManifest(
        policy_id="p",
        version=3,
        kind=WeightKind.FULL,
        files=(
            WeightFile(name="a", size_bytes=0, digest=xxhash.xxh3_128_hexdigest(b"")),
            WeightFile(name="b", size_bytes=5, digest=xxhash.xxh3_128_hexdigest(b"bytes")),
        ),
        created_at=12.5,
    )
    assert read_manifest(tmp_path / "deep" / "root", 3) == manifest


def test_what_was_digested_while_it_was_written_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read = files.digest_file, list[str]()

    def digest_file(path: Path) -> str:
        read.append(path.name)
        return real(path)

    def write(folder: Path) -> dict[str, str]:
        writer({"a": b"x", "b": b"y"})(folder)
        return {"b": "0" * 32}

    monkeypatch.setattr(versions, "digest_file", digest_file)
    manifest = publish_version(tmp_path, "p", 1, WeightKind.FULL, write, 0.0)
    assert read == ["a"]
    assert [file.digest for file in manifest.files] == [files.digest_bytes(b"x"), "0" * 32]


def test_files_that_were_written_elsewhere_are_no_version(tmp_path: Path) -> None:
    """By a rank whose node has another disk there."""

    def write(folder: Path) -> dict[str, str]:
        (folder / "a").write_bytes(b"x")
        return {"a": "0" * 32, "b": "0" * 32}

    with pytest.raises(FileNotFoundError, match="another rank"):
        publish_version(tmp_path, "p", 1, WeightKind.FULL, write, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_publish_again_returns_the_first_and_writes_nothing(tmp_path: Path) -> None:
    first = publish(tmp_path, 1, {"a": b"one"})
    second = publish(tmp_path, 1, {"a": b"two"})
    assert second == first
    assert (version_folder(tmp_path, 1) / "a").read_bytes() == b"one"


@pytest.mark.parametrize("data", [b"same", b"other"])
def test_publish_beside_a_replaced_writer_takes_the_same_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    real = files.rename_folder
    monkeypatch.setattr(versions, "remove_leftovers", lambda *_, **__: None)

    def race(source: Path, target: Path) -> None:
        monkeypatch.setattr(versions, "rename_folder", real)
        assert publish(tmp_path, 1, {"a": data}).version == 1
        real(source, target)

    monkeypatch.setattr(versions, "rename_folder", race)
    if data == b"same":
        assert publish(tmp_path, 1, {"a": b"same"}) == read_manifest(tmp_path, 1)
    else:
        with pytest.raises(FileExistsError, match="File exists"):
            publish(tmp_path, 1, {"a": b"same"})
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    assert (version_folder(tmp_path, 1) / "a").read_bytes() == data


def test_publish_of_another_policy_or_kind_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, 1, {"a": b"one"})
    for policy_id, kind in (("q", WeightKind.FULL), ("p", WeightKind.ADAPTER)):
        with pytest.raises(RatoonError, match=re.escape(f"it is of policy p (full) in {tmp_path}")):
            publish_version(tmp_path, policy_id, 1, kind, writer({}), 0.0)


def test_publish_failing_write_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path) -> dict[str, str]:
        (folder / "a").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        publish_version(tmp_path, "p", 1, WeightKind.FULL, write, 0.0)
    assert list(tmp_path.iterdir()) == []
    assert list_versions(tmp_path) == ()


CRASH = """
import os, pathlib
from ratoon.stream import versions
from ratoon_proto.types import WeightKind

point = {point!r}
if point != "write":
    real = getattr(versions, point)
    setattr(versions, point, lambda *args: os._exit(9))

def write(folder):
    (folder / "a").write_bytes(b"data")
    if point == "write":
        os._exit(9)
    return {{}}

root = pathlib.Path({root!r})
versions.publish_version(root, "p", 4, WeightKind.FULL, write, 0.0, deltas=True)
"""


@pytest.mark.parametrize(
    "point", ["write", "write_delta_apart", "seal_document", "fsync_tree", "rename_folder"]
)
def test_publish_killed_anywhere_shows_nothing_and_can_be_repeated(
    tmp_path: Path, point: str
) -> None:
    publish(tmp_path, 3, {"a": b"before"})
    script = CRASH.format(point=point, root=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    assert list_versions(tmp_path) == (3,)
    assert code_of(lambda: read_manifest(tmp_path, 4)) is ErrorCode.WEIGHTS_NOT_FOUND
    publish(tmp_path, 4, {"a": b"data"})
    assert list_versions(tmp_path) == (3, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000003", "00000004"]


def test_publish_syncs_files_and_manifest_before_it_gives_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, int]] = []
    for step in ("fsync_tree", "rename_folder"):
        real = getattr(versions, step)

        def record(
            folder: Path, *args: Path, _step: str = step, _real: Callable[..., None] = real
        ) -> None:
            order.append((_step, len([*folder.iterdir()])))
            _real(folder, *args)

        monkeypatch.setattr(versions, step, record)
    publish(tmp_path, 1, {"a": b"x"})
    assert order == [("fsync_tree", 2), ("rename_folder", 2)]


def test_list_versions_is_ascending_and_ignores_the_rest(tmp_path: Path) -> None:
    assert list_versions(tmp_path / "none") == ()
    for version in (10, 2, 123456789):
        publish(tmp_path, version, {"a": b"x"})
    (tmp_path / "00000005").mkdir()
    (tmp_path / "notes").mkdir()
    assert list_versions(tmp_path) == (2, 10, 123456789)


def test_prune_keeps_what_it_is_told(tmp_path: Path) -> None:
    for version in range(6):
        publish(tmp_path, version, {"a": str(version).encode()})
    assert prune_versions(tmp_path, {1, 4, 5}) == (0, 2, 3)
    assert list_versions(tmp_path) == (1, 4, 5)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] == ".") == [".spare"]
    assert len(list(tmp_path.iterdir())) == 4
    assert prune_versions(tmp_path, {1, 4, 5, None}) == ()


def test_file_path_takes_only_names_of_the_manifest(tmp_path: Path) -> None:
    publish(tmp_path, 1, {"a": b"x"})
    (tmp_path / "secret").write_bytes(b"s")
    assert find_named(tmp_path, 1, "a")[0].read_bytes() == b"x"
    for name in ("../secret", "manifest.json", str(tmp_path / "secret"), "", ".", "a/../a"):
        assert code_of(lambda n=name: find_named(tmp_path, 1, n)) is ErrorCode.WEIGHTS_NOT_FOUND
    assert code_of(lambda: find_named(tmp_path, 2, "a")) is ErrorCode.WEIGHTS_NOT_FOUND


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=64), offset=st.integers(0, 70), length=st.integers(1, 70))
def test_chunk_is_the_slice_or_out_of_range(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, offset: int, length: int
) -> None:
    root = tmp_path_factory.mktemp("versions")
    digest = publish(root, 1, {"a": data}).files[0].digest
    if offset >= max(len(data), 1):
        with pytest.raises(RatoonError) as caught:
            open_chunk(root, digest, offset, length)
        assert caught.value.code is ErrorCode.RANGE_NOT_SATISFIABLE
        assert caught.value.details == {"size_bytes": str(len(data))}
    else:
        assert open_chunk(root, digest, offset, length) == data[offset : offset + length]


@pytest.mark.parametrize(
    ("digest", "offset", "length", "code"),
    [
        ("{real}", -1, 1, ErrorCode.INVALID_ARGUMENT),
        ("{real}", 0, 0, ErrorCode.INVALID_ARGUMENT),
        ("{real}", 0, -5, ErrorCode.INVALID_ARGUMENT),
        ("{real}", 0, 16 * 2**20 + 1, ErrorCode.INVALID_ARGUMENT),
        ("../../etc/passwd", 0, 1, ErrorCode.INVALID_ARGUMENT),
        ("A" * 32, 0, 1, ErrorCode.INVALID_ARGUMENT),
        ("", 0, 1, ErrorCode.INVALID_ARGUMENT),
        ("0" * 32, 0, 1, ErrorCode.WEIGHTS_NOT_FOUND),
        ("{real}", 10**18, 1, ErrorCode.RANGE_NOT_SATISFIABLE),
    ],
)
def test_chunk_bad_request_is_typed(
    tmp_path: Path, digest: str, offset: int, length: int, code: ErrorCode
) -> None:
    real = publish(tmp_path, 1, {"a": b"data"}).files[0].digest
    assert code_of(lambda: open_chunk(tmp_path, digest.format(real=real), offset, length)) is code


def test_chunk_is_found_in_an_older_version_until_it_is_pruned(tmp_path: Path) -> None:
    digest = publish(tmp_path, 1, {"a": b"one"}).files[0].digest
    publish(tmp_path, 2, {"a": b"two"})
    assert open_chunk(tmp_path, digest, 0, 3) == b"one"
    prune_versions(tmp_path, list_versions(tmp_path)[-1:])
    assert code_of(lambda: open_chunk(tmp_path, digest, 0, 3)) is ErrorCode.WEIGHTS_NOT_FOUND


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', '{"format": 3}', "[]"])
def test_damaged_manifest_is_an_error_not_a_version(tmp_path: Path, text: str) -> None:
    publish(tmp_path, 1, {"a": b"x"})
    (version_folder(tmp_path, 1) / "manifest.json").write_text(text)
    with pytest.raises(RatoonError, match="version 1 is damaged: its manifest") as caught:
        read_manifest(tmp_path, 1)
    assert (caught.value.code, caught.value.field) == (ErrorCode.WEIGHTS_NOT_FOUND, "version")


@pytest.mark.parametrize("name", ["manifest.json", "a"])
def test_publish_over_a_damaged_version_keeps_what_was_damaged_first(
    tmp_path: Path, name: str
) -> None:
    """It was refused, or taken for whole."""
    whole = publish(tmp_path, 1, {"a": b"one"})
    for data in (b"first", b"second"):
        (version_folder(tmp_path, 1) / name).write_bytes(data)
        assert publish(tmp_path, 1, {"a": b"one"}) == whole_version(tmp_path, 1) == whole
    assert (tmp_path / "damaged-00000001" / name).read_bytes() == b"first"
    assert list_versions(tmp_path) == (1,)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EIO, ErrorCode.WEIGHTS_NOT_FOUND),
        (errno.EACCES, ErrorCode.UNAVAILABLE),
        (errno.ESTALE, ErrorCode.UNAVAILABLE),
        (errno.EMFILE, ErrorCode.UNAVAILABLE),
    ],
)
@pytest.mark.parametrize("name", ["read_bytes", "stat"])
def test_what_cannot_be_read_now_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: ErrorCode, name: str
) -> None:
    """Set aside, a version would be gone for a server of files that is away for a moment."""
    publish(tmp_path, 1, {"a": b"one"})

    def fail(_path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, name, fail)
    assert code_of(lambda: whole_version(tmp_path, 1)) is code


def test_manifest_is_json_of_a_stated_format(tmp_path: Path) -> None:
    publish(tmp_path, 1, {"a": b"x"})
    document = json.loads((version_folder(tmp_path, 1) / "manifest.json").read_text())
    assert document["format"] == 3
    assert [file["name"] for file in document["files"]] == ["a"]


def test_manifest_of_another_digest_is_an_error(tmp_path: Path) -> None:
    """Without a digest of its own a manifest with another version or time was believed."""
    publish(tmp_path, 1, {"a": b"x"})
    path = version_folder(tmp_path, 1) / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(RatoonError, match="version 1 is damaged: its manifest") as caught:
            read_manifest(tmp_path, 1)
        assert caught.value.code is ErrorCode.WEIGHTS_NOT_FOUND, place


def test_publishing_again_syncs_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed between the rename and the fsync left a version that a power cut took."""
    publish(tmp_path, 1, {"a": b"x"})
    synced: list[Path] = []
    monkeypatch.setattr(versions, "fsync_folder", synced.append)
    publish(tmp_path, 1, {"a": b"x"})
    assert synced == [tmp_path]


WEIGHTS = "model.safetensors"


def test_the_next_version_is_written_over_the_pages_of_the_one_pruned_last(tmp_path: Path) -> None:
    inodes = []
    for version in range(4):
        publish(tmp_path, version, {WEIGHTS: bytes([version]) * 5000, "config.json": b"{}"})
        inodes.append((version_folder(tmp_path, version) / WEIGHTS).stat().st_ino)
        prune_versions(tmp_path, list_versions(tmp_path)[-1:])
    assert inodes[2:] == inodes[:2]
    assert sorted(path.name for path in version_folder(tmp_path, 3).iterdir()) == [
        "config.json",
        "manifest.json",
        WEIGHTS,
    ]
    assert (version_folder(tmp_path, 3) / WEIGHTS).read_bytes() == b"\3" * 5000
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("way", ["open", "mapped", "linked"])
def test_what_is_still_read_is_not_written_over(tmp_path: Path, way: str) -> None:
    publish(tmp_path, 0, {WEIGHTS: b"0" * 5000})
    path = version_folder(tmp_path, 0) / WEIGHTS
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        if way == "linked":
            (tmp_path / "mine").hardlink_to(path)
        if way != "open":
            file.close()
        if way != "mapped":
            mapped.close()
        publish(tmp_path, 1, {WEIGHTS: b"1" * 5000})
        prune_versions(tmp_path, list_versions(tmp_path)[-1:])
        publish(tmp_path, 2, {WEIGHTS: b"2" * 5000})
        kept = {
            "open": file.read,
            "mapped": lambda: mapped[:],
            "linked": (tmp_path / "mine").read_bytes,
        }[way]()
    assert kept == b"0" * 5000
    assert (version_folder(tmp_path, 2) / WEIGHTS).read_bytes() == b"2" * 5000


def test_files_that_the_next_version_does_not_have_go_with_the_spare_one(tmp_path: Path) -> None:
    publish(tmp_path, 0, {"a.safetensors": b"0" * 9, "b.safetensors": b"0" * 9})
    publish(tmp_path, 1, {"a.safetensors": b"1"})
    prune_versions(tmp_path, list_versions(tmp_path)[-1:])
    manifest = publish(tmp_path, 2, {"a.safetensors": b"2"})
    assert [(file.name, file.size_bytes) for file in manifest.files] == [("a.safetensors", 1)]


def weights(changed: range = range(0)) -> dict[str, bytes]:
    """A tensor of 1000 words, of which those in `changed` are others, and a file beside it."""
    data = flipped(bytes(range(200)) * 10, 2, changed, seed=0)
    return {"model.safetensors": safetensors([("BF16", data)]), "config.json": b"{}"}


def publish_with_deltas(
    root: Path, version: int, contents: dict[str, bytes], kind: WeightKind = WeightKind.FULL
) -> WeightManifest:
    return publish_version(root, "p", version, kind, writer(contents), 12.5, deltas=True)


def test_a_version_has_a_delta_from_the_newest_before_it(tmp_path: Path) -> None:
    assert publish_with_deltas(tmp_path, 3, weights()).deltas == ()
    publish(tmp_path, 4, weights(range(10)))
    manifest = publish_with_deltas(tmp_path, 6, weights(range(60)))
    assert read_manifest(tmp_path, 6) == manifest
    # The first ten have changed alike in both.
    assert manifest.changed_share == 0.05
    (delta,) = manifest.deltas
    assert (delta.parent_version, delta.file.name) == (4, "delta-from-00000004.bin")
    assert [file.name for file in manifest.files] == ["config.json", "model.safetensors"]
    path = version_folder(tmp_path, 6) / delta.file.name
    assert find_file(tmp_path, delta.file.digest) == (path, delta.file)
    assert find_named(tmp_path, 6, delta.file.name)[0] == path
    (made,) = read_delta(path)
    rebuild(made, version_folder(tmp_path, 4) / made.name, tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == weights(range(60))["model.safetensors"]
    assert publish_with_deltas(tmp_path, 6, {}) == manifest


@pytest.mark.parametrize(
    ("contents", "share"),
    [(weights(), 0.0), (weights(range(1000)), 1.0), ({"config.json": b"[]"}, None)],
)
def test_a_delta_of_no_use_is_not_kept(
    tmp_path: Path, contents: dict[str, bytes], share: float | None
) -> None:
    publish(tmp_path, 1, weights())
    manifest = publish_with_deltas(tmp_path, 2, contents)
    assert (manifest.deltas, manifest.changed_share) == ((), share)
    names = {path.name for path in version_folder(tmp_path, 2).iterdir()}
    assert names == {*contents, "manifest.json"}


def test_a_version_does_not_fail_with_its_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_delta(path: Path, *_: object) -> float | None:
        path.write_bytes(b"half")
        raise ChildProcessError("OSError: [Errno 28] No space left on device")

    publish(tmp_path, 1, weights())
    monkeypatch.setattr(versions, "write_delta_apart", write_delta)
    manifest = publish_with_deltas(tmp_path, 2, weights(range(60)))
    assert (manifest.deltas, manifest.changed_share) == ((), None)
    assert not list(version_folder(tmp_path, 2).glob("delta-*"))


@pytest.mark.parametrize("fault", ["kind", "manifest", "file", "size"])
def test_a_parent_that_is_not_whole_or_alike_gives_no_delta(tmp_path: Path, fault: str) -> None:
    publish(tmp_path, 1, weights())
    model = version_folder(tmp_path, 1) / "model.safetensors"
    match fault:
        case "manifest":
            (version_folder(tmp_path, 1) / "manifest.json").write_bytes(b"")
        case "file":
            model.unlink()
        case "size":
            model.write_bytes(model.read_bytes()[:-1])
    kind = WeightKind.ADAPTER if fault == "kind" else WeightKind.FULL
    manifest = publish_with_deltas(tmp_path, 2, weights(range(10)), kind)
    assert (manifest.deltas, manifest.changed_share) == ((), None)
    assert list_versions(tmp_path) == (1, 2)


def held(root: Path, changed: int, before: int | None) -> HeldFiles:
    """Weights of which the first `changed` words are others, compared with those of `before`."""
    compared = None if before is None else weights(range(before))
    return HeldFiles(root.parent / "scratch", weights(range(changed)), compared)


def announce(root: Path, version: int, copy: HeldFiles) -> WeightManifest | None:
    return announce_version(root, "p", version, WeightKind.FULL, copy, 12.5)


def test_a_version_can_be_made_of_its_delta_before_its_files_are_there(tmp_path: Path) -> None:
    root = tmp_path / "root"
    publish(root, 4, weights())
    copy = held(root, 60, 0)
    announced = announce(root, 6, copy)
    assert announced is not None
    assert list_versions(root) == (4,)
    assert announced.changed_share == 0.06
    (delta,) = announced.deltas
    path, file = find_named(root, 6, delta.file.name, "p")
    assert file == delta.file
    assert digest_file(path) == file.digest
    assert find_file(root, file.digest) == (path, file)
    assert open_chunk(root, file.digest, 0, 9) == path.read_bytes()[:9]
    assert find_named(root, 6, "config.json")[0].read_bytes() == b"{}"
    weight_file = next(each for each in announced.files if each.name == NAME)
    for find in (lambda: find_named(root, 6, NAME), lambda: find_file(root, weight_file.digest)):
        with pytest.raises(RatoonError, match="still being written") as caught:
            find()
        assert (caught.value.code, caught.value.field) == (ErrorCode.WEIGHTS_NOT_FOUND, "version")
        assert caught.value.got == "6"
    (made,) = read_delta(path)
    rebuild(made, version_folder(root, 4) / made.name, tmp_path / "made")
    assert digest_file(tmp_path / "made") == weight_file.digest
    manifest = publish_version(
        root, "p", 6, WeightKind.FULL, copy.write, 99.0, deltas=True, announced=announced
    )
    assert manifest == announced == read_manifest(root, 6)
    assert find_named(root, 6, delta.file.name)[0] == version_folder(root, 6) / delta.file.name
    # By files it is the same.
    publish(tmp_path / "other", 4, weights())
    assert publish_with_deltas(tmp_path / "other", 6, weights(range(60))) == manifest
    publish(root, 7, weights())
    assert {each.name for each in root.iterdir()} == {"00000004", "00000006", "00000007"}


@pytest.mark.parametrize(("changed", "before"), [(60, None), (60, 10), (0, 0), (1000, 0)], ids=str)
def test_what_was_not_compared_or_is_of_no_use_is_not_announced(
    tmp_path: Path, changed: int, before: int | None
) -> None:
    root = tmp_path / "root"
    assert announce(root, 3, held(root, changed, before)) is None
    publish(root, 4, weights())
    assert announce(root, 6, held(root, changed, before)) is None
    assert announce(root, 4, held(root, 60, 0)) is None
    assert [each.name for each in root.iterdir()] == ["00000004"]


def test_a_delta_that_cannot_be_written_is_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    root = tmp_path / "root"
    publish(root, 4, weights())
    monkeypatch.setattr(versions, "join_delta", fail)
    assert announce(root, 6, held(root, 60, 0)) is None
    assert [each.name for each in root.iterdir()] == ["00000004"]
