"""Durable writes: whole or absent, in the right order."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ratoon.stream import files


def test_write_atomic_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    files.write_atomic(path, b"first, which is longer")
    files.write_atomic(path, b"second")
    assert path.read_bytes() == b"second"
    assert [p.name for p in tmp_path.iterdir()] == ["journal"]


def test_write_atomic_failed_sync_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    files.write_atomic(path, b"old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["journal"]


def test_write_atomic_syncs_content_before_name_before_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    seen: list[tuple[str, bool]] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        seen.append(("folder" if target.is_dir() else "file", path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    files.write_atomic(path, b"data")
    assert seen == [("file", False), ("folder", True)]


def test_make_folder_syncs_every_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "fsync_folder", synced.append)
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [tmp_path, tmp_path / "a"]


def test_a_closed_folder_is_closed_before_its_name_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed afterwards, a power cut in between left it open for good."""
    modes: list[int] = []
    folder = tmp_path / "a" / "closed"

    def record(_: Path) -> None:
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in [folder] if path.exists())

    monkeypatch.setattr(files, "fsync_folder", record)
    files.make_folder(folder, 0o700)
    assert modes == [0o700]
    assert stat.S_IMODE(folder.parent.stat().st_mode) != 0o700


def test_fsync_tree_syncs_children_before_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "x").write_bytes(b"x")
    (tmp_path / "y").write_bytes(b"y")
    synced: list[Path] = []
    monkeypatch.setattr(files, "fsync_folder", synced.append)
    monkeypatch.setattr(files, "fsync_file", synced.append)
    files.fsync_tree(tmp_path)
    inner = tmp_path / "inner"
    assert synced == [inner / "x", inner, tmp_path / "y", tmp_path]


def test_rename_folder_refuses_a_taken_name(tmp_path: Path) -> None:
    for name in ("new", "taken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(FileExistsError):
        files.rename_folder(tmp_path / "new", tmp_path / "taken")
    assert (tmp_path / "taken" / "file").read_text() == "taken"


def test_remove_folder_forgets_the_name_before_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut between the two left half of a folder under its own name."""
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / "x").write_bytes(b"x")
    seen: list[tuple[Path, int]] = []
    monkeypatch.setattr(
        files, "fsync_folder", lambda folder: seen.append((folder, len([*folder.rglob("x")])))
    )
    files.remove_folder(tmp_path / "version")
    assert seen == [(tmp_path, 1)]
    assert not [*tmp_path.iterdir()]


def test_remove_leftovers_spares_other_names(tmp_path: Path) -> None:
    (tmp_path / ".tmp-00000001-ab").mkdir()
    (tmp_path / ".tmp-00000001-ab" / "part").write_bytes(b"x")
    (tmp_path / ".tmp-file").write_bytes(b"x")
    (tmp_path / "00000001").mkdir()
    files.remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]


def test_remove_folder_minds_nobody_who_removes_it_too(tmp_path: Path) -> None:
    files.remove_folder(tmp_path / "gone")


def test_remove_leftovers_minds_nobody_who_removes_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that was replaced, and has not heard of it."""
    (tmp_path / ".tmp-folder").mkdir()
    (tmp_path / ".tmp-folder" / "part").write_bytes(b"x")
    (tmp_path / ".tmp-file").write_bytes(b"x")
    glob, rmtree = Path.glob, shutil.rmtree

    def raced_glob(folder: Path, pattern: str) -> list[Path]:
        return [*glob(folder, pattern), folder / ".tmp-gone"]

    def raced_rmtree(path: Path, *args: Any, **options: Any) -> None:
        rmtree(path)
        rmtree(path, *args, **options)

    monkeypatch.setattr(Path, "glob", raced_glob)
    monkeypatch.setattr(shutil, "rmtree", raced_rmtree)
    files.remove_leftovers(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1])
def test_digest_file_equals_digest_of_its_bytes(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "f").write_bytes(data)
    assert files.digest_file(tmp_path / "f") == xxhash.xxh3_128(data).hexdigest()
    assert files.digest_bytes(data) == files.digest_file(tmp_path / "f")


@pytest.mark.parametrize("data", [b"", b"x", b"some bytes"])
def test_sealed_bytes_are_read_whole_or_refused(data: bytes) -> None:
    sealed = files.seal_bytes(data)
    assert files.unseal_bytes(sealed) == data
    for place in range(len(sealed)):
        flipped = bytearray(sealed)
        flipped[place] ^= 4
        for damaged in (bytes(flipped), sealed[:place]):
            with pytest.raises(files.DamagedFileError):
                files.unseal_bytes(damaged)


def test_a_sealed_document_is_read_whole_or_refused() -> None:
    fields = {"format": 2, "number": 1.5, "names": ["a", "é"], "none": None}
    sealed = files.seal_document(fields)
    assert files.unseal_document(sealed) == fields
    with pytest.raises(files.DamagedFileError):
        files.unseal_document(b'{"format": 1}')
    for place in range(len(sealed)):
        flipped = bytearray(sealed)
        flipped[place] ^= 1
        for damaged in (bytes(flipped), sealed[:place]):
            with pytest.raises(files.DamagedFileError):
                files.unseal_document(damaged)
