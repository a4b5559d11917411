"""A window's only backward has the room of the sums that it does not need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.planner.activation_plan import max_tokens
from ratoon.planner.device_costs import H200_RATES
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.train.ranks import rank
from ratoon.train.spec import PassHooks, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import AdamWConfig, FullTuning
from tests.train.rank_runs import ranked, sequences_of
from tests.train.trainer_runs import assert_close, make_batch, make_loss, make_step, weights_of

_BATCH = make_batch(0, num_groups=40)
_SPEC = TrainerSpec(
    model=ModelSpec(
        base=PresetBase(name="tiny"), tuning=FullTuning(), dtype=ModelDtype.FLOAT64, seed=0
    ),
    optimizer=AdamWConfig(),
    deterministic=True,
    micro_batch_tokens=None,
    keep_reference=False,
    attention_backend="",
    device="cpu",
    num_threads=1,
)


@pytest.fixture
def large() -> Trainer:
    return Trainer.create(_SPEC)


@pytest.fixture
def small(large: Trainer, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """On a device that holds `_BATCH` at once, but not beside gradient sums."""
    trainer = Trainer.create(_SPEC)
    _lend(trainer, large.prepare_forward(_BATCH).plan.packed_tokens, monkeypatch)
    return trainer


def _lend(trainer: Trainer, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend it the memory of devices that hold so many tokens, but not beside gradient sums."""
    named, sizes = trainer.model.named_trainable(), trainer.model.sizes
    layers = [sum(named[name].nbytes for name in names) for names in trainer.model.named_layers()]
    beside_its_own = replace(sizes, layer_gradient_bytes=max(layers))
    room = next(n for n in range(0, 1 << 30, 1 << 16) if max_tokens(beside_its_own, n) >= tokens)
    sums = sum(parameter.nbytes for parameter in named.values())
    assert 0 < max_tokens(sizes, room - sums) < tokens
    monkeypatch.setattr(rank, "activation_bytes", lambda _device, beside: room - beside)
    monkeypatch.setattr(trainer, "_rates", H200_RATES)
    trainer.limit_activations()


def _plan(trainer: Trainer, batch: RolloutBatch = _BATCH) -> UpdatePlan:
    return trainer.prepare(batch, make_loss(batch)).plan


def _run(trainer: Trainer, batch: RolloutBatch) -> list[int | None]:
    """A forward-backward; the most tokens that activations have room for while it runs."""
    room: list[int | None] = []
    trainer.forward_backward(
        trainer.prepare(batch, make_loss(batch), _plan(trainer, batch)),
        PassHooks(on_progress=lambda *_: room.append(trainer.model.max_tokens())),
    )
    return room


def test_it_runs_whole_and_what_follows_in_its_window_is_cut(small: Trainer) -> None:
    tokens, room = _plan(small).packed_tokens, small.model.max_tokens()
    assert room is not None
    assert room < tokens
    for _ in range(2):
        assert _plan(small).is_one_backward
        assert small.prepare_forward(_BATCH).plan == _plan(small)
        assert min(n for n in _run(small, _BATCH) if n is not None) >= tokens
        assert small.model.max_tokens() == room
        assert not _plan(small).is_one_backward
        assert small.prepare_forward(_BATCH).plan == _plan(small)
        assert set(_run(small, _BATCH)) == {room}
        small.discard_gradients()


@pytest.mark.parametrize("num_passes", [1, pytest.param(2, marks=pytest.mark.more)])
def test_weights_are_those_of_a_device_that_holds_all(
    large: Trainer, small: Trainer, num_passes: int
) -> None:
    for trainer in (large, small):
        for seed in range(num_passes):
            _run(trainer, make_batch(seed, num_groups=40))
        trainer.optim_step(make_step(trainer, make_loss(_BATCH)))
    assert_close(weights_of(small), weights_of(large))


def test_ranks_that_run_one_backward_each_have_that_room_too(
    large: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = cpu_planner(1 << 30, num_ranks=2).plan(*sequences_of(_BATCH)).micro_batches
    tokens = max(part.packed_tokens for part in parts)
    with ranked(_SPEC, 2) as (trainer, _):
        _lend(trainer, tokens, monkeypatch)
        plan, room = _plan(trainer), trainer.model.max_tokens()
        assert plan.is_one_backward
        assert {part.rank for part in plan.micro_batches} == {0, 1}
        assert room is not None
        assert room < tokens <= min(n for n in _run(trainer, _BATCH) if n is not None)
        _run(large, _BATCH)
        for each in (trainer, large):
            each.optim_step(make_step(each, make_loss(_BATCH)))
        assert_close(weights_of(trainer), weights_of(large))


@pytest.mark.more
def test_a_batch_that_has_no_room_even_so_is_cut(small: Trainer) -> None:
    batch = make_batch(1, num_groups=120)
    assert not _plan(small, batch).is_one_backward
    assert set(_run(small, batch)) == {small.model.max_tokens()}


def test_a_step_tells_what_its_forwards_were_planned_to_hold(
    small: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a whole micro-batch the plan has the memory in use before and the activations, but no
    sums."""
    monkeypatch.setattr(rank, "allocated_bytes", lambda _device: 1 << 40)
    plan = _plan(small)
    report = small.update(
        small.prepare(_BATCH, make_loss(_BATCH), plan), make_step(small, make_loss(_BATCH))
    )
    assert plan.is_one_backward
    assert report.planned_memory_bytes == (1 << 40) + small.model.planned_bytes
    assert small.model.planned_bytes > 0


def test_a_cpu_has_no_plan_of_its_memory(large: Trainer) -> None:
    report = large.update(
        large.prepare(_BATCH, make_loss(_BATCH), _plan(large)), make_step(large, make_loss(_BATCH))
    )
    assert report.planned_memory_bytes is None
