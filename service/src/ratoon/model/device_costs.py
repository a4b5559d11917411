"""What the planner's choices cost on a device, in seconds, by formula from the decoder's sizes.

Every cost is a sum of work over rates, so that rates can be fitted linearly to measured steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratoon.model.activation_plan import DecoderSizes, Kept, largest_plan, max_tokens, most_tokens
from ratoon.rollout.costs import CostModel, Recompute

# Keys that a token reads in vain for each prefix above its own: of attention's tiles of 128, one
# where the prefix ends and half of one where its own sequence begins.
_FORK_KEYS = 192
# FLOPs of a (query, key) pair and head dimension: two products forward, five backward.
_PAIR_FLOPS = 14
# Features that elementwise operations of one layer read or write, forward and backward: norms,
# residuals and positions of a hidden state; the gated product of the MLP.
_HIDDEN_PASSES = 24
_MLP_PASSES = 9
# The same of the rows of experts, as wide as a hidden state: three gathers, which read and write,
# and two sums.
_ROW_PASSES = 8
# Steps of held tokens between which the cost of running again is interpolated.
_NUM_STEPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What a device does a second, in bfloat16 training."""

    # FLOP/s of the products of the layers' weights, of tree attention, of the LM head and its loss.
    linear_flops: float
    attention_flops: float
    head_flops: float
    memory_bytes: float
    # Seconds of a layer in a forward and backward of next to nothing.
    layer_call_s: float


# Fitted to shapes of eight layers of Qwen3-8B, packed, streamed and replicated, between what a
# cooler and a warmer device gave; section `costs` of benchmarks/step reports what they predict.
# The head's is that of losses of single tokens, whose logits are computed once; others take a
# quarter more. Bandwidth: data sheet, less what is not reached.
H200_RATES = DeviceRates(
    linear_flops=653e12,
    attention_flops=611e12,
    head_flops=572e12,
    memory_bytes=4.5e12,
    layer_call_s=1.05e-3,
)


def device_costs(
    sizes: DecoderSizes, rates: DeviceRates, *, layers_are_trained: bool = True
) -> CostModel:
    """Costs where every product is kept; `with_recompute` adds what memory makes of them.

    A weight costs 2 FLOPs a token forward, 2 for the gradient of its input and 2 for its own where
    it is trained; of experts, those that a token visits. `layers_are_trained` False: of adapters,
    whose own weights are left out.
    """
    layers, heads = sizes.num_layers, sizes.num_heads * sizes.head_dim
    mlp_weights = 3 * sizes.hidden_size * sizes.mlp_size
    other_weights = _attention_weights(sizes) + sizes.hidden_size * sizes.router_size
    weights = layers * (other_weights + mlp_weights)
    all_mlp_weights = mlp_weights * sizes.num_experts // sizes.experts_per_token
    head_weights = sizes.vocab_size * sizes.hidden_size
    element = sizes.element_bytes
    elementwise = _HIDDEN_PASSES * sizes.hidden_size + _MLP_PASSES * sizes.mlp_size
    elementwise += _ROW_PASSES * sizes.rows_size
    # A gradient is written, read, and added to a sum in float32; the embedding's like the head's.
    trained = layers * (other_weights + all_mlp_weights) * layers_are_trained
    trained += 2 * head_weights * sizes.head_is_trained
    # Of a resident token: keys and values read forward and backward, their gradients added to.
    key_value = 2 * sizes.num_kv_heads * sizes.head_dim
    return CostModel(
        token=(6 if layers_are_trained else 4) * weights / rates.linear_flops
        + layers * elementwise * element / rates.memory_bytes,
        pair=_PAIR_FLOPS * layers * heads / rates.attention_flops,
        row=(6 if sizes.head_is_trained else 4) * head_weights / rates.head_flops,
        call=trained * (2 * element + 8) / rates.memory_bytes + layers * rates.layer_call_s,
        resident=layers * key_value * (2 * element + 8) / rates.memory_bytes,
        fork=_FORK_KEYS,
    )


def recompute_s(sizes: DecoderSizes, rates: DeviceRates, kept: tuple[Kept, ...]) -> float:
    """Seconds a token to run again what the layers do not keep."""
    wide = 2 * sizes.hidden_size * sizes.mlp_size
    weights = 0
    for layer in kept:
        if layer is not Kept.PRODUCTS:
            weights += wide
        if layer in (Kept.ATTENTION, Kept.HOST):
            weights += _attention_weights(sizes)
    return 2 * weights / rates.linear_flops


def with_recompute(
    costs: CostModel, sizes: DecoderSizes, rates: DeviceRates, device_bytes: int, host_bytes: int
) -> CostModel:
    """`costs` where so many bytes are lent to activations, as to `plan_forward`."""
    least = max(1, most_tokens(sizes, device_bytes, Kept.PRODUCTS))
    growth = max(1.0, max_tokens(sizes, device_bytes, host_bytes) / least)
    held = sorted({int(least * growth ** (i / _NUM_STEPS)) for i in range(_NUM_STEPS + 1)})
    plans = [largest_plan(sizes, tokens, device_bytes, host_bytes) for tokens in held]
    least_kept = (Kept.ATTENTION,) * sizes.num_layers
    recompute = Recompute(
        held=tuple(held),
        cost=tuple(recompute_s(sizes, rates, plan or least_kept) for plan in plans),
        stack_share=sizes.stack_bytes / max(1, device_bytes),
        host_tokens=host_bytes // (sizes.num_layers * sizes.kept_bytes(Kept.HOST)),
    )
    return replace(costs, recompute=recompute)


def _attention_weights(sizes: DecoderSizes) -> int:
    """Of one layer: projections to queries, keys, values, and of the output."""
    heads = 2 * sizes.num_heads + 2 * sizes.num_kv_heads
    return sizes.hidden_size * sizes.head_dim * heads
