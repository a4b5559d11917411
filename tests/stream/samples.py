"""Safetensors files and folders of versions, for tests of deltas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ratoon.stream.files import digest_bytes
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.types import WeightFile, WeightKind

NAME = "model.safetensors"
DTYPES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "F64": 8}
# A dtype and its words, little-endian bytes [n].
Tensor = tuple[str, bytes]


def safetensors(tensors: Sequence[Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for index, (dtype, data) in enumerate(tensors):
        start, stop = stop, stop + len(data)
        shape = [len(data) // DTYPES[dtype]]
        entries[f"t{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + b"".join(data for _, data in tensors)


def flipped(data: bytes, word_bytes: int, places: Sequence[int], seed: int) -> bytes:
    """`data` with other words at these places."""
    words = np.frombuffer(data, f"<u{word_bytes}").copy()
    steps = np.random.default_rng(seed).integers(
        1, 2 ** (8 * word_bytes) - 1, len(places), np.uint64
    )
    words[list(places)] += steps.astype(words.dtype)
    return words.tobytes()


def put_version(folder: Path, contents: Mapping[str, bytes], version: int = 7) -> WeightManifest:
    """Write these files to `folder`."""
    folder.mkdir(exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    files = tuple(
        WeightFile(name=name, size_bytes=len(data), digest=digest_bytes(data))
        for name, data in contents.items()
    )
    return WeightManifest(
        policy_id="p", version=version, kind=WeightKind.FULL, files=files, created_at=0.0
    )
