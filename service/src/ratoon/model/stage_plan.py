"""What a forward keeps for its backward beside what else shares the device with it.

The predicted peaks of all stages are within the budget of the device, what they have on the host at
a time is within the other; the same stages have the same plans, whatever is free, so that a replay
finds the same bits. No torch here.

Where the device holds every product of all stages, or the host lends nothing, all stages keep the
same. Else a stage that waits while others are run leaves to the host as many layers as it has room
for, all of them if it can; and a stage that runs at once has what is left of the device and of the
host to itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.activation_plan import (
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
    """Most tokens of a stream's stages at a time.

    `held`: whose activations are held, on the device or the host; for their keys and values, and
    the gradients of these, there are stacks. `waiting`: those of them whose stages wait for others.
    """

    held: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTokens:
    """One forward, and what is held until its backward is over.

    `tokens`: its own. `above`: of the stages that wait for it. `waits`: others descend from it.
    `stream`: what it is a stage of; None: all is run at once. `num_ranks` run it together: tokens
    are those of one of them.
    """

    tokens: int
    above: int
    waits: bool
    stream: StreamTokens | None
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPlan:
    """What each layer keeps.

    `peak_bytes`: most bytes of the device until its backward is over, beyond weights and what else
    stays; those of its stream's stacks and of the stages above it are among them.
    """

    kept: tuple[Kept, ...]
    peak_bytes: int


def plan_forward(
    sizes: DecoderSizes, held: HeldTokens, device_bytes: int, host_bytes: int
) -> ForwardPlan:
    """As much as fits so many bytes of the device and the host.

    Raises `RatoonError` RESOURCE_EXHAUSTED where the least that can be kept does not fit.
    """
    stream = held.stream
    if stream is None:
        return _plan_alike(sizes, held.tokens, device_bytes, host_bytes)
    stack_bytes = stream.held * sizes.stack_bytes
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
    """All but attention runs again; what waits for others does so on the host, as far as it has
    room."""
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
    """Within both budgets; where there is no such plan, the least, which is not."""
    least = least_plan(sizes, held, host_bytes)
    if held.waits:
        return least
    on_host = waiting_plan(sizes, stream.waiting, host_bytes).count(Kept.HOST)
    kept = largest_plan(
        sizes,
        held.tokens,
        device_bytes - _beside_bytes(sizes, held, host_bytes),
        host_bytes - on_host * held.above * sizes.kept_bytes(Kept.HOST),
    )
    return least if kept is None else _with_what_waits(sizes, held, kept, host_bytes)


def _with_what_waits(
    sizes: DecoderSizes, held: HeldTokens, kept: tuple[Kept, ...], host_bytes: int
) -> ForwardPlan:
    own = peak_bytes(sizes, kept, held.tokens, held.tokens)
    return ForwardPlan(kept=kept, peak_bytes=own + _beside_bytes(sizes, held, host_bytes))


def _beside_bytes(sizes: DecoderSizes, held: HeldTokens, host_bytes: int) -> int:
    """Of the device: the stacks, and what the stages above have there."""
    if held.stream is None:
        return 0
    kept = waiting_plan(sizes, held.stream.waiting, host_bytes)
    of_token = sizes.stay_bytes + kept.count(Kept.ATTENTION) * sizes.kept_bytes(Kept.ATTENTION)
    return held.stream.held * sizes.stack_bytes + held.above * of_token
