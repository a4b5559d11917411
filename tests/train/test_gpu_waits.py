"""Host and GPU: a pass asks for all of its work and waits for its results at its end alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from ratoon.model.offload import HostOffload
from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.planner.stage_plan import least_plan
from ratoon.rollout.batch import RolloutBatch, sequence_lengths
from ratoon.rollout.forest import build_forest
from ratoon.rollout.packed import MicroBatch, Stage, UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.validate import validate_groups
from ratoon.train.spec import PassHooks, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import AdamWConfig, FullTuning, LossKind
from tests import builders
from tests.train.bf16_runs import one_prompt
from tests.train.trainer_runs import make_loss

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer.create(
        TrainerSpec(
            model=ModelSpec(
                base=PresetBase(name="small"),
                tuning=FullTuning(),
                dtype=ModelDtype.BFLOAT16,
                seed=0,
            ),
            optimizer=AdamWConfig(),
            deterministic=False,
            micro_batch_tokens=1 << 20,
            keep_reference=False,
            attention_backend="cuda",
            device="cuda:0",
            num_threads=1,
        )
    )


def _one_by_one(batch: RolloutBatch, plan: UpdatePlan) -> UpdatePlan:
    lengths_S = sequence_lengths(batch).tolist()
    parts = [MicroBatch(sequences=(i,), packed_tokens=n) for i, n in enumerate(lengths_S)]
    return replace(plan, micro_batches=tuple(parts))


def _one_a_wave(batch: RolloutBatch, plan: UpdatePlan) -> UpdatePlan:
    forest = build_forest(batch, sort_sequences(batch), np.arange(batch.num_sequences))
    bounds = [*forest.node_start[forest.node_parent == 0].tolist(), forest.num_tokens]
    waves = [Stage(start=start, stop=stop, parent=0) for start, stop in pairwise(bounds)]
    prefix = Stage(start=0, stop=bounds[0], parent=-1)
    (whole,) = plan.micro_batches
    return replace(plan, micro_batches=(replace(whole, stages=(prefix, *waves)),))


def _keep_on_host(trainer: Trainer, patch: pytest.MonkeyPatch) -> HostOffload:
    """All of what waits, however small."""
    model = trainer.model
    kept = partial(least_plan, model.sizes, host_bytes=2**40)
    patch.setitem(vars(model), "_plan_activations", lambda held: kept(held).kept)
    offload = HostOffload(model.device, min_bytes=1)
    patch.setattr(model._layers, "_offload", offload)
    return offload


@pytest.mark.parametrize("cut", [_one_by_one, _one_a_wave])
@pytest.mark.parametrize("has_host", [False, True])
def test_a_pass_waits_once_for_its_sums(
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    cut: Callable[[RolloutBatch, UpdatePlan], UpdatePlan],
    has_host: bool,
) -> None:
    offload = _keep_on_host(trainer, monkeypatch) if has_host else None
    batch = validate_groups(one_prompt(np.random.default_rng(3)), builders.limits())
    loss = make_loss(batch, LossKind.GRPO)
    plan = cut(batch, trainer.prepare(batch, loss).plan)
    waits: list[list[str]] = []
    # The first time compiles.
    for _ in range(2):
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                trainer.forward_backward(trainer.prepare(batch, loss, plan))
                trainer.discard_gradients()
                trainer.forward(
                    trainer.prepare_forward(batch, plan), with_entropy=False, use_reference=False
                )
            finally:
                torch.cuda.set_sync_debug_mode("default")
        texts = [str(w.message) for w in caught]
        waits.append([text for text in texts if text.startswith("called a synchronizing")])
    # The waits are for the loss sums and the tokens' figures, one after the other at the end of the
    # pass, and for the log-probs.
    assert len(waits[1]) == 3, waits[1]
    if offload is not None:
        assert bool(offload.room_bytes) == (cut is _one_a_wave)


def test_the_host_is_one_micro_batch_ahead(trainer: Trainer) -> None:
    """Each is said to be done once it is, and not before the next has been asked for."""
    batch = validate_groups(one_prompt(np.random.default_rng(3)), builders.limits())
    loss = make_loss(batch, LossKind.GRPO)
    plan = _one_by_one(batch, trainer.prepare(batch, loss).plan)
    steps: list[str] = []

    def is_cancelled() -> bool:
        steps.append("asked")
        return False

    trainer.forward_backward(
        trainer.prepare(batch, loss, plan),
        PassHooks(
            on_progress=lambda done, _planned, _tokens: steps.append(f"{done} done"),
            is_cancelled=is_cancelled,
        ),
    )
    trainer.discard_gradients()
    last = len(plan.micro_batches)
    assert steps[:5] == ["0 done", "asked", "asked", "1 done", "asked"]
    assert steps[-3:] == [f"{last - 1} done", f"{last} done", "asked"]
