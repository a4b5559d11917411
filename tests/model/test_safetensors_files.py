"""Our writer of safetensors: the library reads the bits that were given, whatever their form."""

from __future__ import annotations

import errno
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ratoon.model import safetensors_files as module
from ratoon.model.safetensors_files import (
    INDEX_NAME,
    WEIGHTS_NAME,
    FileContent,
    plan_files,
    write_files,
    write_index,
)
from ratoon.stream.files import digest_file


def _tensors() -> dict[str, Tensor]:
    """Tensors of all dtypes and odd sizes, one without elements, one without dimensions, one not
    dense."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "b.bf16": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
        "a.f32": torch.randn(5, generator=generator),
        "c.f64": torch.randn(2, 2, 3, generator=generator, dtype=torch.float64),
        "none": torch.empty(0, 4),
        "one": torch.tensor(3.5),
        "turned": torch.randn(6, 4, generator=generator).T,
        "leaf": torch.randn(9, generator=generator).requires_grad_(),
    }
    tensors["a.f32"][:2] = torch.tensor([float("nan"), float("-inf")])
    return tensors


def _write(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """All of a model's files; their digests."""
    files = plan_files(tensors)
    if len(files) > 1:
        write_index(folder, files, tensors)
    return write_files(
        folder,
        {file: FileContent.of({n: tensors[n] for n in names}) for file, names in files.items()},
    )


def _assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        got, want = found[name], tensor.detach().contiguous()
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        bits = [x.reshape(-1).view(torch.uint8) for x in (got, want)]
        assert torch.equal(*bits), name


@pytest.mark.parametrize(("block_bytes", "max_parts"), [(1, 1), (7, 2), (50, 1), (2**20, 3)])
def test_the_library_reads_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, max_parts: int
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(module, "_MAX_PARTS", max_parts)
    tensors = _tensors()
    digests = _write(tmp_path, tensors)
    assert digests == {WEIGHTS_NAME: digest_file(tmp_path / WEIGHTS_NAME)}
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS_NAME]
    _assert_same_bits(load_file(tmp_path / WEIGHTS_NAME), tensors)
    with safe_open(tmp_path / WEIGHTS_NAME, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("max_bytes", [1, 90, 200])
def test_files_are_of_a_size_or_of_one_tensor_and_the_index_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    monkeypatch.setattr(module, "_MIN_FILE_BYTES", max_bytes)
    monkeypatch.setattr(module, "_NUM_FILES", 1000)
    tensors = _tensors()
    digests = _write(tmp_path, tensors)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert digests == {file: digest_file(tmp_path / file) for file in files}
    found: dict[str, Tensor] = {}
    for file in files:
        of_file = load_file(tmp_path / file)
        assert {
            name for name, place in index["weight_map"].items() if place == file
        } == of_file.keys()
        assert len(of_file) == 1 or sum(x.nbytes for x in of_file.values()) <= max_bytes
        found |= of_file
    _assert_same_bits(found, tensors)
    assert index["metadata"] == {
        "total_parameters": sum(x.numel() for x in tensors.values()),
        "total_size": sum(x.nbytes for x in tensors.values()),
    }


@pytest.mark.parametrize(("size", "num_files"), [(1, 1), (10, 3), (100, 25), (1000, 67)])
def test_a_larger_model_has_more_files_but_not_more_than_threads_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, num_files: int
) -> None:
    monkeypatch.setattr(module, "_MIN_FILE_BYTES", 160)
    tensors = {f"{index:04d}": torch.full((10,), float(index)) for index in range(size)}
    assert len(_write(tmp_path, tensors)) == num_files


def test_equal_tensors_give_equal_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_FILE_BYTES", 90)
    for name, order in (("first", 1), ("second", -1)):
        (tmp_path / name).mkdir()
        _write(tmp_path / name, dict(list(_tensors().items())[::order]))
    first = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}


def test_a_disk_that_is_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that met it; all of them are done then, and the files closed."""
    monkeypatch.setattr(module, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(module, "_MIN_FILE_BYTES", 90)
    before = len(list(Path("/proc/self/fd").iterdir()))
    calls = itertools.count()

    def full(descriptor: int, parts: list[memoryview], offset: int) -> int:
        if next(calls) == 4:
            raise OSError(errno.ENOSPC, "full")
        # As a disk does that is nearly full: less than it was given.
        return os.pwrite(descriptor, parts[0][: max(1, len(parts[0]) // 2)], offset)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="full"):
        _write(tmp_path, _tensors())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("num_bytes", [3, 50])
def test_what_is_written_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """Pieces are parts of a tensor, and several tensors with a part of the next."""

    def some(descriptor: int, parts: list[memoryview], offset: int) -> int:
        return os.pwrite(descriptor, b"".join(parts)[:num_bytes], offset)

    monkeypatch.setattr(os, "pwritev", some)
    tensors = _tensors()
    _write(tmp_path, tensors)
    _assert_same_bits(load_file(tmp_path / WEIGHTS_NAME), tensors)
