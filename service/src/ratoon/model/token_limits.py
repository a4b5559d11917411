"""The bytes of a device as packed tokens, for the planner of micro-batches.

Enter a decoder's sizes and the bytes that are lent to activations, leave `TokenLimits` and sizes of
micro-batches worth trying. Invariant: what the limits hold, `plan_activations` has a plan for, with
the bytes that keys, values and gradients of resident prefixes leave. No torch here.
"""

from __future__ import annotations

from ratoon.model.activation_plan import (
    DLOGIT_BYTES,
    LOGIT_BYTES,
    DecoderSizes,
    Kept,
    max_tokens,
    most_tokens,
    peak_bytes,
)
from ratoon.rollout.limits import TokenLimits

# Steps from what keeps everything to what keeps the least.
_NUM_STEPS = 4
# Against the rounding of the division below.
_ROUND_UP = 1 + 1e-9


def token_limits(sizes: DecoderSizes, device_bytes: int, host_bytes: int) -> TokenLimits:
    """Stages are run in another order than backward: theirs never wait on the host."""
    streamed = max_tokens(sizes, device_bytes)
    return TokenLimits(
        at_once=max_tokens(sizes, device_bytes, host_bytes),
        streamed=streamed,
        prefix_weight=_prefix_weight(sizes, device_bytes, streamed),
    )


def candidate_tokens(sizes: DecoderSizes, device_bytes: int, at_once: int) -> tuple[int, ...]:
    """Tokens of a micro-batch, ascending: from the most that keep all products to `at_once`."""
    least = max(1, most_tokens(sizes, device_bytes, Kept.PRODUCTS))
    growth = max(1.0, at_once / least)
    steps = {int(least * growth ** (i / _NUM_STEPS)) for i in range(_NUM_STEPS)}
    return tuple(sorted({*steps, max(least, at_once)}))


def _prefix_weight(sizes: DecoderSizes, device_bytes: int, streamed: int) -> float:
    """Tokens that a resident token takes the room of, beside its own, however many are held.

    With w of them, t <= streamed - w * r has to mean peak(t) + r * prefix_bytes <= device_bytes:
    w is the largest of prefix_bytes * (streamed - t) / (device_bytes - peak(t)). The peak is the
    largest of terms that are linear but for where the head's buffers are full, so one of the ends
    of a line has it.
    """
    head_bytes = DLOGIT_BYTES if sizes.head_is_trained else LOGIT_BYTES // 4 * sizes.element_bytes
    full_logits = LOGIT_BYTES // (4 * sizes.vocab_size)
    full_group = head_bytes // (sizes.element_bytes * sizes.vocab_size)
    ends = (0, full_logits, full_logits + 1, full_group, full_group + 1, streamed - 1)
    least = (Kept.ATTENTION,) * sizes.num_layers
    weights = [
        sizes.prefix_bytes
        * (streamed - tokens)
        / (device_bytes - peak_bytes(sizes, least, tokens, tokens))
        for tokens in ends
        if 0 <= tokens < streamed
    ]
    return max(weights, default=0.0) * _ROUND_UP
