"""`training.proto` as JSON. Invariant: field for field the messages of the same names.

A number of a report that is not finite is null.
"""

from __future__ import annotations

from ratoon.api.http.schema.base import Bool, Float, Int32, Int64, Tensor, Text, WireModel
from ratoon.train.config import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMode,
    DivideBy,
    KlKind,
    LossKind,
    OldLogprobsKind,
    ReferenceKind,
    SharedTokens,
    StalenessAction,
    TokenWeight,
)
from ratoon.train.report.step_report import SkipReason


class OldLogprobs(WireModel):
    kind: OldLogprobsKind
    forward_operation_id: Text | None = None


class KlConfig(WireModel):
    kind: KlKind
    coefficient: Float
    reference: ReferenceKind
    importance_weighted: Bool | None = None


class RolloutCorrection(WireModel):
    mode: CorrectionMode
    level: CorrectionLevel
    low: Float | None = None
    high: Float


class CorrectionMask(WireModel):
    level: CorrectionLevel
    low: Float
    high: Float


class OverlongFilter(WireModel):
    """Truncated rollouts are dropped after advantages."""


class OverlongPenalty(WireModel):
    max_tokens: Int32
    buffer_tokens: Int32
    scale: Float


class StalenessConfig(WireModel):
    max_versions: Int64
    action: StalenessAction


class LossConfig(WireModel):
    """At most one of `overlong_filter` and `overlong_penalty`; absent: the loss's own default."""

    kind: LossKind
    advantage: AdvantageKind | None = None
    clip_low: Float | None = None
    clip_high: Float | None = None
    dual_clip: Float | None = None
    old_logprobs: OldLogprobs | None = None
    kl: KlConfig | None = None
    entropy_coefficient: Float | None = None
    correction: RolloutCorrection | None = None
    correction_mask: CorrectionMask | None = None
    tau_positive: Float | None = None
    tau_negative: Float | None = None
    top_entropy_share: Float | None = None
    token_weight: TokenWeight | None = None
    shared_tokens: SharedTokens | None = None
    overlong_filter: OverlongFilter | None = None
    overlong_penalty: OverlongPenalty | None = None
    drop_zero_variance_groups: Bool | None = None
    staleness: StalenessConfig | None = None
    router_aux_loss_coefficient: Float | None = None
    allow_truncated_sampling: Bool | None = None


class OptimStepConfig(WireModel):
    learning_rate: Float
    weight_decay: Float | None = None
    max_grad_norm: Float | None = None
    divide_by: DivideBy | None = None
    divide_constant: Float | None = None
    layer_grad_norms: Bool | None = None


class PhaseSeconds(WireModel):
    plan: float
    forward: float
    backward: float
    optimizer: float
    publish: float


class SelfCheckReport(WireModel):
    sequence: int
    tokens: int
    logprob_max_difference: float | None
    logprob_mean_difference: float | None
    gradient_difference: float | None
    worst_parameter_difference: float | None
    worst_parameter: str
    exceeds_limits: bool
    seconds: float


class LayerGradNorm(WireModel):
    layer: str
    norm: float | None


class StepReport(WireModel):
    loss: float | None
    policy_gradient_loss: float | None
    kl: float | None
    entropy: float | None
    clip_fraction_low: float | None
    clip_fraction_high: float | None
    ratio_max: float | None
    sampler_kl: float | None
    sampler_gap_max: float | None
    grad_norm: float | None
    reward_mean: float | None
    num_groups: int
    num_sequences: int
    trained_tokens: int
    replicated_tokens: int
    packed_tokens: int
    token_reduction: float | None
    attention_pair_reduction: float | None
    num_micro_batches: int
    seconds: PhaseSeconds | None
    tokens_per_second: float | None
    hardware_mfu: float | None
    logical_mfu: float | None
    peak_memory_bytes: int
    staleness_mean: float | None
    staleness_max: int | None
    dropped_stale: int
    dropped_truncated: int
    dropped_zero_variance: int
    skipped: bool
    warnings: list[str]
    self_check: SelfCheckReport | None
    skip_reason: SkipReason | None
    old_kl: float | None
    ratio_mean: float | None
    ratio_min: float | None
    ratio_p01: float | None
    ratio_p50: float | None
    ratio_p99: float | None
    clip_fraction_dual: float | None
    correction_masked_fraction: float | None
    correction_truncated_fraction: float | None
    correction_weight_mean: float | None
    correction_ess_fraction: float | None
    reward_std: float | None
    advantage_mean: float | None
    advantage_std: float | None
    zero_variance_fraction: float | None
    truncated_fraction: float | None
    response_length_mean: float | None
    response_length_max: int
    sampler_gap_mean: float | None
    sampler_gap_abs_mean: float | None
    layer_grad_norms: list[LayerGradNorm]
    clip_fraction_positive: float | None
    clip_fraction_negative: float | None
    clamped_ratios: int
    clamped_kls: int
    clamped_sampler_gaps: int
    zero_advantage_sequences: int


class ForwardOutput(WireModel):
    logprobs: Tensor | None
    entropy: Tensor | None
    offsets: Tensor | None
