"""Converts a device's bytes into packed tokens, for the planner of micro-batches. Imports no torch.

If several ranks run a micro-batch together, each has its share of the tokens.
"""

from __future__ import annotations

from ratoon.model.activation_plan import (
    DecoderSizes,
    Kept,
    max_tokens,
    most_tokens,
    streamed_tokens,
)
from ratoon.rollout.costs import TokenLimits

# Number of steps from keeping everything to keeping the least.
_NUM_STEPS = 4


def token_limits(sizes: DecoderSizes, device_bytes: int, host_bytes: int) -> TokenLimits:
    """Token limits of a whole forest, and of stages, however much of them waits on the host."""
    return TokenLimits(
        at_once=sizes.num_ranks * max_tokens(sizes, device_bytes, host_bytes),
        streamed=sizes.num_ranks * streamed_tokens(sizes, device_bytes, host_bytes),
    )


def candidate_tokens(sizes: DecoderSizes, device_bytes: int, at_once: int) -> tuple[int, ...]:
    """Candidate sizes of a micro-batch, ascending: from the most that keep all products to
    `at_once`.

    They are preceded by the most that keep all products in stages.
    """
    in_stages, least = (
        sizes.num_ranks * max(1, most_tokens(sizes, device_bytes, Kept.PRODUCTS, is_streamed=each))
        for each in (True, False)
    )
    growth = max(1.0, at_once / least)
    steps = {int(least * growth ** (i / _NUM_STEPS)) for i in range(_NUM_STEPS)}
    return tuple(sorted({in_stages, *steps, max(least, at_once)}))
