"""A process that makes the calls of one case below a folder, for the tests of the recorder.

python -m tests.durability.calls FOLDER CASE
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CONTENT = b"content"


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def writes(root: Path) -> None:
    flags = os.O_RDWR | os.O_CREAT
    for name in ("write", "vector", "place", "places", "append", "copy of a descriptor", "size"):
        descriptor = os.open(root / name, flags | (os.O_APPEND if name == "append" else 0))
        os.write(descriptor, b"0123456789")
        match name:
            case "vector":
                os.writev(descriptor, [b"ab", b"", b"cde"])
            case "place":
                os.pwrite(descriptor, b"xy", 4)
            case "places":
                os.pwritev(descriptor, [b"x", b"yz"], 20)
            case "append":
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, b"end")
            case "copy of a descriptor":
                os.write(os.dup(descriptor), b"more")
            case "size":
                os.ftruncate(descriptor, 3)
                os.posix_fallocate(descriptor, 0, 6)
            case _:
                pass
        os.close(descriptor)
    (root / "write").write_bytes(b"again")
    (root / "folder").mkdir()
    os.link(root / "write", root / "folder" / "link")
    os.chdir(root / "folder")
    Path("relative").write_bytes(CONTENT)
    Path("doomed").write_bytes(CONTENT)
    os.truncate("relative", 2)
    Path("relative").replace("../renamed")
    Path("doomed").unlink()
    Path("inner").mkdir()
    Path("inner").rmdir()
    folder = os.open(root, os.O_RDONLY)
    os.rename("place", "at", src_dir_fd=folder, dst_dir_fd=folder)
    (root / "f").mkdir()


def copies(root: Path) -> None:
    (root / "original").write_bytes(CONTENT)
    shutil.copy(root / "original", root / "copied")
    with (root / "original").open("rb") as source, (root / "sent").open("wb") as target:
        try:
            os.copy_file_range(source.fileno(), target.fileno(), len(CONTENT))
        except OSError:
            target.write(source.read())


def mapping(root: Path) -> None:
    with (root / "mapped").open("w+b") as file:
        file.write(CONTENT)
        file.flush()
        with mmap.mmap(file.fileno(), len(CONTENT)) as mapped:
            mapped[0] = 0


def threads(root: Path) -> None:
    def write(index: int) -> None:
        path = root / str(index % 7)
        with path.open("ab") as file:
            file.write(b"%d," % index)
            file.flush()
            os.fsync(file.fileno())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(400)))


def torn(root: Path) -> None:
    (root / "a").write_bytes(CONTENT)
    (root / "b").write_bytes(b"o" * 8192)
    for name in "ab":
        sync(root / name)
    sync(root)
    with (root / "b").open("r+b") as file:
        file.seek(4096)
        file.write(b"n" * 8192)
    (root / "a").rename(root / "c")


def durability(root: Path, case: str) -> None:
    """The cases of a strict disk, by what is done after a file is written."""
    if case.startswith("folder"):
        (root / "f").mkdir()
        (root / "f" / "a").write_bytes(CONTENT)
        sync(root / "f" / "a")
        if case != "folder synced outside":
            sync(root / "f")
        if case != "folder synced inside":
            sync(root)
        return
    (root / "a").write_bytes(CONTENT)
    if case not in ("nothing synced", "name synced", "renamed unsynced content"):
        sync(root / "a")
    if case not in ("nothing synced", "content synced"):
        sync(root)
    if case == "written after":
        (root / "a").write_bytes(b"other")
    if case.startswith("renamed"):
        (root / "a").rename(root / "b")
    if case == "replaced":
        (root / "b").write_bytes(b"other")
        (root / "b").replace(root / "a")
    if case.startswith("removed"):
        (root / "a").unlink()
    if case in ("renamed and synced", "renamed unsynced content", "removed and synced"):
        sync(root)


CASES = {
    "writes": writes,
    "copies": copies,
    "mapping": mapping,
    "threads": threads,
    "torn": torn,
}

if __name__ == "__main__":
    folder, name = sys.argv[1:]
    if name in CASES:
        CASES[name](Path(folder))
    else:
        durability(Path(folder), name)
