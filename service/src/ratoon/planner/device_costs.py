"""What the planner must know of a device: costs in seconds, and limits in packed tokens.

Both are formulas from the decoder's sizes. Every cost is a sum of work over rates, so that rates
can be fitted linearly to measured steps. If several ranks run a micro-batch together, each has its
share of the tokens. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from ratoon.planner.activation_plan import (
    DecoderSizes,
    Kept,
    largest_plan,
    max_tokens,
    most_tokens,
    streamed_tokens,
)
from ratoon.planner.costs import CostModel, Recompute, TokenLimits
from ratoon.planner.layer_kinds import window_of, window_of_layers

# Keys that a token reads in vain for each prefix above its own. Attention's tiles have 128 keys:
# one is wasted where the prefix ends, and half of one where its own sequence begins.
_FORK_KEYS = 192
# FLOPs of a (query, key) pair and head dimension: two products forward, five backward.
PAIR_FLOPS = 14
# Features that one layer's elementwise operations read or write, forward and backward: norms,
# residuals and positions of a hidden state; and the gated product of the MLP.
_HIDDEN_PASSES = 24
_MLP_PASSES = 9
# Features read or written for rows of experts, as wide as a hidden state: three gathers, which read
# and write, and two sums.
_ROW_PASSES = 8
# Products of a recurrence's forward and backward, in those of its forward.
_RECURRENT_PASSES = 3.5
# Steps of held tokens between which the cost of recomputation is interpolated.
_NUM_STEPS = 32
# Number of steps from keeping everything to keeping the least.
_NUM_CANDIDATES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Speeds of a device in bfloat16 training."""

    # FLOP/s of the matmuls with the layers' weights, of tree attention, and of the LM head and its
    # loss.
    linear_flops: float
    attention_flops: float
    head_flops: float
    memory_bytes: float
    # Seconds that a layer takes in a forward and backward of hardly any tokens.
    layer_call_s: float
    # Between ranks: bytes per second out of each, and seconds of an exchange of hardly any bytes.
    link_bytes: float
    exchange_s: float


# Fitted to shapes of eight layers of Qwen3-8B, packed, streamed and replicated, between what a
# cooler and a warmer device gave; section `costs` of benchmarks/step reports what they predict.
# The head's is that of losses of single tokens, whose logits are computed once; others take a
# quarter more. Bandwidth: data sheet, less what is not reached. Between ranks: all-to-all copies of
# 64 MiB and more by NVLink; what an exchange takes beside is an estimate.
H200_RATES = DeviceRates(
    linear_flops=653e12,
    attention_flops=611e12,
    head_flops=572e12,
    memory_bytes=4.5e12,
    layer_call_s=1.05e-3,
    link_bytes=175e9,
    exchange_s=1e-4,
)
# According to its data sheet an H100 SXM has the H200's SMs, power and peak FLOP/s, and 3.35 of its
# 4.8 TB/s. Nothing is fitted: whole updates of an 8B model, the only measurement on an H100, took
# 7-9% longer than these rates predict (tests/benchmarks/test_measured_costs.py explains the
# difference).
H100_RATES = replace(H200_RATES, memory_bytes=H200_RATES.memory_bytes * 3.35 / 4.8)

# Rates by torch's name of the device.
KNOWN_RATES: Final[Mapping[str, DeviceRates]] = MappingProxyType(
    {"NVIDIA H200": H200_RATES, "NVIDIA H100 80GB HBM3": H100_RATES}
)

# Exchanges of a layer: two in its forward, two in its backward.
_EXCHANGES = 4


def device_costs(
    sizes: DecoderSizes,
    rates: DeviceRates,
    *,
    layers_are_trained: bool = True,
    adds_up: bool = True,
) -> CostModel:
    """Costs if every matmul's output is kept; `with_recompute` adds the cost of limited memory.

    `adds_up`: gradients are added to sums, else they are the sums.

    A weight costs 2 FLOPs a token forward, 2 for the gradient of its input and, if it is trained, 2
    for its own; of experts, only those that a token visits count. `layers_are_trained` is False for
    adapters, whose own weights are left out. If several ranks run a micro-batch together, each of
    them adds gradients of all weights; copies between them are not hidden.
    """
    num_ranks, hidden = sizes.num_ranks, sizes.hidden_size
    layers, mixers = sizes.layers, [layer.mixer for layer in sizes.layers]
    all_weights = sum(
        layer.mixer_weights(hidden) + layer.mlp.all_weights(hidden) for layer in layers
    )
    head_weights = sizes.vocab_size * hidden
    element = sizes.element_bytes
    elementwise = sum(
        _HIDDEN_PASSES * hidden
        + _MLP_PASSES * layer.mlp.width
        + _ROW_PASSES * layer.mlp.rows_size(hidden)
        for layer in layers
    )
    # A gradient is written, read, and added to a sum in float32, unless it is the sum itself. The
    # embedding's counts like the head's.
    gradient_bytes = 2 * element + (8 if adds_up else 0)
    trained = all_weights * layers_are_trained + 2 * head_weights * sizes.head_is_trained
    # Bytes that each rank sends: for its share of the tokens, the heads that other ranks have.
    exchanged = sum(mixer.exchanged_elements(num_ranks) for mixer in mixers)
    moved = exchanged * element * (num_ranks - 1) / num_ranks**2
    exchange_s = _EXCHANGES * rates.exchange_s if num_ranks > 1 else 0.0
    far, near = (
        sum(mixer.pair_elements for mixer in mixers if (window_of(mixer) is not None) == is_near)
        for is_near in (False, True)
    )
    recurrent_flops = _RECURRENT_PASSES * sum(mixer.token_flops for mixer in mixers)
    costs = CostModel(
        token=(6 if layers_are_trained else 4) * sizes.weights / rates.linear_flops
        + elementwise * element / rates.memory_bytes
        + recurrent_flops / rates.attention_flops,
        pair=PAIR_FLOPS * far / rates.attention_flops,
        window=window_of_layers(layers),
        near_pair=PAIR_FLOPS * near / rates.attention_flops,
        row=(6 if sizes.head_is_trained else 4) * head_weights / rates.head_flops,
        call=trained * gradient_bytes / rates.memory_bytes
        + len(layers) * (rates.layer_call_s + exchange_s),
        # Keys and values of a resident token are read forward and backward, and their gradients are
        # added to.
        resident=sizes.stack_elements * (2 * element + 8) / rates.memory_bytes,
        fork=_FORK_KEYS,
    )
    return costs.over(num_ranks, moved / rates.link_bytes)


def recompute_s(sizes: DecoderSizes, rates: DeviceRates, kept: tuple[Kept, ...]) -> float:
    """Seconds per token to recompute what the layers do not keep."""
    return 2 * sizes.weights_again(kept) / rates.linear_flops


def with_recompute(
    costs: CostModel, sizes: DecoderSizes, rates: DeviceRates, device_bytes: int, host_bytes: int
) -> CostModel:
    """`costs` if these bytes are lent to activations, as to `plan_forward`."""
    least = max(1, most_tokens(sizes, device_bytes, Kept.PRODUCTS))
    growth = max(1.0, max_tokens(sizes, device_bytes, host_bytes) / least)
    held = sorted({int(least * growth ** (i / _NUM_STEPS)) for i in range(_NUM_STEPS + 1)})
    plans = [largest_plan(sizes, tokens, device_bytes, host_bytes) for tokens in held]
    least_kept = (Kept.ATTENTION,) * sizes.num_layers
    on_host = (Kept.HOST,) * sizes.num_layers
    # These numbers are for one rank's share.
    num_ranks = sizes.num_ranks
    recompute = Recompute(
        held=tuple(num_ranks * tokens for tokens in held),
        cost=tuple(recompute_s(sizes, rates, plan or least_kept) / num_ranks for plan in plans),
        stack_share=sizes.stack_bytes / max(1, device_bytes) / num_ranks,
        host_tokens=num_ranks * (host_bytes // sum(sizes.kept_by_layer(on_host))),
    )
    return replace(costs, recompute=recompute)


def token_limits(sizes: DecoderSizes, device_bytes: int, host_bytes: int) -> TokenLimits:
    """Token limits of a whole forest, and of stages, however much of them waits on the host."""
    # A token takes no less than its share of the stacks and what stays of it.
    token_bytes = sizes.stack_bytes + sizes.stay_bytes
    if host_bytes == 0:
        token_bytes += sum(sizes.kept_by_layer((Kept.ATTENTION,) * sizes.num_layers))
    return TokenLimits(
        at_once=sizes.num_ranks * max_tokens(sizes, device_bytes, host_bytes),
        streamed=sizes.num_ranks * streamed_tokens(sizes, device_bytes, host_bytes),
        of_state=sizes.num_ranks * -(-sizes.state_bytes // token_bytes),
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
    steps = {int(least * growth ** (i / _NUM_CANDIDATES)) for i in range(_NUM_CANDIDATES)}
    return tuple(sorted({in_stages, *steps, max(least, at_once)}))
