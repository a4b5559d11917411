"""Checkpoints of each kind of optimizer states, and the trainer that keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.export import export_weights
from ratoon.model.spec import FolderBase, LoraTuning, ModelDtype
from ratoon.train.checkpoint import MANIFEST_NAME, Snapshot, load_checkpoint, write_snapshot
from ratoon.train.config import OptimizerStates
from ratoon.train.digest import StateDigest
from ratoon.train.narrow_adamw import NarrowAdamW
from ratoon.train.trainer import Trainer
from tests.train.optimizer_runs import (
    CONFIG,
    NARROW,
    copied,
    make_gradients,
    make_parameters,
    optim_step,
)
from tests.train.trainer_runs import (
    assert_equal,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
    weights_of,
)


def _trainer(
    base: FolderBase, kind: OptimizerStates, *, tuning: LoraTuning | None = None
) -> Trainer:
    spec = make_trainer(base, dtype=ModelDtype.BFLOAT16, tuning=tuning).spec
    return Trainer.create(replace(spec, optimizer_states=kind))


def _update(trainer: Trainer, seed: int) -> None:
    batch = make_batch(seed)
    loss = make_loss(batch)
    step = make_step(trainer, loss)
    assert not trainer.update(batch, loss, step, trainer.prepare(batch, loss).plan).skipped


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("tuning", [None, LoraTuning(rank=2, alpha=4.0)])
def test_continued_run_has_the_bits_of_an_uninterrupted_one(
    base: FolderBase, tmp_path: Path, kind: OptimizerStates, tuning: LoraTuning | None
) -> None:
    straight = _trainer(base, kind, tuning=tuning)
    start = weights_of(straight)
    for seed in range(2):
        _update(straight, seed)
    straight.save_checkpoint(tmp_path / "checkpoint")
    resumed = _trainer(base, kind, tuning=tuning)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.version == 2
    assert_equal(weights_of(resumed), weights_of(straight))
    for seed in range(2, 4):
        _update(straight, seed)
        _update(resumed, seed)
    assert_equal(weights_of(resumed), weights_of(straight))
    assert any(not torch.equal(start[name], now) for name, now in weights_of(straight).items())


@pytest.mark.parametrize("kind", NARROW)
def test_every_tensor_comes_back_bit_for_bit(
    base: FolderBase, tmp_path: Path, kind: OptimizerStates
) -> None:
    model = make_trainer(base).spec.model
    optimizer = NarrowAdamW(make_parameters(), CONFIG, kind, 0)
    for number in range(2):
        optimizer.step(make_gradients(number), 1.0, optim_step())
    digest_of = StateDigest(torch.device("cpu")).of
    state = optimizer.state().on_host()
    snapshot = Snapshot(state=state, model=model, version=7, digest=digest_of(state))
    write_snapshot(tmp_path / "one", snapshot)
    fresh = NarrowAdamW(make_parameters(1), CONFIG, kind, 0)
    loaded = load_checkpoint(tmp_path / "one", fresh.state(), model, digest_of)
    assert loaded.version == 7
    assert loaded.state.num_steps == 2
    assert loaded.state.kind is kind
    saved, back = copied(optimizer.state()), copied(loaded.state)
    assert_equal(back, saved)
    assert {name: t.dtype for name, t in back.items()} == {n: t.dtype for n, t in saved.items()}
    dtypes = {tensor.dtype for tensor in back.values()}
    coded = {torch.uint8, torch.float32} if kind is OptimizerStates.BF16_8BIT else set()
    assert dtypes == {torch.bfloat16} | coded


@pytest.mark.parametrize(("kind", "other"), list(permutations(OptimizerStates, 2)))
def test_checkpoint_of_another_kind_is_refused_by_name(
    base: FolderBase, tmp_path: Path, kind: OptimizerStates, other: OptimizerStates
) -> None:
    saving = _trainer(base, kind)
    _update(saving, 0)
    saving.save_checkpoint(tmp_path / "one")
    trainer = _trainer(base, other)
    before = weights_of(trainer)
    with pytest.raises(RatoonError) as caught:
        trainer.load_checkpoint(tmp_path / "one")
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == "checkpoint.optimizer_states"
    assert caught.value.got == kind.value
    assert_equal(weights_of(trainer), before)
    assert trainer.version == 0


def test_manifest_that_does_not_name_its_kind_is_of_fp32_states(
    base: FolderBase, tmp_path: Path
) -> None:
    """As those were written before there was another kind."""
    saving = _trainer(base, OptimizerStates.FP32)
    _update(saving, 0)
    saving.save_checkpoint(tmp_path / "one")
    path = tmp_path / "one" / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    assert manifest.pop("optimizer_states") == "fp32"
    del manifest["state_digest"], manifest["manifest_digest"]
    manifest["format"] = 1
    path.write_text(json.dumps(manifest))
    trainer = _trainer(base, OptimizerStates.FP32)
    trainer.load_checkpoint(tmp_path / "one")
    assert_equal(weights_of(trainer), weights_of(saving))
    with pytest.raises(RatoonError) as caught:
        _trainer(base, OptimizerStates.BF16_8BIT).load_checkpoint(tmp_path / "one")
    assert caught.value.field == "checkpoint.optimizer_states"


@pytest.mark.parametrize("kind", NARROW)
def test_published_weights_are_the_parameters(
    base: FolderBase, tmp_path: Path, kind: OptimizerStates
) -> None:
    trainer = _trainer(base, kind)
    _update(trainer, 0)
    state = trainer.export_state()
    parameters: dict[str, Tensor] = dict(trainer.model.named_trainable())
    assert state.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert state[name].data_ptr() == parameter.data_ptr()
    for folder, weights in (("given", state), ("own", None)):
        (tmp_path / folder).mkdir()
        export_weights(trainer.model, tmp_path / folder, weights)
    given, own = ((tmp_path / f / "model.safetensors").read_bytes() for f in ("given", "own"))
    assert given == own


def test_fingerprint_names_the_states(base: FolderBase) -> None:
    names = {_trainer(base, kind).fingerprint()["optimizer_states"] for kind in OptimizerStates}
    assert names == {"fp32", "bf16_stochastic", "bf16_8bit"}


def test_states_without_masters_are_refused_for_wider_models(base: FolderBase) -> None:
    spec = make_trainer(base, dtype=ModelDtype.FLOAT32).spec
    with pytest.raises(RatoonError) as caught:
        Trainer.create(replace(spec, optimizer_states=OptimizerStates.BF16_8BIT))
    assert caught.value.field == "optimizer_states"
