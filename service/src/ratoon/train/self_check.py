"""The packing self-check: one rollout of a batch, run packed and alone, and how far the two are
apart.

It leaves weights, moments, window and random numbers as they were, bit for bit, and picks its
rollout by policy seed, version and batch, so that a replay picks the same.

Both runs go through the update's own passes, with the loss terms of the one rollout: as a part of
its micro-batch of the plan, and as the only sequence of another, whose layers run as those of the
first, so that nothing is compiled for it. The gradient of the one is negated in the window's own
sums and that of the other added, so that no gradient is ever held twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch, sent_field, sent_index
from ratoon.rollout.offenders import offenders
from ratoon.rollout.selection import trained_lengths
from ratoon.shards.parts import origin_of
from ratoon.train.optim.gradients import GradientSums
from ratoon.train.passes import forward_backward_pass
from ratoon.train.prepare import Prepared
from ratoon.train.spec import PassHooks
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto.types import SelfCheckReport, StepWarning

# Share of the whole gradient's norm below which a tensor's own norm is no measure of its error.
_NORM_FLOOR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckLimits:
    """Differences above which the report warns; log-probs in nats, gradients as rel-L2."""

    logprob_max: float
    logprob_mean: float
    gradient: float
    worst_parameter: float


# docs/architecture.md says what healthy runs measure and why the limits are where they are.
LIMITS: Mapping[ModelDtype, SelfCheckLimits] = MappingProxyType(
    {
        ModelDtype.FLOAT64: SelfCheckLimits(
            logprob_max=1e-9, logprob_mean=1e-9, gradient=1e-9, worst_parameter=1e-9
        ),
        ModelDtype.FLOAT32: SelfCheckLimits(
            logprob_max=1e-3, logprob_mean=1e-4, gradient=1e-3, worst_parameter=1e-2
        ),
        ModelDtype.BFLOAT16: SelfCheckLimits(
            logprob_max=1.0, logprob_mean=0.05, gradient=0.25, worst_parameter=0.5
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckOutcome:
    """`report` None: there was nothing to compare, or no memory to do it in."""

    report: SelfCheckReport | None
    warnings: tuple[StepWarning, ...]


NOT_CHECKED = SelfCheckOutcome(report=None, warnings=())


def is_due(version: int, every: int) -> bool:
    """Whether a forward-backward on `version` has a self-check; `every` 0: none ever has.

    Version 0 has none, unless all have one: a policy's first caller waits for compilers already.
    """
    return every > 0 and version % every == 1 % every


def run_self_check(
    model: PolicyModel,
    gradients: GradientSums,
    prepared: Prepared,
    *,
    seed: int,
    is_cancelled: Callable[[], bool],
) -> SelfCheckOutcome:
    """Compare one rollout of `prepared`, packed against alone. `gradients` must be empty.

    `seed`: the policy's, which chooses the rollout.

    The check takes the time of a forward and backward of the micro-batch and of the rollout, and no
    memory beyond what the micro-batch takes anyway. Raises `RatoonError` CANCELLED; whatever it
    raises, `gradients` is empty again.
    """
    started = time.perf_counter()
    sequence = sample_rollout(prepared, seed)
    if sequence is None:
        return NOT_CHECKED
    packed, alone = _packed_and_alone(prepared, sequence)
    (micro_batch,) = packed.plan.micro_batches
    hooks = PassHooks(is_cancelled=is_cancelled)
    # Stages have graphs of their own, and it may not fit at once.
    tokens = 0 if micro_batch.stages else micro_batch.packed_tokens
    try:
        with model.run_as(tokens):
            report = _compared(partial(_run, model, hooks), packed, alone, gradients)
    except (torch.OutOfMemoryError, RatoonError) as err:
        if isinstance(err, RatoonError) and err.code is not ErrorCode.RESOURCE_EXHAUSTED:
            raise
        # Several ranks may have room for what one has not.
        text = f"the self-check of version {prepared.version} did not run: out of device memory"
        return SelfCheckOutcome(report=None, warnings=(warn(WarningKind.SELF_CHECK_NOT_RUN, text),))
    finally:
        gradients.clear()
    exceeded = _exceeded(report, model)
    report = replace(
        report,
        sequence=sent_index(prepared.batch, sequence),
        exceeds_limits=bool(exceeded),
        seconds=time.perf_counter() - started,
    )
    warnings = (_warning(sequence, exceeded, prepared.batch),) if exceeded else ()
    return SelfCheckOutcome(report=report, warnings=warnings)


def sample_rollout(prepared: Prepared, seed: int) -> int | None:
    """A rollout that counts and is packed with others; None where there is none.

    One whose advantage is not zero, if any is such: without it most losses have no gradient.
    """
    columns, batch = prepared.columns, prepared.batch
    is_shared_S = np.zeros(batch.num_sequences, np.bool_)
    for micro_batch in prepared.plan.micro_batches:
        is_shared_S[list(micro_batch.sequences)] = len(micro_batch.sequences) > 1
    for mask_J in (columns.counted_J & (columns.advantage_J != 0), columns.counted_J):
        candidates = np.flatnonzero(is_shared_S & (trained_lengths(batch, mask_J) > 0))
        if len(candidates):
            draw = xxhash.xxh3_64_intdigest(f"{seed}/self_check/{prepared.version}".encode())
            return int(candidates[draw % len(candidates)])
    return None


def _packed_and_alone(prepared: Prepared, sequence: int) -> tuple[Prepared, Prepared]:
    """The terms of one rollout, to be run in its micro-batch of the plan, and alone."""
    batch, plan, columns = prepared.batch, prepared.plan, prepared.columns
    is_it_S = np.arange(batch.num_sequences) == sequence
    is_its_J = np.repeat(is_it_S, np.diff(batch.response_offsets))
    of_it = replace(
        columns, trained_J=columns.trained_J & is_its_J, counted_J=columns.counted_J & is_its_J
    )
    own = next(part for part in plan.micro_batches if sequence in part.sequences)
    alone = cpu_planner(plan.micro_batch_tokens).plan(batch, prepared.prefixes, is_it_S)
    return (
        replace(prepared, columns=of_it, asked_J=None, plan=replace(plan, micro_batches=(own,))),
        replace(prepared, columns=of_it, asked_J=None, plan=alone),
    )


def _run(model: PolicyModel, hooks: PassHooks, prepared: Prepared) -> NDArray[np.float64]:
    """The log-probs of the rollout's trained tokens, whose gradients are added up."""
    trained_J = prepared.columns.trained_J
    found = forward_backward_pass(model, prepared, hooks).tokens
    # A token that did not run is no number, and so is its difference.
    return found.columns(len(trained_J))[0, trained_J]


def _compared(
    run: Callable[[Prepared], NDArray[np.float64]],
    packed: Prepared,
    alone: Prepared,
    gradients: GradientSums,
) -> SelfCheckReport:
    """Run the rollout in both ways; gradients are relative to that of the rollout alone."""
    alone_J = run(alone)
    norms = _norms(gradients)
    total = math.hypot(*norms.values())
    for tensor in gradients.sums().values():
        tensor.neg_()
    gap_J = np.abs(run(packed) - alone_J)
    gaps = _norms(gradients)
    total_gap = math.hypot(*gaps.values())
    report = SelfCheckReport(
        tokens=len(gap_J),
        logprob_max_difference=float(gap_J.max()),
        logprob_mean_difference=float(gap_J.mean()),
    )
    if total == 0 and total_gap == 0:
        return report
    errors = {
        name: _relative(gap, max(norms[name], _NORM_FLOOR * total)) for name, gap in gaps.items()
    }
    # A difference that is not a number is the worst there is.
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return replace(
        report,
        gradient_difference=_relative(total_gap, total),
        worst_parameter_difference=errors[worst],
        worst_parameter=origin_of(worst)[0],
    )


def _norms(gradients: GradientSums) -> dict[str, float]:
    """L2 norm of each sum, by name; one wait for the device."""
    sums = gradients.sums()
    norms = torch.stack([torch.linalg.vector_norm(tensor) for tensor in sums.values()])
    return dict(zip(sums, norms.tolist(), strict=True))


def _relative(gap: float, scale: float) -> float:
    if gap == 0:
        return 0.0
    return gap / scale if scale else math.inf


def _exceeded(report: SelfCheckReport, model: PolicyModel) -> list[str]:
    """What is over its limit, in words.

    Rounding may send a token to other experts than alone, which no limit tells from a fault: a
    model with experts has one in float64 only.
    """
    dtype = model.spec.dtype
    if model.sizes.experts.is_routed and dtype is not ModelDtype.FLOAT64:
        return []
    limits = LIMITS[dtype]
    measured = [
        ("largest log-prob difference", report.logprob_max_difference, limits.logprob_max),
        ("mean log-prob difference", report.logprob_mean_difference, limits.logprob_mean),
        ("gradient difference", report.gradient_difference, limits.gradient),
        (report.worst_parameter, report.worst_parameter_difference, limits.worst_parameter),
    ]
    return [
        f"{name} {value:.3g} > {limit:g}"
        for name, value, limit in measured
        if value is not None and not value <= limit
    ]


def _warning(sequence: int, exceeded: list[str], batch: RolloutBatch) -> StepWarning:
    place, problem = sent_field(batch, sequence), ", ".join(exceeded)
    return warn(
        WarningKind.SELF_CHECK_EXCEEDED,
        f"self-check: {place} is not the same packed as alone: {problem}",
        offenders(batch, np.array([sequence])),
    )
