"""Plans what a stage's forward keeps for its backward, given what shares the device with it.

The predicted peaks of all stages are within the device's budget, and what they have on the host at
a time is within the host's. The same stages have the same plans, however much is free, so that a
replay finds the same bits. This module imports no torch.

If the device holds every product of all stages, or the host lends nothing, all stages keep the
same. Otherwise a stage that waits while others run offloads as many layers as the host has room
for, all of them if possible; a stage that runs at once has the rest of the device and of the host
to itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratoon.errors import ErrorCode, RatoonError
from ratoon.planner.activation_plan import (
    DecoderSizes,
    Kept,
    largest_plan,
    peak_bytes,
    plan_activations,
    streamed_tokens,
    waiting_plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTokens:
    """Largest numbers of tokens in a stream's stages at a time.

    `held`: tokens whose activations are held, on the device or the host; stacks hold their keys and
    values, and the gradients of these. `waiting`: those of them whose stages wait for others.
    `states`: nodes from whose ends later stages continue; linear attention keeps a state of each.
    """

    held: int
    waiting: int
    states: int = 0

    def beside_bytes(self, sizes: DecoderSizes) -> int:
        """Bytes of the stacks and the states."""
        return self.held * sizes.stack_bytes + self.states * sizes.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTokens:
    """Tokens of one forward, and of everything held until its backward is over.

    `tokens`: its own tokens. `above`: tokens of the stages that wait for it. `waits`: whether
    others descend from it. `stream`: the stream that it is a stage of; None: everything runs at
    once. `num_ranks` ranks run it together; tokens are then those of one rank.
    """

    tokens: int
    above: int
    waits: bool
    stream: StreamTokens | None
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """What each layer keeps.

    `peak_bytes`: peak bytes of the device until its backward is over, beyond weights and other
    permanent memory; they include its stream's stacks and the stages above it.
    """

    kept: tuple[Kept, ...]
    peak_bytes: int


def plan_forward(
    sizes: DecoderSizes, held: HeldTokens, device_bytes: int, host_bytes: int
) -> ForwardPlan:
    """Plan to keep as much as fits into the bytes of the device and the host.

    Raises `RatoonError` RESOURCE_EXHAUSTED where the least that can be kept does not fit.
    """
    stream = held.stream
    if stream is None:
        return _plan_alike(sizes, held.tokens, device_bytes, host_bytes)
    stack_bytes = stream.beside_bytes(sizes)
    most = peak_bytes(sizes, (Kept.PRODUCTS,) * sizes.num_layers, stream.held, stream.held)
    if host_bytes == 0 or most + stack_bytes <= device_bytes:
        alike = _plan_alike(sizes, stream.held, device_bytes - stack_bytes, 0)
        return replace(alike, peak_bytes=alike.peak_bytes + stack_bytes)
    plan = _plan_stage(sizes, held, stream, device_bytes, host_bytes)
    if plan.peak_bytes > device_bytes:
        raise RatoonError(
            ErrorCode.RESOURCE_EXHAUSTED,
            f"the activations of {stream.held} packed tokens, held at a time in stages, do not fit "
            f"{device_bytes} bytes of the device and {host_bytes} of the host",
            field="micro_batch_tokens",
            got=str(stream.held),
            expected=f"at most {streamed_tokens(sizes, device_bytes, host_bytes)}",
            details={"resource": "memory"},
        )
    return plan


def least_plan(sizes: DecoderSizes, held: HeldTokens, host_bytes: int) -> ForwardPlan:
    """Plan that recomputes everything but attention; waiting stages keep it on the host, as far as
    that has room."""
    kept = (Kept.ATTENTION,) * sizes.num_layers
    if held.waits and held.stream is not None:
        kept = waiting_plan(sizes, held.stream.waiting, host_bytes)
    return _with_what_waits(sizes, held, kept, host_bytes)


def _plan_alike(
    sizes: DecoderSizes, tokens: int, device_bytes: int, host_bytes: int
) -> ForwardPlan:
    kept = plan_activations(sizes, tokens, tokens, device_bytes, host_bytes)
    return ForwardPlan(kept=kept, peak_bytes=peak_bytes(sizes, kept, tokens, tokens))


def _plan_stage(
    sizes: DecoderSizes, held: HeldTokens, stream: StreamTokens, device_bytes: int, host_bytes: int
) -> ForwardPlan:
    """Plan within both budgets; if there is none, the smallest plan, which exceeds them."""
    least = least_plan(sizes, held, host_bytes)
    if held.waits:
        return least
    waiting = waiting_plan(sizes, stream.waiting, host_bytes)
    kept = largest_plan(
        sizes,
        held.tokens,
        device_bytes - _beside_bytes(sizes, held, host_bytes),
        host_bytes - held.above * _bytes_of(sizes, waiting, Kept.HOST),
    )
    return least if kept is None else _with_what_waits(sizes, held, kept, host_bytes)


def _with_what_waits(
    sizes: DecoderSizes, held: HeldTokens, kept: tuple[Kept, ...], host_bytes: int
) -> ForwardPlan:
    own = peak_bytes(sizes, kept, held.tokens, held.tokens)
    return ForwardPlan(kept=kept, peak_bytes=own + _beside_bytes(sizes, held, host_bytes))


def _beside_bytes(sizes: DecoderSizes, held: HeldTokens, host_bytes: int) -> int:
    """Bytes of the device that the stacks and the stages above take."""
    if held.stream is None:
        return 0
    kept = waiting_plan(sizes, held.stream.waiting, host_bytes)
    of_token = sizes.stay_bytes + _bytes_of(sizes, kept, Kept.ATTENTION)
    return held.stream.beside_bytes(sizes) + held.above * of_token


def _bytes_of(sizes: DecoderSizes, plan: tuple[Kept, ...], kind: Kept) -> int:
    """Bytes of one token in the layers that keep `kind`."""
    by_layer = zip(plan, sizes.kept_by_layer(plan), strict=True)
    return sum(num_bytes for kept, num_bytes in by_layer if kept is kind)
