"""Deltas between two versions: what makes the files of one out of those of the other.

The format, with its reasons, is in docs/api.md, *Weight deltas*; `ratoon_client.weights.deltas`
reads it. Nobody relies on a delta: what it makes must have the digests of the version's manifest.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from ratoon.stream.files import seal_bytes
from ratoon.stream.manifest import WeightFile, WeightManifest

DELTA_FORMAT = 1
# What a thread reads, compares and compresses at a time.
RUN_BYTES = 4 * 2**20
# A delta that is not smaller than this share of the files that it makes is not kept.
_MAX_SHARE = 0.5
# A mean gap above which two bytes per gap compress better than one.
_LONG_GAP = 350
_NUM_THREADS = 8
_LENGTH_BYTES = 8

T = TypeVar("T")
R = TypeVar("R")
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Bytes [start, stop) of a file and of the same file of the parent: words of one size."""

    before: Path
    after: Path
    start: int
    stop: int
    word_bytes: int

    @property
    def num_words(self) -> int:
        return (self.stop - self.start) // self.word_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoded:
    """`entry` describes the run in the header; None: nothing has changed."""

    entry: dict[str, Any] | None
    streams: tuple[bytes, ...]
    num_changed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A file that both versions have, with the same tensors."""

    file: WeightFile
    parent_digest: str
    runs: tuple[_Run, ...]


def write_delta(
    path: Path, before: Path, parent: WeightManifest, after: Path, files: Sequence[WeightFile]
) -> float | None:
    """Write to `path` what makes `files`, in folder `after`, out of those of `parent`, in `before`.

    Returns the share of words that changed, None where no file could be compared. There is nothing
    at `path` where no file has changed, or most of it. Raises `OSError`.
    """
    pairs = _pairs(before, parent, after, files)
    num_words = sum(run.num_words for pair in pairs for run in pair.runs)
    if not num_words:
        return None
    pairs = [pair for pair in pairs if pair.file.digest != pair.parent_digest]
    limit = _MAX_SHARE * sum(pair.file.size_bytes for pair in pairs)
    num_changed = 0
    entries: list[dict[str, Any]] = []
    with path.open("xb") as out, ThreadPoolExecutor(_NUM_THREADS) as threads:
        for pair in pairs:
            runs: list[dict[str, Any]] = []
            for encoded in _in_order(threads, _encode, pair.runs):
                num_changed += encoded.num_changed
                # The share is counted to the end.
                if encoded.entry is not None and out.tell() < limit:
                    runs.append(encoded.entry)
                    out.writelines(encoded.streams)
            entries.append(_entry(pair, runs))
        header = {"format": DELTA_FORMAT, "parent_version": parent.version, "files": entries}
        sealed = seal_bytes(json.dumps(header, separators=(",", ":")).encode())
        out.write(sealed + len(sealed).to_bytes(_LENGTH_BYTES, "little"))
        is_of_use = out.tell() < limit
    if not is_of_use:
        path.unlink()
    return num_changed / num_words


def _entry(pair: _Pair, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": pair.file.name,
        "size_bytes": pair.file.size_bytes,
        "digest": pair.file.digest,
        "parent_digest": pair.parent_digest,
        "runs": runs,
    }


def _pairs(
    before: Path, parent: WeightManifest, after: Path, files: Sequence[WeightFile]
) -> list[_Pair]:
    parents = {(file.name, file.size_bytes): file for file in parent.files}
    pairs: list[_Pair] = []
    for file in files:
        known = parents.get((file.name, file.size_bytes))
        if known is None or not file.name.endswith(".safetensors"):
            continue
        with (before / file.name).open("rb") as old, (after / file.name).open("rb") as new:
            length = new.read(_LENGTH_BYTES)
            header = new.read(int.from_bytes(length, "little"))
            is_alike = old.read(_LENGTH_BYTES + len(header)) == length + header
        if is_alike:
            runs = _runs(before / file.name, after / file.name, header)
            pairs.append(_Pair(file=file, parent_digest=known.digest, runs=tuple(runs)))
    return pairs


def _runs(before: Path, after: Path, header: bytes) -> Iterator[_Run]:
    """The data of a safetensors file, tensor after tensor, in pieces of at most RUN_BYTES."""
    entries = cast("dict[str, Any]", json.loads(header))
    sizes = sorted(
        (*entry["data_offsets"], math.prod(entry["shape"]))
        for name, entry in entries.items()
        if name != "__metadata__" and math.prod(entry["shape"])
    )
    offset = _LENGTH_BYTES + len(header)
    for word_bytes, alike in groupby(sizes, key=lambda size: (size[1] - size[0]) // size[2]):
        tensors = list(alike)
        first, last = offset + tensors[0][0], offset + tensors[-1][1]
        for start in range(first, last, RUN_BYTES):
            stop = min(start + RUN_BYTES, last)
            yield _Run(before=before, after=after, start=start, stop=stop, word_bytes=word_bytes)


def _encode(run: _Run) -> _Encoded:
    old, new = (
        np.fromfile(path, f"<u{run.word_bytes}", run.num_words, offset=run.start)
        for path in (run.before, run.after)
    )
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return _Encoded(entry=None, streams=(), num_changed=0)
    compress = zstandard.ZstdCompressor(level=1).compress
    gap_bytes = 1 if len(changed) * _LONG_GAP > len(new) else 2
    words = [*_planes(_digits(changed, gap_bytes)), *_planes(_differences(old, new, changed))]
    entry: dict[str, Any] = {"start": run.start, "stop": run.stop}
    streams = tuple(compress(plane) for plane in words)
    if sum(map(len, streams)) < new.nbytes:
        entry |= {"encoding": "sparse", "word_bytes": run.word_bytes, "gap_bytes": gap_bytes}
        entry |= {"num_changed": len(changed)}
    else:
        entry |= {"encoding": "dense"}
        streams = (min(new.tobytes(), compress(new.data), key=len),)
    entry |= {"streams": [len(stream) for stream in streams]}
    return _Encoded(entry=entry, streams=streams, num_changed=len(changed))


def _digits(changed: Array, gap_bytes: int) -> Array:
    """Unchanged words before each changed one, uint [n + escapes]; all ones: so many, and more."""
    escape = 2 ** (8 * gap_bytes) - 1
    gaps = np.diff(changed, prepend=-1) - 1
    num_escapes, rest = np.divmod(gaps, escape)
    ends = np.arange(len(gaps)) + np.cumsum(num_escapes)
    digits = np.full(int(ends[-1]) + 1, escape, f"<u{gap_bytes}")
    digits[ends] = rest
    return digits


def _differences(old: Array, new: Array, changed: Array) -> Array:
    """New minus old word modulo 2^bits, small ones of either sign as small numbers, uint [n]."""
    difference = new[changed] - old[changed]
    signed = difference.view(difference.dtype.str.replace("u", "i"))
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(difference.dtype)


def _planes(words: Array) -> Array:
    """The lowest bytes of all words, then the next ones, uint8 [bytes of a word, n]."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(words), -1).T)


def _in_order(
    threads: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T]
) -> Iterator[R]:
    """As `threads.map`, and holds no more results than threads have made ahead."""
    ahead: deque[Future[R]] = deque()
    for item in items:
        ahead.append(threads.submit(work, item))
        if len(ahead) > 2 * _NUM_THREADS:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()
