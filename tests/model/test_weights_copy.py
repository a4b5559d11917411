"""The copy of the weights that is published beside later steps."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ratoon.errors import ErrorCode
from ratoon.model import export, safetensors_files
from ratoon.model.export import WeightsCopy, export_weights
from ratoon.model.host_memory import host_tensors
from ratoon.model.spec import ModelDtype
from ratoon.stream.files import digest_file
from ratoon_proto.types import FullTuning, LoraTuning
from tests.model.builders import FULL, LORA, error_of, load, randomize
from tests.tiny_models import ARCHITECTURES, write_folder


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: digest_file(path) for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("architecture", "tuning", "is_merged"),
    [
        *((architecture, FULL, False) for architecture in ARCHITECTURES),
        *(
            (architecture, LORA, is_merged)
            for architecture in ("qwen3", "qwen3_moe")
            for is_merged in (False, True)
        ),
    ],
)
def test_a_copy_is_written_as_the_weights_were_when_it_was_taken(
    tmp_path: Path, architecture: str, tuning: FullTuning | LoraTuning, is_merged: bool
) -> None:
    """Twice: the second copy is in the memory of the first."""
    base = write_folder(tmp_path / "base", architecture)
    model = load(base, tuning=tuning, dtype=ModelDtype.BFLOAT16)
    copy = WeightsCopy(model, is_merged=is_merged)
    for number in (1, 2):
        randomize(model, number)
        written, copied = tmp_path / f"written-{number}", tmp_path / f"copied-{number}"
        written.mkdir()
        copied.mkdir()
        export_weights(model, written, is_merged=is_merged)
        copy.take()
        randomize(model, 10 + number)
        copy.write(copied)
        assert _digests(copied) == _digests(written)
    assert _digests(tmp_path / "copied-1") != _digests(tmp_path / "copied-2")


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
@pytest.mark.parametrize(
    ("architecture", "tuning", "is_merged"),
    [
        (architecture, *case)
        for architecture in ("qwen3", "qwen3_moe")
        for case in ((FULL, False), (LORA, False), (LORA, True))
    ],
)
def test_ranks_write_each_file_once_and_copy_what_they_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    tuning: FullTuning | LoraTuning,
    is_merged: bool,
    num_ranks: int,
) -> None:
    monkeypatch.setattr(safetensors_files, "_MIN_FILE_BYTES", 10_000)
    base = write_folder(tmp_path / "base", architecture)
    model = load(base, tuning=tuning, dtype=ModelDtype.BFLOAT16)
    randomize(model, 1)
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    whole.mkdir()
    shared.mkdir()
    expected = export_weights(model, whole, is_merged=is_merged)
    copies = [WeightsCopy(model, rank, num_ranks, is_merged=is_merged) for rank in range(num_ranks)]
    for copy in copies:
        copy.take()
    randomize(model, 2)
    digests = [copy.write(shared) for copy in copies]
    assert sum(len(each) for each in digests) == len(expected)
    assert {name: digest for each in digests for name, digest in each.items()} == expected
    assert _digests(shared) == _digests(whole)
    held = [sum(value.nbytes for value in copy._values.values()) for copy in copies]
    if tuning is LORA and not is_merged:
        assert [len(each) for each in digests] == [1] + [0] * (num_ranks - 1)
    elif architecture == "qwen3":
        own = dict(model.module.named_parameters())
        assert sum(held) == sum(p.nbytes for name, p in own.items() if ".lora_" not in name)


class _Operations(TorchDispatchMode):
    """Counts what is asked of torch."""

    num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def test_a_second_version_is_written_without_a_word_to_torch(tmp_path: Path) -> None:
    """Each of ten thousands of experts' tensors would take the lock that a step's launches need."""
    model = load(write_folder(tmp_path / "base", "qwen3_moe"))
    copy = WeightsCopy(model)
    for number, wanted in ((1, 1), (2, 0)):
        copy.take()
        with _Operations() as operations:
            (tmp_path / str(number)).mkdir()
            copy.write(tmp_path / str(number))
        assert min(operations.num_calls, 1) == wanted


def test_files_are_shared_out_by_their_bytes() -> None:
    assert export._owners([5], 8) == [0]
    assert export._owners([10] * 6, 3) == [0, 0, 1, 1, 2, 2]
    assert export._owners([60, 10, 10, 10, 10, 20], 2) == [0, 1, 1, 1, 1, 1]
    owners = export._owners([7, 0, 9, 3, 3, 8, 1, 1, 0], 4)
    assert owners == sorted(owners)
    assert owners[-1] < 4


def test_tensors_share_memory_and_overlap_nowhere() -> None:
    shapes = {
        str(index): torch.Size(shape)
        for index, shape in enumerate([(5, 4), (30,), (), (10, 10), (0,), (7,), (1, 2, 3)])
    }
    tensors = host_tensors(shapes, torch.float32, torch.device("cpu"))
    for index, (name, tensor) in enumerate(tensors.items()):
        assert (tensor.shape, tensor.dtype) == (shapes[name], torch.float32)
        assert tensor.is_contiguous()
        tensor.fill_(index)
    for index, tensor in enumerate(tensors.values()):
        assert (tensor == index).all()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    assert list(held.values()) == [4 * sum(shape.numel() for shape in shapes.values())]


def test_sharded_files_of_a_version_are_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red before: transformers removed them when it wrote the configuration."""
    monkeypatch.setattr(safetensors_files, "_MIN_FILE_BYTES", 10_000)
    model = load(write_folder(tmp_path / "base", "qwen3"))
    folder = tmp_path / "weights"
    folder.mkdir()
    copy = WeightsCopy(model)
    copy.take()
    copy.write(folder)
    shards = {path.name: path.open("rb") for path in folder.glob("model-*-of-*.safetensors")}
    assert len(shards) > 1
    copy.write(folder)
    for name, opened in shards.items():
        with opened:
            assert os.fstat(opened.fileno()).st_ino == (folder / name).stat().st_ino


def test_a_copy_that_the_host_has_no_memory_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(write_folder(tmp_path / "base", "qwen3"))
    memory = SimpleNamespace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    error = error_of(WeightsCopy(model).take)
    assert error.code is ErrorCode.RESOURCE_EXHAUSTED
    assert "0.0 GiB are free" in error.message
