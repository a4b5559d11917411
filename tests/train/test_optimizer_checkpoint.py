"""Checkpoints of each kind of optimizer states, and the trainer that keeps them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.export import export_weights
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.train.checkpoint import Snapshot, read_manifest, read_states, write_states
from ratoon.train.optim.bf16_adamw import Bf16AdamW
from ratoon.train.optim.digest import StateDigest
from ratoon.train.spec import OptimizerStates
from ratoon.train.trainer import Trainer
from ratoon_proto.types import LoraTuning
from tests.train.optimizer_runs import (
    CONFIG,
    copied,
    make_gradients,
    make_parameters,
    optim_step,
    take_step,
)
from tests.train.trainer_runs import (
    assert_equal,
    make_trainer,
    state_of,
    update,
    weights_of,
)

_WIDE, _BF16, _REMAINDER, _CODES = torch.float32, torch.bfloat16, torch.int16, torch.uint8
_DTYPES = {
    OptimizerStates.FP32: {_WIDE},
    OptimizerStates.BF16_SPLIT: {_BF16, _REMAINDER, _WIDE},
    # Scales of codes are float32; a parameter that is not whole blocks has bfloat16 moments.
    OptimizerStates.BF16_SPLIT_8BIT: {_BF16, _REMAINDER, _CODES, _WIDE},
    OptimizerStates.BF16_STOCHASTIC: {_BF16},
    OptimizerStates.BF16_8BIT: {_BF16, _CODES, _WIDE},
}


def _trainer(
    base: FolderBase, kind: OptimizerStates, *, tuning: LoraTuning | None = None
) -> Trainer:
    spec = make_trainer(base, dtype=ModelDtype.BFLOAT16, tuning=tuning).spec
    return Trainer.create(replace(spec, optimizer_states=kind))


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_every_tensor_comes_back_bit_for_bit(
    base: FolderBase, tmp_path: Path, kind: OptimizerStates
) -> None:
    model = make_trainer(base).spec.model
    own = make_parameters()
    optimizer = Bf16AdamW(own, CONFIG, kind, 0)
    for number in range(2):
        take_step(optimizer, make_gradients(number), 1.0, optim_step())
    state = optimizer.state().on_host()
    digest = StateDigest(torch.device("cpu")).of(state)
    snapshot = Snapshot(
        write_files=lambda folder: [write_states(folder, state, 0, 1)],
        kind=kind,
        num_steps=state.num_steps,
        model=model,
        version=7,
        digest=digest,
    )
    snapshot.write(tmp_path / "one")
    others = make_parameters(1)
    fresh = Bf16AdamW(others, CONFIG, kind, 0)
    manifest = read_manifest(tmp_path / "one", kind, model)
    assert (manifest.version, manifest.state_digest) == (7, digest)
    loaded = read_states(tmp_path / "one", manifest, fresh.state())
    assert loaded.num_steps == 2
    assert loaded.kind is kind
    saved, back = copied(optimizer.state()), copied(loaded)
    assert_equal(back, saved)
    assert {name: t.dtype for name, t in back.items()} == {n: t.dtype for n, t in saved.items()}
    assert {tensor.dtype for tensor in back.values()} == _DTYPES[kind]
    fresh.load(loaded)
    assert_equal(copied(fresh.state()), saved)
    assert_equal(
        {n: p.detach() for n, p in others.items()}, {n: p.detach() for n, p in own.items()}
    )


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (OptimizerStates.FP32, OptimizerStates.BF16_SPLIT),
        (OptimizerStates.BF16_8BIT, OptimizerStates.FP32),
    ],
)
def test_checkpoint_of_another_kind_is_refused_by_name(
    base: FolderBase, tmp_path: Path, kind: OptimizerStates, other: OptimizerStates
) -> None:
    saving = _trainer(base, kind)
    update(saving, 0)
    saving.snapshot().write(tmp_path / "one")
    trainer = _trainer(base, other)
    before = weights_of(trainer)
    with pytest.raises(RatoonError) as caught:
        trainer.load_checkpoint(tmp_path / "one")
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "checkpoint.optimizer_states"
    assert caught.value.got == kind.value
    assert_equal(weights_of(trainer), before)
    assert trainer.version == 0


@pytest.mark.parametrize("kind", [OptimizerStates.FP32, OptimizerStates.BF16_SPLIT])
def test_published_weights_are_the_parameters(
    base: FolderBase, tmp_path: Path, kind: OptimizerStates
) -> None:
    trainer = _trainer(base, kind)
    update(trainer, 0)
    for folder in ("copied", "own"):
        (tmp_path / folder).mkdir()
    trainer.copy_weights().write(tmp_path / "copied")
    export_weights(trainer.model, tmp_path / "own")
    copied, own = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("copied", "own")
    )
    assert_equal(copied, own)
    parameters = trainer.model.named_trainable()
    assert own.keys() <= parameters.keys()
    assert_equal(own, {name: parameters[name].detach() for name in own})


@pytest.mark.parametrize("tuning", [None, LoraTuning(rank=2, alpha=4.0)])
def test_a_choice_that_is_left_open_keeps_masters_and_is_told(
    base: FolderBase, tuning: LoraTuning | None
) -> None:
    spec = make_trainer(base, dtype=ModelDtype.BFLOAT16, tuning=tuning).spec
    trainer = Trainer.create(replace(spec, optimizer_states=None))
    assert trainer.info().optimizer_states == "bf16_split"
    assert trainer.fingerprint()["optimizer_states"] == "bf16_split"
    assert state_of(trainer).kind is OptimizerStates.BF16_SPLIT
    assert trainer.spec.optimizer_states is OptimizerStates.BF16_SPLIT


@pytest.mark.parametrize("kind", [OptimizerStates.BF16_STOCHASTIC, OptimizerStates.BF16_SPLIT_8BIT])
def test_a_step_that_rounding_outweighs_is_warned_about(
    base: FolderBase, kind: OptimizerStates
) -> None:
    trainer = _trainer(base, kind)
    warned = [
        [w for w in update(trainer, 0, learning_rate=rate).warnings if w.kind == "rounded_updates"]
        for rate in (1e-6, 1e-5, 0.0)
    ]
    is_alone = kind in (OptimizerStates.BF16_STOCHASTIC, OptimizerStates.BF16_8BIT)
    assert [len(found) for found in warned] == [int(is_alone), 0, 0]
    if is_alone:
        assert "1e-06" in str(warned[0][0])
        assert kind.value in str(warned[0][0])
