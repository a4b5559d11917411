"""Runs of a weight delta: the words of a file that differ from its parent's, as compressed streams.

The format, with its reasons, is in docs/api.md, *Weight deltas*. Whoever finds the changed words,
on a device (`compared_copy`) or in files (`ratoon.stream.deltas`), brings each run here as planes:
equal changes give equal bytes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

# Bytes that are compared and compressed at a time.
RUN_BYTES = 4 * 2**20
# Mean gap above which two bytes per gap compress better than one.
LONG_GAP = 350
_LEVEL = 1

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes [start, stop) of a file and of the same file of the parent: words of one size."""

    start: int
    stop: int
    word_bytes: int

    @property
    def num_words(self) -> int:
        return (self.stop - self.start) // self.word_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRun:
    """`entry` describes the run in the delta's header; `num_changed` words of it differ."""

    entry: dict[str, Any]
    streams: tuple[bytes, ...]
    num_changed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPart:
    """Consecutive runs of a delta, whose streams are in `path`; `runs` by the file's name."""

    path: Path
    num_changed: int
    runs: dict[str, list[dict[str, Any]]]


def make_compressor() -> zstandard.ZstdCompressor:
    """The compressor of all streams, for one thread."""
    return zstandard.ZstdCompressor(level=_LEVEL)


def compress_all(data: Array, places: Sequence[tuple[int, int]], num_threads: int) -> list[bytes]:
    """Compress the planes of uint8 [n] at `places`, (start, length) each, in one call.

    The call holds Python's interpreter lock only at its beginning and end. Equal planes give the
    bytes that `make_compressor` makes of them.
    """
    if not places:
        return []
    segments = np.array(places, "<u8").tobytes()
    # The library's types are those of bytes alone.
    planes: Any = zstandard.BufferWithSegments(data, segments)  # pyright: ignore[reportArgumentType]
    frames = make_compressor().multi_compress_to_buffer(planes, threads=num_threads)
    return [frames[index].tobytes() for index in range(len(places))]


def gap_bytes_of(num_changed: int, num_words: int) -> int:
    """Bytes of each gap between `num_changed` words of a run."""
    return 1 if num_changed * LONG_GAP > num_words else 2


def encoded_run(
    run: Run,
    num_changed: int,
    planes: tuple[bytes, ...],
    after: Array,
    compressor: zstandard.ZstdCompressor,
) -> EncodedRun:
    """The smaller encoding of a run: its compressed `planes`, or the new bytes, uint8 [n] `after`.

    `after` may be empty for a run whose planes are known to be smaller.
    """
    entry: dict[str, Any] = {"start": run.start, "stop": run.stop}
    streams = planes
    if sum(map(len, planes)) < run.stop - run.start:
        entry |= {"encoding": "sparse", "word_bytes": run.word_bytes}
        entry |= {"gap_bytes": gap_bytes_of(num_changed, run.num_words)}
        entry |= {"num_changed": num_changed}
    else:
        assert len(after) == run.stop - run.start
        entry |= {"encoding": "dense"}
        streams = (min(after.tobytes(), compressor.compress(after.data), key=len),)
    entry |= {"streams": [len(stream) for stream in streams]}
    return EncodedRun(entry=entry, streams=streams, num_changed=num_changed)
