"""Writes deltas between two versions, which turn the files of one into those of the other.

The format, with its reasons, is in docs/api.md, *Weight deltas*; `ratoon_client.weights.deltas`
reads it. Nobody relies on a delta: its result must have the digests of the version's manifest.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import shutil
import subprocess  # nosec B404 - of this package's own module
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import zstandard

from ratoon.model import delta_runs
from ratoon.model.delta_runs import (
    Array,
    DeltaPart,
    EncodedRun,
    Run,
    encoded_run,
    gap_bytes_of,
    make_compressor,
)
from ratoon.stream.files import seal_bytes
from ratoon.stream.manifest import WeightManifest, from_document, read_file, to_document
from ratoon_proto.types import WeightFile

DELTA_FORMAT = 1
# A delta is kept only if it is smaller than this share of the resulting files.
_MAX_SHARE = 0.5
# Time that an encoder may take to start, and bytes a second of the slowest encoder.
_START_S = 60.0
_LEAST_RATE = 20e6
# Parameters of mallopt(3): M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD.
_MALLOC = {-1: 2**30, -2: 2**26, -3: 2**25}
_NUM_PROCESSES = min(os.cpu_count() or 1, 16)
# Minimum bytes of the files per process: a process takes a quarter of a second to start.
_LEAST_BYTES = 256 * 2**20
_LENGTH_BYTES = 8
# Bytes compared at a time; no word is longer.
_GROUP_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A file that both versions have, with the same tensors."""

    file: WeightFile
    parent_digest: str
    runs: tuple[Run, ...]

    @property
    def has_changed(self) -> bool:
        return self.file.digest != self.parent_digest


class _Reader:
    """Memory for a run of either version."""

    def __init__(self) -> None:
        self._buffers = [np.empty(delta_runs.RUN_BYTES + _GROUP_BYTES, np.uint8) for _ in range(2)]

    def read(self, files: Sequence[BinaryIO], run: Run) -> list[Array]:
        """Returns the run before and after, uint8 [its bytes and zeros, whole groups]."""
        size = run.stop - run.start
        for file, buffer in zip(files, self._buffers, strict=True):
            if os.preadv(file.fileno(), [buffer[:size].data], run.start) != size:
                raise OSError(errno.EIO, "a file of a version was cut")
            buffer[size : size + _GROUP_BYTES] = 0
        return [buffer[: size + -size % _GROUP_BYTES] for buffer in self._buffers]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Inputs of a delta; `after` None: files of one name and size are known to have one header."""

    before: Path
    parent: WeightManifest
    after: Path | None
    files: tuple[WeightFile, ...]

    def pairs(self) -> list[_Pair]:
        """Files in both versions, whether they have changed or not."""
        parents = {(file.name, file.size_bytes): file for file in self.parent.files}
        pairs: list[_Pair] = []
        for file in self.files:
            known = parents.get((file.name, file.size_bytes))
            if known is None or not file.name.endswith(".safetensors"):
                continue
            header = _header(self.before / file.name)
            if self.after is None or _header(self.after / file.name) == header:
                runs = tuple(_runs(header))
                pairs.append(_Pair(file=file, parent_digest=known.digest, runs=runs))
        return pairs


def write_delta(
    path: Path, before: Path, parent: WeightManifest, after: Path, files: Sequence[WeightFile]
) -> float | None:
    """Write to `path` the delta that makes `files`, in folder `after`, out of those of `parent`, in
    `before`.

    Returns the share of words that changed, or None if no file could be compared. Writes nothing if
    no file has changed, or most of it. Raises `OSError`.
    """
    source = _Source(before=before, parent=parent, after=after, files=tuple(files))
    with _part_paths(path, 1) as paths:
        return _join(path, source, [_write_part(paths[0], source, 0, 1)])


def join_delta(
    path: Path,
    before: Path,
    parent: WeightManifest,
    files: Sequence[WeightFile],
    parts: Sequence[DeltaPart],
) -> float | None:
    """Write to `path` the delta of `parts`, in the order of the files, and remove theirs.

    The parts have the changed runs of all files that differ from the parent's. Returns and raises
    what `write_delta` does, for the same bytes; `files` need not exist yet.
    """
    source = _Source(before=before, parent=parent, after=None, files=tuple(files))
    covered = {name for part in parts for name in part.runs}
    assert all(pair.file.name in covered for pair in source.pairs() if pair.has_changed)
    return _join(path, source, parts)


def write_delta_apart(
    path: Path, before: Path, parent: WeightManifest, after: Path, files: Sequence[WeightFile]
) -> float | None:
    """Does the same as `write_delta` in separate processes, at most one per core: encoding holds
    Python's interpreter lock for much of its time, which the caller, who trains meanwhile, needs
    too.

    Raises `ChildProcessError` with a process's exit status and last output.
    """
    source = _Source(before=before, parent=parent, after=after, files=tuple(files))
    size_bytes = sum(file.size_bytes for file in files)
    num_parts = max(1, min(_NUM_PROCESSES, size_bytes // _LEAST_BYTES))
    bound_s = _START_S + size_bytes / _LEAST_RATE
    described = {
        "before": str(before),
        "parent": to_document(parent),
        "after": str(after),
        "files": [asdict(file) for file in files],
    }

    def encode(number: int, path: Path) -> DeltaPart:
        own = {"path": str(path), "number": number, "num_parts": num_parts}
        return DeltaPart(path=path, **_ask_encoder({**described, **own}, bound_s))

    with _part_paths(path, num_parts) as paths:
        with ThreadPoolExecutor(num_parts) as threads:
            parts = list(threads.map(encode, range(num_parts), paths))
        return _join(path, source, parts)


def _ask_encoder(request: dict[str, Any], bound_s: float) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "ratoon.stream.deltas"]
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
    """Runs the process of a part.

    It constantly allocates and frees arrays of megabytes. glibc is told to keep their pages,
    because returned pages have to be zeroed first.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for parameter, value in _MALLOC.items():
            libc.mallopt(parameter, value)
    request = json.load(sys.stdin)
    source = _Source(
        before=Path(request["before"]),
        parent=from_document(request["parent"]),
        after=Path(request["after"]),
        files=tuple(map(read_file, request["files"])),
    )
    part = _write_part(Path(request["path"]), source, request["number"], request["num_parts"])
    json.dump({"num_changed": part.num_changed, "runs": part.runs}, sys.stdout)


@contextmanager
def _part_paths(path: Path, num_parts: int) -> Generator[list[Path]]:
    paths = [path.with_name(f"{path.name}.{number}") for number in range(num_parts)]
    try:
        yield paths
    finally:
        for each in paths:
            each.unlink(missing_ok=True)


def _write_part(path: Path, source: _Source, number: int, num_parts: int) -> DeltaPart:
    """Write part `number` of `num_parts`, which have about as many runs each."""
    assert source.after is not None
    pairs = [pair for pair in source.pairs() if pair.has_changed]
    limit = _limit(pairs)
    runs = [(pair, run) for pair in pairs for run in pair.runs]
    own = runs[len(runs) * number // num_parts : len(runs) * (number + 1) // num_parts]
    compressor, reader = make_compressor(), _Reader()
    entries: dict[str, list[dict[str, Any]]] = {}
    num_changed = 0
    with path.open("xb") as out:
        for pair in pairs:
            of_pair = [run for each, run in own if each is pair]
            paths = (folder / pair.file.name for folder in (source.before, source.after))
            with next(paths).open("rb") as old, next(paths).open("rb") as new:
                for run in of_pair:
                    before, after = reader.read([old, new], run)
                    encoded = _encode(before, after, run, compressor)
                    if encoded is None:
                        continue
                    num_changed += encoded.num_changed
                    # Counting of the share continues to the end.
                    if out.tell() < limit:
                        entries.setdefault(pair.file.name, []).append(encoded.entry)
                        out.writelines(encoded.streams)
    return DeltaPart(path=path, num_changed=num_changed, runs=entries)


def _join(path: Path, source: _Source, parts: Sequence[DeltaPart]) -> float | None:
    """Join the parts in order into the delta; returns as `write_delta`."""
    pairs = source.pairs()
    num_words = sum(run.num_words for pair in pairs for run in pair.runs)
    changed = [pair for pair in pairs if pair.has_changed]
    files = [_entry(pair, parts) for pair in changed]
    header = {"format": DELTA_FORMAT, "parent_version": source.parent.version, "files": files}
    sealed = seal_bytes(json.dumps(header, separators=(",", ":")).encode())
    first, *others = parts
    first.path.rename(path)
    with path.open("ab") as out:
        for part in others:
            with part.path.open("rb") as streams:
                shutil.copyfileobj(streams, out, delta_runs.RUN_BYTES)
            part.path.unlink()
        out.write(sealed + len(sealed).to_bytes(_LENGTH_BYTES, "little"))
        is_of_use = out.tell() < _limit(changed)
    if not is_of_use:
        path.unlink()
    return sum(part.num_changed for part in parts) / num_words if num_words else None


def _header(path: Path) -> bytes:
    """The header of a safetensors file."""
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little"))


def _limit(pairs: Sequence[_Pair]) -> float:
    """Bytes from which on a delta is useless."""
    return _MAX_SHARE * sum(pair.file.size_bytes for pair in pairs)


def _entry(pair: _Pair, parts: Iterable[DeltaPart]) -> dict[str, Any]:
    return {
        "name": pair.file.name,
        "size_bytes": pair.file.size_bytes,
        "digest": pair.file.digest,
        "parent_digest": pair.parent_digest,
        "runs": [run for part in parts for run in part.runs.get(pair.file.name, ())],
    }


def _runs(header: bytes) -> Iterator[Run]:
    """Yields the data of a safetensors file, tensor after tensor, in pieces of at most
    delta_runs.RUN_BYTES."""
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
        for start in range(first, last, delta_runs.RUN_BYTES):
            stop = min(start + delta_runs.RUN_BYTES, last)
            yield Run(start=start, stop=stop, word_bytes=word_bytes)


def _encode(
    before: Array, after: Array, run: Run, compressor: zstandard.ZstdCompressor
) -> EncodedRun | None:
    """The run's changes; None: nothing has changed."""
    changed, old, new = _changed(before, after, run.word_bytes)
    if not len(changed):
        return None
    gap_bytes = gap_bytes_of(len(changed), run.num_words)
    words = [*_planes(_digits(changed, gap_bytes)), *_planes(_differences(old, new))]
    planes = tuple(compressor.compress(plane) for plane in words)
    whole = after[: run.stop - run.start]
    return encoded_run(run, len(changed), planes, whole, compressor)


def _changed(before: Array, after: Array, word_bytes: int) -> tuple[Array, Array, Array]:
    """Returns the indices of changed words of uint8 [whole groups], their old values and their new
    ones, [n].

    Most words stay equal, so whole groups are compared first.
    """
    groups = [each.view(f"<u{_GROUP_BYTES}") for each in (before, after)]
    others = np.flatnonzero(groups[0] != groups[1])
    old, new = (each[others].view(f"<u{word_bytes}") for each in groups)
    within = np.flatnonzero(old != new)
    which, place = np.divmod(within, _GROUP_BYTES // word_bytes)
    return others[which] * (_GROUP_BYTES // word_bytes) + place, old[within], new[within]


def _digits(changed: Array, gap_bytes: int) -> Array:
    """Returns the number of unchanged words before each changed one, uint [n + escapes]; all ones
    means that many, and more."""
    escape = 2 ** (8 * gap_bytes) - 1
    gaps = np.diff(changed, prepend=-1) - 1
    num_escapes = gaps // escape
    ends = np.arange(len(gaps)) + np.cumsum(num_escapes)
    digits = np.full(int(ends[-1]) + 1, escape, f"<u{gap_bytes}")
    digits[ends] = gaps - escape * num_escapes
    return digits


def _differences(old: Array, new: Array) -> Array:
    """Returns new minus old word modulo 2^bits, with small differences of either sign as small
    numbers, uint [n]."""
    difference = new - old
    signed = difference.view(difference.dtype.str.replace("u", "i"))
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(difference.dtype)


def _planes(words: Array) -> Array:
    """Returns the lowest bytes of all words, then the next ones, uint8 [bytes of a word, n]."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(words), -1).T)


if __name__ == "__main__":
    _main()
