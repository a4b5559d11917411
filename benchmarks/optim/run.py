"""Trains a preset with one kind of optimizer states, through the service's own trainer.

All runs start from the same weights, and runs of one seed see the same batches in the same order. A
run records the loss of every update, and how far all updates together are from float32's.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.timing import release
from benchmarks.optim.task import Task, draw_batches
from ratoon.model.loader import read_model
from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import OptimStep
from ratoon.train.numerics import configure_torch
from ratoon.train.optim.adamw import MasterAdamW
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.optim.rounding import join_float32
from ratoon.train.optim.state import OptimizerState
from ratoon.train.spec import OptimizerStates, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    AdamWConfig,
    DivideBy,
    FullTuning,
    LossConfig,
    LossKind,
    OptimStepConfig,
)

Run = dict[str, Any]

# The control: bfloat16 weights and moments, which AdamW rounds to nearest.
NEAREST = "bf16_nearest"
BASELINE = OptimizerStates.FP32.value
WITH_MASTERS = (OptimizerStates.BF16_SPLIT.value, OptimizerStates.BF16_SPLIT_8BIT.value)
WITHOUT_MASTERS = (OptimizerStates.BF16_STOCHASTIC.value, OptimizerStates.BF16_8BIT.value)
JUDGED = (*WITH_MASTERS, *WITHOUT_MASTERS)
KINDS = (BASELINE, *JUDGED, NEAREST)

_INITIAL_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained, for how long and how often; other kinds use the first of float32's seeds.

    A seed decides the groups drawn and how states are rounded, not the initial weights: policies
    start from one model too, and it keeps seed noise small.
    """

    preset: str
    task: Task
    # Baseline first.
    kinds: tuple[str, ...]
    num_updates: int
    # Highest first.
    learning_rates: tuple[float, ...]
    max_grad_norm: float
    baseline_seeds: int
    seeds: int

    def runs(self, seed: int) -> list[tuple[float, str]]:
        """Learning rate and kind of each of a seed's runs; each rate starts with the baseline."""
        kinds = self.kinds if seed < self.seeds else (BASELINE,)
        return [(rate, kind) for rate in self.learning_rates for kind in kinds]


FULL = Plan(
    preset="small",
    kinds=KINDS,
    task=Task(num_symbols=16, num_groups=8, num_responses=8, prompt_tokens=32, response_tokens=64),
    num_updates=200,
    learning_rates=(1e-4, 1e-5, 1e-6),
    max_grad_norm=1.0,
    baseline_seeds=5,
    seeds=3,
)
SMALL = Plan(
    preset="tiny",
    kinds=(BASELINE, OptimizerStates.BF16_SPLIT.value, OptimizerStates.BF16_8BIT.value, NEAREST),
    task=Task(num_symbols=4, num_groups=2, num_responses=2, prompt_tokens=4, response_tokens=8),
    num_updates=8,
    learning_rates=(1e-3, 1e-6),
    max_grad_norm=1.0,
    baseline_seeds=3,
    seeds=2,
)


class NearestAdamW(MasterAdamW):
    """torch's AdamW on bfloat16 parameters: a control, whose rounding loses small steps."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig) -> None:
        super().__init__({}, config)
        self._parameters = dict(parameters)
        # Fused: computes a step in float32, rounds what it keeps to nearest.
        self._adamw = torch.optim.AdamW(
            list(parameters.values()),
            lr=0.0,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def _apply(
        self, sums: Mapping[str, Tensor], divisor: float, norm: float, step: OptimStep
    ) -> None:
        """Like `MasterAdamW._apply`, but rounds the gradients too."""
        assert self._adamw is not None
        scale = step.clip_factor(norm) / divisor
        for group in self._adamw.param_groups:
            group["lr"], group["weight_decay"] = step.learning_rate, step.weight_decay
        for name, parameter in self._parameters.items():
            parameter.grad = (sums[name] * scale).to(parameter.dtype)
        self._adamw.step()
        for parameter in self._parameters.values():
            parameter.grad = None


def train_seed(plan: Plan, seed: int, device_name: str) -> list[Run]:
    """All runs of a seed. `samples`: each update's loss before its step, in nats per token.

    `cosine` and `error` compare w_T - w_0 with that of the seed's baseline at the same rate; the
    error is the norm of the difference over the baseline's. Raises RuntimeError if a step is
    skipped.
    """
    device = torch.device(device_name)
    batches = draw_batches(plan.task, plan.num_updates, seed)
    runs: list[Run] = []
    baseline: dict[str, Tensor] = {}
    for rate, kind in plan.runs(seed):
        start = time.perf_counter()
        # Layers are compiled anew, and one process can hold only a limited number.
        torch.compiler.reset()
        trainer = _trainer(plan, kind, seed, device)
        before = _exact_weights(trainer)
        losses = [_update(trainer, batch, plan, rate) for batch in batches]
        moved = {name: weight - before[name] for name, weight in _exact_weights(trainer).items()}
        del trainer, before
        release(device)
        baseline = moved if kind == BASELINE else baseline
        run = {"learning_rate": rate, "states": kind, "seed": seed}
        seconds = time.perf_counter() - start
        runs.append(run | _compare(moved, baseline) | {"seconds": seconds, "samples": losses})
        print(f"{rate:g} {kind}, seed {seed}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return runs


def _exact_weights(trainer: Trainer) -> dict[str, Tensor]:
    """Float32 copies: of the masters, if there are any."""
    optimizer = trainer.ranks.own.optimizer
    if isinstance(optimizer, NearestAdamW):
        return {name: p.detach().float() for name, p in trainer.model.named_trainable().items()}
    state: OptimizerState = optimizer.state()
    remainders = state.weight_remainder
    return {
        name: join_float32(weight.view(torch.int16), remainders[name])
        if name in remainders
        else weight.to(torch.float32, copy=True)
        for name, weight in state.weights.items()
    }


def _compare(moved: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Cosine and relative error over all parameters together, in float64."""

    def dot(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
        products = [(tensor.double() * two[name].double()).sum() for name, tensor in one.items()]
        return torch.stack(products).sum().item()

    norms = math.sqrt(dot(moved, moved) * dot(exact, exact))
    difference = {name: tensor - exact[name] for name, tensor in moved.items()}
    return {
        # A zero update has no direction.
        "cosine": dot(moved, exact) / norms if norms else 0.0,
        "error": math.sqrt(dot(difference, difference) / dot(exact, exact)),
    }


def _trainer(plan: Plan, kind: str, seed: int, device: torch.device) -> Trainer:
    states = OptimizerStates.FP32 if kind == NEAREST else OptimizerStates(kind)
    spec = TrainerSpec(
        model=ModelSpec(
            base=PresetBase(name=plan.preset),
            tuning=FullTuning(),
            dtype=ModelDtype.BFLOAT16,
            seed=seed,
        ),
        optimizer=AdamWConfig(),
        # Only the states may differ from the baseline.
        deterministic=True,
        micro_batch_tokens=1 << 20,
        keep_reference=False,
        attention_backend="",
        device=str(device),
        num_threads=1,
        optimizer_states=states,
    )
    configure_torch(spec)
    # The model is not compiled, which would take longer than the few updates of so small a model.
    initial = replace(spec.model, seed=_INITIAL_SEED)
    model = read_model(initial).place(device)
    trainer = Trainer(spec, model)
    if kind == NEAREST:
        # Deliberately not a setting of the service.
        nearest = NearestAdamW(model.named_trainable(), spec.optimizer)
        trainer.ranks.own.optimizer = nearest
    return trainer


def _update(trainer: Trainer, batch: RolloutBatch, plan: Plan, learning_rate: float) -> float:
    """Mean cross-entropy over the batch's trained tokens, before its update."""
    request = LossConfig(kind=LossKind.CROSS_ENTROPY)
    loss = resolve_loss(request, batch, has_frozen_reference=False)
    optim = OptimStepConfig(
        learning_rate=learning_rate,
        max_grad_norm=plan.max_grad_norm,
        divide_by=DivideBy.TOKENS,
    )
    step = resolve_optim(optim, loss.normalisation, trainer.spec.optimizer)
    report = trainer.update(trainer.prepare(batch, loss), step)
    if report.skipped:
        raise RuntimeError(f"the step was skipped: {report.warnings}")
    assert report.loss is not None
    return report.loss
