"""An object store whose objects are files of this disk, for tests that run without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from ratoon.stream.files import TEMPORARY_PREFIX, make_folder, write_atomic
from ratoon.stream.object_store import ObjectStore


class LocalStore(ObjectStore):
    """Objects appear whole, or not at all, as in S3."""

    def __init__(self, root: Path) -> None:
        make_folder(root)
        self._root = root.resolve()
        self._place = str(self._root)
        self._timeout_s = 0.0
        self._store = _Objects(auto_mkdir=True, skip_instance_cache=True)


class _Objects(LocalFileSystem):
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        make_folder(Path(path).parent)
        write_atomic(Path(path), value)

    def rm_file(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def find(self, path: str, *args: Any, **options: Any) -> list[str]:
        found: Any = super().find(path, *args, **options)
        return [name for name in found if f"/{TEMPORARY_PREFIX}" not in name]

    def call_s3(self, *_: Any, **__: Any) -> dict[str, Any]:
        """No upload is in parts."""
        return {}
