"""`Blobs` on a local file system; a path that links lead out of the root is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

from ratoon.errors import invalid
from ratoon.stream import blobs
from ratoon.stream.files import (
    fsync_folder,
    make_folder,
    remove_folder,
    remove_leftovers,
    write_atomic,
)


class LocalBlobs:
    """See `Blobs`. A missing root is created."""

    def __init__(self, root: Path) -> None:
        make_folder(root)
        self._root = root.resolve()

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        make_folder(path.parent)
        write_atomic(path, data)

    def get(self, key: str, digest: str) -> bytes:
        data = self._path(key).read_bytes()
        blobs.check_digest(key, data, digest)
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        with self._path(key).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink()
        except FileNotFoundError:
            return
        fsync_folder(path.parent)

    def names(self, key: str) -> tuple[str, ...]:
        return tuple(path.name for path in self._below(key) if path.is_file())

    def put_folder(self, key: str, source: Path) -> None:
        target = self._path(key)
        files = blobs.describe_folder(source)
        manifest = target / blobs.FOLDER_MANIFEST
        if manifest.is_file():
            blobs.check_same(key, manifest.read_bytes(), files)
            return
        with blobs.made_folder(target) as folder:
            for file in files:
                shutil.copyfile(source / file.name, folder / file.name)
            (folder / blobs.FOLDER_MANIFEST).write_bytes(blobs.encode_manifest(files))

    def get_folder(self, key: str, target: Path) -> None:
        source = self._path(key)
        files = blobs.decode_manifest(key, (source / blobs.FOLDER_MANIFEST).read_bytes())
        with blobs.made_folder(target) as folder:
            for file in files:
                shutil.copyfile(source / file.name, folder / file.name)
                blobs.check_file(key, folder / file.name, file)

    def delete_folder(self, key: str) -> None:
        remove_folder(self._path(key))

    def folder_names(self, key: str) -> tuple[str, ...]:
        return tuple(
            path.name for path in self._below(key) if (path / blobs.FOLDER_MANIFEST).is_file()
        )

    def remove_leftovers(self, key: str) -> None:
        folder = self._path(key)
        if folder.is_dir():
            remove_leftovers(folder)

    def _below(self, key: str) -> list[Path]:
        folder = self._path(key)
        if not folder.is_dir():
            return []
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))

    def _path(self, key: str) -> Path:
        path = self._root / blobs.checked_key(key)
        if not path.resolve().is_relative_to(self._root):
            raise invalid("key", repr(key), "a path that stays below the root")
        return path
