"""Policies whose adapters take turns on one model: each gets the bits that it gets alone."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec, PresetBase
from ratoon.train.loss.spec import OptimStep
from ratoon.train.spec import OptimizerStates, PassHooks, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import AdamWConfig, FullTuning, LoraTuning, LossKind, ParallelLayout
from tests.tiny_models import write_folder
from tests.train.trainer_runs import forward_backward, make_batch, make_loss, make_step, update
from tests.work_units import rows

# Name -> architecture, dtype, adapted modules.
KINDS = {
    "dense": ("qwen3", ModelDtype.FLOAT32, ()),
    "dense_bf16": ("qwen3", ModelDtype.BFLOAT16, ("q_proj", "v_proj", "down_proj")),
    "experts": ("qwen3_moe", ModelDtype.FLOAT32, ()),
    "heads": ("qwen3", ModelDtype.FLOAT32, ("q_proj", "embed_tokens", "lm_head")),
}
SEEDS = (1, 2, 3)
# What each operation leaves: its name and result, the digest of the state, that of open sums.
Trace = list[tuple[str, str, str]]


def spec_of(root: Path, kind: str, seed: int) -> TrainerSpec:
    """Tenants differ in all that is theirs: adapter, optimizer, cuts."""
    architecture, dtype, targets = KINDS[kind]
    tuning = LoraTuning(rank=4, alpha=8.0, target_modules=targets)
    base = FolderBase(folder=str(write_folder(root / kind, architecture, seed=1)))
    states = OptimizerStates.FP32 if dtype is ModelDtype.FLOAT32 else OptimizerStates.BF16_SPLIT
    return TrainerSpec(
        model=ModelSpec(base=base, tuning=tuning, dtype=dtype, seed=seed),
        optimizer=AdamWConfig(weight_decay=0.01 * seed),
        deterministic=True,
        micro_batch_tokens=48 + seed,
        keep_reference=True,
        attention_backend="",
        device="cpu",
        num_threads=1,
        optimizer_states=states,
        self_check_every=2,
        max_tenants=len(SEEDS),
    )


def script(trainer: Trainer, folder: Path) -> Iterator[str]:
    """Windows of two forward-backwards, an update, a Forward, a checkpoint and its return, exported
    weights; yields after each operation."""
    seed = trainer.spec.model.seed
    for window in range(2):
        step: OptimStep | None = None
        for part in range(2):
            batch = make_batch(100 * seed + 10 * window + part, num_groups=2)
            loss = make_loss(batch, LossKind.GRPO)
            report = forward_backward(trainer, batch, loss)
            step = make_step(trainer, loss)
            yield f"forward_backward {report.loss} {report.self_check is None}"
        assert step is not None
        trainer.optim_step(step)
        yield "optim_step"
    batch = make_batch(100 * seed + 50, num_groups=2)
    run = trainer.prepare_forward(batch)
    arrays = trainer.forward(run, with_entropy=True, use_reference=bool(seed % 2))
    yield f"forward {arrays.logprobs.tolist()}"
    snapshot = trainer.snapshot()
    update(trainer, 100 * seed + 60)
    yield "update beside a snapshot"
    snapshot.write(folder / "kept")
    held = trainer.copy_weights()
    update(trainer, 100 * seed + 70)
    yield "update beside a copy"
    exported = folder / "exported"
    exported.mkdir()
    yield f"export {sorted(held.write(exported).items())}"
    forward_backward(trainer, batch, make_loss(batch))
    yield "a window that is discarded"
    trainer.load_checkpoint(folder / "kept")
    yield f"load {snapshot.digest}"


def left_by(trainer: Trainer, did: str) -> tuple[str, str, str]:
    sums = hashlib.sha256()
    if not trainer.is_window_empty:
        for name in trainer.ranks.own.optimizer.state().weights:
            sums.update(trainer.ranks.own.gradients.sum_of(name).contiguous().numpy().tobytes())
    return did, trainer.state_digest(), sums.hexdigest()


def alone(spec: TrainerSpec, folder: Path) -> Trace:
    folder.mkdir()
    trainer = Trainer.create(spec)
    return [left_by(trainer, did) for did in script(trainer, folder)]


# All of an adapter's maps are in the one with experts, beside theirs.
@pytest.mark.parametrize("kind", rows(KINDS, now=("experts", "heads")))
def test_tenants_in_any_order_have_the_bits_that_they_have_alone(kind: str, tmp_path: Path) -> None:
    """One comes while others' windows are open; the first, whose model it was, goes first."""
    specs = {seed: spec_of(tmp_path, kind, seed) for seed in SEEDS}
    expected = {seed: alone(spec, tmp_path / f"alone-{seed}") for seed, spec in specs.items()}
    assert len({trace[-1][1] for trace in expected.values()}) == len(SEEDS)
    assert all(len({sums for _, _, sums in trace}) > 4 for trace in expected.values())

    found: dict[int, Trace] = {seed: [] for seed in SEEDS}
    running: dict[int, tuple[Trainer, Iterator[str]]] = {}
    rng = np.random.default_rng(0)
    while any(len(found[seed]) < len(expected[seed]) for seed in SEEDS):
        # Each in turn at first, so that every pair of neighbours is of two tenants; then by chance.
        num_done = sum(map(len, found.values()))
        is_open = [seed for seed in SEEDS if len(found[seed]) < len(expected[seed])]
        if num_done < 3 * len(SEEDS):
            seed = SEEDS[num_done % len(SEEDS)]
        else:
            seed = int(rng.choice(is_open))
        if seed not in running:
            folder = tmp_path / f"shared-{seed}"
            folder.mkdir()
            others = [trainer for trainer, _ in running.values()]
            made = others[0].beside(specs[seed]) if others else Trainer.create(specs[seed])
            running[seed] = made, script(made, folder)
        trainer, steps = running[seed]
        found[seed].append(left_by(trainer, next(steps)))
        if len(found[seed]) == len(expected[seed]):
            del running[seed]
    for seed in SEEDS:
        assert found[seed] == expected[seed]


def test_a_base_has_the_bits_that_it_had(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "dense", 1)
    one = Trainer.create(spec)
    base = {n: p.clone() for n, p in one.model.module.named_parameters() if not p.requires_grad}
    assert base
    two = one.beside(replace(spec, model=replace(spec.model, seed=2)))
    for seed in range(2):
        update(one, seed)
        update(two, seed)
    for name, parameter in one.model.module.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name]), name
            assert parameter.grad is None
    assert one.state_digest() != two.state_digest()


def test_what_fails_in_one_tenant_changes_nothing_of_another(tmp_path: Path) -> None:
    """A cancelled pass, a gradient that is not finite and a discard, beside an open window."""
    spec = spec_of(tmp_path, "dense", 1)
    one = Trainer.create(spec)
    two = one.beside(replace(spec, model=replace(spec.model, seed=2)))
    batch = make_batch(0)
    loss = make_loss(batch)
    forward_backward(one, batch, loss)
    before = left_by(one, "")

    with pytest.raises(RatoonError) as caught:
        forward_backward(two, batch, loss, hooks=PassHooks(is_cancelled=lambda: True))
    assert caught.value.code is ErrorCode.CANCELLED
    two.discard_gradients()
    forward_backward(two, batch, loss)
    for name in two.ranks.own.optimizer.state().weights:
        two.ranks.own.gradients.sum_of(name).fill_(float("nan"))
    digest = two.state_digest()
    assert two.optim_step(make_step(two, loss)).skipped
    assert two.state_digest() == digest
    forward_backward(two, batch, loss)
    two.discard_gradients()
    assert left_by(one, "") == before


def test_another_tenant_takes_sixteen_bytes_a_parameter(tmp_path: Path) -> None:
    """Adapter, rest of its masters, moments, and sums of an open window; nothing of the base.

    By the difference of two ranks: each tenant has tables of its own besides, of 80 KB.
    """
    spec = spec_of(tmp_path, "dense_bf16", 1)
    (fewer_bytes, fewer), (more_bytes, more) = (taken_by_two(spec, rank) for rank in (2, 8))
    assert 15.5 < (more_bytes - fewer_bytes) / (more - fewer) / 2 < 16.5


def taken_by_two(spec: TrainerSpec, rank: int) -> tuple[int, int]:
    """Bytes that two more tenants take, and the parameters of each."""
    tuning, base = LoraTuning(rank=rank, alpha=8.0), PresetBase(name="tiny")
    one = Trainer.create(replace(spec, model=replace(spec.model, base=base, tuning=tuning)))
    window_of(one)
    before = storage_bytes()
    others = [one.beside(one.spec) for _ in range(2)]
    for other in others:
        window_of(other)
    assert {id(trainer.model) for trainer in others} == {id(one.model)}
    return storage_bytes() - before, one.info().num_trainable_parameters


def window_of(trainer: Trainer) -> None:
    """Opens a window whose sums are float32, as they are from the second backward on."""
    for seed in range(2):
        batch = make_batch(seed, num_groups=2)
        forward_backward(trainer, batch, make_loss(batch))
    trainer.ranks.own.gradients.sums()


def storage_bytes() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    # What a compiler left of other tests has tensors without memory.
    real = (each for each in gc.get_objects() if type(each) in (torch.Tensor, Parameter))
    storages = [each.untyped_storage() for each in real]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_a_turn_costs_less_than_a_millisecond(tmp_path: Path) -> None:
    """For as many tensors as 36 layers have: of this model's, scaled up."""
    spec = spec_of(tmp_path, "dense", 1)
    one = Trainer.create(spec)
    two = one.beside(spec)
    sets = one.ranks.own._parameters, two.ranks.own._parameters
    started = time.perf_counter()
    for turn in range(100):
        one.model.bind(sets[turn % 2])
    per_tensor_s = (time.perf_counter() - started) / 100 / len(sets[0])
    assert per_tensor_s * 504 < 1e-3


def test_who_shares_a_model_is_said_by_its_key(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "dense", 1)
    preset = replace(spec, model=replace(spec.model, base=PresetBase(name="tiny")))

    def with_seed(one: TrainerSpec, seed: int) -> TrainerSpec:
        return replace(one, model=replace(one.model, seed=seed))

    own = replace(spec, optimizer=AdamWConfig(), micro_batch_tokens=7, keep_reference=False)
    assert spec.host_key == with_seed(own, 2).host_key
    others = (
        preset,
        with_seed(preset, 2),
        replace(spec, model=replace(spec.model, dtype=ModelDtype.BFLOAT16)),
        replace(spec, model=replace(spec.model, tuning=LoraTuning(rank=8, alpha=8.0))),
        replace(spec, num_threads=2),
        replace(spec, max_tenants=4),
        replace(spec, publishes_merged=True),
    )
    assert len({one.host_key for one in (spec, *others)}) == 1 + len(others)
    for unshared in (
        replace(spec, max_tenants=1),
        replace(spec, model=replace(spec.model, tuning=FullTuning())),
        replace(spec, parallel=ParallelLayout(num_workers=2)),
    ):
        assert unshared.host_key == ""
