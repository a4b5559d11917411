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
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

from ratoon.errors import ErrorCode, RatoonError
from ratoon.planner.layer_kinds import Layer, Mlp

# Bounds on the LM head's float32 logits, and on their gradients, that exist at a time: those of
# `ratoon_kernels.token_logprobs.fused`, which imports torch.
LOGIT_BYTES = 640 * 2**20
DLOGIT_BYTES = 1280 * 2**20
# Bytes of a target of the LM head beside a row's own: id, row, order, sort keys in int64, log-prob
# and gradient in float32, and what sorting takes.
_TARGET_BYTES = 60
# Offloaded layers whose activations are resident on the device while one runs backward.
_LAYERS_UNDER_WAY = 2
# FLOP/s of the layers' products on a Hopper GPU, and bytes a second copied to the host meanwhile:
# per GPU, and per host, as measured on machines of one to four GPUs. They are constants on every
# GPU: they decide what is kept, and so bits, and rates measured anew would be other numbers.
_OPERATIONS = 653e12
_LINK_BYTES = 51e9
_HOST_BYTES = 120e9


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
class HeadLoad:
    """What a batch takes of the LM head beside a row, and a target of it, for each packed token.

    `targets`: further targets of a packed token, such as a teacher's tokens of each path.
    `rows`: its rows, at least 1: paths with other sampling masks have rows of their own.
    """

    targets: float = 0.0
    rows: float = 1.0

    @property
    def target_bytes(self) -> int:
        """Bytes of the further targets of one packed token."""
        return math.ceil(_TARGET_BYTES * self.targets)


NO_LOAD = HeadLoad()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes that decide the bytes.

    `num_ranks` ranks run a micro-batch together; bytes are then those of one of a rank's own
    tokens. `num_on_host` ranks of one policy share a host, and copy to it at the same time.
    """

    layers: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    element_bytes: int
    head_is_trained: bool
    # Rank of an adapter on the LM head; 0: there is none.
    head_adapter_size: int = 0
    # Bytes of a layer's gradients that stay in the parameters' dtype until the end of the backward;
    # 0 if they are added to existing sums.
    layer_gradient_bytes: int = 0
    num_ranks: int = 1
    num_on_host: int = 1
    load: HeadLoad = NO_LOAD

    def over(self, num_ranks: int) -> DecoderSizes:
        """Sizes for `num_ranks` ranks that run a micro-batch together; they divide the query
        heads."""
        return replace(self, num_ranks=num_ranks)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Heads among which ranks share each layer: a divisor of those that any layer has."""
        return math.gcd(*(layer.mixer.num_heads for layer in self.layers))

    @property
    def experts(self) -> Mlp:
        """Routed experts of the model's layers; a dense MLP if it has none."""
        return next((each.mlp for each in self.layers if each.mlp.is_routed), self.layers[0].mlp)

    def kept_by_layer(self, plan: Sequence[Kept]) -> list[int]:
        """Bytes of one token in each layer from forward to backward, on the device or the host."""
        return self._by_layer(self.kept_bytes, plan)

    def kept_bytes(self, kept: Kept, layer: Layer | None = None) -> int:
        """Bytes of one token in `layer`, the first by default, from forward to backward."""
        layer = layer or self.layers[0]
        mixer, mlp = layer.mixer, layer.mlp
        elements = self.hidden_size + mixer.output_size
        if kept in (Kept.NARROW, Kept.PRODUCTS, Kept.AWAY):
            elements += sum(outputs for _, outputs in mixer.projections(self.hidden_size))
            elements += mlp.router_size + layer.adapter_size
            elements += self.hidden_size * layer.has_post_norms
        if kept in (Kept.PRODUCTS, Kept.AWAY):
            elements += 2 * mlp.width + layer.expert_adapter_size
        other_bytes = mixer.wide_bytes + mlp.route_bytes(self.element_bytes)
        return elements * self.element_bytes + other_bytes

    def working_by_layer(self, plan: Sequence[Kept]) -> list[int]:
        """Bytes of one token while the backward of each layer runs.

        They are the MLP's product, its gradient and those of gate and up, and gate and up
        themselves if they are recomputed. With experts they include the rows that go in and the
        gradients of those that come out. Adapters of the MLP add terms to gate and up, and to the
        gradient of the rows that go in. They are at least the mixer's.
        """
        return self._by_layer(self.working_bytes, plan)

    def working_bytes(self, kept: Kept, layer: Layer | None = None) -> int:
        """Bytes of one token while the backward of `layer`, the first by default, runs."""
        layer = layer or self.layers[0]
        mlp = layer.mlp
        is_adapted = bool(layer.expert_adapter_size if mlp.is_routed else layer.adapter_size)
        has_products = kept in (Kept.PRODUCTS, Kept.AWAY)
        wide = (4 if has_products else 6) + 2 * is_adapted
        rows = 2 + 2 * is_adapted
        elements = wide * mlp.width + 4 * self.hidden_size + rows * mlp.rows_size(self.hidden_size)
        return max(elements, layer.mixer.working_elements(self.num_ranks)) * self.element_bytes

    def weights_again(self, plan: Sequence[Kept]) -> int:
        """Weights that a token passes twice, because their matmuls are recomputed."""
        return sum(self._by_layer(self._again, plan))

    def _again(self, kept: Kept, layer: Layer) -> int:
        weights = 0
        if kept not in (Kept.PRODUCTS, Kept.AWAY):
            weights += 2 * self.hidden_size * layer.mlp.width
        if kept in (Kept.ATTENTION, Kept.HOST):
            weights += layer.mixer_weights(self.hidden_size)
            weights += self.hidden_size * layer.mlp.width * layer.has_post_norms
        return weights

    def _by_layer(self, of: Callable[[Kept, Layer], int], plan: Sequence[Kept]) -> list[int]:
        known: dict[tuple[int, Kept], int] = {}
        found: list[int] = []
        for layer, kept in zip(self.layers, plan, strict=True):
            # Layers of a kind are one object: hashing its fields would take longer than the plan.
            key = id(layer), kept
            if key not in known:
                known[key] = of(kept, layer)
            found.append(known[key])
        return found

    @property
    def weights(self) -> int:
        """Weights of all layers that a token passes."""
        return sum(layer.weights(self.hidden_size) for layer in self.layers)

    @property
    def away_stride(self) -> int:
        """Number of layers whose forward takes as long as copying the products of one to the host,
        if that is the largest and those are the smallest."""
        copied = max(self.kept_by_layer((Kept.AWAY,) * self.num_layers))
        copy_s = copied / min(_LINK_BYTES, _HOST_BYTES / self.num_on_host)
        weights = min(map(self._copied_beside, self.layers))
        return math.ceil(copy_s * _OPERATIONS / (2 * weights))

    def _copied_beside(self, layer: Layer) -> int:
        # A router's product is too small to hide a copy.
        router = self.hidden_size * layer.mlp.router_size
        return layer.weights(self.hidden_size) - router

    @property
    def stay_bytes(self) -> int:
        """Bytes of one predicting token until its backward, without what layers keep.

        They are the last layer's output, its norm, their gradient, its rows and their targets.
        """
        states = math.ceil((3 + self.load.rows) * self.hidden_size) * self.element_bytes
        return states + self.load.target_bytes

    @property
    def stack_elements(self) -> int:
        """Keys and values of one token of a streamed prefix, in all layers."""
        return sum(layer.mixer.stack_elements(self.num_ranks) for layer in self.layers)

    @property
    def stack_bytes(self) -> int:
        """Bytes of one token of a streamed prefix: keys, values, and their gradients in fp32 or
        wider."""
        return self.stack_elements * (self.element_bytes + max(4, self.element_bytes))

    @property
    def state_bytes(self) -> int:
        """Bytes of what linear attention passes on at a node's end in a stream, and of its
        gradients, in all layers."""
        elements = sum(layer.mixer.state_elements(self.num_ranks) for layer in self.layers)
        return elements * 2 * max(4, self.element_bytes)

    def head_bytes(self, rows: int) -> int:
        """Working memory of `token_logprobs` in bytes, beyond its inputs."""
        row_logits = self.vocab_size * self.element_bytes
        group_bytes = LOGIT_BYTES // 4 * self.element_bytes
        head_sums = 0
        if self.head_is_trained:
            group_bytes, head_sums = DLOGIT_BYTES, 4 * self._head_elements
        logits = min(LOGIT_BYTES, rows * self.vocab_size * 4)
        group_rows = min(group_bytes // row_logits, rows)
        features = self.hidden_size + self.head_adapter_size
        hidden = (4 * group_rows + self.element_bytes * rows) * features
        # What the adapter adds for each row, its gradient, and the sum of that of B.
        adapter = (self.element_bytes * rows + 4 * self.vocab_size) * self.head_adapter_size
        return logits + group_rows * row_logits + hidden + head_sums + adapter

    @property
    def head_gradient_bytes(self) -> int:
        """Bytes of the gradient of the LM head's weight, which stay while the layers' backward
        runs."""
        return self._head_elements * self.element_bytes if self.head_is_trained else 0

    @property
    def _head_elements(self) -> int:
        return self.vocab_size * self.hidden_size


def peak_bytes(sizes: DecoderSizes, kept: tuple[Kept, ...], tokens: int, rows: int) -> int:
    """Peak bytes of a forward and backward, beyond weights and other permanent memory.

    `rows`: tokens that predict.
    """
    assert len(kept) == sizes.num_layers
    rows = math.ceil(rows * sizes.load.rows)
    layer_bytes = sizes.kept_by_layer(kept)
    on_device = [0 if k.is_on_host else tokens * n for k, n in zip(kept, layer_bytes, strict=True)]
    working_bytes = sizes.working_by_layer(kept)
    # The last layer's output, its norm, their gradient; the rows that predict.
    resident = (3 * tokens + rows) * sizes.hidden_size * sizes.element_bytes
    resident += sum(on_device) + tokens * sizes.load.target_bytes
    peak = resident + sizes.head_bytes(rows)
    resident += sizes.head_gradient_bytes
    # Offloaded layers are fetched before the first of them runs backward.
    on_host = [tokens * n for k, n in zip(kept, layer_bytes, strict=True) if k.is_on_host]
    fetched = min(len(on_host), _LAYERS_UNDER_WAY) * max(on_host, default=0)
    comes_at = fetched_at(sizes, kept)
    for index in reversed(range(len(kept))):
        beside = fetched if comes_at is not None and index <= comes_at else 0
        peak = max(peak, resident + beside + tokens * working_bytes[index])
        resident += sizes.layer_gradient_bytes - on_device[index]
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
    largest = max(sizes.kept_by_layer((Kept.AWAY,) * num_layers))
    most = host_bytes // max(1, tokens * largest)
    best, steps = plan, range(num_layers, 3 * num_layers + 1)

    for count in range(1, min(most, num_layers // stride) + 1):
        if not sizes.weights_again(best):
            break
        # The lowest layers go first: they come back last, when the others' room is free.
        away = range(0, count * stride, stride)

        def at(step: int, away: range = away) -> tuple[Kept, ...]:
            below = enumerate(_after_steps(num_layers, step))
            return tuple(Kept.AWAY if index in away else kept for index, kept in below)

        def is_too_much(step: int) -> bool:
            return peak_bytes(sizes, at(step), tokens, rows) > device_bytes

        found = bisect_left(steps, True, key=is_too_much) - 1
        if found >= 0 and sizes.weights_again(at(steps[found])) < sizes.weights_again(best):
            best = at(steps[found])
    return best


def _on_host(sizes: DecoderSizes, tokens: int, host_bytes: int) -> int:
    """Number of first layers for which the host has room."""
    layer_bytes = sizes.kept_by_layer((Kept.HOST,) * sizes.num_layers)
    ends = [*accumulate(tokens * each for each in layer_bytes)]
    return bisect_right(ends, host_bytes)


def _after_steps(num_layers: int, step: int) -> tuple[Kept, ...]:
    """Plan after `step` upgrades: each upgrades one layer by one step, starting from the last
    layer."""
    whole, rest = divmod(step, num_layers)
    upper = _STEPS[min(whole + 1, len(_STEPS) - 1)]
    return (_STEPS[whole],) * (num_layers - rest) + (upper,) * rest
