"""Gradients of decoder layers on their way to the owners of their parts, during one pass.

All ranks compute from the plan in which order they send: it decides which rank waits for which, and
in which order an owner adds. A rank's backward runs ahead of its thread by a few layers, and waits
then. No rank waits for one that was stopped or is gone: each goes through all turns, and says so
where it has nothing to send.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import cast

import torch
from torch import Tensor, nn

from ratoon.errors import CopyFailedError, ErrorCode, RatoonError
from ratoon.planner.waves import runs_of
from ratoon.rollout.packed import MicroBatch, UpdatePlan
from ratoon.shards.copies import Copies, Copy
from ratoon.shards.parts import Part
from ratoon.train.clock import Moment
from ratoon.train.optim.gradients import add_terms
from ratoon.train.ranks.shares import Outbox

# Time of a backward, in forwards.
_BACKWARD_COST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A rank's gradients of one layer in one of its backwards.

    `slot` counts the layers of all of its backwards, each from the last layer down.
    """

    rank: int
    slot: int
    layer: int


def turns_of(plan: UpdatePlan, num_ranks: int, num_layers: int) -> list[tuple[Turn, ...]]:
    """Steps of turns that are taken together, at most one per rank, ordered by rank.

    Steps are in the order in which backwards would reach them if all ranks processed tokens equally
    fast, so a rank with more micro-batches, or shorter ones, hardly waits for the others. Each
    rank's turns are in the order of slots. A rank that runs fewer backwards than planned (a stage
    that predicts nothing has none) leaves its last turns unused.
    """
    timed = sorted(
        (time, rank, slot)
        for rank in range(num_ranks)
        for slot, time in enumerate(_times(plan.of_rank(rank).micro_batches, num_layers))
    )
    steps: list[list[Turn]] = [[]]
    for _, rank, slot in timed:
        if any(turn.rank == rank for turn in steps[-1]):
            steps.append([])
        layer = num_layers - 1 - slot % num_layers
        steps[-1].append(Turn(rank=rank, slot=slot, layer=layer))
    return [tuple(sorted(step, key=lambda turn: turn.rank)) for step in steps if step]


def _times(micro_batches: tuple[MicroBatch, ...], num_layers: int) -> Iterator[int]:
    """The time at which a rank reaches each slot, in tokens times layers."""
    now = 0
    for micro_batch in micro_batches:
        for tokens, is_backward in _runs(micro_batch):
            if is_backward:
                for _ in range(num_layers):
                    now += _BACKWARD_COST * tokens
                    yield now
            else:
                now += tokens * num_layers


def _runs(micro_batch: MicroBatch) -> Iterator[tuple[int, bool]]:
    """The tokens of each forward and backward of a micro-batch, in order."""
    if not micro_batch.stages:
        yield micro_batch.packed_tokens, False
        yield micro_batch.packed_tokens, True
    for index, is_backward in runs_of(micro_batch.stages):
        yield micro_batch.stages[index].num_tokens, is_backward


# Layers that a backward may be ahead of the thread.
_AHEAD = 2
# How often one that waits asks whether to go on.
_ASK_S = 0.2
# Seconds for other ranks to end a pass that was stopped: they look between micro-batches.
_END_S = 600.0
_SILENT = "another rank is gone, or its machine does not answer"


class Signal(IntEnum):
    """A word that ranks tell one another: the first three before each turn, the last after it."""

    # The rank's pass was stopped, or failed: it neither sends nor takes gradients any more.
    STOPPED = -1
    # No gradients follow: none flowed, or the rank has no turn in this step.
    NOTHING = 0
    # The rank's gradients follow.
    SENDS = 1
    # The rank has taken its parts from the others' outboxes, which may be filled again.
    TAKEN = 2


def handed_bytes(layers: Sequence[Mapping[str, Tensor]], num_ranks: int) -> int:
    """The most bytes that gradients take on their way, besides the sums.

    They are the gradients of the layer that runs, of the layers that the backward is ahead, and of
    the layer being sent, and the parts that other ranks send for this rank's share of one layer.
    """
    most = max((sum(p.nbytes for p in layer.values()) for layer in layers), default=0)
    return (_AHEAD + 2) * most + math.ceil(most * (num_ranks - 1) / num_ranks)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's gradients by parameter, once the device is at `moment`."""

    slot: float
    gradients: dict[str, Tensor]
    moment: Moment | None


_END = _Layer(math.inf, {}, None)


class LayerExchange:
    """Passes on the gradients of one rank's backwards, during one pass, in a thread of its own.

    States: open; finished or stopped; joined. Apart from that thread, one thread at a time uses it.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, nn.Parameter]],
        parts: Sequence[Sequence[Sequence[Part]]],
        shards: Mapping[str, Tensor],
        copies: Copies,
        steps: Sequence[tuple[Turn, ...]],
        is_cancelled: Callable[[], bool],
        outbox: Outbox | None = None,
    ) -> None:
        """`parts`: by layer, then by rank. `shards`: this rank's sums, by part. `outbox`: the way
        that gradients take between the ranks of a node; others, and all if None, send messages."""
        self._layers, self._parts, self._shards = layers, parts, shards
        self._outbox = outbox
        self._near: Collection[int] = () if outbox is None else outbox.neighbours
        self._copies, self._steps, self._is_cancelled = copies, steps, is_cancelled
        self._device = next(p.device for layer in layers for p in layer.values())
        # The number of the backward, the slot that it is in, and the gradients that it has there.
        self._backward, self._slot, self._pending = 0, 0, dict[str, Tensor]()
        self._num_slots = sum(turn.rank == copies.rank for step in steps for turn in step)
        self._handed = Queue[_Layer](_AHEAD)
        # A layer that the thread has taken off the queue and not passed on.
        self._head: _Layer | None = None
        self._is_stopped = Event()
        self._other_is_stopped = False
        self._error: Exception | None = None
        # Earlier work on the sums, which must be over before the thread adds to them.
        self._begun = Moment(self._device)
        # A daemon: a process that ends does not wait for it.
        self._thread = Thread(target=self._run, name="gradients", daemon=True)
        self._thread.start()

    def take(self, layer: int, name: str, gradient: Tensor) -> None:
        """Take one parameter's gradient; a backward goes from the last layer down."""
        down = len(self._layers) - 1 - layer
        slot = self._backward * len(self._layers) + down
        if slot < self._slot or name in self._pending:
            self._hand_over()
            self._backward += 1
            slot += len(self._layers)
        elif slot > self._slot:
            self._hand_over()
        self._slot = slot
        self._pending[name] = gradient
        if len(self._pending) == len(self._layers[layer]):
            self._hand_over()

    def finish(self) -> None:
        """Wait until all gradients of all ranks are added."""
        self._hand_over()
        self._put(_END)
        while self._thread.is_alive():
            self._thread.join(_ASK_S)
            self._check()
            if self._thread.is_alive() and self._is_cancelled():
                raise _cancelled("while it waited for other ranks")
        self._check()

    def stop(self) -> None:
        """Hand nothing over any more, and let the other ranks know."""
        self._is_stopped.set()
        try:
            while True:
                self._handed.get_nowait()
        except Empty:
            self._handed.put(_END)

    def join(self) -> None:
        """Wait for the thread, which waits for the others to finish or to be stopped.

        Raises `CopyFailedError` where they do not: no exchange is possible any more.
        """
        deadline = time.monotonic() + _END_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(_ASK_S)
            if self._thread.is_alive() and self._copies.is_cut():
                raise CopyFailedError(_SILENT)
        if self._thread.is_alive():
            raise CopyFailedError(f"other ranks have not ended a pass within {_END_S:g} s")

    def _hand_over(self) -> None:
        """Give the thread the layer's gradients; a parameter without one gets zeros."""
        if not self._pending:
            return
        assert self._slot < self._num_slots, "more backwards than planned"
        layer = self._layers[len(self._layers) - 1 - self._slot % len(self._layers)]
        gradients = {
            name: self._pending[name] if name in self._pending else torch.zeros_like(parameter)
            for name, parameter in layer.items()
        }
        handed = _Layer(self._slot, gradients, Moment(self._device))
        self._slot, self._pending = self._slot + 1, {}
        self._put(handed)

    def _put(self, layer: _Layer) -> None:
        while True:
            self._check()
            try:
                return self._handed.put(layer, timeout=_ASK_S)
            except Full:
                if self._is_cancelled():
                    raise _cancelled("while it waited for other ranks") from None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._copies.is_cut():
            raise CopyFailedError(_SILENT)
        if self._other_is_stopped:
            raise _cancelled("as another rank was stopped")

    @torch.no_grad()
    def _run(self) -> None:
        """The thread: it takes part in every step, even after an error, as others wait there."""
        own: AbstractContextManager[object] = nullcontext()
        with self._noting_errors():
            own = self._on_own_stream()
        with own:
            for step in self._steps:
                with self._noting_errors():
                    self._run_step(step)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Keep what the block raises, to be raised where the backward runs."""
        try:
            yield
        except Exception as err:  # noqa: BLE001 - whatever it is, other ranks must hear of it
            self._error = self._error or err

    def _on_own_stream(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self._device))

    def _run_step(self, step: tuple[Turn, ...]) -> None:
        rank = self._copies.rank
        mine = next((turn for turn in step if turn.rank == rank), None)
        owners = [] if mine is None else self._owners(mine)
        senders = [turn for turn in step if turn is not mine and self._parts[turn.layer][rank]]
        peers = sorted({*owners, *(turn.rank for turn in senders)})
        gradients, terms = None, dict[int, list[Tensor]]()
        # All that takes memory comes before the word: behind it, others wait for the copies.
        with self._noting_errors():
            self._begun.wait()
            gradients = None if mine is None else self._next(mine.slot)
            terms = {turn.rank: self._room(turn) for turn in senders}
            if mine is not None and gradients is not None and not self._is_stopped.is_set():
                terms[rank] = _of(gradients, self._parts[mine.layer][rank])
                if self._outbox is not None:
                    self._outbox.put(mine.layer, gradients)
        word = Signal.NOTHING if gradients is None else Signal.SENDS
        if self._is_stopped.is_set() or self._error is not None:
            gradients, word, senders = None, Signal.STOPPED, []
        heard = self._copies.tell(peers, word)
        self._other_is_stopped |= Signal.STOPPED in heard.values()
        senders = [turn for turn in senders if heard.get(turn.rank) == Signal.SENDS]
        near = [peer for peer in heard if peer in self._near]
        far = [peer for peer in heard if peer not in self._near]
        try:
            receivers = [peer for peer in far if heard[peer] != Signal.STOPPED]
            self._copies.exchange(
                [] if mine is None else self._messages(mine.layer, gradients, receivers),
                [
                    Copy(tensor, turn.rank)
                    for turn in senders
                    if turn.rank in far
                    for tensor in terms[turn.rank]
                ],
            )
            for turn in senders:
                if self._outbox is not None and turn.rank in near:
                    self._outbox.take(turn.layer, turn.rank, terms[turn.rank])
            added = {turn.rank for turn in senders} | ({rank} if gradients is not None else set())
            self._add([(turn.layer, terms[turn.rank]) for turn in step if turn.rank in added])
            # Another stream may use their memory from here on.
            Moment(self._device).wait()
        finally:
            taken = self._copies.tell(near, Signal.TAKEN)
        if lost := {*peers} - {*far, *taken}:
            raise CopyFailedError(f"ranks {sorted(lost)} are gone")

    def _messages(
        self, layer: int, gradients: Mapping[str, Tensor] | None, peers: Collection[int]
    ) -> list[Copy]:
        """Copies of each peer's parts of a layer's gradients, if there are gradients."""
        if gradients is None:
            return []
        others = [peer for peer in sorted(peers) if self._parts[layer][peer]]
        return [
            Copy(tensor, peer)
            for peer in others
            for tensor in _of(gradients, self._parts[layer][peer])
        ]

    def _add(self, terms: Sequence[tuple[int, list[Tensor]]]) -> None:
        """Add gradients, given by layer, to the sums of this rank's parts, in order."""
        by_layer: dict[int, list[list[Tensor]]] = {}
        for layer, of_parts in terms:
            by_layer.setdefault(layer, []).append(of_parts)
        for layer, of_ranks in by_layer.items():
            parts = self._parts[layer][self._copies.rank]
            for part, *of_part in zip(parts, *of_ranks, strict=True):
                add_terms(self._shards[part.name], of_part)

    def _next(self, slot: int) -> dict[str, Tensor] | None:
        """The gradients that the backward hands over for a slot; None if it skipped the slot."""
        if self._head is None:
            self._head = self._handed.get()
        if self._head.slot > slot:
            return None
        layer, self._head = self._head, None
        assert layer.slot == slot
        cast("Moment", layer.moment).wait()
        return layer.gradients

    def _owners(self, turn: Turn) -> list[int]:
        """Other ranks that have parts of the turn's layer."""
        by_rank = enumerate(self._parts[turn.layer])
        return [rank for rank, parts in by_rank if parts and rank != turn.rank]

    def _room(self, turn: Turn) -> list[Tensor]:
        """Empty tensors for this rank's parts of the layer that another rank sends."""
        layer = self._layers[turn.layer]
        own = self._parts[turn.layer][self._copies.rank]
        return [part.empty_like(layer[part.parameter]) for part in own]


def _of(tensors: Mapping[str, Tensor], parts: Sequence[Part]) -> list[Tensor]:
    return [part.of(tensors[part.parameter]) for part in parts]


def _cancelled(when: str) -> RatoonError:
    return RatoonError(ErrorCode.CANCELLED, f"the pass of a rank was cancelled {when}")
