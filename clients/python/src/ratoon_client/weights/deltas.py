"""Weight deltas: a version's file out of the parent's.

The format is in docs/api.md, *Weight deltas*; `ratoon.stream.deltas` of the service writes it. What
is made has the digest that the delta promises, or there is no file.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from ratoon_client.errors import IntegrityError

DELTA_FORMAT = 1
MAX_RUN_BYTES = 4 * 2**20
_SEAL_BYTES = 16
_LENGTH_BYTES = 8
_WORD_BYTES = (1, 2, 4, 8)
_GAP_BYTES = (1, 2)
_NUM_THREADS = 8

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes [start, stop) of a file, which streams at `place` of the delta make.

    Without an encoding they are the parent's.
    """

    start: int
    stop: int
    encoding: str = ""
    place: int = 0
    streams: tuple[int, ...] = ()
    word_bytes: int = 1
    gap_bytes: int = 1
    num_changed: int = 0

    @property
    def num_words(self) -> int:
        return (self.stop - self.start) // self.word_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaFile:
    """A file that the delta makes; its runs, in order, are what differs from the parent's file."""

    delta: Path
    name: str
    size_bytes: int
    digest: str
    parent_digest: str
    runs: tuple[Run, ...]


def read_delta(path: Path) -> tuple[DeltaFile, ...]:
    """The files that a delta makes. Raises IntegrityError for bytes that are no delta."""
    try:
        header, payload_bytes = _header(path)
        files = _files(path, header)
        promised = sum(sum(run.streams) for file in files for run in file.runs)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as err:
        raise IntegrityError(f"{path.name} is no weight delta: {err!r:.200}") from err
    if promised != payload_bytes:
        raise IntegrityError(f"{path.name} has {payload_bytes} bytes of streams, not {promised}")
    return files


def rebuild(file: DeltaFile, parent: Path, target: Path) -> None:
    """Make `file` at `target`, on the disk, out of `parent`.

    Raises IntegrityError where that does not give the file's digest, `OSError`; no target then.
    """
    state = xxhash.xxh3_128()
    try:
        with (
            target.open("wb", buffering=0) as out,
            ThreadPoolExecutor(_NUM_THREADS) as threads,
        ):
            for content in _rebuilt(threads, file, parent, out.fileno()):
                state.update(content.data)
            if state.hexdigest() != file.digest:
                raise IntegrityError(f"{file.name} rebuilt from a delta has another digest")
            os.fsync(out.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def apply(file: DeltaFile, data: Array) -> None:
    """Make `file` of its parent's bytes, uint8 [size_bytes], in place.

    All runs of a file are one call of each array function, which other threads of the process do
    not wait for. Raises IntegrityError where the bytes then have another digest, `OSError`; they
    are spoiled then.
    """
    if len(data) != file.size_bytes:
        raise IntegrityError(f"{file.name} has {len(data)} bytes before, not {file.size_bytes}")
    with file.delta.open("rb") as opened:
        first = min((run.place for run in file.runs), default=0)
        last = max((run.place + sum(run.streams) for run in file.runs), default=0)
        opened.seek(first)
        streams = opened.read(last - first)
    groups: dict[tuple[int, int], list[Run]] = {}
    for run in file.runs:
        if run.encoding == "sparse":
            groups.setdefault((run.word_bytes, run.gap_bytes), []).append(run)
            continue
        (size,) = run.streams
        content = streams[run.place - first :][:size]
        num_bytes = run.stop - run.start
        whole = content if size == num_bytes else _inflated(content, num_bytes)
        data[run.start : run.stop] = np.frombuffer(whole, np.uint8)
    for runs in groups.values():
        _apply_sparse(runs, first, streams, data)
    if xxhash.xxh3_128_hexdigest(data.data) != file.digest:
        raise IntegrityError(f"{file.name} made of a delta has another digest")


def _apply_sparse(runs: Sequence[Run], first: int, streams: bytes, data: Array) -> None:
    """Apply runs of one size of words and of gaps, whose `streams` begin at `first` of the
    delta."""
    word_bytes, gap_bytes = runs[0].word_bytes, runs[0].gap_bytes
    offsets = [run.place - first for run in runs]
    frames = [
        [streams[start + end - size : start + end] for end, size in _ends(run.streams)]
        for start, run in zip(offsets, runs, strict=True)
    ]
    counts = np.array([run.num_changed for run in runs])
    num_words = np.array([run.num_words for run in runs])
    escape = 2 ** (8 * gap_bytes) - 1
    sizes = np.array([_content_size(planes[0]) for planes in frames], np.uint64)
    # Before there is memory for them.
    if (sizes < counts).any() or (sizes > counts + num_words // escape).any():
        raise IntegrityError("gaps of another number of words than have changed")
    origin = runs[0].start % word_bytes
    if any(run.start % word_bytes != origin for run in runs):
        raise IntegrityError("runs that do not begin with a word")
    gaps, differences = (
        [
            b"".join(
                _inflated(planes[at], size) for planes, size in zip(frames, wanted, strict=True)
            )
            for at in places
        ]
        for places, wanted in (
            (range(gap_bytes), sizes),
            (range(gap_bytes, gap_bytes + word_bytes), counts),
        )
    )
    starts = np.array([run.start // word_bytes for run in runs])
    changed = _all_positions(_joined(gaps), escape, sizes.astype(np.int64), counts, num_words)
    words = data[origin : len(data) - (len(data) - origin) % word_bytes].view(f"<u{word_bytes}")
    words[changed + np.repeat(starts, counts)] += _differences(_joined(differences))


def _all_positions(
    digits: Array, escape: int, sizes: Array, counts: Array, num_words: Array
) -> Array:
    """Indexes of the changed words, each in its run, int64 [sum(counts)]: `digits` of runs, one
    run's after the other's, `sizes` of each."""
    ends = np.flatnonzero(digits != escape)
    last = np.cumsum(sizes)
    found = np.diff(np.searchsorted(ends, last), prepend=0)
    if (found != counts).any() or (digits[last - 1] == escape).any():
        raise IntegrityError("gaps of another number of words than have changed")
    total = np.cumsum(digits, dtype=np.int64)
    # The words of the runs before, which each run begins without.
    passed = np.concatenate([[0], total[last[:-1] - 1]]) + np.cumsum(counts) - counts
    changed = total[ends] + np.arange(len(ends)) - np.repeat(passed, counts)
    if (changed[np.cumsum(counts) - 1] >= num_words).any():
        raise IntegrityError("a changed word behind the end of its run")
    return changed


def _ends(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each of consecutive streams ends, and its size."""
    return zip(accumulate(sizes), sizes, strict=True)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The delta's header, and how many bytes come before it."""
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(size_bytes - _LENGTH_BYTES, 0))
        place = size_bytes - _LENGTH_BYTES - int.from_bytes(file.read(), "little")
        if place < 0:
            raise ValueError("no place for a header")
        file.seek(place)
        sealed = file.read(size_bytes - _LENGTH_BYTES - place)
    text, seal = sealed[:-_SEAL_BYTES], sealed[-_SEAL_BYTES:]
    if xxhash.xxh3_128_digest(text) != seal:
        raise ValueError("the header has another digest")
    header = cast("dict[str, Any]", json.loads(text))
    if header["format"] != DELTA_FORMAT:
        raise ValueError(f"format {header['format']}, expected {DELTA_FORMAT}")
    return header, place


def _files(delta: Path, header: dict[str, Any]) -> tuple[DeltaFile, ...]:
    files: list[DeltaFile] = []
    place = 0
    for entry in header["files"]:
        size_bytes = int(entry["size_bytes"])
        runs, place = _all_runs(entry["runs"], size_bytes, place)
        texts = {name: str(entry[name]) for name in ("name", "digest", "parent_digest")}
        files.append(DeltaFile(delta=delta, size_bytes=size_bytes, runs=runs, **texts))
    return tuple(files)


def _all_runs(
    entries: list[dict[str, Any]], size_bytes: int, place: int
) -> tuple[tuple[Run, ...], int]:
    """The runs of a file, and where the next file's streams are. Raises ValueError."""
    runs: list[Run] = []
    end = 0
    for entry in entries:
        run = _run(entry, place)
        _check(run, end, size_bytes)
        runs.append(run)
        end, place = run.stop, place + sum(run.streams)
    return tuple(runs), place


def _run(entry: dict[str, Any], place: int) -> Run:
    sparse = ("word_bytes", "gap_bytes", "num_changed")
    return Run(
        start=int(entry["start"]),
        stop=int(entry["stop"]),
        encoding=str(entry["encoding"]),
        place=place,
        streams=tuple(int(size) for size in entry["streams"]),
        **{name: int(entry[name]) for name in sparse if name in entry},
    )


def _check(run: Run, end: int, size_bytes: int) -> None:
    """Raises ValueError for a run that no service writes."""
    num_bytes = run.stop - run.start
    is_within = end <= run.start < run.stop <= size_bytes and num_bytes <= MAX_RUN_BYTES
    num_streams = 1
    if run.encoding == "sparse":
        num_streams = run.gap_bytes + run.word_bytes
        is_within = (
            is_within
            and run.word_bytes in _WORD_BYTES
            and run.gap_bytes in _GAP_BYTES
            and num_bytes % run.word_bytes == 0
            and 1 <= run.num_changed <= num_bytes // run.word_bytes
        )
    elif run.encoding != "dense":
        raise ValueError(f"encoding {run.encoding!r:.20}")
    if not is_within or len(run.streams) != num_streams or min(run.streams) < 0:
        raise ValueError(f"run {run.start} to {run.stop} of {size_bytes} bytes")


def _whole(file: DeltaFile) -> Iterator[Run]:
    """The runs of a file and those between them."""
    end = Run(start=file.size_bytes, stop=file.size_bytes)
    start = 0
    for run in (*file.runs, end):
        for begin in range(start, run.start, MAX_RUN_BYTES):
            yield Run(start=begin, stop=min(begin + MAX_RUN_BYTES, run.start))
        if run is not end:
            yield run
        start = run.stop


def _rebuilt(
    threads: ThreadPoolExecutor, file: DeltaFile, parent: Path, descriptor: int
) -> Iterator[Array]:
    """The runs in order, uint8 [n], as they are written by the threads."""

    def write(run: Run) -> Array:
        content = _content(run, file.delta, parent)
        written = 0
        while written < len(content):
            written += os.pwrite(descriptor, content[written:].data, run.start + written)
        return content

    ahead: deque[Future[Array]] = deque()
    for run in _whole(file):
        ahead.append(threads.submit(write, run))
        if len(ahead) > 2 * _NUM_THREADS:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _content(run: Run, delta: Path, parent: Path) -> Array:
    """The bytes of a run, uint8 [n]. Raises IntegrityError."""
    num_bytes = run.stop - run.start
    streams = _streams(run, delta)
    if run.encoding == "dense":
        (data,) = streams
        is_raw = len(data) == num_bytes
        return np.frombuffer(data if is_raw else _inflated(data, num_bytes), np.uint8)
    words = np.fromfile(
        parent, f"<u{run.word_bytes}", num_bytes // run.word_bytes, offset=run.start
    )
    if words.nbytes != num_bytes:
        raise IntegrityError(f"{parent.name} ends before byte {run.stop}")
    if run.encoding == "sparse":
        gaps, differences = streams[: run.gap_bytes], streams[run.gap_bytes :]
        changed = _positions(run, gaps, len(words))
        planes = [_inflated(plane, run.num_changed) for plane in differences]
        words[changed] += _differences(_joined(planes))
    return words.view(np.uint8)


def _streams(run: Run, delta: Path) -> list[bytes]:
    if not run.streams:
        return []
    with delta.open("rb") as file:
        file.seek(run.place)
        data = file.read(sum(run.streams))
    ends = list(accumulate(run.streams))
    return [data[end - size : end] for end, size in zip(ends, run.streams, strict=True)]


def _positions(run: Run, planes: list[bytes], num_words: int) -> Array:
    """Indexes of the changed words, ascending, int64 [num_changed]."""
    escape = 2 ** (8 * run.gap_bytes) - 1
    most = run.num_changed + num_words // escape
    size = _content_size(planes[0])
    if not run.num_changed <= size <= most:
        raise IntegrityError(f"{size} gaps for {run.num_changed} changed words")
    digits = _joined([_inflated(plane, size) for plane in planes])
    ends = np.flatnonzero(digits != escape)
    if len(ends) != run.num_changed or ends[-1] != size - 1:
        raise IntegrityError(f"{len(ends)} gaps for {run.num_changed} changed words")
    changed = np.cumsum(digits, dtype=np.int64)[ends] + np.arange(len(ends))
    if changed[-1] >= num_words:
        raise IntegrityError(f"a changed word {changed[-1]} of {num_words}")
    return changed


def _differences(folded: Array) -> Array:
    """Unfold 0, 1, 2, 3, 4, ... to the differences 0, -1, 1, -2, 2, ..., modulo 2^bits."""
    return (folded >> 1) ^ (0 - (folded & 1))


def _joined(planes: list[bytes]) -> Array:
    """Words, uint [n], of their lowest bytes, their next ones, ..."""
    rows = np.frombuffer(b"".join(planes), np.uint8).reshape(len(planes), -1)
    return np.ascontiguousarray(rows.T).view(f"<u{len(planes)}")[:, 0]


def _content_size(frame: bytes) -> int:
    try:
        return zstandard.get_frame_parameters(frame).content_size
    except zstandard.ZstdError as err:
        raise IntegrityError(f"a stream is no zstd frame: {err}") from err


def _inflated(frame: bytes, size: int) -> bytes:
    """The `size` bytes of a frame. Raises IntegrityError for another size."""
    if _content_size(frame) != size:
        raise IntegrityError(f"a stream is not of {size} bytes")
    try:
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise IntegrityError(f"a stream is damaged: {err}") from err
