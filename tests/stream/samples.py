"""Safetensors files and folders of versions, for tests of deltas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ratoon.model.delta_runs import DeltaPart
from ratoon.stream import deltas
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


class HeldFiles:
    """Files that are held as a trainer's weights are; `before`: what they were compared with."""

    def __init__(
        self, scratch: Path, contents: Mapping[str, bytes], before: Mapping[str, bytes] | None
    ) -> None:
        self._scratch, self.contents, self._before = scratch, contents, before

    def write(self, folder: Path) -> dict[str, str]:
        for name, data in self.contents.items():
            (folder / name).write_bytes(data)
        return {}

    def write_rest(self, folder: Path) -> dict[str, str]:
        for name, data in self.contents.items():
            if name != NAME:
                (folder / name).write_bytes(data)
        return {}

    def write_delta(
        self, path: Path, parents: Mapping[str, str]
    ) -> tuple[list[DeltaPart], dict[str, str]] | None:
        if self._before is None or digest_bytes(self._before[NAME]) != parents[NAME]:
            return None
        self._scratch.mkdir(exist_ok=True)
        before, after = self._scratch / "before", self._scratch / "after"
        source = deltas._Source(
            before=before,
            parent=put_version(before, {NAME: self._before[NAME]}),
            after=after,
            files=put_version(after, {NAME: self.contents[NAME]}).files,
        )
        part = deltas._write_part(path.with_name(f"{path.name}.0"), source, 0, 1)
        part.runs.setdefault(NAME, [])
        return [part], {NAME: digest_bytes(self.contents[NAME])}
