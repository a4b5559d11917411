"""Hypothesis strategies of small batches that collide a lot: few token ids, nested prompts.

Leaves valid `RolloutBatch`es. Invariant: the smallest example is one group of one rollout.
"""

from __future__ import annotations

import numpy as np
from hypothesis import assume, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.raw import RawRollout
from ratoon.rollout.validate import validate_groups
from tests.builders import group, limits, rollout

VOCAB_SIZE = 3

# A busy machine must not fail a test, so no deadline.
CHECKED = settings(max_examples=100, deadline=None)

# One byte a token, and another for the rest: a draw costs far more than what is tested.
_RESPONSES = st.lists(st.tuples(st.binary(max_size=6), st.integers(0, 255)), min_size=1, max_size=5)
_GROUPS = st.lists(st.tuples(st.binary(max_size=5), _RESPONSES), min_size=1, max_size=4)


def _tokens(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, np.uint8).astype(np.int32) % VOCAB_SIZE


def _rollout(data: bytes, bits: int, *, is_bare: bool) -> RawRollout:
    """Tokens and mask from `data`; `is_bare`: the first is not trained."""
    mask = (np.frombuffer(data, np.uint8) & 128) == 0
    if is_bare:
        mask[:1] = False
    return rollout(
        _tokens(data),
        loss_mask=mask,
        temperature=0.5 if bits & 3 == 3 else 1.0,
        reward=float(bits >> 2 & 1),
        truncated=bits >> 3 & 1 == 1,
        policy_version=bits >> 4,
    )


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    """Up to 4 groups of up to 5 rollouts of up to 6 tokens, prompts of up to 5."""
    groups = [
        group(
            _tokens(prompt),
            [_rollout(data, bits, is_bare=not prompt) for data, bits in responses],
            f"group-{g}",
        )
        for g, (prompt, responses) in enumerate(draw(_GROUPS))
    ]
    masks = [raw.loss_mask for each in groups for raw in each.rollouts]
    assume(any(mask is not None and mask.any() for mask in masks))
    return validate_groups(groups, limits(vocab_size=VOCAB_SIZE))


@st.composite
def kept_masks(draw: st.DrawFn, batch: RolloutBatch) -> NDArray[np.bool_]:
    """Some sequences of `batch`, bool [S]."""
    bits = draw(st.integers(0, 2**batch.num_sequences - 1))
    return np.array([bits >> s & 1 == 1 for s in range(batch.num_sequences)], np.bool_)
