"""Plans what each layer keeps from its forward for its backward, by formula from the free bytes.

A plan's predicted peak is within its budget. If even the smallest plan's is not, planning raises an
error. This module imports no torch.

Attention never runs twice: its output and log-sum-exp are always kept. Keeping any matmul output
saves the same FLOPs per byte (D per element), so layers are upgraded one step at a time, starting
from the last, whose memory is free again when the other layers' backward needs room. Lent host
memory also saves recomputation: some of the lower layers keep all products there, spaced so that
each copy overlaps the layers between them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from ratoon.errors import ErrorCode, RatoonError

# Bounds on the LM head's float32 logits, and on their gradients, that exist at a time: those of
# `ratoon_kernels.token_logprobs.fused`, which imports torch.
LOGIT_BYTES = 640 * 2**20
DLOGIT_BYTES = 1280 * 2**20
# Offloaded layers whose activations are resident on the device while one runs backward.
_LAYERS_UNDER_WAY = 2
# FLOP/s of the layers' products on a Hopper GPU, and bytes a second copied to the host meanwhile:
# per GPU, and per host, as measured on machines of one to four GPUs. They are constants on every
# GPU: they decide what is kept, and so bits, and rates measured anew would be other numbers.
_OPERATIONS = 653e12
_LINK_BYTES = 51e9
_HOST_BYTES = 120e9
# Bytes per expert of a token, without its weight: the expert's index and the row.
_ROUTE_BYTES = 2 + 4


class Kept(StrEnum):
    """What a decoder layer keeps for its backward.

    ATTENTION: its input, attention's output and log-sum-exp, and the routes of its tokens; the rest
    is recomputed. NARROW: also the outputs of its matmuls, except the wide ones into the MLP or its
    experts. PRODUCTS: those too, so that only elementwise operations are recomputed, and rows of
    experts are gathered again. HOST: as ATTENTION, but in host memory meanwhile. AWAY: as PRODUCTS,
    but in host memory.

    An adapter's output of A is kept like that of a matmul. Its B is always recomputed: that costs
    little, and its output is as wide as what it is added to.
    """

    HOST = "host"
    ATTENTION = "attention"
    NARROW = "narrow"
    PRODUCTS = "products"
    AWAY = "away"

    @property
    def is_on_host(self) -> bool:
        return self in (Kept.HOST, Kept.AWAY)


# Each step takes more of the device's memory than the previous one.
_STEPS = (Kept.HOST, Kept.ATTENTION, Kept.NARROW, Kept.PRODUCTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes that decide the bytes.

    `mlp_size`: intermediate features that a token passes, over all its experts together.
    `num_experts`: experts of a layer; 1, with 1 per token, for dense layers. `adapter_size`: sum of
    the adapter ranks that a token passes in a layer, without those on its experts, which are
    `expert_adapter_size`.

    `num_ranks` ranks run a micro-batch together; bytes are then those of one of a rank's own
    tokens. `num_on_host` ranks of one policy share a host, and copy to it at the same time.
    """

    num_layers: int
    hidden_size: int
    mlp_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    element_bytes: int
    head_is_trained: bool
    num_experts: int = 1
    experts_per_token: int = 1
    adapter_size: int = 0
    expert_adapter_size: int = 0
    # Bytes of a layer's gradients that stay in the parameters' dtype until the end of the backward;
    # 0 if they are added to existing sums.
    layer_gradient_bytes: int = 0
    num_ranks: int = 1
    num_on_host: int = 1

    def over(self, num_ranks: int) -> DecoderSizes:
        """Sizes for `num_ranks` ranks that run a micro-batch together; they divide the query
        heads."""
        return replace(self, num_ranks=num_ranks)

    @property
    def key_copies(self) -> int:
        """Number of ranks that attend to each key head: more than one if there are more ranks than
        key heads, or if a rank's query heads are not whole groups."""
        of_key = self.num_heads // self.num_kv_heads
        return of_key // math.gcd(self.num_heads // self.num_ranks, of_key)

    @property
    def exchanged_elements(self) -> int:
        """Elements that one token exchanges between ranks in one layer: queries, results and their
        gradients in 2 + 4 exchanges, keys and values in 1 + 2."""
        keys = 2 * self.num_kv_heads * self.key_copies
        return (6 * self.num_heads + 3 * keys) * self.head_dim

    def kept_bytes(self, kept: Kept) -> int:
        """Bytes of one token in one layer from forward to backward, on the device or the host."""
        heads = self.num_heads * self.head_dim
        elements = self.hidden_size + heads
        if kept in (Kept.NARROW, Kept.PRODUCTS, Kept.AWAY):
            elements += heads + 2 * self.num_kv_heads * self.head_dim + self.hidden_size
            elements += self.router_size + self.adapter_size
        if kept in (Kept.PRODUCTS, Kept.AWAY):
            elements += 2 * self.mlp_size + self.expert_adapter_size
        routes = self.experts_per_token * (self.element_bytes + _ROUTE_BYTES)
        other_bytes = 4 * self.num_heads + routes * self.is_routed
        return elements * self.element_bytes + other_bytes

    def working_bytes(self, kept: Kept) -> int:
        """Bytes of one token while the backward of one layer runs.

        They are the MLP's product, its gradient and those of gate and up, and gate and up
        themselves if they are recomputed. With experts they include the rows that go in and the
        gradients of those that come out. Adapters of the MLP add terms to gate and up, and to the
        gradient of the rows that go in. With several ranks they are at least attention's: the
        inputs of its backward twice, by tokens and by heads, and gradients in float32.
        """
        is_adapted = bool(self.expert_adapter_size if self.is_routed else self.adapter_size)
        has_products = kept in (Kept.PRODUCTS, Kept.AWAY)
        wide = (4 if has_products else 6) + 2 * is_adapted
        rows = 2 + 2 * is_adapted
        elements = wide * self.mlp_size + 4 * self.hidden_size + rows * self.rows_size
        if self.num_ranks > 1:
            keys = 2 * self.num_kv_heads * self.key_copies
            elements = max(elements, (10 * self.num_heads + 6 * keys) * self.head_dim)
        return elements * self.element_bytes

    def weights_again(self, kept: Kept) -> int:
        """Weights of one layer that a token passes twice, because their matmuls are recomputed."""
        weights = 0
        if kept not in (Kept.PRODUCTS, Kept.AWAY):
            weights += 2 * self.hidden_size * self.mlp_size
        if kept in (Kept.ATTENTION, Kept.HOST):
            weights += self.attention_weights
        return weights

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's projections to queries, keys and values, and of its output
        projection."""
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def away_stride(self) -> int:
        """Number of layers whose forward takes as long as copying one layer's products to the
        host."""
        weights = self.attention_weights + 3 * self.hidden_size * self.mlp_size
        copy_s = self.kept_bytes(Kept.AWAY) / min(_LINK_BYTES, _HOST_BYTES / self.num_on_host)
        return math.ceil(copy_s * _OPERATIONS / (2 * weights))

    @property
    def is_routed(self) -> bool:
        """Whether the layers have experts."""
        return self.num_experts > 1

    @property
    def router_size(self) -> int:
        """Router logits of a token; 0 for a dense model."""
        return self.num_experts * self.is_routed

    @property
    def rows_size(self) -> int:
        """Features of a token's rows, one as wide as its hidden state per expert; 0 if dense."""
        return self.experts_per_token * self.hidden_size * self.is_routed

    @property
    def stay_bytes(self) -> int:
        """Bytes of one predicting token until its backward, without what layers keep.

        They are the last layer's output, its norm, their gradient, and the row.
        """
        return 4 * self.hidden_size * self.element_bytes

    @property
    def stack_bytes(self) -> int:
        """Bytes of one token of a streamed prefix: keys, values, and their gradients in fp32 or
        wider."""
        pair = 2 * self.num_kv_heads * self.key_copies * self.head_dim
        return self.num_layers * pair * (self.element_bytes + max(4, self.element_bytes))

    def head_bytes(self, rows: int) -> int:
        """Working memory of `token_logprobs` in bytes, beyond its inputs."""
        row_logits = self.vocab_size * self.element_bytes
        group_bytes = LOGIT_BYTES // 4 * self.element_bytes
        head_sums = 0
        if self.head_is_trained:
            group_bytes, head_sums = DLOGIT_BYTES, 4 * self._head_elements
        logits = min(LOGIT_BYTES, rows * self.vocab_size * 4)
        group_rows = min(group_bytes // row_logits, rows)
        hidden = (4 * group_rows + self.element_bytes * rows) * self.hidden_size
        return logits + group_rows * row_logits + hidden + head_sums

    @property
    def head_gradient_bytes(self) -> int:
        """Bytes of the gradient of the LM head's weight, which stay while the layers' backward
        runs."""
        return self._head_elements * self.element_bytes if self.head_is_trained else 0

    @property
    def _head_elements(self) -> int:
        return self.vocab_size * self.hidden_size


def peak_bytes(sizes: DecoderSizes, kept: tuple[Kept, ...], tokens: int, rows: int) -> int:
    """Peak bytes of a forward and backward, beyond weights and other permanent memory."""
    assert len(kept) == sizes.num_layers
    kinds = {*kept}
    kept_bytes = {kind: tokens * sizes.kept_bytes(kind) for kind in kinds}
    on_device = {kind: 0 if kind.is_on_host else kept_bytes[kind] for kind in kinds}
    working_bytes = {kind: tokens * sizes.working_bytes(kind) for kind in kinds}
    # The last layer's output, its norm, their gradient; the rows that predict.
    resident = (3 * tokens + rows) * sizes.hidden_size * sizes.element_bytes
    resident += sum(on_device[kind] for kind in kept)
    peak = resident + sizes.head_bytes(rows)
    resident += sizes.head_gradient_bytes
    # Offloaded layers are fetched before the first of them runs backward.
    on_host = [kept_bytes[kind] for kind in kept if kind.is_on_host]
    fetched = min(len(on_host), _LAYERS_UNDER_WAY) * max(on_host, default=0)
    comes_at = fetched_at(sizes, kept)
    for index, kind in reversed([*enumerate(kept)]):
        beside = fetched if comes_at is not None and index <= comes_at else 0
        peak = max(peak, resident + beside + working_bytes[kind])
        resident += sizes.layer_gradient_bytes - on_device[kind]
    return peak


def fetched_at(sizes: DecoderSizes, kept: tuple[Kept, ...]) -> int | None:
    """Layer before whose backward the first offloaded layer is fetched; None: none is offloaded."""
    last = max((index for index, layer in enumerate(kept) if layer.is_on_host), default=None)
    if last is None or kept[last] is Kept.HOST:
        return last
    return min(last + sizes.away_stride, sizes.num_layers) - 1


def plan_activations(
    sizes: DecoderSizes, tokens: int, rows: int, device_bytes: int, host_bytes: int = 0
) -> tuple[Kept, ...]:
    """Plan what each layer keeps: as much as fits into the bytes of the device and the host.

    Raises `RatoonError` RESOURCE_EXHAUSTED where the least that can be kept does not fit.
    """
    plan = _largest_plan(sizes, tokens, rows, device_bytes, host_bytes)
    if plan is None:
        raise RatoonError(
            ErrorCode.RESOURCE_EXHAUSTED,
            f"the activations of {tokens} packed tokens do not fit {device_bytes} bytes of the "
            f"device and {host_bytes} of the host",
            field="micro_batch_tokens",
            got=str(tokens),
            expected=f"at most {max_tokens(sizes, device_bytes, host_bytes)}",
            details={"resource": "memory"},
        )
    return plan


def max_tokens(sizes: DecoderSizes, device_bytes: int, host_bytes: int = 0) -> int:
    """Largest micro-batch in packed tokens, if each of them may predict."""

    return _most(
        sizes,
        device_bytes,
        lambda tokens: largest_plan(sizes, tokens, device_bytes, host_bytes) is None,
    )


def most_tokens(
    sizes: DecoderSizes, device_bytes: int, kept: Kept, *, is_streamed: bool = False
) -> int:
    """Largest micro-batch if every layer keeps `kept`; if streamed, with stacks of all tokens'
    keys."""
    plan, stack_bytes = (kept,) * sizes.num_layers, sizes.stack_bytes * is_streamed

    def is_too_much(tokens: int) -> bool:
        peak = peak_bytes(sizes, plan, tokens, tokens)
        return peak + tokens * stack_bytes > device_bytes

    return _most(sizes, device_bytes, is_too_much)


def streamed_tokens(sizes: DecoderSizes, device_bytes: int, host_bytes: int) -> int:
    """Most tokens that stages of any tree and waves can hold at a time, beside their stacks.

    This is the number that fits if each token keeps HOST in the first h of the L layers and
    ATTENTION in the others: h = L if the host has room for L layers of all tokens, else max(0, H -
    1) if it has room for H. `stage_plan` takes no more for them: waiting stages have at least H
    layers on the host, and the running stage uses the rest. Unless that suffices for the whole
    stage, less than one of its layers stays unused.
    """

    def is_too_much(tokens: int) -> bool:
        room = _on_host(sizes, tokens, host_bytes)
        on_host = room if room == sizes.num_layers else max(0, room - 1)
        plan = _after_steps(sizes.num_layers, sizes.num_layers - on_host)
        peak = peak_bytes(sizes, plan, tokens, tokens)
        return peak + tokens * sizes.stack_bytes > device_bytes

    return _most(sizes, device_bytes, is_too_much)


def waiting_plan(sizes: DecoderSizes, tokens: int, host_bytes: int) -> tuple[Kept, ...]:
    """Plan with as many layers of these tokens on the host as it has room for; the others keep
    ATTENTION."""
    return _after_steps(sizes.num_layers, sizes.num_layers - _on_host(sizes, tokens, host_bytes))


def largest_plan(
    sizes: DecoderSizes, tokens: int, device_bytes: int, host_bytes: int
) -> tuple[Kept, ...] | None:
    """`plan_activations` for tokens that may all predict; None if nothing fits."""
    return _largest_plan(sizes, tokens, tokens, device_bytes, host_bytes)


def _most(sizes: DecoderSizes, device_bytes: int, is_too_much: Callable[[int], bool]) -> int:
    upper = device_bytes // (sizes.hidden_size * sizes.element_bytes) + 2
    return max(0, bisect_left(range(max(0, upper)), True, key=is_too_much) - 1)


def _largest_plan(
    sizes: DecoderSizes, tokens: int, rows: int, device_bytes: int, host_bytes: int
) -> tuple[Kept, ...] | None:
    num_layers = sizes.num_layers
    # The first step has as many layers on the host as it has room for. Each further step takes more
    # of the device.
    on_host = _on_host(sizes, tokens, host_bytes)
    steps = range(num_layers - on_host, 3 * num_layers + 1)

    def is_too_much(step: int) -> bool:
        plan = _after_steps(num_layers, step)
        return peak_bytes(sizes, plan, tokens, rows) > device_bytes

    found = bisect_left(steps, True, key=is_too_much) - 1
    if found < 0:
        return None
    plan = _after_steps(num_layers, steps[found])
    if Kept.HOST in plan:
        return plan
    return _with_products_away(sizes, tokens, rows, device_bytes, host_bytes, plan)


def _with_products_away(
    sizes: DecoderSizes,
    tokens: int,
    rows: int,
    device_bytes: int,
    host_bytes: int,
    plan: tuple[Kept, ...],
) -> tuple[Kept, ...]:
    """`plan`, or the plan with the fewest layers AWAY among those that recompute least."""
    num_layers, stride = sizes.num_layers, sizes.away_stride
    most = host_bytes // max(1, tokens * sizes.kept_bytes(Kept.AWAY))
    best, steps = plan, range(num_layers, 3 * num_layers + 1)

    def again(plan: tuple[Kept, ...]) -> int:
        return sum(map(sizes.weights_again, plan))

    for count in range(1, min(most, num_layers // stride) + 1):
        if not again(best):
            break
        # The lowest layers go first: they come back last, when the others' room is free.
        away = range(0, count * stride, stride)

        def at(step: int, away: range = away) -> tuple[Kept, ...]:
            below = enumerate(_after_steps(num_layers, step))
            return tuple(Kept.AWAY if index in away else kept for index, kept in below)

        def is_too_much(step: int) -> bool:
            return peak_bytes(sizes, at(step), tokens, rows) > device_bytes

        found = bisect_left(steps, True, key=is_too_much) - 1
        if found >= 0 and again(at(steps[found])) < again(best):
            best = at(steps[found])
    return best


def _on_host(sizes: DecoderSizes, tokens: int, host_bytes: int) -> int:
    layer_bytes = max(1, tokens * sizes.kept_bytes(Kept.HOST))
    return min(sizes.num_layers, host_bytes // layer_bytes)


def _after_steps(num_layers: int, step: int) -> tuple[Kept, ...]:
    """Plan after `step` upgrades: each upgrades one layer by one step, starting from the last
    layer."""
    whole, rest = divmod(step, num_layers)
    upper = _STEPS[min(whole + 1, len(_STEPS) - 1)]
    return (_STEPS[whole],) * (num_layers - rest) + (upper,) * rest
