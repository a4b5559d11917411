"""What the caller asked of the loss, judged against the batch and completed. Imports no torch.

An option that would not be used is refused, never ignored.
"""

from __future__ import annotations

from ratoon.errors import invalid
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.raw import sequence_field
from ratoon.train.loss.checks import require, require_finite, require_not_negative
from ratoon.train.loss.kinds import LOSSES, LossDefinition, resolve_objective
from ratoon.train.loss.resolve_logprobs import (
    resolve_correction,
    resolve_correction_mask,
    resolve_kl,
    resolve_old_logprobs,
)
from ratoon.train.loss.spec import Loss
from ratoon.train.optim.resolve import check_optim, resolve_optim
from ratoon_proto.types import (
    AdvantageKind,
    LossConfig,
    LossKind,
    OldLogprobsKind,
    OverlongFilter,
    OverlongPenalty,
    StalenessConfig,
)

__all__ = ["check_optim", "resolve_loss", "resolve_optim"]

_REWARD_ADVANTAGES = (
    AdvantageKind.GROUP_MEAN_STD,
    AdvantageKind.GROUP_MEAN,
    AdvantageKind.GROUP_MEAN_BATCH_STD,
    AdvantageKind.LEAVE_ONE_OUT,
    AdvantageKind.NONE,
)


def resolve_loss(request: LossConfig, batch: RolloutBatch, *, has_frozen_reference: bool) -> Loss:
    """Fill in the defaults of the loss and check that `batch` carries all that it needs.

    `has_frozen_reference`: the policy keeps its initial weights. Raises `RatoonError`
    (INVALID_ARGUMENT or UNSUPPORTED) naming the field.
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
    )


def _resolve_advantage(
    request: LossConfig, definition: LossDefinition, batch: RolloutBatch
) -> AdvantageKind | None:
    if definition.advantage is None:
        _refuse_given(
            "loss.advantage", request.advantage, f"absent: {request.kind} takes token_weights"
        )
        if batch.advantages is not None:
            raise invalid(
                "groups[0].rollouts[0].advantages",
                "advantages",
                f"none: {request.kind} takes token_weights",
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
            f"{sequence_field(batch.group_offsets, int(unsaid_S.argmax()))}.policy_version",
            "none",
            "the version that sampled it: loss.staleness was asked for",
        )
    return staleness


def _check_token_weights(kind: LossKind, batch: RolloutBatch) -> None:
    if batch.token_weights is not None and LOSSES[kind].advantage is not None:
        raise invalid(
            "groups[0].rollouts[0].token_weights", "weights", f"none: {kind} takes advantages"
        )


def _refuse_given(field: str, value: object, expected: str) -> None:
    if value is not None:
        raise invalid(field, value, expected)
