"""The plan of what is kept: its arithmetic, its limits, and that it takes what there is."""

import dataclasses
from itertools import pairwise

import pytest

from harness.decoder_sizes import uniform_sizes
from ratoon.errors import ErrorCode, RatoonError
from ratoon.planner.activation_plan import (
    DLOGIT_BYTES,
    LOGIT_BYTES,
    HeadLoad,
    Kept,
    fetched_at,
    max_tokens,
    peak_bytes,
    plan_activations,
)
from ratoon_kernels.token_logprobs import fused

FLAT_8B = {
    "num_layers": 36, "hidden_size": 4096, "mlp_size": 12288, "num_heads": 32, "num_kv_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "element_bytes": 2, "head_is_trained": True,
}  # fmt: skip
FLAT_30B = FLAT_8B | {
    "num_layers": 48, "hidden_size": 2048, "mlp_size": 8 * 768, "num_kv_heads": 4,
    "num_experts": 128, "experts_per_token": 8,
}  # fmt: skip
QWEN3_8B, QWEN3_30B = uniform_sizes(**FLAT_8B), uniform_sizes(**FLAT_30B)
SMALL = uniform_sizes(
    num_layers=3, hidden_size=8, mlp_size=24, num_heads=2, num_kv_heads=1, head_dim=4,
    vocab_size=16, element_bytes=2, head_is_trained=True,
)  # fmt: skip
GIB = 2**30


def test_bytes_of_a_token_are_those_of_its_tensors() -> None:
    # Input 4096, output of attention 4096, 32 fp32 log-sum-exps.
    assert QWEN3_8B.kept_bytes(Kept.ATTENTION) == 2 * (4096 + 4096) + 4 * 32
    # q 4096, k and v 1024 each, output projection 4096.
    narrow = QWEN3_8B.kept_bytes(Kept.ATTENTION) + 2 * (4096 + 2 * 1024 + 4096)
    assert QWEN3_8B.kept_bytes(Kept.NARROW) == narrow
    assert QWEN3_8B.kept_bytes(Kept.PRODUCTS) == narrow + 2 * (2 * 12288)


def test_bytes_of_a_routed_token_are_those_of_its_tensors() -> None:
    # Input 2048, output of attention 4096, 32 fp32 log-sum-exps; of 8 experts the weight, the
    # number (int16) and the row (int32).
    attention = 2 * (2048 + 4096) + 4 * 32 + 8 * (2 + 2 + 4)
    assert QWEN3_30B.kept_bytes(Kept.ATTENTION) == attention
    # q 4096, k and v 512 each, output projection 2048, logits of 128 experts.
    narrow = attention + 2 * (4096 + 2 * 512 + 2048 + 128)
    assert QWEN3_30B.kept_bytes(Kept.NARROW) == narrow
    # Gate and up of 8 experts; the rows that go in and come out are not kept.
    assert QWEN3_30B.kept_bytes(Kept.PRODUCTS) == narrow + 2 * 8 * 2 * 768
    # The product, its gradient, those of gate and up; 4 hidden, 8 rows in, gradients of 8 out.
    working = 2 * (4 * 8 * 768 + 4 * 2048 + 2 * 8 * 2048)
    assert QWEN3_30B.working_bytes(Kept.PRODUCTS) == working
    assert QWEN3_30B.working_bytes(Kept.NARROW) == working + 2 * 2 * 8 * 768


def test_bytes_of_an_adapted_token_are_those_of_its_tensors() -> None:
    """Rank 16: four projections of attention, three of each expert."""
    ranks = {"adapter_size": 4 * 16, "head_is_trained": False}
    adapted = uniform_sizes(**FLAT_30B | ranks | {"expert_adapter_size": 8 * 3 * 16})
    for kept, more in (
        (Kept.ATTENTION, 0),
        (Kept.NARROW, 2 * 4 * 16),
        (Kept.PRODUCTS, 2 * (4 * 16 + 8 * 3 * 16)),
    ):
        assert adapted.kept_bytes(kept) == QWEN3_30B.kept_bytes(kept) + more
        # Terms of gate and up; two more gradients of the rows of 8 experts.
        terms = 2 * (2 * 8 * 768 + 2 * 8 * 2048)
        assert adapted.working_bytes(kept) == QWEN3_30B.working_bytes(kept) + terms
    of_attention = uniform_sizes(**FLAT_30B | ranks)
    assert of_attention.working_bytes(Kept.NARROW) == QWEN3_30B.working_bytes(Kept.NARROW)
    dense = uniform_sizes(**FLAT_8B | {"adapter_size": 7 * 16})
    terms = 2 * 2 * 12288
    assert dense.working_bytes(Kept.NARROW) == QWEN3_8B.working_bytes(Kept.NARROW) + terms


def test_peak_of_one_layer_by_hand() -> None:
    sizes = dataclasses.replace(SMALL, layers=SMALL.layers[:1], vocab_size=1000)
    kept = 2 * (8 + 8 + 8 + 2 * 4 + 8 + 2 * 24) + 4 * 2
    resident = 10 * kept + (3 * 10 + 4) * 8 * 2
    # The backward of the layer: the product, its gradient, those of gate and up; 4 hidden.
    working = 10 * (4 * 24 + 4 * 8) * 2
    # Logits of the 4 rows and their gradients; gradients of their hidden states, first in fp32;
    # those of the head in fp32.
    head = 4 * 1000 * (4 + 2) + 4 * 8 * (4 + 2) + 1000 * 8 * 4
    assert head > working + 1000 * 8 * 2
    assert peak_bytes(sizes, (Kept.PRODUCTS,), 10, 4) == resident + head
    frozen = dataclasses.replace(sizes, head_is_trained=False, vocab_size=10)
    assert peak_bytes(frozen, (Kept.PRODUCTS,), 10, 4) == resident + working


def test_targets_and_rows_beside_are_in_the_peak() -> None:
    """A teacher's 64 tokens of each of 36,000: what they were measured to take, within a tenth."""
    sizes, kept = QWEN3_8B, (Kept.PRODUCTS,) * 36
    plain, tokens = peak_bytes(sizes, kept, 36_000, 36_000), 36_000
    taught = dataclasses.replace(sizes, load=HeadLoad(targets=64.0))
    assert peak_bytes(taught, kept, tokens, tokens) == plain + 36_000 * 64 * 60
    split = dataclasses.replace(sizes, load=HeadLoad(rows=1.5))
    more_rows = peak_bytes(sizes, kept, tokens, 54_000) - plain
    assert peak_bytes(split, kept, tokens, tokens) == plain + more_rows
    for loaded in (taught, split):
        assert max_tokens(loaded, 60 * GIB) < max_tokens(sizes, 60 * GIB)
        assert loaded.stay_bytes > sizes.stay_bytes
    most = max_tokens(taught, 60 * GIB)
    assert plan_activations(taught, most, most, 60 * GIB)
    with pytest.raises(RatoonError):
        plan_activations(taught, most + 1, most + 1, 60 * GIB)


def test_the_heads_buffers_are_those_of_the_kernels() -> None:
    """The buffers have the largest number of rows that they hold, however many rows there are."""
    assert (LOGIT_BYTES, DLOGIT_BYTES) == (fused.LOGIT_BYTES, fused.DLOGIT_BYTES)
    rows = 10**6
    more = QWEN3_8B.head_bytes(2 * rows) - QWEN3_8B.head_bytes(rows)
    assert more == rows * 4096 * 2
    group_rows = DLOGIT_BYTES // (2 * 151936)
    fixed = LOGIT_BYTES + group_rows * (2 * 151936 + 4 * 4096) + 4 * 151936 * 4096
    assert QWEN3_8B.head_bytes(rows) == fixed + rows * 4096 * 2
    frozen = dataclasses.replace(QWEN3_8B, head_is_trained=False)
    group_rows = LOGIT_BYTES // (4 * 151936)
    fixed = LOGIT_BYTES + group_rows * (2 * 151936 + 4 * 4096)
    assert frozen.head_bytes(rows) == fixed + rows * 4096 * 2


# The drafts of docs/decisions/0010 on an H200: bf16, 41,323 tokens of which 36,233 predict, and
# gradients that stay; by layers that keep ATTENTION, NARROW and PRODUCTS, the peak without the
# weights, in GiB.
MEASURED = {(36, 0, 0): 46.3 - 15.3, (0, 36, 0): 74.4 - 15.3, (0, 4, 32): 133.1 - 15.3}


@pytest.mark.parametrize(("layers", "measured_gib"), MEASURED.items())
def test_predictions_are_what_was_measured(
    layers: tuple[int, int, int], measured_gib: float
) -> None:
    kinds = (Kept.ATTENTION, Kept.NARROW, Kept.PRODUCTS)
    kept = tuple(kind for kind, count in zip(kinds, layers, strict=True) for _ in range(count))
    parameters = 6_945_767_424 // 36
    sizes = dataclasses.replace(QWEN3_8B, layer_gradient_bytes=2 * parameters)
    predicted = peak_bytes(sizes, kept, 41_323, 36_233) / GIB
    assert predicted == pytest.approx(measured_gib, rel=0.05)


def test_gradients_that_stay_fill_the_room_that_layers_leave() -> None:
    sizes = dataclasses.replace(SMALL, layer_gradient_bytes=10**6)
    kept = (Kept.ATTENTION,) * 3
    # At the first layer's backward, those of the two others are there.
    resident = (3 * 10 + 10) * 8 * 2 + 10 * sizes.kept_bytes(Kept.ATTENTION) + 2 * 10**6
    working = 10 * sizes.working_bytes(Kept.ATTENTION)
    expected = resident + sizes.head_gradient_bytes + working
    assert peak_bytes(sizes, kept, 10, 10) == expected


def test_what_waits_on_the_host_is_not_beside_what_runs_before_it() -> None:
    """The group of 262,144 tokens of docs/performance.md: beyond the weights it took 100.9 GiB."""
    kept = (Kept.HOST,) * 23 + (Kept.ATTENTION,) * 13
    sizes = dataclasses.replace(QWEN3_8B, layer_gradient_bytes=2 * 6_945_767_424 // 36)
    assert peak_bytes(sizes, kept, 270_336, 270_336) / GIB == pytest.approx(100.9, rel=0.1)


@pytest.mark.parametrize("tokens", [1, 1000, 41323])
def test_a_plan_takes_all_that_fits_and_no_more(tokens: int) -> None:
    most = peak_bytes(QWEN3_8B, (Kept.PRODUCTS,) * 36, tokens, tokens)
    least = peak_bytes(QWEN3_8B, (Kept.ATTENTION,) * 36, tokens, tokens)
    assert plan_activations(QWEN3_8B, tokens, tokens, most) == (Kept.PRODUCTS,) * 36
    assert plan_activations(QWEN3_8B, tokens, tokens, least)[0] is Kept.ATTENTION
    order = [Kept.ATTENTION, Kept.NARROW, Kept.PRODUCTS]
    plans = [
        plan_activations(QWEN3_8B, tokens, tokens, least + (most - least) * i // 40)
        for i in range(41)
    ]
    for i, plan in enumerate(plans):
        budget = least + (most - least) * i // 40
        assert peak_bytes(QWEN3_8B, plan, tokens, tokens) <= budget
        ranks = [order.index(kept) for kept in plan]
        assert ranks == sorted(ranks), "the last layers keep most"
        if ranks[0] < 2:
            raised = max(j for j, rank in enumerate(ranks) if rank == min(ranks))
            more = (*plan[:raised], order[ranks[raised] + 1], *plan[raised + 1 :])
            assert peak_bytes(QWEN3_8B, more, tokens, tokens) > budget
    for before, after in pairwise(plans):
        assert [order.index(k) for k in before] <= [order.index(k) for k in after]


def test_what_fits_neither_device_nor_again_goes_to_the_host() -> None:
    tokens, sizes = 41323, QWEN3_8B
    layer = tokens * sizes.kept_bytes(Kept.HOST)
    least = peak_bytes(sizes, (Kept.ATTENTION,) * 36, tokens, tokens)
    with pytest.raises(RatoonError):
        plan_activations(sizes, tokens, tokens, least - 1)
    # It is not fetched before the others have run backward, and left the device.
    plan = plan_activations(sizes, tokens, tokens, least - 1, 36 * layer)
    assert plan == (Kept.HOST,) + (Kept.ATTENTION,) * 35
    with pytest.raises(RatoonError) as caught:
        plan_activations(sizes, tokens, tokens, least - 1, layer - 1)
    assert caught.value.details == {"resource": "memory"}
    # Two layers' are on the device all the same while the backward goes down.
    deepest = peak_bytes(sizes, (Kept.HOST,) * 36, tokens, tokens)
    assert least - 36 * layer < deepest <= least - 34 * layer
    # So the last two may stay there.
    plan = plan_activations(sizes, tokens, tokens, deepest, 36 * layer)
    assert plan == (Kept.HOST,) * 34 + (Kept.ATTENTION,) * 2
    assert max_tokens(sizes, 100 * GIB, 100 * GIB) > 1.3 * max_tokens(sizes, 100 * GIB)


def test_the_host_takes_products_that_would_run_again() -> None:
    """With the recorded group on one H200, beside 8-bit moments, 13 layers recomputed gate and
    up."""
    tokens, device = 41_323, int(103.5 * GIB)
    sizes = dataclasses.replace(QWEN3_8B, layer_gradient_bytes=2 * 6_945_767_424 // 36)
    layer = tokens * sizes.kept_bytes(Kept.AWAY)
    alone = plan_activations(sizes, tokens, tokens, device)
    assert alone.count(Kept.NARROW) == 13
    plan = plan_activations(sizes, tokens, tokens, device, 100 * layer)
    assert sizes.away_stride == 3
    away = [index for index, kept in enumerate(plan) if kept is Kept.AWAY]
    assert away == [*range(0, 3 * len(away), 3)]
    assert set(plan) == {Kept.AWAY, Kept.PRODUCTS}
    assert peak_bytes(sizes, plan, tokens, tokens) <= device
    # No more of them than that takes, no more than the host has room for.
    fewer = tuple(Kept.PRODUCTS if index == away[-1] else k for index, k in enumerate(plan))
    assert peak_bytes(sizes, fewer, tokens, tokens) > device
    little = plan_activations(sizes, tokens, tokens, device, 3 * layer - 1)
    assert little.count(Kept.AWAY) == 2
    assert 0 < little.count(Kept.NARROW) < 13
    most = peak_bytes(sizes, (Kept.PRODUCTS,) * 36, tokens, tokens)
    assert plan_activations(sizes, tokens, tokens, most, 100 * layer) == (Kept.PRODUCTS,) * 36


def test_gpus_of_a_host_share_what_it_takes() -> None:
    """Two are bound by their own links still."""
    strides = [dataclasses.replace(QWEN3_8B, num_on_host=n).away_stride for n in (1, 2, 4, 8)]
    assert strides == [3, 3, 5, 10]


def test_a_peak_counts_what_comes_back_while_it_is_due() -> None:
    sizes = dataclasses.replace(QWEN3_8B, layers=QWEN3_8B.layers[:12])
    plan = tuple(Kept.AWAY if index in (0, 3) else Kept.PRODUCTS for index in range(12))
    assert fetched_at(sizes, plan) == 5
    assert fetched_at(sizes, (Kept.HOST, Kept.HOST, Kept.ATTENTION)) == 1
    assert fetched_at(sizes, (Kept.PRODUCTS,) * 12) is None
    # By the layer that they come back at, six others have left.
    tokens = 1000
    here = peak_bytes(
        dataclasses.replace(sizes, layers=sizes.layers[:10]), (Kept.PRODUCTS,) * 10, tokens, 1
    )
    assert peak_bytes(sizes, plan, tokens, 1) == here


def test_max_tokens_is_the_last_number_that_has_a_plan() -> None:
    budget = 100 * GIB
    largest = max_tokens(QWEN3_8B, budget)
    assert 100_000 < largest < 200_000
    assert plan_activations(QWEN3_8B, largest, largest, budget) == (Kept.ATTENTION,) * 36
    with pytest.raises(RatoonError) as caught:
        plan_activations(QWEN3_8B, largest + 1, largest + 1, budget)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert caught.value.expected == f"at most {largest}"
    assert max_tokens(QWEN3_8B, 0) == 0
