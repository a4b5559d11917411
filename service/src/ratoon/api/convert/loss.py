"""Loss and optimizer configuration from the wire.

Enters `LossConfig` and `OptimStepConfig`, leaves `LossRequest` and `OptimRequest`. Invariant: only
names are judged here; whether numbers make sense is for `train.loss.resolve`, against the batch.
"""

from __future__ import annotations

from ratoon.api.convert.checks import at_least, required
from ratoon.api.convert.enums import from_wire, optional_from_wire
from ratoon.train.config import (
    AdvantageKind,
    CorrectionLevel,
    CorrectionMask,
    CorrectionMode,
    DivideBy,
    KlConfig,
    KlKind,
    LossKind,
    LossRequest,
    OldLogprobs,
    OldLogprobsKind,
    OptimRequest,
    OverlongFilter,
    OverlongPenalty,
    ReferenceKind,
    RolloutCorrection,
    SharedTokens,
    Staleness,
    StalenessAction,
    TokenWeight,
)
from ratoon_proto.v1 import training_pb2 as wire

# Left out, none of them is 0, which would train without saying that something is missing.
_NUMBER = "a number"


def loss_request(message: wire.LossConfig) -> LossRequest:
    """Raises INVALID_ARGUMENT naming the field below `loss`."""
    return LossRequest(
        kind=from_wire("loss.kind", message.kind, wire.LossKind, LossKind),
        advantage=optional_from_wire(
            "loss.advantage", message.advantage, wire.AdvantageKind, AdvantageKind
        ),
        clip_low=message.clip_low if message.HasField("clip_low") else None,
        clip_high=message.clip_high if message.HasField("clip_high") else None,
        dual_clip=message.dual_clip if message.HasField("dual_clip") else None,
        tau_positive=message.tau_positive if message.HasField("tau_positive") else None,
        tau_negative=message.tau_negative if message.HasField("tau_negative") else None,
        top_entropy_share=(
            message.top_entropy_share if message.HasField("top_entropy_share") else None
        ),
        old_logprobs=_old_logprobs(message.old_logprobs),
        kl=_kl(message.kl) if message.HasField("kl") else None,
        entropy_coefficient=message.entropy_coefficient,
        correction=_correction(message.correction) if message.HasField("correction") else None,
        correction_mask=(
            _correction_mask(message.correction_mask)
            if message.HasField("correction_mask")
            else None
        ),
        token_weight=optional_from_wire(
            "loss.token_weight", message.token_weight, wire.TokenWeight, TokenWeight
        ),
        shared_tokens=from_wire(
            "loss.shared_tokens", message.shared_tokens, wire.SharedTokens, SharedTokens
        ),
        overlong=_overlong(message),
        drop_zero_variance_groups=(
            message.drop_zero_variance_groups
            if message.HasField("drop_zero_variance_groups")
            else None
        ),
        staleness=_staleness(message.staleness) if message.HasField("staleness") else None,
        router_aux_loss_coefficient=message.router_aux_loss_coefficient,
        allow_truncated_sampling=message.allow_truncated_sampling,
    )


def optim_request(message: wire.OptimStepConfig) -> OptimRequest:
    """Raises INVALID_ARGUMENT naming the field below `optim`."""
    if not message.HasField("learning_rate"):
        raise required("optim.learning_rate", _NUMBER)
    return OptimRequest(
        learning_rate=message.learning_rate,
        weight_decay=message.weight_decay if message.HasField("weight_decay") else None,
        max_grad_norm=message.max_grad_norm if message.HasField("max_grad_norm") else None,
        divide_by=optional_from_wire("optim.divide_by", message.divide_by, wire.DivideBy, DivideBy),
        divide_constant=message.divide_constant if message.HasField("divide_constant") else None,
        layer_grad_norms=message.layer_grad_norms,
    )


def _old_logprobs(message: wire.OldLogprobs) -> OldLogprobs | None:
    kind = optional_from_wire(
        "loss.old_logprobs.kind", message.kind, wire.OldLogprobsKind, OldLogprobsKind
    )
    if kind is None:
        if message.forward_operation_id:
            raise required("loss.old_logprobs.kind", "from_forward")
        return None
    return OldLogprobs(kind=kind, forward_operation_id=message.forward_operation_id)


def _kl(message: wire.KlConfig) -> KlConfig:
    if not message.HasField("coefficient"):
        raise required("loss.kl.coefficient", _NUMBER)
    return KlConfig(
        kind=from_wire("loss.kl.kind", message.kind, wire.KlKind, KlKind),
        coefficient=message.coefficient,
        reference=from_wire(
            "loss.kl.reference", message.reference, wire.ReferenceKind, ReferenceKind
        ),
        importance_weighted=message.importance_weighted,
    )


def _correction(message: wire.RolloutCorrection) -> RolloutCorrection:
    return RolloutCorrection(
        mode=from_wire("loss.correction.mode", message.mode, wire.CorrectionMode, CorrectionMode),
        level=from_wire(
            "loss.correction.level", message.level, wire.CorrectionLevel, CorrectionLevel
        ),
        low=message.low,
        high=message.high,
    )


def _correction_mask(message: wire.CorrectionMask) -> CorrectionMask:
    for name in ("low", "high"):
        if not message.HasField(name):
            raise required(f"loss.correction_mask.{name}", _NUMBER)
    return CorrectionMask(
        level=from_wire(
            "loss.correction_mask.level", message.level, wire.CorrectionLevel, CorrectionLevel
        ),
        low=message.low,
        high=message.high,
    )


def _overlong(message: wire.LossConfig) -> OverlongFilter | OverlongPenalty | None:
    match message.WhichOneof("overlong"):
        case "overlong_filter":
            return OverlongFilter()
        case "overlong_penalty":
            penalty = message.overlong_penalty
            if not penalty.HasField("scale"):
                raise required("loss.overlong_penalty.scale", _NUMBER)
            return OverlongPenalty(
                max_tokens=penalty.max_tokens,
                buffer_tokens=penalty.buffer_tokens,
                scale=penalty.scale,
            )
        case None:
            return None


def _staleness(message: wire.StalenessConfig) -> Staleness:
    return Staleness(
        max_versions=at_least("loss.staleness.max_versions", message.max_versions, 0),
        action=from_wire(
            "loss.staleness.action", message.action, wire.StalenessAction, StalenessAction
        ),
    )
