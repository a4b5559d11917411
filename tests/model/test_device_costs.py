"""Costs of a device, by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ratoon.model.activation_plan import Kept
from ratoon.model.device_costs import (
    H200_RATES,
    DeviceRates,
    device_costs,
    recompute_s,
    token_limits,
    with_recompute,
)
from ratoon.rollout.costs import Work
from ratoon.rollout.packed import Stage
from tests.model.test_activation_plan import QWEN3_8B, QWEN3_30B

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
