"""Deltas between two versions: what makes the files of one out of those of the other.

The format, with its reasons, is in docs/api.md, *Weight deltas*; `ratoon_client.weights.deltas`
reads it. Nobody relies on a delta: what it makes must have the digests of the version's manifest.
"""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess  # nosec B404 - of this package's own module
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from ratoon.stream.files import seal_bytes
from ratoon.stream.manifest import WeightFile, WeightKind, WeightManifest

DELTA_FORMAT = 1
# What a thread reads, compares and compresses at a time.
RUN_BYTES = 4 * 2**20
# A delta that is not smaller than this share of the files that it makes is not kept.
_MAX_SHARE = 0.5
# What an encoder may take to start, and bytes a second that the slowest encodes.
_START_S = 60.0
_LEAST_RATE = 20e6
# A mean gap above which two bytes per gap compress better than one.
_LONG_GAP = 350
_NUM_THREADS = min(os.cpu_count() or 1, 16)
_LENGTH_BYTES = 8
# What is compared at a time; no word is longer.
_GROUP_BYTES = 8

T = TypeVar("T")
R = TypeVar("R")
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Bytes [start, stop) of a file and of the same file of the parent: words of one size."""

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

    before: Path
    after: Path
    file: WeightFile
    parent_digest: str
    runs: tuple[_Run, ...]


class _Reader(threading.local):
    """A thread's own memory for a run of either version, and its compressor."""

    def __init__(self) -> None:
        self._buffers = [np.empty(RUN_BYTES + _GROUP_BYTES, np.uint8) for _ in range(2)]
        self.compress = zstandard.ZstdCompressor(level=1).compress

    def read(self, descriptors: Sequence[int], run: _Run) -> list[Array]:
        """The run before and after, uint8 [its bytes and zeros, whole groups]."""
        size = run.stop - run.start
        for descriptor, buffer in zip(descriptors, self._buffers, strict=True):
            if os.preadv(descriptor, [buffer[:size].data], run.start) != size:
                raise OSError(errno.EIO, "a file of a version was cut")
            buffer[size : size + _GROUP_BYTES] = 0
        return [buffer[: size + -size % _GROUP_BYTES] for buffer in self._buffers]


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
    reader = _Reader()

    def encode(source: tuple[Sequence[int], _Run]) -> _Encoded:
        return _encode(reader, *source)

    with path.open("xb") as out, ExitStack() as opened, ThreadPoolExecutor(_NUM_THREADS) as threads:
        sources: list[tuple[Sequence[int], _Run]] = []
        for pair in pairs:
            both = [opened.enter_context(p.open("rb")) for p in (pair.before, pair.after)]
            descriptors = [each.fileno() for each in both]
            sources += [(descriptors, run) for run in pair.runs]
        encoded_runs = _in_order(threads, encode, sources)
        for pair in pairs:
            runs: list[dict[str, Any]] = []
            for encoded in islice(encoded_runs, len(pair.runs)):
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


def write_delta_apart(
    path: Path, before: Path, parent: WeightManifest, after: Path, files: Sequence[WeightFile]
) -> float | None:
    """As `write_delta`, by a process of its own: its threads share no interpreter lock with the
    caller's, who trains meanwhile.

    Raises `ChildProcessError` with how the process ended, and what it said last.
    """
    request = {
        "path": str(path),
        "before": str(before),
        "parent": asdict(parent),
        "after": str(after),
        "files": [asdict(file) for file in files],
    }
    command = [sys.executable, "-P", "-m", "ratoon.stream.deltas"]
    bound_s = _START_S + sum(file.size_bytes for file in files) / _LEAST_RATE
    try:
        done = subprocess.run(  # nosec B603
            command,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            timeout=bound_s,
        )
    except subprocess.TimeoutExpired as err:
        raise ChildProcessError(f"the encoder has not ended within {bound_s:.0f} s") from err
    if done.returncode:
        last = "".join(done.stderr.splitlines()[-1:])
        raise ChildProcessError(f"the encoder ended with {done.returncode}: {last}")
    return json.loads(done.stdout)


def _main() -> None:
    """The process of `write_delta_apart`."""
    request = json.load(sys.stdin)
    parent = WeightManifest(**request["parent"])
    share = write_delta(
        Path(request["path"]),
        Path(request["before"]),
        replace(parent, kind=WeightKind(parent.kind), files=_weight_files(parent.files)),
        Path(request["after"]),
        _weight_files(request["files"]),
    )
    sys.stdout.write(json.dumps(share))


def _weight_files(entries: Iterable[Any]) -> tuple[WeightFile, ...]:
    return tuple(WeightFile(**entry) for entry in entries)


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
        paths = before / file.name, after / file.name
        with paths[0].open("rb") as old, paths[1].open("rb") as new:
            length = new.read(_LENGTH_BYTES)
            header = new.read(int.from_bytes(length, "little"))
            is_alike = old.read(_LENGTH_BYTES + len(header)) == length + header
        if is_alike:
            pairs.append(
                _Pair(
                    before=paths[0],
                    after=paths[1],
                    file=file,
                    parent_digest=known.digest,
                    runs=tuple(_runs(header)),
                )
            )
    return pairs


def _runs(header: bytes) -> Iterator[_Run]:
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
            yield _Run(start=start, stop=stop, word_bytes=word_bytes)


def _encode(reader: _Reader, descriptors: Sequence[int], run: _Run) -> _Encoded:
    before, after = reader.read(descriptors, run)
    changed, old, new = _changed(before, after, run.word_bytes)
    if not len(changed):
        return _Encoded(entry=None, streams=(), num_changed=0)
    gap_bytes = 1 if len(changed) * _LONG_GAP > run.num_words else 2
    words = [*_planes(_digits(changed, gap_bytes)), *_planes(_differences(old, new))]
    entry: dict[str, Any] = {"start": run.start, "stop": run.stop}
    streams = tuple(reader.compress(plane) for plane in words)
    if sum(map(len, streams)) < run.stop - run.start:
        entry |= {"encoding": "sparse", "word_bytes": run.word_bytes, "gap_bytes": gap_bytes}
        entry |= {"num_changed": len(changed)}
    else:
        entry |= {"encoding": "dense"}
        whole = after[: run.stop - run.start]
        streams = (min(whole.tobytes(), reader.compress(whole.data), key=len),)
    entry |= {"streams": [len(stream) for stream in streams]}
    return _Encoded(entry=entry, streams=streams, num_changed=len(changed))


def _changed(before: Array, after: Array, word_bytes: int) -> tuple[Array, Array, Array]:
    """Which words of uint8 [whole groups] have changed, what they were and what they are, [n].

    Most words stay, so whole groups of them are compared first.
    """
    groups = [each.view(f"<u{_GROUP_BYTES}") for each in (before, after)]
    others = np.flatnonzero(groups[0] != groups[1])
    old, new = (each[others].view(f"<u{word_bytes}") for each in groups)
    within = np.flatnonzero(old != new)
    which, place = np.divmod(within, _GROUP_BYTES // word_bytes)
    return others[which] * (_GROUP_BYTES // word_bytes) + place, old[within], new[within]


def _digits(changed: Array, gap_bytes: int) -> Array:
    """Unchanged words before each changed one, uint [n + escapes]; all ones: so many, and more."""
    escape = 2 ** (8 * gap_bytes) - 1
    gaps = np.diff(changed, prepend=-1) - 1
    num_escapes = gaps // escape
    ends = np.arange(len(gaps)) + np.cumsum(num_escapes)
    digits = np.full(int(ends[-1]) + 1, escape, f"<u{gap_bytes}")
    digits[ends] = gaps - escape * num_escapes
    return digits


def _differences(old: Array, new: Array) -> Array:
    """New minus old word modulo 2^bits, small ones of either sign as small numbers, uint [n]."""
    difference = new - old
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


if __name__ == "__main__":
    _main()
