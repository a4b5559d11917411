"""Safetensors files, written by several threads from wherever the tensors are, with their digests.

Equal tensors give equal files, byte for byte. Source of the format: the README of
https://github.com/huggingface/safetensors.

The library's own writer writes with one thread, and wants all tensors of a file on the host.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import torch
import xxhash
from torch import Tensor

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# A thread writes a whole file, as its digest takes the bytes in order: files are small beside what
# a thread writes of a large model, and few for who lists them.
_NUM_FILES = 64
_MIN_FILE_BYTES = 250 * 10**6

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT = 8
_NUM_THREADS = min(os.cpu_count() or 1, 16)
# Of the host's pinned memory, a thread, where tensors are on a GPU.
_CHUNK_BYTES = 64 * 2**20
# Of what is digested and then written, which a core's cache holds: memory is read once for both.
_BLOCK_BYTES = 2 * 2**20


class _Staging(threading.local):
    """Memory of the host that a device copies to, of each thread."""

    buffer: Tensor | None = None

    def on_host(self, content: Tensor) -> Tensor:
        if content.device.type == "cpu":
            return content
        if self.buffer is None:
            self.buffer = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        return self.buffer[: len(content)].copy_(content)


def plan_files(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Names of tensors by the file that they go into. Sizes alone decide."""
    sizes = {name: tensors[name].nbytes for name in sorted(tensors)}
    files = _split(sizes, max(sum(sizes.values()) // _NUM_FILES, _MIN_FILE_BYTES))
    if len(files) == 1:
        return {WEIGHTS_NAME: files[0]}
    count = len(files)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(files, 1)
    }


def write_index(
    folder: Path, files: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]
) -> None:
    """Write which of several files has which tensor; the `tensors` may have no values."""
    totals = {
        "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
    }
    weight_map = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True)
    (folder / INDEX_NAME).write_text(text + "\n", encoding="utf-8")


def write_files(
    folder: Path,
    files: Mapping[str, Mapping[str, Tensor]],
    wait: Callable[[str], None] = lambda _file: None,
) -> dict[str, str]:
    """Write tensors of floats, by name, into files, by name; returns the files' digests.

    A thread of its own calls `wait` before it reads a file's tensors, the largest file's first.

    A digest is the xxh3-128, 32 hexadecimal digits, of what was given, not of what can be read.
    Files that are there are written over in place, so that their pages are used again. Raises
    `OSError`; files that are not whole are left to the caller then.
    """
    staging = _Staging()

    def write(name: str) -> str:
        wait(name)
        return _write_whole(folder / name, files[name], staging)

    # The largest first: what is left at the end is small.
    sizes = {name: sum(x.nbytes for x in tensors.values()) for name, tensors in files.items()}
    names = sorted(files, key=lambda name: -sizes[name])
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        try:
            return dict(zip(names, threads.map(write, names), strict=True))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


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


def _write_whole(path: Path, tensors: Mapping[str, Tensor], staging: _Staging) -> str:
    """Write a file; its digest."""
    digest, offset = xxhash.xxh3_128(), 0
    # By size of elements, so that each is aligned, then by name.
    by_size = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    ordered = dict(by_size)
    header = memoryview(_header(ordered))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, len(header) + sum(tensor.nbytes for tensor in ordered.values()))
        for content in chain([header], _contents(ordered, staging)):
            for start in range(0, len(content), _BLOCK_BYTES):
                block = content[start : start + _BLOCK_BYTES]
                digest.update(block)
                _write_at(descriptor, offset, block)
                offset += len(block)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


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


def _contents(tensors: Mapping[str, Tensor], staging: _Staging) -> Iterator[memoryview]:
    """The bytes of all tensors, each valid until the next."""
    for tensor in tensors.values():
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for chunk in content.split(_CHUNK_BYTES):
            yield staging.on_host(chunk).numpy().data


def _write_at(descriptor: int, offset: int, content: memoryview) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        offset, content = offset + written, content[written:]
