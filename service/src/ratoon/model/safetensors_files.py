"""Safetensors files, written by several threads, with their digests.

Equal tensors give equal files, byte for byte. Source of the format: the README of
https://github.com/huggingface/safetensors.

The library's own writer writes with one thread.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import xxhash
from torch import Tensor

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Number of files. A thread writes a whole file, because its digest takes the bytes in order: files
# must be small beside a thread's share of a large model, and few for readers that list them.
_NUM_FILES = 64
_MIN_FILE_BYTES = 250 * 10**6

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT = 8
_NUM_THREADS = min(os.cpu_count() or 1, 16)
# Bytes that a thread writes at a time. Each write takes Python's interpreter lock, which the thread
# that launches kernels needs for each launch: 30 µs a time.
_BLOCK_BYTES = 16 * 2**20
# Maximum number of buffers in a pwritev(2).
_MAX_PARTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """Content of a file; for tensors that are overwritten in place it is made only once.

    Attributes:
        header: What says which bytes after it are which tensor's, and its length.
        blocks: Memory, one after the other, of at most `_BLOCK_BYTES` together.
        num_bytes: All of it.
    """

    header: bytes
    blocks: tuple[tuple[memoryview, ...], ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> FileContent:
        """Content with tensors of floats by name, on the host. Tensors that are not dense are
        copied."""
        # Tensors are sorted by element size, so that each is aligned, then by name.
        by_size = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        ordered = dict(by_size)
        header = _header(ordered)
        return cls(
            header=header,
            blocks=tuple(_blocks(ordered)),
            num_bytes=len(header) + sum(tensor.nbytes for tensor in ordered.values()),
        )


def plan_files(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Assigns tensor names to files, by sizes only."""
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
    """Write the index of which file has which tensor; the `tensors` may have no values."""
    totals = {
        "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
    }
    weight_map = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True)
    (folder / INDEX_NAME).write_text(text + "\n", encoding="utf-8")


def write_files(
    folder: Path,
    files: Mapping[str, FileContent],
    wait: Callable[[str], None] = lambda _file: None,
    num_writers: int = 1,
) -> dict[str, str]:
    """Write files by name; returns their digests.

    A separate thread per file calls `wait` before it reads the file's tensors, the largest file's
    first. `num_writers` write at the same time on one machine; if there are several, each uses half
    the threads, because with one per core the threads that launch kernels would wait for a core.

    A digest is the xxh3-128, 32 hexadecimal digits, of the given bytes, not of those on the disk.
    Existing files are overwritten in place, so that their pages are reused. Raises `OSError`; the
    caller then handles incomplete files.
    """

    def write(name: str) -> str:
        wait(name)
        return _write_whole(folder / name, files[name])

    # The largest file comes first, so that the last ones are small.
    names = sorted(files, key=lambda name: -files[name].num_bytes)
    num_threads = _NUM_THREADS if num_writers == 1 else max(1, _NUM_THREADS // 2)
    with ThreadPoolExecutor(num_threads) as threads:
        try:
            return dict(zip(names, threads.map(write, names), strict=True))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _split(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Splits names into files, in order, filling each file before the next."""
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > max_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def _write_whole(path: Path, content: FileContent) -> str:
    """Write a file and return its digest."""
    digest = xxhash.xxh3_128(content.header)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, content.num_bytes)
        offset = _write_at(descriptor, 0, [memoryview(content.header)])
        for block in content.blocks:
            for part in block:
                digest.update(part)
            offset = _write_at(descriptor, offset, block)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Header of a file: its length, 8 bytes, and which of the following bytes belong to which
    tensor."""
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


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[tuple[memoryview, ...]]:
    block: list[memoryview] = []
    held = 0
    for tensor in tensors.values():
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for part in content.split(_BLOCK_BYTES) if len(content) else ():
            if block and held + len(part) > _BLOCK_BYTES:
                yield tuple(block)
                block, held = [], 0
            block.append(part.numpy().data)
            held += len(part)
    if block:
        yield tuple(block)


def _write_at(descriptor: int, offset: int, parts: Sequence[memoryview]) -> int:
    """Write the parts one after the other, and return where they end."""
    left = deque(parts)
    while left:
        written = os.pwritev(descriptor, [*islice(left, _MAX_PARTS)], offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = left[0][written:]
    return offset
