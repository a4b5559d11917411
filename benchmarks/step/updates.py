"""Section `updates`: whole GRPO and DAPO updates by the service's trainer, in seconds per phase.

Old log-probs, plan and update are the service's own calls, in its order; free memory decides the
number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from benchmarks.common.timing import measure as measure_samples
from benchmarks.common.timing import release, require_time, timed
from benchmarks.step.run import Row, Run, Scale, Section, figures_or_refusal
from benchmarks.step.subjects import open_policy
from benchmarks.step.ways import Plan, Ways, measure_way
from benchmarks.step.workload import (
    PEAK_FLOPS,
    ModelSize,
    StepWork,
    make_batch,
    mfu,
    packed_batch,
    packed_work,
    replicated_work,
    step_flops,
)
from ratoon.model.spec import ModelDtype
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.passes import ForwardArrays
from ratoon.train.spec import OptimizerStates, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    AdamWConfig,
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    MuonConfig,
    OldLogprobs,
    OldLogprobsKind,
    OptimStepConfig,
    ReferenceKind,
    StepReport,
)

# Beyond this, float32 states do not fit one GPU.
MAX_FP32_PARAMETERS = 3e9
KL_COEFFICIENT = 1e-3
LEARNING_RATE = 1e-6
WITH_KL = "-kl"
BY_MUON = "-muon"
# The forward's share of the work of forward and backward.
FORWARD_SHARE = {"weights": 2 / 6, "pairs": 4 / 14}


def cases(scale: Scale) -> list[str]:
    return [f"{kind} {size.name}" for size in scale.update_models for kind in scale.updates]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields each case with its row."""
    scale = run.scale
    for size in scale.update_models:
        for kind, groups in scale.updates.items():
            case = f"{kind} {size.name}"
            if case not in wanted or run.is_out_of_time:
                continue
            batch = make_batch(groups, size.vocab_size, run.seed)
            row: Row = {"how": scale.ours.how, "model": size.name, "algorithm": kind}
            row |= figures_or_refusal(partial(_measure_update, run, size, kind, batch))
            release(run.device)
            yield case, [row]


def _measure_update(run: Run, size: ModelSize, algorithm: str, batch: RolloutBatch) -> Row:
    require_time(run.stop_at, 0.0)
    ways = Ways(run, size)
    is_compared = batch.num_groups == 1 and not algorithm.endswith((WITH_KL, BY_MUON))
    step = _plain_step(ways, batch) if is_compared else {}
    update = open_update(ways, algorithm, batch)
    reports: list[dict[str, float]] = []

    def run_all() -> None:
        reports.append(run_phases(update))

    warm_up_s = timed(run_all, run.device)
    on_policy = measure_samples(
        lambda: update.step(None), run.device, num_samples=run.num_samples, stop_at=run.stop_at
    )
    reports.clear()
    measured = measure_samples(
        run_all, run.device, num_samples=run.num_samples, stop_at=run.stop_at
    )
    trainer = update.trainer
    plan = trainer.prepare(batch, update.on_policy).plan
    has_reference = update.trainer.spec.keep_reference
    passes = 2 if has_reference else 1
    packed, replicated = packed_work(packed_batch(batch)), replicated_work(batch)
    middle = min(reports, key=lambda phases: abs(phases["total_s"] - measured.seconds))
    planned = trainer.ranks.own.planned_memory_bytes
    return {
        "step": step,
        "optimizer_states": str(trainer.spec.optimizer_states),
        "has_reference": has_reference,
        "host_gib": run.host_bytes / 2**30,
        "warm_up_s": warm_up_s,
        "seconds": measured.seconds,
        "joules": measured.joules,
        "on_policy_s": on_policy.seconds,
        "on_policy_joules": on_policy.joules,
        "on_policy_samples": on_policy.samples,
        **middle,
        "hardware_mfu": update_flops(size, packed, passes) / measured.seconds / PEAK_FLOPS,
        "logical_mfu": update_flops(size, replicated, passes) / measured.seconds / PEAK_FLOPS,
        # MFU of forward and backward, with everything that the trainer keeps in memory.
        "trained_mfu": mfu(size, packed, middle["forward_s"] + middle["backward_s"]),
        "peak_gib": measured.peak_gib,
        **({} if planned is None else {"planned_gib": planned / 2**30}),
        "num_micro_batches": len(plan.micro_batches),
        "num_stages": sum(len(part.stages) for part in plan.micro_batches),
        "packed_tokens": plan.packed_tokens,
        "replicated_tokens": plan.unshared_tokens,
        "samples": measured.samples,
    }


def _plain_step(ways: Ways, batch: RolloutBatch) -> Row:
    """Measures only forward and backward, before optimizer states are allocated."""
    row, _ = measure_way(ways, ways.run.scale.ours, batch, Plan(cuts=()))
    ways.clear()
    return {name: row[name] for name in ("seconds", "peak_gib", "samples")}


def update_flops(size: ModelSize, work: StepWork, num_forwards: int) -> float:
    """FLOPs of a forward and backward plus `num_forwards` more forwards."""
    weights = step_flops(size, StepWork(tokens=work.tokens, rows=work.rows, pairs=0))
    pairs = step_flops(size, work) - weights
    forward = FORWARD_SHARE["weights"] * weights + FORWARD_SHARE["pairs"] * pairs
    return weights + pairs + num_forwards * forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A repeatable update by the service's trainer."""

    trainer: Trainer
    batch: RolloutBatch
    # Updates with the old log-probs of a Forward, and with the update's own.
    loss: Loss
    on_policy: Loss

    def old_logprobs(self) -> ForwardArrays:
        """A Forward of the policy's present weights."""
        return self.trainer.forward(
            self.trainer.prepare_forward(self.batch), with_entropy=False, use_reference=False
        )

    def step(self, old: ForwardArrays | None) -> StepReport:
        """Plan, forward, backward and optimizer; `old` None: on policy, whatever steps went before.

        Those of a Forward are for one step: on its batch again ever more tokens are clipped, and a
        backward of zeros is faster.

        Raises:
            RuntimeError: The trainer skipped the step.
        """
        request = OptimStepConfig(learning_rate=LEARNING_RATE, max_grad_norm=1.0)
        loss = self.on_policy if old is None else self.loss
        step = resolve_optim(request, loss.normalisation, self.trainer.spec.optimizer)
        old_J = None if old is None else old.logprobs
        report = self.trainer.update(
            self.trainer.prepare(self.batch, loss, old_logprobs_J=old_J), step
        )
        if report.skipped or not math.isfinite(cast("float", report.grad_norm)):
            raise RuntimeError(f"the step was skipped: {report.warnings}")
        return report


def open_update(
    ways: Ways, algorithm: str, batch: RolloutBatch, states: OptimizerStates | None = None
) -> Update:
    """An update by an algorithm of `Scale.updates`; `states` None: those that fit the GPU."""
    has_reference = algorithm.endswith(WITH_KL)
    kl = KlConfig(kind=KlKind.K3, coefficient=KL_COEFFICIENT, reference=ReferenceKind.FROZEN)
    request = LossConfig(
        kind=LossKind(algorithm.removesuffix(WITH_KL).removesuffix(BY_MUON)),
        kl=kl if has_reference else None,
        old_logprobs=OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="old"),
    )
    own = replace(request, old_logprobs=OldLogprobs(kind=OldLogprobsKind.ON_POLICY))
    loss, on_policy = (
        resolve_loss(each, batch, has_frozen_reference=has_reference) for each in (request, own)
    )
    is_large = sum(p.numel() for p in ways.module.parameters()) > MAX_FP32_PARAMETERS
    fitting = OptimizerStates.BF16_8BIT if is_large else OptimizerStates.FP32
    optimizer = AdamWConfig(muon=MuonConfig() if algorithm.endswith(BY_MUON) else None)
    trainer = open_trainer(
        ways, states or fitting, has_reference=has_reference, optimizer=optimizer
    )
    return Update(trainer=trainer, batch=batch, loss=loss, on_policy=on_policy)


def open_trainer(
    ways: Ways,
    states: OptimizerStates,
    *,
    has_reference: bool,
    optimizer: AdamWConfig = AdamWConfig(),  # noqa: B008 - it is frozen
) -> Trainer:
    """The service's trainer, limited to free memory; float32 weights always get float32 states."""
    run, module = ways.run, ways.module
    # Built anew: a copy would share the layers' `forward`s.
    frozen = run.module(ways.size) if has_reference else None
    policy = open_policy(module, run.scale.ours, frozen)
    is_narrow = policy.spec.dtype is ModelDtype.BFLOAT16
    spec = TrainerSpec(
        model=policy.spec,
        optimizer=optimizer,
        deterministic=False,
        micro_batch_tokens=None,
        keep_reference=has_reference,
        attention_backend=run.scale.ours.backend,
        device=str(run.device),
        num_threads=1,
        optimizer_states=states if is_narrow else OptimizerStates.FP32,
        host_activation_bytes=run.host_bytes,
    )
    trainer = Trainer(spec, policy, rates=run.rates)
    trainer.limit_activations()
    return trainer


def run_phases(update: Update) -> dict[str, float]:
    """Old log-probs, then an update with them; seconds per phase and in total."""
    old = update.old_logprobs()
    reports: list[StepReport] = []
    update_s = timed(lambda: reports.append(update.step(old)), update.trainer.model.device)
    (report,) = reports
    phases = {
        "old_logprobs_s": old.report.seconds.forward,
        "forward_s": report.seconds.forward,
        "backward_s": report.seconds.backward,
        "optimizer_s": report.seconds.optimizer,
    }
    return {
        **phases,
        "update_s": update_s,
        "total_s": sum(phases.values()),
        "clip_fraction": clip_fraction(report),
    }


def clip_fraction(report: StepReport) -> float:
    """The share of tokens that the clip holds, of a batch that was run."""
    assert report.clip_fraction_low is not None
    assert report.clip_fraction_high is not None
    return report.clip_fraction_low + report.clip_fraction_high


UPDATES = Section(cases=cases, measure=measure)
