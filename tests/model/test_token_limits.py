"""Limits in tokens against the plan of bytes: what they hold is never refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.errors import RatoonError
from ratoon.model.activation_plan import DecoderSizes, Kept, peak_bytes, plan_activations
from ratoon.model.device_costs import (
    H200_RATES,
    candidate_tokens,
    device_costs,
    token_limits,
    with_recompute,
)
from ratoon.model.stage_plan import HeldTokens, StreamTokens, plan_forward
from ratoon.rollout.batch import RolloutBatch, sequence_lengths
from ratoon.rollout.packed import MicroBatch
from ratoon.rollout.prefixes import sort_sequences
from tests.builders import random_batch
from tests.model.test_activation_plan import QWEN3_8B
from tests.plans import make_plan
from tests.rollout.stages import held_tokens

GIB = 2**30
# Sizes at which the head's buffers fill up within a few hundred tokens.
SMALL = DecoderSizes(
    num_layers=4,
    hidden_size=64,
    mlp_size=192,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=2**20,
    element_bytes=2,
    head_is_trained=False,
)
CHECKED = settings(max_examples=200, deadline=None)


def _refuses(sizes: DecoderSizes, part: MicroBatch, device_bytes: int, host_bytes: int) -> bool:
    """Whether the model does, asked as `PolicyModel` asks for a forward with gradients."""
    at_once = HeldTokens(tokens=part.packed_tokens, above=0, waits=False, stream=None)
    try:
        for held in held_tokens(part.stages) if part.stages else [at_once]:
            plan_forward(sizes, held, device_bytes, host_bytes)
    except RatoonError:
        return True
    return False


def _least(sizes: DecoderSizes, tokens: int) -> int:
    return peak_bytes(sizes, (Kept.ATTENTION,) * sizes.num_layers, tokens, tokens)


def _batch(seed: int) -> RolloutBatch:
    return random_batch(np.random.default_rng(seed), num_groups=3, max_response=40)


@CHECKED
@given(
    seed=st.integers(0, 2**16),
    sizes=st.sampled_from([QWEN3_8B, SMALL, dataclasses.replace(SMALL, vocab_size=512)]),
    room=st.floats(0.0, 0.4),
    has_host=st.booleans(),
    asked=st.sampled_from([None, 30, 10**6]),
    call=st.sampled_from([None, 0.0]),
)
def test_no_plan_is_refused_but_for_a_path_that_is_too_long(
    seed: int,
    sizes: DecoderSizes,
    room: float,
    has_host: bool,
    asked: int | None,
    call: float | None,
) -> None:
    batch = _batch(seed)
    longest = int(sequence_lengths(batch).max())
    total = int(sequence_lengths(batch).sum())
    # From what the longest path takes to a good part of all.
    least, most = _least(sizes, longest), _least(sizes, total)
    device_bytes = int(least + room * (most - least))
    host_bytes = total * 2**14 if has_host else 0
    limits = token_limits(sizes, device_bytes, host_bytes)
    costs = device_costs(sizes, H200_RATES)
    if call is not None:
        # Where a call is free, whatever does not fit is streamed, if it can be.
        costs = dataclasses.replace(costs, call=call)
    plan = make_plan(
        batch,
        sort_sequences(batch),
        np.ones(batch.num_sequences, np.bool_),
        candidate_tokens(sizes, device_bytes, limits.at_once) if asked is None else (asked,),
        with_recompute(costs, sizes, H200_RATES, device_bytes, host_bytes),
        limits,
    )
    refused = [
        part for part in plan.micro_batches if _refuses(sizes, part, device_bytes, host_bytes)
    ]
    assert refused == []


@CHECKED
@given(seed=st.integers(0, 2**16), share=st.floats(0.3, 0.99))
def test_only_what_holds_no_path_is_refused(seed: int, share: float) -> None:
    """A budget below the longest path: that one alone is refused, however the rest is cut."""
    batch = _batch(seed)
    length_S = sequence_lengths(batch)
    device_bytes = _least(SMALL, int(length_S.max() * share))
    limits = token_limits(SMALL, device_bytes, 0)
    plan = make_plan(
        batch,
        sort_sequences(batch),
        np.ones(batch.num_sequences, np.bool_),
        (limits.at_once,),
        device_costs(SMALL, H200_RATES),
        limits,
    )
    too_long = {s for s in range(batch.num_sequences) if length_S[s] > limits.at_once}
    assert too_long
    for part in plan.micro_batches:
        if _refuses(SMALL, part, device_bytes, 0):
            assert too_long & set(part.sequences)


@pytest.mark.parametrize("sizes", [QWEN3_8B, dataclasses.replace(QWEN3_8B, head_is_trained=False)])
@pytest.mark.parametrize("room", [6, 20, 110])
def test_limits_are_the_bytes_own(sizes: DecoderSizes, room: int) -> None:
    device_bytes = room * GIB
    limits = token_limits(sizes, device_bytes, 0)
    tokens = limits.streamed
    plan_activations(sizes, tokens, tokens, device_bytes - tokens * sizes.stack_bytes)
    with pytest.raises(RatoonError):
        plan_activations(
            sizes, tokens + 1, tokens + 1, device_bytes - (tokens + 1) * sizes.stack_bytes
        )
    plan_activations(sizes, limits.at_once, limits.at_once, device_bytes)
    with pytest.raises(RatoonError):
        plan_activations(sizes, limits.at_once + 1, limits.at_once + 1, device_bytes)


def test_candidates_are_from_all_products_to_all_that_fits() -> None:
    limits = token_limits(QWEN3_8B, 100 * GIB, 0)
    tokens = candidate_tokens(QWEN3_8B, 100 * GIB, limits.at_once)
    assert list(tokens) == sorted(set(tokens))
    assert tokens[-1] == limits.at_once
    for count, stacks in ((tokens[0], QWEN3_8B.stack_bytes), (tokens[1], 0)):
        kept, less = (
            set(plan_activations(QWEN3_8B, n, n, 100 * GIB - n * stacks))
            for n in (count, count + 1)
        )
        assert kept == {Kept.PRODUCTS} < less
    assert candidate_tokens(QWEN3_8B, 0, 0) == (1,)


@pytest.mark.parametrize("num_ranks", [2, 8, 16])
def test_ranks_together_hold_as_many_times_as_much(num_ranks: int) -> None:
    """Past the eight key heads each rank has copies, and less room in stages."""
    sizes, device_bytes = QWEN3_8B.over(num_ranks), 20 * GIB
    alone, together = (token_limits(each, device_bytes, 0) for each in (QWEN3_8B, sizes))
    assert together.at_once == num_ranks * alone.at_once
    copies = 2 if num_ranks > 8 else 1
    assert (sizes.key_copies, sizes.stack_bytes) == (copies, copies * QWEN3_8B.stack_bytes)
    assert (together.streamed < num_ranks * alone.streamed) == (copies > 1)
    own = together.streamed // num_ranks
    stream = StreamTokens(held=own, waiting=own // 2)
    for held, most in (
        (HeldTokens(tokens=own // 2, above=own // 2, waits=False, stream=stream), own),
        (HeldTokens(tokens=alone.at_once, above=0, waits=False, stream=None), alone.at_once),
    ):
        plan_forward(sizes, held, device_bytes, 0)
        more = StreamTokens(held=most + 1, waiting=0) if held.stream else None
        with pytest.raises(RatoonError):
            plan_forward(
                sizes, dataclasses.replace(held, tokens=most + 1, stream=more), device_bytes, 0
            )
