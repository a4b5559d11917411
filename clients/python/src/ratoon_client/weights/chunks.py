"""A file on its way in chunks: its bytes, and a log of the chunks that are in.

A chunk in the log is counted only while the bytes on disk still have its digest, so what an
interrupted pull left can be trusted as far as it goes. The file's digest is made while chunks come,
of each one once all before it are there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from ratoon_client.errors import IntegrityError
from ratoon_proto.types import WeightFile

_READ_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Bytes [offset, offset + length)."""

    offset: int
    length: int


def chunk_ranges(size_bytes: int, chunk_bytes: int) -> Iterator[ChunkRange]:
    """The chunks of a file, in order; none where it is empty."""
    for offset in range(0, size_bytes, chunk_bytes):
        yield ChunkRange(offset=offset, length=min(chunk_bytes, size_bytes - offset))


def digest_of(data: bytes) -> str:
    """xxh3-128, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def check_chunk(name: str, offset: int, length: int, data: bytes, digest: str) -> None:
    """Raises IntegrityError where `data` is not `length` bytes of that digest."""
    check_length(name, offset, length, data)
    if digest_of(data) != digest:
        raise IntegrityError(f"{name}: the chunk at {offset} has another digest than its sender's")


def check_length(name: str, offset: int, length: int, data: bytes) -> None:
    if len(data) != length:
        raise IntegrityError(
            f"{name}: the chunk at {offset} has {len(data)} bytes, {length} were asked for"
        )


def is_whole(path: Path, file: WeightFile) -> bool:
    """Whether what is at `path` can be read and has the size and the digest of `file`."""
    try:
        return path.stat().st_size == file.size_bytes and _digest(path) == file.digest
    except OSError:
        return False


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()


class PartialFile:
    """Open from construction to `close`; `write` may be called from several threads."""

    def __init__(self, path: Path, *, size_bytes: int) -> None:
        self.path = path
        self._log_path = path.with_name(f"{path.name}.chunks")
        self._data = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._data, size_bytes)
        self._log = os.open(
            self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        # The digest of the first `_digested` bytes; lengths of chunks behind them, by offset.
        self._state, self._digested = xxhash.xxh3_128(), 0
        self._ahead: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._data)
        os.close(self._log)

    def missing(self, ranges: list[ChunkRange]) -> list[ChunkRange]:
        """The `ranges` that are not on disk with the digest they came with."""
        logged = self._logged()
        # Nothing is read of what was never logged.
        return [
            part for part in ranges if part not in logged or logged[part] != self._digest_at(part)
        ]

    def write(self, offset: int, data: bytes) -> None:
        """The log's line comes after the bytes: a crash in between loses one chunk."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._data, memoryview(data)[written:], offset + written)
        os.write(self._log, f"{offset} {len(data)} {digest_of(data)}\n".encode())
        with self._lock:
            self._ahead[offset] = len(data)
            while length := self._ahead.pop(self._digested, 0):
                self._digest_next(length)

    def finish(self, digest: str) -> None:
        """Put the bytes on disk. Raises IntegrityError, and forgets them, where they are others."""
        with self._lock:
            self._digest_next(self._size_bytes - self._digested)
        if self._state.hexdigest() != digest:
            self.path.unlink()
            self._log_path.unlink()
            raise IntegrityError(f"the file does not have the digest {digest}; nothing is kept")
        os.fsync(self._data)

    def _logged(self) -> dict[ChunkRange, str]:
        logged: dict[ChunkRange, str] = {}
        for line in self._log_path.read_text(encoding="ascii", errors="replace").splitlines():
            match line.split(" "):
                case [offset, length, digest] if offset.isdecimal() and length.isdecimal():
                    logged[ChunkRange(offset=int(offset), length=int(length))] = digest
                case _:
                    # The tail of a log that was cut off by a crash.
                    continue
        return logged

    def _digest_at(self, part: ChunkRange) -> str:
        return digest_of(os.pread(self._data, part.length, part.offset))

    def _digest_next(self, length: int) -> None:
        """Add the next bytes, as they are in the file, to its digest."""
        stop = self._digested + length
        while block := os.pread(
            self._data, min(stop - self._digested, _READ_BYTES), self._digested
        ):
            self._state.update(block)
            self._digested += len(block)
