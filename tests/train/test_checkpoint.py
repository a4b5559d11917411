"""Checkpoints: continued runs give the same bits, damage is found by name, nothing half-applies."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.stream.files import digest_file, seal_document, unseal_document
from ratoon.train.checkpoint import states_name
from ratoon.train.gradient_window import WindowState
from ratoon.train.saved_state import MANIFEST_NAME
from ratoon.train.trainer import Trainer
from ratoon_proto.types import FullTuning, LoraTuning, LossKind
from tests.tiny_models import write_folder
from tests.train.trainer_runs import (
    FROZEN,
    OUTCOMES,
    assert_equal,
    forward_backward,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
    update,
    weights_of,
)

STATES_NAME = states_name(0, 1)


@pytest.mark.parametrize("tuning", [FullTuning(), LoraTuning(rank=2, alpha=4.0)], ids=str)
def test_a_critic_goes_on_with_the_same_bits(
    base: FolderBase, tmp_path: Path, tuning: FullTuning | LoraTuning
) -> None:
    """Its head and the head's moments come back; a policy without one refuses them by name."""
    options: dict[str, Any] = {"dtype": ModelDtype.FLOAT32, "tuning": tuning}

    def step(trainer: Trainer, seed: int) -> None:
        batch = make_batch(seed, **OUTCOMES[LossKind.VALUE])
        loss = make_loss(batch, LossKind.VALUE)
        trainer.update(trainer.prepare(batch, loss), make_step(trainer, loss))

    trainer = make_trainer(base, value_head=True, **options)
    step(trainer, 0)
    trainer.snapshot().write(tmp_path / "one")
    step(trainer, 1)
    again = make_trainer(base, value_head=True, **options)
    again.load_checkpoint(tmp_path / "one")
    assert again.state_digest() != trainer.state_digest()
    step(again, 1)
    assert again.state_digest() == trainer.state_digest()
    head = again.model.value_head
    assert head is not None
    assert head.weight.all()
    with pytest.raises(RatoonError) as refused:
        make_trainer(base, **options).load_checkpoint(tmp_path / "one")
    assert refused.value.field == "checkpoint.model"
    assert "value_head" in refused.value.message


def test_a_checkpoint_of_before_there_were_critics_is_read(
    base: FolderBase, tmp_path: Path
) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    trainer.snapshot().write(tmp_path / "one")
    document = unseal_document((tmp_path / "one" / MANIFEST_NAME).read_bytes())
    assert "value_head" not in document["model"]


_update = partial(update, kl=FROZEN)


@pytest.fixture(scope="module")
def _written(base: FolderBase, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    _update(trainer, 0)
    folder = tmp_path_factory.mktemp("written") / "one"
    trainer.snapshot().write(folder)
    _update(trainer, 1)
    return trainer, folder


@pytest.fixture
def written(_written: tuple[Trainer, Path], tmp_path: Path) -> tuple[Trainer, Path]:
    """A trainer at version 2, which no test changes, and a copy of its checkpoint of version 1."""
    trainer, folder = _written
    return trainer, shutil.copytree(folder, tmp_path / "one")


@pytest.mark.parametrize(
    ("architecture", "tuning", "dtype"),
    [
        ("qwen3", FullTuning(), ModelDtype.FLOAT32),
        ("qwen3", FullTuning(), ModelDtype.BFLOAT16),
        ("qwen3", LoraTuning(rank=2, alpha=4.0), ModelDtype.FLOAT32),
        (
            "qwen3",
            LoraTuning(rank=2, alpha=4.0, target_modules=("embed_tokens", "lm_head")),
            ModelDtype.BFLOAT16,
        ),
        ("qwen3_moe", LoraTuning(rank=2, alpha=4.0), ModelDtype.BFLOAT16),
    ],
)
def test_continued_run_has_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, architecture: str, tuning: FullTuning | LoraTuning, dtype: ModelDtype
) -> None:
    """Trap 10: moments and step count come back too, and the frozen reference is the first one."""
    base = FolderBase(folder=str(write_folder(tmp_path / "base", architecture)))
    straight = make_trainer(base, tuning=tuning, dtype=dtype)
    for seed in range(2):
        _update(straight, seed)
    size = straight.snapshot().write(tmp_path / "checkpoint")
    assert size == sum(path.stat().st_size for path in (tmp_path / "checkpoint").iterdir())
    resumed = make_trainer(base, tuning=tuning, dtype=dtype)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.version == straight.version == 2
    assert_equal(weights_of(resumed), weights_of(straight))
    for seed in range(2, 4):
        _update(straight, seed)
        _update(resumed, seed)
    assert resumed.version == 4
    assert_equal(weights_of(resumed), weights_of(straight))


def test_load_goes_back_and_empties_the_window(base: FolderBase, tmp_path: Path) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    _update(trainer, 0)
    trainer.snapshot().write(tmp_path / "one")
    then = weights_of(trainer)
    batch = make_batch(7)
    reference = trainer.forward(
        trainer.prepare_forward(batch), with_entropy=False, use_reference=True
    ).logprobs
    _update(trainer, 1)
    forward_backward(trainer, batch, make_loss(batch, kl=FROZEN))
    assert any(not torch.equal(then[name], now) for name, now in weights_of(trainer).items())
    trainer.load_checkpoint(tmp_path / "one")
    assert trainer.version == 1
    assert trainer.window_state is WindowState.EMPTY
    assert_equal(weights_of(trainer), then)
    again = trainer.forward(
        trainer.prepare_forward(batch), with_entropy=False, use_reference=True
    ).logprobs
    np.testing.assert_array_equal(again, reference)
    policy = trainer.forward(
        trainer.prepare_forward(batch), with_entropy=False, use_reference=False
    ).logprobs
    assert np.abs(policy - reference).max() > 1e-4


def _flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _remove(path: Path) -> None:
    path.unlink()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_flip_byte, _cut, _remove, _fifo, _folder])
def test_damaged_file_is_named_and_nothing_is_applied(
    written: tuple[Trainer, Path], damage: Callable[[Path], None]
) -> None:
    """Trap 11, for loads: a checkpoint is applied whole or not at all."""
    trainer, folder = written
    damage(folder / STATES_NAME)
    now = weights_of(trainer)
    with pytest.raises(RatoonError) as caught:
        trainer.load_checkpoint(folder)
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.field == STATES_NAME
    assert STATES_NAME in caught.value.message
    assert trainer.version == 2
    assert_equal(weights_of(trainer), now)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 2}'])
def test_manifest_that_is_no_manifest_is_refused(written: tuple[Trainer, Path], text: str) -> None:
    trainer, folder = written
    (folder / MANIFEST_NAME).write_text(text)
    with pytest.raises(RatoonError) as caught:
        trainer.load_checkpoint(folder)
    assert caught.value.field == MANIFEST_NAME


@pytest.mark.parametrize(
    "change",
    [
        {"format": 4},
        {"files": []},
        {"files": [{"name": "../x", "size_bytes": 1, "digest": "0"}]},
        {"version": "x"},
        {"seq": None},
    ],
    ids=str,
)
def test_sealed_manifest_of_other_fields_is_refused(
    written: tuple[Trainer, Path], change: dict[str, object]
) -> None:
    trainer, folder = written
    manifest = unseal_document((folder / MANIFEST_NAME).read_bytes())
    (folder / MANIFEST_NAME).write_bytes(seal_document(manifest | change))
    with pytest.raises(RatoonError) as caught:
        trainer.load_checkpoint(folder)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INTERNAL, MANIFEST_NAME)


def test_manifest_with_any_byte_changed_is_refused(written: tuple[Trainer, Path]) -> None:
    """Its version and number of steps are in no other file."""
    trainer, folder = written
    path = folder / MANIFEST_NAME
    data = path.read_bytes()
    for index in range(len(data)):
        flipped = bytearray(data)
        flipped[index] ^= 1 << index // 8 % 8
        path.write_bytes(flipped)
        with pytest.raises(RatoonError) as caught:
            trainer.load_checkpoint(folder)
        assert caught.value.field == MANIFEST_NAME


def _shift(tensors: dict[str, Tensor]) -> None:
    tensors[_EMBEDDING][0, 0] += 1


def test_state_with_another_digest_is_refused_with_both(base: FolderBase, tmp_path: Path) -> None:
    """Files that are whole, and a manifest that agrees with them, of numbers never trained."""
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    _update(trainer, 0)
    trainer.snapshot().write(tmp_path / "one")
    expected = trainer.state_digest()
    _rewrite(tmp_path / "one", _shift)
    _update(trainer, 1)
    now = trainer.state_digest()
    with pytest.raises(RatoonError) as caught:
        trainer.load_checkpoint(tmp_path / "one")
    error = caught.value
    assert (error.code, error.field) == (ErrorCode.INTERNAL, "state_digest")
    assert error.expected == expected
    assert error.got not in (expected, now)
    assert expected in error.message
    assert str(error.got) in error.message
    assert (trainer.state_digest(), trainer.version) == (now, 2)


def test_snapshot_stays_while_training_goes_on(base: FolderBase, tmp_path: Path) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.BFLOAT16)
    _update(trainer, 0)
    snapshot = trainer.snapshot()
    assert (snapshot.version, snapshot.digest) == (1, trainer.state_digest())
    sizes: list[int] = []
    writing = threading.Thread(target=lambda: sizes.append(snapshot.write(tmp_path / "one")))
    _update(trainer, 1)
    writing.start()
    _update(trainer, 2)
    writing.join()
    assert sizes == [sum(path.stat().st_size for path in (tmp_path / "one").iterdir())]
    later = trainer.state_digest()
    trainer.load_checkpoint(tmp_path / "one")
    assert trainer.version == 1
    assert trainer.state_digest() == snapshot.digest != later


@pytest.mark.parametrize("name", [STATES_NAME, MANIFEST_NAME])
def test_written_snapshot_is_read_back(base: FolderBase, tmp_path: Path, name: str) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    before = trainer.snapshot()
    _update(trainer, 0)
    snapshot = trainer.snapshot()
    snapshot.write(tmp_path / "one")
    snapshot.verify(tmp_path / "one")
    with pytest.raises(RatoonError, match=before.digest):
        before.verify(tmp_path / "one")
    _flip_byte(tmp_path / "one" / name)
    with pytest.raises(RatoonError, match=name):
        snapshot.verify(tmp_path / "one")


def test_missing_checkpoint_is_not_found(base: FolderBase, tmp_path: Path) -> None:
    with pytest.raises(RatoonError) as caught:
        make_trainer(base, dtype=ModelDtype.FLOAT32).load_checkpoint(tmp_path / "none")
    assert caught.value.code is ErrorCode.CHECKPOINT_NOT_FOUND


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the weights and make the manifest agree, as a careless tool might."""
    path = folder / STATES_NAME
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    manifest = unseal_document((folder / MANIFEST_NAME).read_bytes())
    for entry in manifest["files"]:
        if entry["name"] == STATES_NAME:
            entry["digest"], entry["size_bytes"] = digest_file(path), path.stat().st_size
    (folder / MANIFEST_NAME).write_bytes(seal_document(manifest))


_EMBEDDING = "weights/model.embed_tokens.weight"


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors[_EMBEDDING]


def _reshape(tensors: dict[str, Tensor]) -> None:
    tensors[_EMBEDDING] = tensors[_EMBEDDING][1:].contiguous()


def _narrow(tensors: dict[str, Tensor]) -> None:
    tensors[_EMBEDDING] = tensors[_EMBEDDING].to(torch.bfloat16)


@pytest.mark.parametrize("change", [_drop, _reshape, _narrow])
def test_other_tensors_are_refused_by_name(
    written: tuple[Trainer, Path], change: Callable[[dict[str, Tensor]], None]
) -> None:
    trainer, folder = written
    _rewrite(folder, change)
    now = weights_of(trainer)
    with pytest.raises(RatoonError, match=_EMBEDDING) as caught:
        trainer.load_checkpoint(folder)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert_equal(weights_of(trainer), now)


def test_checkpoint_of_another_model_is_refused(base: FolderBase, tmp_path: Path) -> None:
    """The frozen part of the model is not in the checkpoint: its spec must be the same."""
    trainer = make_trainer(base)
    trainer.snapshot().write(tmp_path / "one")
    spec = trainer.spec
    other = Trainer.create(replace(spec, model=replace(spec.model, seed=1)))
    with pytest.raises(RatoonError) as caught:
        other.load_checkpoint(tmp_path / "one")
    assert caught.value.field == "checkpoint.model"


def test_save_appears_whole_or_not_at_all(
    base: FolderBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32)
    trainer.snapshot().write(tmp_path / "one")
    with pytest.raises(FileExistsError):
        trainer.snapshot().write(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]

    def full_disk(folder: Path) -> None:
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr("ratoon.stream.files.fsync_tree", full_disk)
    with pytest.raises(OSError, match="No space"):
        trainer.snapshot().write(tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]
