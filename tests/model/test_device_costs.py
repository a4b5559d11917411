"""Costs of a device, by hand; limits in tokens against the plan of bytes: what they hold is never
refused.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.decoder_sizes import uniform_sizes
from ratoon.errors import RatoonError
from ratoon.planner.activation_plan import DecoderSizes, Kept, peak_bytes, plan_activations
from ratoon.planner.costs import Work
from ratoon.planner.device_costs import (
    H200_RATES,
    DeviceRates,
    candidate_tokens,
    device_costs,
    recompute_s,
    token_limits,
    with_recompute,
)
from ratoon.planner.layer_kinds import Attention
from ratoon.planner.stage_plan import HeldTokens, StreamTokens, plan_forward
from ratoon.rollout.batch import RolloutBatch, sequence_lengths
from ratoon.rollout.packed import MicroBatch, Stage
from ratoon.rollout.prefixes import sort_sequences
from tests.builders import random_batch
from tests.model.test_activation_plan import QWEN3_8B, QWEN3_30B
from tests.plans import make_plan
from tests.rollout.stages import held_tokens

GIB = 2**30
NOTHING = DeviceRates(
    linear_flops=math.inf,
    attention_flops=math.inf,
    head_flops=math.inf,
    memory_bytes=math.inf,
    layer_call_s=0.0,
    link_bytes=math.inf,
    exchange_s=0.0,
)
# Sizes at which the head's buffers fill up within a few hundred tokens.
SMALL = uniform_sizes(
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
CHECKED = settings(max_examples=80, deadline=None)


def test_running_again_by_hand() -> None:
    """Gate and up of a layer that keeps NARROW; all that attention is made of beside it, too."""
    wide = 2 * 4096 * 12_288
    attention = 4096 * 128 * (32 + 8 + 8 + 32)
    rate = H200_RATES.linear_flops
    again = {
        kept: recompute_s(QWEN3_8B, H200_RATES, (kept,) * 36) * rate / (2 * 36) for kept in Kept
    }
    assert again == {
        Kept.PRODUCTS: 0,
        Kept.AWAY: 0,
        Kept.NARROW: pytest.approx(wide, rel=1e-12),
        Kept.ATTENTION: pytest.approx(wide + attention, rel=1e-12),
        Kept.HOST: pytest.approx(wide + attention, rel=1e-12),
    }


def test_each_price_is_work_over_its_rate() -> None:
    parameters = 36 * (4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12_288)
    linear = device_costs(QWEN3_8B, dataclasses.replace(NOTHING, linear_flops=1.0))
    assert (linear.token, linear.pair, linear.row, linear.call) == (6.0 * parameters, 0, 0, 0)
    attention = device_costs(QWEN3_8B, dataclasses.replace(NOTHING, attention_flops=1.0))
    assert (attention.token, attention.pair, attention.row) == (0, 14.0 * 128 * 32 * 36, 0)
    head = device_costs(QWEN3_8B, dataclasses.replace(NOTHING, head_flops=1.0))
    assert (head.token, head.row) == (0, 6.0 * 151_936 * 4096)
    memory = device_costs(QWEN3_8B, dataclasses.replace(NOTHING, memory_bytes=1.0))
    assert memory.call == (parameters + 2 * 151_936 * 4096) * 12
    assert memory.resident == 36 * 2 * 8 * 128 * 12
    calls = device_costs(QWEN3_8B, dataclasses.replace(NOTHING, layer_call_s=0.5))
    assert (calls.token, calls.call) == (0, 18.0)
    frozen = dataclasses.replace(QWEN3_8B, head_is_trained=False)
    adapters = device_costs(
        frozen, dataclasses.replace(NOTHING, linear_flops=1.0), layers_are_trained=False
    )
    assert adapters.token == 4.0 * parameters
    assert device_costs(frozen, H200_RATES, layers_are_trained=False).call < 0.05


def test_pairs_of_layers_with_a_window_have_a_price_of_their_own() -> None:
    """Gemma 3's way: five of six layers; a window costs no token a pair that it does not see."""
    layer = QWEN3_8B.layers[0]
    assert isinstance(layer.mixer, Attention)
    near = dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=512))
    mixed = dataclasses.replace(QWEN3_8B, layers=((near,) * 5 + (layer,)) * 6)
    costs, full = device_costs(mixed, H200_RATES), device_costs(QWEN3_8B, H200_RATES)
    assert (costs.window, full.window) == (512, None)
    assert costs.near_pair == pytest.approx(5 * costs.pair, rel=1e-12)
    assert costs.pair + costs.near_pair == pytest.approx(full.pair, rel=1e-12)
    assert costs.token == full.token
    both = costs.over(2, 0.0)
    assert (both.near_pair, both.pair) == (costs.near_pair / 2, costs.pair / 2)
    for length, share in ((512, 1.0), (8192, (1 + 5 * 2 * 512 / 8192) / 6)):
        lengths = np.array([length])
        assert costs.of_pairs(lengths) == pytest.approx(share * full.of_pairs(lengths), rel=0.03)
    assert costs.of_pairs(np.array([512])) == pytest.approx(full.of_pairs(np.array([512])))


def test_a_token_pays_for_its_own_experts_and_a_call_for_all() -> None:
    other = 2048 * 128 * (32 + 4 + 4 + 32) + 2048 * 128
    expert = 3 * 2048 * 768
    linear = device_costs(QWEN3_30B, dataclasses.replace(NOTHING, linear_flops=1.0))
    assert linear.token == 6.0 * 48 * (other + 8 * expert)
    memory = device_costs(QWEN3_30B, dataclasses.replace(NOTHING, memory_bytes=1.0))
    assert memory.call == (48 * (other + 128 * expert) + 2 * 151_936 * 2048) * 12
    # Rows of 8 experts are gathered three times, each read and written, and added up twice.
    assert memory.token == 48 * 2 * (24 * 2048 + 9 * 8 * 768 + (3 * 2 + 2) * 8 * 2048)


def test_recomputation_costs_more_the_more_is_held() -> None:
    device_bytes = 60 * GIB
    limits = token_limits(QWEN3_8B, device_bytes, 0)
    costs = device_costs(QWEN3_8B, H200_RATES)
    again = with_recompute(costs, QWEN3_8B, H200_RATES, device_bytes, 0).recompute
    all_again = recompute_s(QWEN3_8B, H200_RATES, (Kept.ATTENTION,) * 36)
    prices = [again.of(tokens, is_streamed=False) for tokens in range(1, limits.at_once, 501)]
    assert prices == sorted(prices)
    assert prices[0] == 0
    assert again.of(limits.at_once, is_streamed=False) == pytest.approx(all_again, rel=0.01)
    # A stream's stacks leave less to keep.
    streamed = [again.of(tokens, is_streamed=True) for tokens in range(1, limits.streamed, 501)]
    assert all(more >= less for more, less in zip(streamed, prices, strict=False))
    assert again.of(limits.streamed, is_streamed=True) == pytest.approx(all_again, rel=0.02)
    assert again.of(10**9, is_streamed=True) == again.cost[-1]


def test_what_may_wait_on_the_host_is_what_it_has_room_for() -> None:
    costs = device_costs(QWEN3_8B, H200_RATES)
    again = with_recompute(costs, QWEN3_8B, H200_RATES, 60 * GIB, 10 * GIB).recompute
    # 36 layers keep input and attention's output, 4096 of 16 bits each, and 32 sums of 32 bits.
    assert again.host_tokens == 10 * GIB // (36 * (4 * 4096 + 4 * 32)) == 18_063


def test_a_micro_batch_pays_for_what_is_run_again() -> None:
    costs = with_recompute(device_costs(QWEN3_8B, H200_RATES), QWEN3_8B, H200_RATES, 60 * GIB, 0)
    plain = device_costs(QWEN3_8B, H200_RATES)
    work = Work(tokens=60_000, pairs=0, rows=0)
    again = 60_000 * costs.recompute.of(60_000, is_streamed=False)
    assert again > 0.1
    assert costs.packed(work) == pytest.approx(plain.packed(work) + again)
    # In stages that hold 15,000 at a time everything is kept.
    stages = (
        Stage(start=0, stop=5000, parent=-1),
        *(
            Stage(start=start, stop=start + 10_000, parent=0)
            for start in range(5000, 55_000, 10_000)
        ),
        Stage(start=55_000, stop=60_000, parent=0),
    )
    assert costs.streamed(work, stages) == pytest.approx(plain.streamed(work, stages))


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
    assert sizes.stack_bytes == copies * QWEN3_8B.stack_bytes
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
