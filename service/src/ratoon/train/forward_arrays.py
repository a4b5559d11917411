"""What a Forward answers, and what a loss may take from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid
from ratoon.rollout.batch import RolloutBatch
from ratoon.train.loss.spec import Loss
from ratoon_proto.types import OldLogprobsKind, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardArrays:
    """Per response token of the batch, [J], 0 where the loss mask is false.

    float32; float64 for a float64 model. `entropy` None: not asked for.
    """

    logprobs: NDArray[np.floating]
    entropy: NDArray[np.floating] | None
    report: StepReport


def check_forward_logprobs(
    batch: RolloutBatch,
    loss: Loss,
    old_logprobs_J: NDArray[np.floating] | None,
    entropy_J: NDArray[np.floating] | None,
) -> None:
    """Whether the Forward that the loss names was of as many tokens as the batch has."""
    old = loss.old_logprobs
    is_asked = old is not None and old.kind is OldLogprobsKind.FROM_FORWARD
    assert is_asked == (old_logprobs_J is not None), "from_forward log-probs come with their loss"
    needs_entropy = loss.top_entropy_share is not None
    assert needs_entropy == (entropy_J is not None), "entropies come with their loss"
    if old_logprobs_J is not None and old_logprobs_J.shape != batch.loss_mask.shape:
        raise invalid(
            "loss.old_logprobs.forward_operation_id",
            f"a Forward of {old_logprobs_J.size} response tokens",
            f"one of this batch's {len(batch.loss_mask)}",
        )
