"""Tensors of a model folder that training leaves as they are: they pass into each version.

In: a folder and the names of such tensors. Out: one safetensors file, the same in every version.
Invariant: its bytes are those that the folder had when the policy was made, or there is no version.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import xxhash

from ratoon.errors import invalid
from ratoon.model.families.wrapped import Names
from ratoon.model.folder import ModelFolder, file_field
from ratoon.model.safetensors_files import make_header, read_header, weight_files

_BLOCK_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Bytes [start, stop) of a folder's file: a tensor."""

    file: str
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Aside:
    """`digests` of the tensors' bytes, by name; `digest`: of the file that they make."""

    folder: ModelFolder
    header: bytes
    pieces: tuple[_Piece, ...]
    digests: Mapping[str, str]
    digest: str
    num_elements: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(piece.num_bytes for piece in self.pieces)

    @classmethod
    def read(cls, folder: ModelFolder, names: Collection[str]) -> Aside | None:
        """Reads these tensors of a folder, whose files are checked; None if there are none."""
        found = dict[str, tuple[dict[str, Any], _Piece]]()
        for file in weight_files(folder):
            with folder.open(file) as opened:
                try:
                    entries, first = read_header(opened)
                except ValueError as err:
                    raise _changed(file) from err
            for name, entry in entries.items():
                if name in names:
                    start, stop = (first + offset for offset in entry["data_offsets"])
                    found[name] = entry, _Piece(file=file, start=start, stop=stop)
        if not found:
            return None
        # The largest elements come first, so that each tensor is aligned.
        ordered = sorted(found, key=lambda name: (-_element_bytes(*found[name]), name))
        described = {
            name: (entry["dtype"], entry["shape"], piece.num_bytes)
            for name, (entry, piece) in ((name, found[name]) for name in ordered)
        }
        header = make_header(described)
        whole, digests = xxhash.xxh3_128(header), dict[str, str]()
        for name in ordered:
            of_tensor = xxhash.xxh3_128()
            for block in _blocks(folder, found[name][1]):
                of_tensor.update(block)
                whole.update(block)
            digests[name] = of_tensor.hexdigest()
        return cls(
            folder=folder,
            header=header,
            pieces=tuple(found[name][1] for name in ordered),
            digests=digests,
            digest=whole.hexdigest(),
            num_elements=sum(math.prod(shape) for _, shape, _ in described.values()),
        )

    def publish(self, folder: Path, name: str) -> str:
        """Put the file at its name in the folder of a version; returns its digest.

        Raises INVALID_ARGUMENT where no earlier version has it and the policy's folder was changed.
        """
        if not link_earlier(folder, name, self.digest):
            self._write(folder / name)
        return self.digest

    def _write(self, path: Path) -> None:
        state = xxhash.xxh3_128(self.header)
        with path.open("xb") as file:
            file.write(self.header)
            for piece in self.pieces:
                for block in _blocks(self.folder, piece):
                    state.update(block)
                    file.write(block)
        if state.hexdigest() != self.digest:
            path.unlink()
            raise _changed(self.pieces[0].file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What versions take over from the folder that a policy began with.

    `files` are published beside the weights, by name; config.json among them is the folder's own.
    `media_tokens`: tokens that stand for an image or a video, by the fields that say so.
    """

    files: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    names: Names = Names()  # noqa: RUF009 - it is frozen
    aside: Aside | None = None
    media_tokens: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


def link_earlier(folder: Path, name: str, digest: str) -> bool:
    """Whether a file of this digest could be linked, or else copied, from an earlier version.

    Versions lie beside `folder`. Nothing is there under the name before; a folder for it is.
    """
    path = folder / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    for earlier in sorted(folder.parent.glob(f"[0-9]*/{name}"), reverse=True):
        with contextlib.suppress(FileNotFoundError):
            with earlier.open("rb") as file:
                found = hashlib.file_digest(file, cast("Any", xxhash.xxh3_128))
            if found.hexdigest() == digest:
                _link(earlier, path)
                return True
    return False


def _blocks(folder: ModelFolder, piece: _Piece) -> Iterator[bytes]:
    with folder.open(piece.file) as file:
        for start in range(piece.start, piece.stop, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, piece.stop - start)
            block = os.pread(file.fileno(), size, start)
            if len(block) != size:
                raise _changed(piece.file)
            yield block


def _element_bytes(entry: Mapping[str, Any], piece: _Piece) -> int:
    return piece.num_bytes // max(1, math.prod(entry["shape"]))


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # A file system without links, or with too many of this file.
        shutil.copyfile(source, target)


def _changed(file: str) -> Exception:
    expected = "the tensors of when the policy was made, which no published version has"
    return invalid(file_field(file), "other tensors", expected)
