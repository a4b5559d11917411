"""A file system of a few MiB, to be filled to the last byte.

In: a folder and a size. Out: the folder with a tmpfs on it. Invariant: it is gone afterwards.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MIB = 2**20


class NoMountError(Exception):
    """Nothing can be mounted here; says why."""


@dataclass
class SmallDisk:
    """A small file system at `root`, and how to leave nothing of it."""

    root: Path
    ballast: list[Path] = field(default_factory=list[Path])

    def fill(self) -> None:
        """To the last byte, and the last file where there is a bound on files."""
        for size_bytes in (MIB, 4096, 1):
            while True:
                path = self.root / f"ballast-{len(self.ballast)}"
                self.ballast.append(path)
                try:
                    path.write_bytes(b"x" * size_bytes)
                except OSError as err:
                    assert err.errno == errno.ENOSPC
                    path.unlink(missing_ok=True)
                    break
        assert shutil.disk_usage(self.root).free == 0

    def clear(self) -> None:
        for path in self.ballast:
            path.unlink(missing_ok=True)


@contextmanager
def mounted(root: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Raises `NoMountError`. `root` is made."""
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(root)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError as err:
        raise NoMountError("there is no mount command") from err
    if done.returncode != 0:
        raise NoMountError(f"a tmpfs cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield SmallDisk(root=root)
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)
