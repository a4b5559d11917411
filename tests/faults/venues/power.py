"""A power cut: the disk as if nothing was written that was not synced.

It records every fsync of a process. After all processes are killed, it leaves a folder whose files
end where they were last synced and whose names are those of the last sync of their folder. SQLite's
own files are left alone: its syncs are not visible here.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

_LOG = "synced.jsonl"


def record_syncs(root: Path) -> None:
    """From now on os.fsync of this process writes down what is on disk, and returns."""
    descriptor = os.open(root / _LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def fsync(synced: int) -> None:
        status = os.fstat(synced)
        path = Path(f"/proc/self/fd/{synced}").readlink()
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else None
        note = {"inode": status.st_ino, "size": status.st_size, "names": names}
        os.write(descriptor, (json.dumps(note) + "\n").encode())

    os.fsync = fsync


def cut_power(root: Path, folder: Path) -> int:
    """Make `folder` what its disk holds; gives how many files lost bytes or their name."""
    log = root / _LOG
    sizes: dict[int, int] = {}
    names: dict[int, set[str]] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        note = json.loads(line)
        if note["names"] is None:
            sizes[note["inode"]] = note["size"]
        else:
            names[note["inode"]] = set(note["names"])
    return _cut(folder, sizes, names)


def _cut(folder: Path, sizes: dict[int, int], names: dict[int, set[str]]) -> int:
    num_lost = 0
    known = names.get(folder.stat().st_ino, set())
    for path in folder.iterdir():
        if path.name not in known:
            num_lost += 1
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif path.is_dir():
            num_lost += _cut(path, sizes, names)
        elif sizes.get(path.stat().st_ino, 0) < path.stat().st_size:
            num_lost += 1
            os.truncate(path, sizes.get(path.stat().st_ino, 0))
    return num_lost
