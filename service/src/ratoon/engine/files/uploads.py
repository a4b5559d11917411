"""Parts of batches that were sent ahead of their operation, as files of the policy.

All methods block: call them in threads. Parts are immutable; a corrupt part counts as missing. Only
uploads that a call has used are evicted to make room.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from ratoon.engine.files.paths import PolicyPaths, safe_name
from ratoon.engine.refusals import check_room
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger
from ratoon.stream.files import (
    SEAL_BYTES,
    DamagedFileError,
    fsync_folder,
    make_folder,
    seal_bytes,
    unseal_bytes,
    write_atomic,
)

_LOG = get_logger("uploads")
_PARTS = "[0-9]*"
# Marks an upload that a call has used; its mtime says when.
_USED = "used"
# Prefix of the mark that names the sender's API key.
_BY = "by~"


class UploadFiles:
    """All uploads of a policy; each expires `ttl_s` after its newest part.

    Used uploads are kept for retries of their calls, until others need the space.
    """

    def __init__(
        self, paths: PolicyPaths, *, ttl_s: float, max_upload_bytes: int, max_total_bytes: int
    ) -> None:
        self._folder = paths.uploads
        self._ttl_s = ttl_s
        self._max_upload_bytes = max_upload_bytes
        self._max_total_bytes = max_total_bytes
        # The lock admits one part at a time, so that sums stay correct and no folder is removed
        # while a part arrives.
        self._lock = threading.Lock()

    def put(
        self,
        upload_id: str,
        part_index: int,
        body: bytes,
        *,
        key_id: str = "",
        check_key: Callable[[int], None] = lambda _num_bytes: None,
    ) -> None:
        """Store a part. `check_key` refuses bytes beyond the limit of the API key `key_id`.

        Raises KEY_REUSED for other bytes of a part, BODY_TOO_LARGE for the sum of one upload,
        RESOURCE_EXHAUSTED for the sum of all, and what `check_key` raises.
        """
        path = self._folder / safe_name("upload_id", upload_id) / _part_name(part_index)
        with self._lock:
            self._put(path, body, key_id, check_key)

    def _put(self, path: Path, body: bytes, key_id: str, check_key: Callable[[int], None]) -> None:
        folder, upload_id, part_index = path.parent, path.parent.name, int(path.name)
        make_folder(folder)
        # The part belongs to a call that is yet to come, even if all parts are here already.
        (folder / _USED).unlink(missing_ok=True)
        stored = _read_part(path)
        if stored == body:
            path.touch()
            # The process that stored it may have been killed before it synced the names.
            fsync_folder(folder)
            fsync_folder(self._folder)
            return
        if stored is not None:
            raise RatoonError(
                ErrorCode.KEY_REUSED,
                f"part_index: part {part_index} of upload {upload_id} was sent with other bytes",
                field="part_index",
                got=str(part_index),
                expected="the same bytes, or a part not sent yet",
            )
        path.unlink(missing_ok=True)  # The stored part was damaged.
        size_bytes = len(body) + _total_bytes(folder.glob(_PARTS))
        if size_bytes > self._max_upload_bytes:
            raise RatoonError(
                ErrorCode.BODY_TOO_LARGE,
                f"groups: the parts of upload {upload_id} are {size_bytes} bytes together, "
                f"expected at most {self._max_upload_bytes}",
                field="groups",
                got=str(size_bytes),
                expected=f"at most {self._max_upload_bytes} bytes",
            )
        used = _total_bytes(self._folder.glob(f"*/{_PARTS}"))
        used -= self._drop_used(used + len(body) - self._max_total_bytes)
        check_room("bytes of uploads", "upload_bytes", used, len(body), self._max_total_bytes)
        check_key(len(body))
        if key_id:
            (folder / f"{_BY}{key_id}").touch()
        write_atomic(path, seal_bytes(body))
        fsync_folder(self._folder)

    def get(self, upload_id: str, num_parts: int) -> list[bytes]:
        """Parts 0 to num_parts - 1. Raises UPLOAD_NOT_FOUND naming the first missing one."""
        folder = self._folder / safe_name("upload_id", upload_id)
        parts: list[bytes] = []
        for part_index in range(num_parts):
            part = _read_part(folder / _part_name(part_index))
            if part is None:
                raise RatoonError(
                    ErrorCode.UPLOAD_NOT_FOUND,
                    f"upload {upload_id} has no part {part_index}, or has expired",
                    field="upload.upload_id",
                    got=upload_id,
                    expected=f"{num_parts} parts, each sent",
                    details={"missing_part": str(part_index)},
                )
            parts.append(part)
        with suppress(FileNotFoundError):  # The upload may be evicted meanwhile.
            (folder / _USED).touch()
        return parts

    def _drop_used(self, wanted_bytes: int) -> int:
        """Evict used uploads, the first used first; returns the bytes freed."""
        freed = 0
        if wanted_bytes > 0:
            for mark in sorted(self._folder.glob(f"*/{_USED}"), key=_modified):
                freed += _total_bytes(mark.parent.glob(_PARTS))
                shutil.rmtree(mark.parent, ignore_errors=True)
                if freed >= wanted_bytes:
                    break
        return freed

    def drop_expired(self) -> None:
        horizon = time.time() - self._ttl_s
        for folder in self._folder.iterdir():
            with self._lock:
                newest = max(map(_modified, folder.glob("*")), default=0.0)
                if max(newest, _modified(folder)) < horizon:
                    shutil.rmtree(folder, ignore_errors=True)


def upload_bytes_of(policies: Path, key_id: str) -> int:
    """Bytes of `key_id`'s unused uploads, over all policies in a folder."""
    marks = policies.glob(f"*/uploads/*/{_BY}{key_id}")
    folders = [mark.parent for mark in marks if not (mark.parent / _USED).exists()]
    return sum(_total_bytes(folder.glob(_PARTS)) for folder in folders)


def _part_name(part_index: int) -> str:
    if part_index < 0:
        raise invalid("part_index", part_index, "at least 0")
    return f"{part_index:06d}"


def _read_part(path: Path) -> bytes | None:
    """Reads a stored part; None if it is missing or damaged, so that it is sent again."""
    try:
        return unseal_bytes(path.read_bytes())
    except FileNotFoundError:
        return None
    except DamagedFileError as err:
        _LOG.error("upload part is damaged", path=str(path), reason=str(err))
        return None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _total_bytes(parts: Iterable[Path]) -> int:
    return sum(map(_size_bytes, parts))


def _size_bytes(part: Path) -> int:
    try:
        return part.stat().st_size - SEAL_BYTES
    except FileNotFoundError:
        return 0  # It was a temporary file, renamed meanwhile.
