"""Safetensors files, written by several threads from wherever the tensors are.

Equal tensors give equal files, byte for byte. Source of the format: the README of
https://github.com/huggingface/safetensors.

The library's own writer writes with one thread, and wants all tensors of a file on the host.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Small enough that a large model has a file for each thread: one file takes one writer at a time.
MAX_FILE_BYTES = 10**9

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT = 8
_NUM_THREADS = min(os.cpu_count() or 1, 16)
# Of what is written at a time; of the host's pinned memory, a thread, where tensors are on a GPU.
_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Bytes of one tensor, uint8 [n], and their place in an open file."""

    descriptor: int
    offset: int
    content: Tensor


class _Staging(threading.local):
    """Memory of the host that a device copies to, of each thread."""

    buffer: Tensor | None = None

    def on_host(self, content: Tensor) -> Tensor:
        if content.device.type == "cpu":
            return content
        if self.buffer is None:
            self.buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        return self.buffer[: len(content)].copy_(content)


def write_weights(
    folder: Path, tensors: Mapping[str, Tensor], max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write `tensors`, of floats, in files of at most so many bytes of data, or of one tensor.

    Files that are there are written over in place, so that their pages are used again. Raises
    `OSError`; files that are not whole are left to the caller then.
    """
    names = _split({name: tensors[name].nbytes for name in sorted(tensors)}, max_file_bytes)
    count = len(names)
    files = {
        WEIGHTS_NAME if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors": of_file
        for number, of_file in enumerate(names, 1)
    }
    _write(folder, {file: {n: tensors[n] for n in of_file} for file, of_file in files.items()})
    if count > 1:
        sizes = {
            "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
            "total_size": sum(tensor.nbytes for tensor in tensors.values()),
        }
        weight_map = {name: file for file, of_file in files.items() for name in of_file}
        text = json.dumps({"metadata": sizes, "weight_map": weight_map}, indent=2, sort_keys=True)
        (folder / INDEX_NAME).write_text(text + "\n", encoding="utf-8")


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one new file, whatever its size, its tensors by name. Raises as `write_weights`."""
    _write(path.parent, {path.name: {name: tensors[name] for name in sorted(tensors)}})


def _split(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names by file, in their order, each file filled up before the next."""
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > max_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def _write(folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    staging = _Staging()

    def write(part: _Part) -> None:
        _write_at(part.descriptor, part.offset, staging.on_host(part.content).numpy().data)

    # Files are closed once no thread writes any more.
    with ExitStack() as opened, ThreadPoolExecutor(_NUM_THREADS) as threads:
        parts: list[Iterable[_Part]] = []
        for name, tensors in files.items():
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o666)
            opened.callback(os.close, descriptor)
            # By size of elements, so that each is aligned.
            ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
            header = _header(ordered)
            _write_at(descriptor, 0, memoryview(header))
            parts.append(_parts(descriptor, len(header), ordered))
            size = len(header) + sum(tensor.nbytes for tensor in ordered.values())
            os.ftruncate(descriptor, size)
        try:
            # In turn from each file, so that threads seldom wait for one another.
            in_turn = (part for turn in zip_longest(*parts) for part in turn if part is not None)
            for _ in threads.map(write, in_turn):
                pass
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Its length, 8 bytes, and what says which bytes after it are which tensor's."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, tensor in tensors.items():
        start, stop = stop, stop + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _parts(descriptor: int, offset: int, tensors: Mapping[str, Tensor]) -> Iterator[_Part]:
    for tensor in tensors.values():
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for chunk in content.split(_CHUNK_BYTES):
            yield _Part(descriptor=descriptor, offset=offset, content=chunk)
            offset += len(chunk)


def _write_at(descriptor: int, offset: int, content: memoryview) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        offset, content = offset + written, content[written:]
