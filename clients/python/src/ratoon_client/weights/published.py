"""Files of a version from the service's own folder, where this host has it.

A file of this user is linked, any other is copied, and both are verified after that.

Why nothing that is linked is written over: the service uses the files of a pruned version again in
three steps. It renames the version's folder; it checks that a file has no other name and that
nobody has it open; it writes. A link that is there before the check is seen by it. So once a file
is linked it is looked up under the version's name again: while it is there, the folder was not yet
renamed, and the check is still to come. Else the link may have come too late, and is removed. Bytes
that were written over before, or are of another version of that number, have another digest. Where
a file system has no leases (fcntl(2)), as networks' have none, the service writes over no file.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from ratoon_client.weights.checks import is_plain_name
from ratoon_client.weights.partial import is_whole
from ratoon_proto.types import WeightFile


def published_folder(weights_root: Path, policy_id: str, version: int) -> Path | None:
    """Where the service puts a version; None for an id that would lead elsewhere."""
    return weights_root / policy_id / f"{version:08d}" if is_plain_name(policy_id) else None


def take_published(source: Path, target: Path, file: WeightFile) -> bool:
    """Make `target` of the service's `source`; whether that was possible and it is `file`.

    Nothing is left at `target` otherwise.
    """
    try:
        target.unlink(missing_ok=True)
        if source.stat().st_size == file.size_bytes:
            if not _is_linked(source, target):
                _copy(source, target)
            if is_whole(target, file):
                return True
        target.unlink(missing_ok=True)
    except OSError:  # Pruned, not ours to read, no room: what is wrong shows in the fetch.
        target.unlink(missing_ok=True)
    return False


def _is_linked(source: Path, target: Path) -> bool:
    """Another user could change what is linked after it was verified."""
    try:
        target.hardlink_to(source)
        linked = target.lstat()
        is_ours = stat.S_ISREG(linked.st_mode) and linked.st_uid == os.geteuid()
        if is_ours and os.path.samestat(linked, source.lstat()):
            return True
    except OSError:  # Another file system, or pruned meanwhile.
        pass
    target.unlink(missing_ok=True)
    return False


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as copied:
        os.fsync(copied.fileno())
