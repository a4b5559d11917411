"""Compiling ahead of the first call: it is in nobody's way, and changes nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon.model import layers
from ratoon.model.loader import read_model
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.train.trainer import Trainer
from ratoon_proto.types import FullTuning, LoraTuning, Shard
from tests.model.compiled import eager_graphs
from tests.tiny_models import write_folder
from tests.train.rank_runs import ranked, update_over
from tests.train.trainer_runs import (
    assert_equal,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
    weights_of,
)


def _update(trainer: Trainer, seed: int = 5) -> int:
    """Packed tokens of its one micro-batch."""
    batch = make_batch(seed)
    loss = make_loss(batch)
    prepared = trainer.prepare(batch, loss)
    trainer.update(prepared, make_step(trainer, loss))
    (whole,) = prepared.plan.micro_batches
    return whole.packed_tokens


@pytest.mark.parametrize("tuning", [FullTuning(), LoraTuning(rank=2, alpha=4.0)])
def test_everything_else_has_the_same_bits(
    base: FolderBase, tuning: FullTuning | LoraTuning
) -> None:
    ahead, plain = (
        make_trainer(base, dtype=ModelDtype.FLOAT32, tuning=tuning, tokens=1000) for _ in range(2)
    )
    ahead.compile_ahead([300])
    assert ahead.state_digest() == plain.state_digest()
    ahead.await_compiler()
    ahead.warm_up(3000)
    assert ahead.is_window_empty
    assert all(p.grad is None for p in ahead.model.named_trainable().values())
    for trainer in (ahead, plain):
        _update(trainer)
    assert_equal(weights_of(ahead), weights_of(plain))


def test_a_pass_compiles_nothing_more(base: FolderBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though only a few tokens were run, of another range."""
    monkeypatch.setattr(layers, "_MOST_TOKENS", (61, 1021))
    spec = make_trainer(base, dtype=ModelDtype.FLOAT32, tokens=1000).spec
    with eager_graphs() as graphs:
        model = read_model(spec.model).place(torch.device("cpu"), compile_layers=True)
        trainer = Trainer(spec, model)
        trainer.compile_ahead([500])
        trainer.await_compiler()
        assert len(graphs) == 1
        batch = make_batch(5)
        report = trainer.forward_backward(trainer.prepare(batch, make_loss(batch)))
        assert 61 < report.packed_tokens < 1021
        assert len(graphs) == 1


def test_who_needs_the_model_waits_for_one_number_of_tokens_alone(
    base: FolderBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32, tokens=1000)
    ran, may_go = list[int](), threading.Event()

    def slow(num_tokens: int) -> None:
        ran.append(num_tokens)
        may_go.wait()

    monkeypatch.setattr(trainer.ranks.own, "warm_up", slow)
    trainer.compile_ahead([3000, 300, 30])
    update = threading.Thread(target=_update, args=(trainer,))
    update.start()
    update.join(0.2)
    assert update.is_alive()
    may_go.set()
    update.join()
    assert ran == [3000]
    assert trainer.version == 1


def test_a_failure_fails_no_update(base: FolderBase, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32, tokens=1000)

    def broken(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(trainer.ranks.own, "warm_up", broken)
    trainer.compile_ahead([300])
    _update(trainer)
    assert trainer.version == 1


def test_what_ran_is_known_by_its_range(base: FolderBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_MOST_TOKENS", (61, 1021))
    trainer = make_trainer(base, dtype=ModelDtype.FLOAT32, tokens=1000)
    trainer.warm_up(300)
    assert trainer.run_tokens == {}
    tokens = [_update(trainer, seed) for seed in range(3)]
    assert len({*tokens}) == 3
    assert trainer.run_tokens == {1021: max(tokens)}


def test_policies_of_one_geometry_have_the_same_graphs(base: FolderBase, tmp_path: Path) -> None:
    """Whatever their threads; those of another mode, geometry or tuning have others."""
    options: dict[str, Any] = {"dtype": ModelDtype.FLOAT32}
    trainer = make_trainer(base, **options)
    known = trainer.graphs()
    trainer.spec = replace(trainer.spec, num_threads=7)
    assert trainer.graphs() == known
    trainer.spec = replace(trainer.spec, deterministic=not trainer.spec.deterministic)
    assert trainer.graphs() != known
    other = FolderBase(folder=str(write_folder(tmp_path / "other", "qwen2")))
    assert make_trainer(other, **options).graphs() != known
    adapted = make_trainer(base, tuning=LoraTuning(rank=2, alpha=4.0), **options)
    assert adapted.graphs() != known


def test_each_of_several_ranks_compiles_ahead(base: FolderBase) -> None:
    spec = make_trainer(base, dtype=ModelDtype.FLOAT32).spec
    weights: list[dict[str, torch.Tensor]] = []
    for is_ahead in (True, False):
        with ranked(spec, 2, 100, Shard.GRADIENTS) as (two, _):
            if is_ahead:
                two.compile_ahead([300])
            update_over(two, 0, (0, 1))
            assert not two.is_compiling
            weights.append(weights_of(two))
    assert_equal(*weights)
