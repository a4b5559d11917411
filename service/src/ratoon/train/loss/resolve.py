"""What the caller asked of the loss, judged against the batch and completed. Imports no torch.

An option that would not be used is refused, never ignored. Only sampler log-probs that the
trainer's own can be compared with enter a ratio: at the sampling temperature, and over the tokens
that the trainer's are over, unless the caller says that it knows.
"""

from __future__ import annotations

from dataclasses import replace

from ratoon.errors import invalid
from ratoon.rollout.batch import RolloutBatch, sent_field
from ratoon.rollout.raw import first_true
from ratoon.rollout.sampling_masks import is_unmasked
from ratoon.train.loss.kinds import (
    LOSSES,
    LossDefinition,
    require,
    require_finite,
    require_not_negative,
    resolve_objective,
)
from ratoon.train.loss.spec import Distillation, Loss, ValueLoss
from ratoon_proto.types import (
    AdvantageKind,
    CorrectionMask,
    CorrectionMode,
    Divergence,
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    OverlongFilter,
    OverlongPenalty,
    ReferenceKind,
    RolloutCorrection,
    StalenessConfig,
)

_REWARD_ADVANTAGES = (
    AdvantageKind.GROUP_MEAN_STD,
    AdvantageKind.GROUP_MEAN,
    AdvantageKind.GROUP_MEAN_BATCH_STD,
    AdvantageKind.LEAVE_ONE_OUT,
    AdvantageKind.NONE,
)


def resolve_loss(
    request: LossConfig,
    batch: RolloutBatch,
    *,
    has_frozen_reference: bool,
    has_value_head: bool = False,
) -> Loss:
    """Fill in the defaults of the loss and check that `batch` carries all that it needs.

    `has_frozen_reference`: the policy keeps its initial weights; `has_value_head`: it has a critic.
    Raises `RatoonError` (INVALID_ARGUMENT or UNSUPPORTED) naming the field.
    """
    definition = LOSSES[request.kind]
    require_not_negative("loss.router_aux_loss_coefficient", request.router_aux_loss_coefficient)
    require_finite("loss.entropy_coefficient", request.entropy_coefficient)
    _check_token_weights(request.kind, batch)
    return Loss(
        kind=request.kind,
        objective=resolve_objective(request),
        advantage=_resolve_advantage(request, definition, batch),
        old_logprobs=resolve_old_logprobs(request, batch),
        kl=resolve_kl(request, batch, has_frozen_reference=has_frozen_reference),
        entropy_coefficient=request.entropy_coefficient,
        correction=resolve_correction(request, batch),
        correction_mask=resolve_correction_mask(request, batch),
        top_entropy_share=_resolve_top_entropy(request),
        token_weight=request.token_weight or definition.token_weight,
        default_divide_by=definition.divide_by,
        shared_tokens=request.shared_tokens,
        overlong=_resolve_overlong(request, batch),
        drop_zero_variance_groups=_resolve_zero_variance(request, definition, batch),
        staleness=_resolve_staleness(request, batch),
        router_aux_loss_coefficient=request.router_aux_loss_coefficient,
        report_groups=request.report_groups,
        count_untrained=request.count_untrained,
        distillation=_resolve_distillation(request, batch),
        value=_resolve_value(request, batch, has_value_head=has_value_head),
    )


def _resolve_advantage(
    request: LossConfig, definition: LossDefinition, batch: RolloutBatch
) -> AdvantageKind | None:
    if definition.advantage is None:
        takes = "token_weights" if definition.takes_weights else "no advantage"
        if request.advantage is not None:
            expected = f"absent: {request.kind} takes {takes}"
            raise invalid("loss.advantage", request.advantage, expected)
        if batch.advantages is not None:
            raise invalid(
                "groups[0].rollouts[0].advantages",
                "advantages",
                f"none: {request.kind} takes {takes}",
            )
        return None
    default = AdvantageKind.GIVEN if batch.advantages is not None else definition.advantage
    kind = request.advantage or default
    if kind is AdvantageKind.GIVEN and batch.advantages is None:
        raise invalid("loss.advantage", kind, "rollouts that carry advantages; they carry none")
    if kind in _REWARD_ADVANTAGES and batch.rewards is None:
        if request.advantage is None:
            raise invalid(
                "groups[0].rollouts[0].reward",
                "neither reward nor advantages",
                f"one of them in every rollout: {request.kind} needs advantages",
            )
        raise invalid("loss.advantage", kind, "rollouts that carry rewards; they carry none")
    return kind


def _resolve_overlong(
    request: LossConfig, batch: RolloutBatch
) -> OverlongFilter | OverlongPenalty | None:
    overlong = request.overlong
    if not isinstance(overlong, OverlongPenalty):
        return overlong
    if LOSSES[request.kind].advantage is None:
        raise invalid("loss.overlong_penalty", "one", f"absent: {request.kind} has no advantages")
    if batch.rewards is None:
        raise invalid("loss.overlong_penalty", "no rewards", "rollouts that carry rewards")
    if overlong.buffer_tokens <= 0:
        raise invalid("loss.overlong_penalty.buffer_tokens", overlong.buffer_tokens, "at least 1")
    if overlong.max_tokens < overlong.buffer_tokens:
        raise invalid(
            "loss.overlong_penalty.max_tokens",
            overlong.max_tokens,
            f"at least buffer_tokens ({overlong.buffer_tokens})",
        )
    require_not_negative("loss.overlong_penalty.scale", overlong.scale)
    return overlong


def _resolve_top_entropy(request: LossConfig) -> float | None:
    """Entropies are those of a Forward before the update, known before any backward."""
    share, old = request.top_entropy_share, request.old_logprobs
    if share is None:
        return None
    if old is None or old.kind is not OldLogprobsKind.FROM_FORWARD:
        raise invalid(
            "loss.top_entropy_share", share, "old_logprobs from_forward, of a Forward with entropy"
        )
    require("loss.top_entropy_share", share, 0 < share <= 1, "a number above 0, at most 1")
    return share


def _resolve_zero_variance(
    request: LossConfig, definition: LossDefinition, batch: RolloutBatch
) -> bool:
    """Variance is of rewards: with ready-made advantages there is none to look at."""
    if request.drop_zero_variance_groups is None:
        return definition.drop_zero_variance_groups and batch.rewards is not None
    if request.drop_zero_variance_groups and batch.rewards is None:
        raise invalid("loss.drop_zero_variance_groups", "true", "rollouts that carry rewards")
    return request.drop_zero_variance_groups


def _resolve_staleness(request: LossConfig, batch: RolloutBatch) -> StalenessConfig | None:
    staleness = request.staleness
    if staleness is None:
        return None
    if staleness.max_versions < 0:
        raise invalid("loss.staleness.max_versions", staleness.max_versions, "at least 0")
    unsaid_S = batch.policy_version < 0
    if unsaid_S.any():
        raise invalid(
            f"{sent_field(batch, int(unsaid_S.argmax()))}.policy_version",
            "none",
            "the version that sampled it: loss.staleness was asked for",
        )
    return staleness


def _check_token_weights(kind: LossKind, batch: RolloutBatch) -> None:
    if batch.token_weights is not None and not LOSSES[kind].takes_weights:
        takes = "no weights" if LOSSES[kind].advantage is None else "advantages"
        raise invalid(
            "groups[0].rollouts[0].token_weights", "weights", f"none: {kind} takes {takes}"
        )


def resolve_old_logprobs(request: LossConfig, batch: RolloutBatch) -> OldLogprobs | None:
    """Old log-probs enter the ratio and the correction; a loss with neither has none."""
    definition = LOSSES[request.kind]
    if not _has_old_logprobs(request):
        if request.old_logprobs is not None:
            raise invalid(
                "loss.old_logprobs",
                request.old_logprobs.kind,
                f"absent: {request.kind} has no ratio, and no correction was asked for",
            )
        return None
    if request.old_logprobs is None and definition.needs_old_logprobs:
        raise invalid(
            "loss.old_logprobs",
            "none",
            f"one: the clip of {request.kind} is narrower than the difference between a sampler's "
            "numerics and the trainer's. Recommended: on_policy where a batch is one update, else "
            "from_forward, with a correction for that difference; sampler and given are taken as "
            "they are",
        )
    default = OldLogprobsKind.SAMPLER if definition.has_ratio else OldLogprobsKind.ON_POLICY
    old = request.old_logprobs or OldLogprobs(kind=default)
    from_forward = old.kind is OldLogprobsKind.FROM_FORWARD
    if from_forward != bool(old.forward_operation_id):
        raise invalid(
            "loss.old_logprobs.forward_operation_id",
            repr(old.forward_operation_id),
            "the id of a Forward" if from_forward else f"empty for {old.kind}",
        )
    if old.kind is OldLogprobsKind.SAMPLER:
        _require_sampler("loss.old_logprobs", "sampler", request, batch)
    if old.kind is OldLogprobsKind.GIVEN and batch.old_logprobs is None:
        raise invalid("loss.old_logprobs", "given", "rollouts that carry old_logprobs")
    return old


def resolve_kl(
    request: LossConfig, batch: RolloutBatch, *, has_frozen_reference: bool
) -> KlConfig | None:
    """There are a KL term's reference log-probs, and old ones for its weight; None: no term."""
    kl = request.kl
    if kl is None:
        return None
    require_finite("loss.kl.coefficient", kl.coefficient)
    if kl.reference is ReferenceKind.GIVEN and batch.reference_logprobs is None:
        raise invalid("loss.kl.reference", "given", "rollouts that carry reference_logprobs")
    if kl.reference is ReferenceKind.FROZEN and not has_frozen_reference:
        raise invalid(
            "loss.kl.reference", "frozen", "a policy created with a reference, or given log-probs"
        )
    field = "loss.kl.importance_weighted"
    if kl.importance_weighted and kl.kind not in (KlKind.K1, KlKind.K3):
        raise invalid(field, kl.kind, "kl.kind k1 or k3: no other estimate becomes unbiased by it")
    if kl.importance_weighted and not _has_old_logprobs(request):
        raise invalid(field, request.kind, "a loss with old log-probs, whose ratio is the weight")
    if kl.reference is ReferenceKind.TEACHER:
        # Its log-probs are in the batch once it has answered.
        return replace(kl, reference=ReferenceKind.GIVEN, teachers=())
    return kl


def _resolve_distillation(request: LossConfig, batch: RolloutBatch) -> Distillation | None:
    """There are a teacher's tokens and log-probs; None: no such term."""
    asked, field = request.distillation, "loss.distillation"
    if asked is None:
        if request.kind is LossKind.DISTILLATION:
            raise invalid(field, "none", "the divergence from the teacher")
        return None
    require_finite(f"{field}.coefficient", asked.coefficient)
    is_mixed = asked.divergence is Divergence.JENSEN_SHANNON
    if asked.beta is not None and not is_mixed:
        expected = f"absent: {asked.divergence} has no mixture"
        raise invalid(f"{field}.beta", asked.beta, expected)
    beta = 0.5 if asked.beta is None else asked.beta
    require(f"{field}.beta", beta, 1e-6 <= beta <= 1 - 1e-6, "a number from 1e-6 to 1 - 1e-6")
    if batch.teacher_logprobs is None and not asked.teachers:
        expected = "teachers, or rollouts that carry teacher_tokens and teacher_logprobs"
        raise invalid(field, "no teacher", expected)
    if batch.sampling_mask is not None:
        # The teacher's tokens may be outside of it, where the policy has no log-prob.
        raise invalid(field, "rollouts with a sampling_mask", "rollouts without")
    return Distillation(divergence=asked.divergence, coefficient=asked.coefficient, beta=beta)


def _resolve_value(
    request: LossConfig, batch: RolloutBatch, *, has_value_head: bool
) -> ValueLoss | None:
    """There are a value head, returns and, for a clip, old values; None: no such term."""
    asked, field = request.value, "loss.value"
    if asked is None:
        if request.kind is LossKind.VALUE:
            raise invalid(field, "none", "the loss of the value head")
        return None
    if not has_value_head:
        raise invalid(field, "a policy without a value head", "one created with value_head")
    require_finite(f"{field}.coefficient", asked.coefficient)
    if batch.returns is None:
        raise invalid(field, "no returns", "rollouts that carry returns")
    if asked.clip is not None:
        require(f"{field}.clip", asked.clip, asked.clip > 0, "a finite float32 above 0")
        if batch.old_values is None:
            raise invalid(f"{field}.clip", asked.clip, "rollouts that carry old_values")
    return ValueLoss(coefficient=asked.coefficient, clip=asked.clip)


def _has_old_logprobs(request: LossConfig) -> bool:
    is_corrected = request.correction is not None or request.correction_mask is not None
    return LOSSES[request.kind].has_ratio or is_corrected


def resolve_correction(request: LossConfig, batch: RolloutBatch) -> RolloutCorrection | None:
    """Old and sampler log-probs are there, and differ; None: no correction."""
    correction = request.correction
    if correction is None:
        return None
    _require_mismatch("loss.correction", correction.mode, request, batch)
    _require_bounds("loss.correction", correction.low, correction.high)
    if correction.mode is CorrectionMode.TRUNCATE and correction.low != 0:
        raise invalid("loss.correction.low", correction.low, "absent: it belongs to mode mask")
    return correction


def resolve_correction_mask(request: LossConfig, batch: RolloutBatch) -> CorrectionMask | None:
    """Old and sampler log-probs are there, and differ; None: no mask."""
    mask = request.correction_mask
    if mask is None:
        return None
    _require_mismatch("loss.correction_mask", mask.level, request, batch)
    _require_bounds("loss.correction_mask", mask.low, mask.high)
    return mask


def _require_mismatch(field: str, got: object, request: LossConfig, batch: RolloutBatch) -> None:
    """There are old and sampler log-probs, and they differ."""
    if LOSSES[request.kind].advantage is None:
        raise invalid(field, got, f"absent: {request.kind} has no sampler")
    old = request.old_logprobs
    sampler_is_default = old is None and LOSSES[request.kind].has_ratio
    if sampler_is_default or (old is not None and old.kind is OldLogprobsKind.SAMPLER):
        raise invalid(
            field,
            "old_logprobs sampler",
            "old_logprobs given, from_forward or on_policy: exp(old - sampler) would be 1",
        )
    _require_sampler(field, got, request, batch)


def _require_bounds(field: str, low: float, high: float) -> None:
    """A weight of 1, where sampler and trainer agree, is neither truncated nor masked."""
    require(f"{field}.low", low, 0 <= low <= 1, "a number from 0 to 1")
    require(f"{field}.high", high, high >= 1, "a finite float32, at least 1")


def _require_sampler(field: str, got: object, request: LossConfig, batch: RolloutBatch) -> None:
    """Sampler log-probs that may enter a ratio: there, at the temperature, over the same tokens."""
    if batch.sampler_logprobs is None:
        raise invalid(field, got, "rollouts that carry sampler_logprobs")
    raw = first_true(batch.sampler_is_raw)
    if raw is not None:
        raise invalid(
            f"{sent_field(batch, raw)}.sampler_logprobs_kind",
            "raw",
            f"processed: {field} puts sampler log-probs into a ratio",
        )
    cut = first_true(is_unmasked(batch))
    if cut is not None and not request.allow_truncated_sampling:
        name = "top_p" if batch.top_p[cut] < 1 else "top_k"
        raise invalid(
            f"{sent_field(batch, cut)}.{name}",
            getattr(batch, name)[cut],
            f"none: {field} puts log-probs that top-p or top-k renormalised into a ratio with the "
            "whole distribution; send the sampling_mask, sample without, or set "
            "loss.allow_truncated_sampling",
        )
