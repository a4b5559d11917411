"""Weight deltas: their size, and the seconds to write them and to make the version of them.

A version in bfloat16, N(0, 0.02), and others of which a share of the values, anywhere, is another:
one step of the dtype up or down (`step`, what an optimizer mostly does), or a new draw (`draw`). On
two cores, files in memory. A plain copy of the same file with its digest is measured beside it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratoon.stream.deltas import write_delta_apart
from ratoon.stream.files import digest_file
from ratoon.stream.manifest import WeightManifest
from ratoon_client.weights.deltas import read_delta, rebuild
from ratoon_proto.types import WeightFile, WeightKind

NAME = "model.safetensors"
CORES = 2
SHARES = (0.001, 0.01, 0.04, 0.1, 0.5)
KINDS = ("step", "draw")
# Of one tensor.
BLOCK_WORDS = 2**23
Words = NDArray[np.uint16]
# One up, one down.
_STEPS = np.array([1, 2**16 - 1], np.uint16)


def measure(root: Path, size_mb: int, repeats: int, seed: int) -> list[dict[str, Any]]:
    """A row for each kind and share; takes three times the size in `root`, and as many cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:CORES])
    try:
        return list(_rows(root, size_mb, repeats, seed))
    finally:
        os.sched_setaffinity(0, cores)


def _rows(root: Path, size_mb: int, repeats: int, seed: int) -> Iterator[dict[str, Any]]:
    before, after = root / "before", root / "after"
    before.mkdir()
    after.mkdir()
    blocks = range(-(-size_mb * 10**6 // (2 * BLOCK_WORDS)))
    first = _write(before, blocks, lambda block: _normal(seed, block))
    parent = WeightManifest(
        policy_id="p", version=1, kind=WeightKind.FULL, files=(first,), created_at=0.0
    )
    for kind in KINDS:
        for share in SHARES:

            def words(block: int, kind: str = kind, share: float = share) -> Words:
                return _changed(_normal(seed, block), kind, share, seed, block)

            file = _write(after, blocks, words)
            yield {"kind": kind, "share": share, **_measure(root, parent, file, repeats)}


def _measure(root: Path, parent: WeightManifest, file: WeightFile, repeats: int) -> dict[str, Any]:
    delta, made = root / "delta", root / "made"
    changed_share = 0.0

    def encode() -> None:
        nonlocal changed_share
        share = write_delta_apart(delta, root / "before", parent, root / "after", [file])
        assert share is not None
        changed_share = share

    def apply() -> None:
        (entry,) = read_delta(delta)
        rebuild(entry, root / "before" / NAME, made)

    def copy() -> None:
        shutil.copyfile(root / "after" / NAME, made)
        assert digest_file(made) == file.digest

    encode_s = _timed(encode, repeats, lambda: delta.unlink(missing_ok=True))
    is_kept = delta.exists()
    rebuild_s = _timed(apply, repeats, lambda: made.unlink(missing_ok=True)) if is_kept else []
    copy_s = _timed(copy, repeats, lambda: made.unlink(missing_ok=True))
    made.unlink()
    raw = {"encode_s": encode_s, "rebuild_s": rebuild_s, "copy_s": copy_s}
    return {
        # Without a delta the file itself is what is sent.
        "size_percent": round(100 * delta.stat().st_size / file.size_bytes, 3) if is_kept else 100,
        "bound_percent": round(100 * _positions_bits(changed_share) / 16, 3),
        "changed_share": changed_share,
        **{name: round(statistics.median(values), 3) for name, values in raw.items() if values},
        "raw_s": {name: [round(value, 4) for value in values] for name, values in raw.items()},
    }


def _positions_bits(share: float) -> float:
    """Entropy per value of which ones have changed: what no coding of random places is below."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p)


def _timed(work: Callable[[], None], repeats: int, prepare: Callable[[], None]) -> list[float]:
    times: list[float] = []
    for _ in range(repeats):
        prepare()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def _write(folder: Path, blocks: Sequence[int], words: Callable[[int], Words]) -> WeightFile:
    """A safetensors file with a tensor per block."""
    size = 2 * BLOCK_WORDS
    entries = {
        f"layers.{block:04d}.weight": {
            "dtype": "BF16",
            "shape": [BLOCK_WORDS],
            "data_offsets": [block * size, (block + 1) * size],
        }
        for block in blocks
    }
    header = json.dumps(entries).encode()
    path = folder / NAME
    with path.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for block in blocks:
            words(block).tofile(out)
    return WeightFile(name=NAME, size_bytes=path.stat().st_size, digest=digest_file(path))


def _normal(seed: int, block: int) -> Words:
    """Values of N(0, 0.02) in bfloat16."""
    rng = np.random.default_rng((seed, block))
    bits = (0.02 * rng.standard_normal(BLOCK_WORDS, np.float32)).view(np.uint32)
    return ((bits + 0x8000) >> 16).astype(np.uint16)


def _changed(old: Words, kind: str, share: float, seed: int, block: int) -> Words:
    rng = np.random.default_rng((seed, block, 1))
    is_changed = rng.random(BLOCK_WORDS, np.float32) < share
    if kind == "step":
        return old + np.where(is_changed, rng.choice(_STEPS, BLOCK_WORDS), np.uint16(0))
    return np.where(is_changed, np.roll(old, 1), old)
