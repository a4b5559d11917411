"""Model folders that callers send, for policies that are about to be created.

Files arrive in pieces, and are kept by digest until CreatePolicy names them. Then they become a
folder of the policy, which stays for as long as the policy. A file has its digest for a name only
once it is whole, verified and durable.

    sent/<policy_id>/<digest>, and <digest>.part of what has arrived of it

All methods block: call them in threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ratoon.engine.files.paths import PolicyPaths, safe_name
from ratoon.engine.refusals import check_room
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.stream.files import (
    digest_file,
    fsync_file,
    fsync_folder,
    made_folder,
    make_folder,
    remove_folder,
)
from ratoon_proto.types import WeightFile

# Folder below the data root.
SENT = "sent"
_PART = ".part"
# Most files of one policy: their names and digests are a CreatePolicy of 64 KiB.
MAX_FILES = 512


class SentModels:
    """What was sent for policies that are not created yet; each expires `ttl_s` after its newest
    piece."""

    def __init__(
        self,
        data_root: Path,
        *,
        ttl_s: float,
        max_total_bytes: int,
        paths_of: Callable[[str], PolicyPaths],
    ) -> None:
        self._root = data_root / SENT
        self._ttl_s = ttl_s
        self._max_total_bytes = max_total_bytes
        self._paths_of = paths_of
        # The lock admits one piece at a time, so that the sum stays correct and no folder is
        # removed while a piece arrives.
        self._lock = threading.Lock()

    def put(self, policy_id: str, file: WeightFile, offset: int, data: bytes) -> int:
        """Store a piece of a file; returns how many bytes of it have arrived from its beginning.

        A piece that is here already changes nothing. Raises INVALID_ARGUMENT for a piece beyond
        what has arrived, or that ends after the file, and for a whole file of another digest, which
        is dropped; RESOURCE_EXHAUSTED for the sum of all.
        """
        folder = self._root / safe_name("policy_id", policy_id)
        whole = folder / safe_name("digest", file.digest)
        with self._lock:
            if offset == 0:
                self._drop_expired()
            arrived = self._arrived(policy_id, file)
            if offset > arrived:
                raise invalid("offset", offset, f"at most {arrived}, which have arrived")
            end = offset + len(data)
            if end > file.size_bytes:
                raise invalid("data", f"bytes up to {end}", f"at most {file.size_bytes} in all")
            if end <= arrived and whole.exists():
                return arrived
            part = whole.with_name(whole.name + _PART)
            if end > arrived or not part.exists():
                self._append(part, data[arrived - offset :], arrived)
            if end == file.size_bytes:
                _finish(part, whole, file)
            return max(arrived, end)

    def _append(self, part: Path, data: bytes, arrived: int) -> None:
        make_folder(part.parent)
        check_room(
            "bytes of models that were sent",
            "sent_model_bytes",
            _total_bytes(self._root.glob("*/*")),
            len(data),
            self._max_total_bytes,
        )
        if not part.exists():
            used = sum(1 for _ in part.parent.iterdir())
            check_room("files of a model", "sent_model_files", used, 1, MAX_FILES)
        with part.open("ab") as file:
            # A full disk may have left the beginning of a piece.
            file.truncate(arrived)
            file.write(data)

    def check(self, policy_id: str, files: Iterable[WeightFile]) -> None:
        """Check that all files have arrived, unless the policy has them as its own.

        Raises UPLOAD_NOT_FOUND with `details.digest` of the first that has not, and in
        `details.arrived` the bytes that have.
        """
        if self._paths_of(policy_id).model.is_dir():
            return
        for index, file in enumerate(files):
            whole = self._root / policy_id / file.digest
            if whole.is_file() and _total_bytes([whole]) == file.size_bytes:
                continue
            arrived = self._arrived(policy_id, file)
            raise RatoonError(
                ErrorCode.UPLOAD_NOT_FOUND,
                f"{file.name} of the model has not been sent, or has expired",
                field=f"spec.sent_model.files[{index}]",
                got=f"{arrived} bytes",
                expected=f"{file.size_bytes} bytes, sent by SendModelFile",
                details={"digest": file.digest, "arrived": str(arrived)},
            )

    def take(self, policy_id: str, files: Iterable[WeightFile]) -> None:
        """Make the files the policy's own folder, once. Raises UPLOAD_NOT_FOUND as `check`."""
        target, sent = self._paths_of(policy_id).model, self._root / policy_id
        with self._lock:
            self.check(policy_id, files)
            if not target.is_dir():
                with made_folder(target) as folder:
                    for file in files:
                        (folder / file.name).parent.mkdir(exist_ok=True)
                        # Two names may have the same bytes.
                        os.link(sent / file.digest, folder / file.name)
            remove_folder(sent)

    def _arrived(self, policy_id: str, file: WeightFile) -> int:
        whole = self._root / policy_id / file.digest
        return sum(_total_bytes([path]) for path in (whole, whole.with_name(whole.name + _PART)))

    def _drop_expired(self) -> None:
        horizon = time.time() - self._ttl_s
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if newest < horizon:
                remove_folder(folder)


def _finish(part: Path, whole: Path, file: WeightFile) -> None:
    """Give a file that has arrived its name, durably. Raises INVALID_ARGUMENT, and drops it."""
    digest = digest_file(part)
    if digest != file.digest:
        part.unlink()
        raise invalid("digest", file.digest, f"{digest}, as the bytes that came; send them again")
    fsync_file(part)
    part.replace(whole)
    fsync_folder(whole.parent)
    fsync_folder(whole.parent.parent)


def _total_bytes(paths: Iterable[Path]) -> int:
    return sum(map(_size_bytes, paths))


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
