"""Safetensors files: read in place from a model folder, and written with their digests.

Reading checks names, shapes and dtypes by the files' headers, before anything is allocated; values
are finite, and each is read once. Writing uses several threads, where the library's own writer has
one; equal tensors give equal files, byte for byte. Source of the format: the README of
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path
from types import EllipsisType
from typing import Any, cast

import torch
import xxhash
from safetensors import SafetensorError, deserialize, safe_open
from torch import Tensor

from ratoon.errors import RatoonError, invalid, shown, unsupported
from ratoon.model.folder import FIELD, ModelFolder, file_field

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Number of files. A thread writes a whole file, because its digest takes the bytes in order: files
# must be small beside a thread's share of a large model, and few for readers that list them.
_NUM_FILES = 64
_MIN_FILE_BYTES = 250 * 10**6
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT = 8
# A file begins with its header's length; the library refuses longer headers.
_LENGTH_BYTES, _MAX_HEADER_BYTES = 8, 10**8
_METADATA = "__metadata__"
_NUM_THREADS = min(os.cpu_count() or 1, 16)
# Bytes that a thread writes at a time. Each write takes Python's interpreter lock, which the thread
# that launches kernels needs for each launch: 30 µs a time.
_BLOCK_BYTES = 16 * 2**20
# Maximum number of buffers in a pwritev(2).
_MAX_PARTS = 1024
# A safetensors tensor, which `[...]` reads.
Stored = Any
_MAX_INDEX_BYTES = 2**24
_MAX_FILES = 1024
_SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth")
_ADAPTER_CONFIG = "adapter_config.json"
_READ_DTYPES = {word: dtype for dtype, word in _DTYPES.items()} | {"F16": torch.float16}
# Bound below which bfloat16 and float32 hold a value, however it is rounded.
_MAX_WEIGHT = 2.0**127
# Parameters [E, F, D] that hold all experts of a layer, with the projections that follow one
# another in the features F.
FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemory:
    """A tensor in `data`, the bytes of it that a file had: as safetensors has tensors."""

    dtype: str
    shape: list[int]
    data: bytearray

    def get_shape(self) -> list[int]:
        """Its dimensions, as the file states them."""
        return self.shape

    def get_dtype(self) -> str:
        """Word of safetensors for its elements."""
        return self.dtype

    def __getitem__(self, _all: EllipsisType) -> Tensor:
        """All values; the tensor must be of floats or bytes."""
        dtype = _READ_DTYPES.get(self.dtype, torch.uint8)
        return torch.frombuffer(self.data, dtype=dtype).reshape(self.shape)


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


def plan_files(tensors: Mapping[str, Tensor], aside: Sequence[str] = ()) -> dict[str, list[str]]:
    """Assigns tensor names to files, by sizes only; those `aside` have the last one alone."""
    sizes = {name: tensors[name].nbytes for name in sorted(tensors)}
    files = _split(sizes, max(sum(sizes.values()) // _NUM_FILES, _MIN_FILE_BYTES))
    if aside:
        files.append([*aside])
    if len(files) == 1:
        return {WEIGHTS_NAME: files[0]}
    count = len(files)
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(files, 1)
    }


def write_index(
    folder: Path,
    files: Mapping[str, Sequence[str]],
    tensors: Mapping[str, Tensor],
    aside: tuple[int, int] = (0, 0),
) -> None:
    """Write the index of which file has which tensor; the `tensors` may have no values.

    `aside`: elements and bytes of those that are not among the `tensors`.
    """
    totals = {
        "total_parameters": sum(tensor.numel() for tensor in tensors.values()) + aside[0],
        "total_size": sum(tensor.nbytes for tensor in tensors.values()) + aside[1],
    }
    weight_map = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True)
    (folder / INDEX_NAME).write_text(text + "\n", encoding="utf-8")


def write_files(
    folder: Path,
    files: Mapping[str, FileContent],
    wait: Callable[[str], None] = lambda _file: None,
    num_writers: int = 1,
    digests: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Write files by name; returns their digests, which are computed unless they are given.

    A separate thread per file calls `wait` before it reads the file's tensors, the largest file's
    first. `num_writers` write at the same time on one machine; if there are several, each uses half
    the threads, because with one per core the threads that launch kernels would wait for a core.

    A digest is the xxh3-128, 32 hexadecimal digits, of the given bytes, not of those on the disk.
    Existing files are overwritten in place, so that their pages are reused. Raises `OSError`; the
    caller then handles incomplete files.
    """

    def write(name: str) -> str:
        wait(name)
        known = None if digests is None else digests[name]
        return _write_whole(folder / name, files[name], known)

    num_threads = _NUM_THREADS if num_writers == 1 else max(1, _NUM_THREADS // 2)
    # The largest file comes first, so that the last ones are small.
    names = sorted(files, key=lambda name: -files[name].num_bytes)
    return _by_threads(write, names, num_threads)


def digest_files(
    files: Mapping[str, FileContent], wait: Callable[[str, int], None]
) -> dict[str, str]:
    """The digests of files by name, as `write_files` returns them.

    Files arrive in their order: `wait` returns once so many bytes of a file's tensors are there.
    """

    def digest(name: str) -> str:
        state, num_bytes = xxhash.xxh3_128(files[name].header), 0
        for block in files[name].blocks:
            num_bytes += sum(part.nbytes for part in block)
            wait(name, num_bytes)
            for part in block:
                state.update(part)
        return state.hexdigest()

    return _by_threads(digest, [*files], _NUM_THREADS)


def _by_threads(
    work: Callable[[str], str], names: Sequence[str], num_threads: int
) -> dict[str, str]:
    with ThreadPoolExecutor(num_threads) as threads:
        try:
            return dict(zip(names, threads.map(work, names), strict=True))
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


def _write_whole(path: Path, content: FileContent, known: str | None) -> str:
    """Write a file and return its digest, which is computed unless it is `known`."""
    digest = xxhash.xxh3_128(content.header)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.ftruncate(descriptor, content.num_bytes)
        offset = _write_at(descriptor, 0, [memoryview(content.header)])
        for block in content.blocks:
            for part in block if known is None else ():
                digest.update(part)
            offset = _write_at(descriptor, offset, block)
    finally:
        os.close(descriptor)
    return known or digest.hexdigest()


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    return make_header(
        {
            name: (_DTYPES[tensor.dtype], list(tensor.shape), tensor.nbytes)
            for name, tensor in tensors.items()
        }
    )


def make_header(tensors: Mapping[str, tuple[str, list[int], int]]) -> bytes:
    """Header of a file: its length, 8 bytes, and which of the following bytes belong to which
    tensor.

    `tensors`: dtype in the format's words, shape and bytes of each, by name.
    """
    entries: dict[str, object] = {_METADATA: {"format": "pt"}}
    stop = 0
    for name, (dtype, shape, num_bytes) in tensors.items():
        start, stop = stop, stop + num_bytes
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


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


def are_finite(weights: Tensor) -> bool:
    """Whether all weights are finite, and stay so however they are rounded; there must be at least
    one."""
    low, high = weights.aminmax()
    # A NaN is in no range.
    return bool((low > -_MAX_WEIGHT) & (high < _MAX_WEIGHT))


def weight_files(folder: ModelFolder, *, has_adapter: bool = False) -> list[str]:
    """Names of the files with a model's weights: one, those that an index names, or, without an
    index and for an adapter, all of the format.

    Raises UNSUPPORTED for pickles, and for an adapter beside a model; INVALID_ARGUMENT for an index
    that names anything but safetensors files in the folder itself.
    """
    names = folder.names()
    if not has_adapter:
        if _ADAPTER_CONFIG in names:
            raise unsupported(FIELD, _ADAPTER_CONFIG, "a model without an adapter beside it")
        if WEIGHTS_NAME in names:
            return [WEIGHTS_NAME]
        if INDEX_NAME in names:
            return _indexed(folder)
    if found := [name for name in names if name.endswith(_SUFFIX)]:
        return found
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise unsupported(FIELD, shown(", ".join(pickles))[1:-1], "safetensors: no pickle is read")
    raise invalid(FIELD, "no weights", f"{WEIGHTS_NAME}, or {INDEX_NAME} and the files it names")


def _indexed(folder: ModelFolder) -> list[str]:
    weight_map = folder.read_object(INDEX_NAME, _MAX_INDEX_BYTES).get("weight_map")
    field = f"{file_field(INDEX_NAME)}: weight_map"
    if not isinstance(weight_map, dict) or not weight_map:
        raise invalid(field, shown(weight_map), "a file's name by tensor")
    files = set[str]()
    for file in cast("dict[str, object]", weight_map).values():
        if not isinstance(file, str) or not file.endswith(_SUFFIX) or "/" in file:
            expected = f"the name of a {_SUFFIX} file of the folder itself"
            raise invalid(field, shown(file), expected)
        files.add(file)
        if len(files) > _MAX_FILES:
            raise invalid(field, "more files", f"at most {_MAX_FILES}")
    return sorted(files)


def read_header(file: FileIO) -> tuple[dict[str, Any], int]:
    """Returns a file's tensors as its header describes them, by name, and where their bytes begin.

    Raises `ValueError` for a file that is none of the format.
    """
    length = int.from_bytes(os.pread(file.fileno(), _LENGTH_BYTES, 0), "little")
    if length > _MAX_HEADER_BYTES:
        raise ValueError("a longer header")
    entries: object = json.loads(os.pread(file.fileno(), length, _LENGTH_BYTES))
    if not isinstance(entries, dict):
        raise ValueError("a header that is no object")
    described = {name: entry for name, entry in entries.items() if name != _METADATA}
    return described, _LENGTH_BYTES + length


def open_tensors(folder: ModelFolder) -> dict[str, Stored]:
    """Opens all tensors of a model's files by name, in file order.

    Their bytes are mapped: replacing one of the files later changes nothing. Raises what
    `weight_files` and `ModelFolder.open` raise, and INVALID_ARGUMENT for a file that is not
    safetensors and for a duplicate tensor.
    """
    tensors: dict[str, Stored] = {}
    for name in weight_files(folder):
        with folder.open(name) as file:
            try:
                # The library opens the file by its descriptor, and so maps the very file that was
                # checked.
                opened = cast("Any", safe_open(f"/dev/fd/{file.fileno()}", framework="pt"))
            except (SafetensorError, OSError, ValueError) as err:
                raise not_safetensors(name, err) from err
        add_tensors(tensors, {key: opened.get_slice(key) for key in opened.offset_keys()})
    return tensors


def parse_tensors(file: str, data: bytes) -> dict[str, Stored]:
    """All tensors of a file's bytes, by name. Raises INVALID_ARGUMENT for other bytes than those
    of the format."""
    try:
        return {name: InMemory(**described) for name, described in deserialize(data)}
    except (SafetensorError, ValueError) as err:
        raise not_safetensors(file, err) from err


def add_tensors(tensors: dict[str, Stored], more: Mapping[str, Stored]) -> None:
    """Add those of another file. Raises INVALID_ARGUMENT for a duplicate."""
    for name, tensor in more.items():
        if name in tensors:
            raise twice(name)
        tensors[name] = tensor


def twice(name: str) -> RatoonError:
    """What a tensor that a folder has under two names, or in two files, is refused with."""
    return invalid(tensor_field(name), "there twice", "each tensor once")


def not_safetensors(file: str, err: Exception) -> RatoonError:
    """What a file that is none of the format, or is damaged, is refused with."""
    got = f"no safetensors file that can be read ({shown(str(err))})"
    return invalid(file_field(file), got, "one")


def check_floats(tensors: Mapping[str, Stored]) -> None:
    """Raises UNSUPPORTED for the first tensor that is not of floats of 16, 32 or 64 bits."""
    for name, tensor in tensors.items():
        if (dtype := tensor.get_dtype()) not in _READ_DTYPES:
            raise unsupported(tensor_field(name), dtype, "floats of 16, 32 or 64 bits")


def check_names_and_shapes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises INVALID_ARGUMENT naming the first tensor that is missing, not the model's, or of
    another shape."""
    for kind, names in (
        ("missing", expected.keys() - found.keys()),
        ("not the model's", found.keys() - expected.keys()),
    ):
        if names:
            got = f"{len(names)} tensors {kind}, the first of them this one"
            raise invalid(tensor_field(min(names)), got, "every weight of the model and no other")
    for name, like in expected.items():
        if found[name].shape != like.shape:
            got = f"shape {tuple(found[name].shape)}"
            raise invalid(tensor_field(name), got, f"{tuple(like.shape)}")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises INVALID_ARGUMENT naming the tensor."""
    if not are_finite(tensor):
        raise invalid(tensor_field(name), "a value that is not finite", "below 2**127 in magnitude")


def on_meta(name: str, stored: Stored) -> Tensor:
    """A tensor of the same shape without values. Raises INVALID_ARGUMENT, naming it, for a shape
    that none has."""
    try:
        return torch.empty(stored.get_shape(), device="meta")
    except (RuntimeError, TypeError) as err:
        got = f"shape {shown(str(stored.get_shape()))}"
        raise invalid(tensor_field(name), got, "one that a tensor may have") from err


def tensor_field(name: str) -> str:
    """Name of a folder's tensor in errors."""
    return f"{FIELD}[{shown(name)}]"


def part_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Splits fused experts into a view for each projection of each expert, as the hub has them.

    A tensor with such a name and another shape stays unchanged.
    """
    parted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, leaf = name.rpartition(".")
        parts = FUSED_EXPERTS.get(leaf, ())
        if not parts or tensor.ndim != 3 or tensor.shape[1] % len(parts):
            parted[name] = tensor
            continue
        for expert, fused in enumerate(tensor.unbind()):
            for part, rows in zip(parts, fused.tensor_split(len(parts)), strict=True):
                parted[f"{experts}.{expert}.{part}.weight"] = rows
    return parted
