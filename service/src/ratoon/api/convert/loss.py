"""Loss and optimizer step of a call.

Only names and presence are checked here; `train.loss.resolve` checks the numbers against the batch.
"""

from __future__ import annotations

from ratoon.api.convert.checks import at_least, required
from ratoon.api.convert.records import read
from ratoon.train.config import (
    LossRequest,
    OldLogprobs,
    OptimRequest,
    OverlongFilter,
    OverlongPenalty,
    RolloutCorrection,
)
from ratoon_proto.v1 import training_pb2 as wire


def loss_request(message: wire.LossConfig) -> LossRequest:
    """Raises INVALID_ARGUMENT naming the field below `loss`."""
    if message.HasField("staleness"):
        at_least("loss.staleness.max_versions", message.staleness.max_versions, 0)
    return read(
        message,
        LossRequest,
        "loss",
        old_logprobs=_old_logprobs(message.old_logprobs),
        correction=_correction(message),
        overlong=_overlong(message),
    )


def optim_request(message: wire.OptimStepConfig) -> OptimRequest:
    """Raises INVALID_ARGUMENT naming the field below `optim`."""
    return read(message, OptimRequest, "optim")


def _old_logprobs(message: wire.OldLogprobs) -> OldLogprobs | None:
    if message.kind:
        return read(message, OldLogprobs, "loss.old_logprobs")
    if message.forward_operation_id:
        raise required("loss.old_logprobs.kind", "from_forward")
    return None


def _correction(message: wire.LossConfig) -> RolloutCorrection | None:
    """`low` belongs to one mode only, and defaults to 0."""
    if not message.HasField("correction"):
        return None
    correction = message.correction
    return read(correction, RolloutCorrection, "loss.correction", low=correction.low)


def _overlong(message: wire.LossConfig) -> OverlongFilter | OverlongPenalty | None:
    match message.WhichOneof("overlong"):
        case "overlong_filter":
            return OverlongFilter()
        case "overlong_penalty":
            return read(message.overlong_penalty, OverlongPenalty, "loss.overlong_penalty")
        case None:
            return None
