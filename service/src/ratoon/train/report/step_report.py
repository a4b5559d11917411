"""What a forward-backward or an optimizer step did, field for field the wire's `StepReport`.

Means are over what the loss counts; `None` stands for a quantity that does not exist or was not
computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SkipReason(StrEnum):
    """Why an optimizer step was skipped; `NumericsGuard` has the limits."""

    NO_TOKENS = "no_tokens"
    NON_FINITE_LOSS = "non_finite_loss"
    NON_FINITE_GRADIENT = "non_finite_gradient"
    GRADIENT_NORM = "gradient_norm"
    REFERENCE_KL = "reference_kl"
    SAMPLER_KL = "sampler_kl"
    NON_FINITE_STEP = "non_finite_step"
    ZERO_GRADIENT = "zero_gradient"

    @property
    def is_of_numbers(self) -> bool:
        """Whether numbers are wrong; else the batch had nothing to learn from."""
        return self not in (SkipReason.NO_TOKENS, SkipReason.ZERO_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    plan: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    publish: float = 0.0
    digest: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckReport:
    """One rollout, packed against alone; field for field `ratoon.v1.SelfCheckReport`."""

    # Index of the rollout in request order, and its trained tokens.
    sequence: int
    tokens: int
    # |log-prob packed - alone| over those tokens, in nats.
    logprob_max_difference: float
    logprob_mean_difference: float
    # rel-L2 over all trained parameters and of the worst tensor; None: the loss has no gradient.
    gradient_difference: float | None = None
    worst_parameter_difference: float | None = None
    worst_parameter: str = ""
    exceeds_limits: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGradNorm:
    """`name`: the parameter's. `max_abs`: its gradient's largest absolute value."""

    name: str
    norm: float
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """Of one layer's router. `max_load`: the busiest expert's choices over the mean of all."""

    layer: int
    max_load: float
    # Experts that no token visits.
    unused_experts: int
    # Mean over tokens, in nats.
    entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Field for field `ratoon.v1.StepReport`; see the .proto for the meaning of each."""

    loss: float | None = None
    policy_gradient_loss: float | None = None
    kl: float | None = None
    entropy: float | None = None
    clip_fraction_low: float | None = None
    clip_fraction_high: float | None = None
    ratio_max: float | None = None
    sampler_kl: float | None = None
    sampler_gap_max: float | None = None
    grad_norm: float | None = None
    reward_mean: float | None = None
    num_groups: int = 0
    num_sequences: int = 0
    trained_tokens: int = 0
    unshared_tokens: int = 0
    packed_tokens: int = 0
    token_reduction: float | None = None
    attention_pair_reduction: float | None = None
    num_micro_batches: int = 0
    seconds: PhaseSeconds = PhaseSeconds()
    tokens_per_second: float | None = None
    hardware_mfu: float | None = None
    logical_mfu: float | None = None
    peak_memory_bytes: int = 0
    planned_memory_bytes: int | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    dropped_stale: int = 0
    dropped_truncated: int = 0
    dropped_zero_variance: int = 0
    skipped: bool = False
    warnings: tuple[str, ...] = ()
    self_check: SelfCheckReport | None = None
    skip_reason: SkipReason | None = None
    old_kl: float | None = None
    ratio_mean: float | None = None
    ratio_min: float | None = None
    ratio_p01: float | None = None
    ratio_p50: float | None = None
    ratio_p99: float | None = None
    clip_fraction_dual: float | None = None
    correction_masked_fraction: float | None = None
    correction_truncated_fraction: float | None = None
    correction_weight_mean: float | None = None
    correction_ess_fraction: float | None = None
    reward_std: float | None = None
    advantage_mean: float | None = None
    advantage_std: float | None = None
    zero_variance_fraction: float | None = None
    truncated_fraction: float = 0.0
    response_length_mean: float = 0.0
    response_length_max: int = 0
    sampler_gap_mean: float | None = None
    sampler_gap_abs_mean: float | None = None
    tensor_grad_norms: tuple[TensorGradNorm, ...] = ()
    clip_fraction_positive: float | None = None
    clip_fraction_negative: float | None = None
    clamped_ratios: int = 0
    clamped_kls: int = 0
    clamped_sampler_gaps: int = 0
    zero_advantage_sequences: int = 0
    token_staleness_mean: float | None = None
    changed_share: float | None = None
    rank_seconds: tuple[float, ...] = ()
    rank_gap: float | None = None
    routers: tuple[RouterReport, ...] = ()
    router_aux_loss: float | None = None
    route_mismatch: float | None = None
    route_conflicts: int = 0
