"""Callers of the real service: one policy's segments, through the public client.

Only the client's own retries are at work. An error about something that was acknowledged is noted
as lost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratoon_client import AsyncRatoonClient, Group, Loss, Optim, group, rollout
from ratoon_client.errors import RatoonApiError, RatoonClientError
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.values import FromForward
from ratoon_proto.types import Operation
from tests.faults.judge.calls import (
    LEARNING_RATE,
    NAME,
    NO_VERSION,
    Call,
    Kind,
    groups_of,
    import_folder,
    in_any_order,
    segments,
    write_import,
)
from tests.faults.judge.history import Notes, Told

# Longer than a service needs to come back.
PATIENCE_S = 900.0


class Player:
    """The callers of one policy; `has_seqs`: it has client sequencing.

    `model_folder`: the policy's own, in the models root, where its imports are written.
    """

    def __init__(
        self,
        client: AsyncRatoonClient,
        policy_id: str,
        seed: int,
        model_folder: Path,
        *,
        has_seqs: bool,
        notes: Notes,
    ) -> None:
        self.policy_id, self.seed = policy_id, seed
        self.notes = notes
        self.num_segments = 0
        self._model_folder = model_folder
        self._client = client
        self._has_seqs = has_seqs
        self._segments: Iterator[list[Call]] = segments(seed)
        self._rng = random.Random(seed)
        self._next_seq = 1
        self._handles: dict[str, AsyncOperationHandle[Any]] = {}

    async def play_until(self, stop: asyncio.Event) -> None:
        """Segment after segment, until told to stop; the last checkpoint at the end."""
        while not stop.is_set():
            await self.play(next(self._segments))
            self.num_segments += 1
        final = Call(number=1 << 30, kind=Kind.SAVE_CHECKPOINT, checkpoint_id="final")
        await self.play([final])

    async def play(self, calls: list[Call]) -> None:
        """Make the calls, a third of them twice and in any order, and wait for their ends."""
        first = self._next_seq
        self._next_seq += len(calls)
        seqs = {call.number: first + index for index, call in enumerate(calls)}
        for call in calls:
            if call.kind is Kind.IMPORT_WEIGHTS:
                write_import(call, self.seed, self._model_folder, self._model_folder.parent)
        for block in in_any_order(calls):
            arrivals = [*block, *self._rng.sample(block, len(block) // 3)]
            self._rng.shuffle(arrivals)
            await asyncio.gather(*(self._make(call, seqs[call.number]) for call in arrivals))
        names = [n for call in calls for n in sorted(self.notes.operations.get(call.number, ()))]
        await asyncio.gather(*(self._follow(name) for name in names))

    async def _make(self, call: Call, seq: int) -> None:
        try:
            handle = await self._send(call, seq)
            self.notes.acknowledged(call, handle.operation_id, handle.seq)
            self._handles[handle.operation_id] = handle
            if call.is_cancelled:
                await handle.cancel()
        except RatoonClientError as error:
            self.notes.errors.append(f"call {call.number} ({call.kind}): {error!r}")

    async def _follow(self, operation_id: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                ended = await self._handles[operation_id].wait(PATIENCE_S)
            except RatoonApiError as error:
                # The wait is over, not the operation: a seq before it has not arrived again.
                if error.code == "SEQ_GAP" and time.monotonic() < deadline:
                    continue
                self.notes.errors.append(f"{operation_id}: {error!r}")
                return
            except RatoonClientError as error:
                self.notes.errors.append(f"{operation_id}: {error!r}")
                return
            self.notes.told[operation_id] = _told(ended)
            return

    async def _send(self, call: Call, seq: int) -> AsyncOperationHandle[Any]:
        key: dict[str, Any] = {"request_id": f"call-{call.number}"}
        if self._has_seqs:
            key = {"seq": seq}
        # A session a call: calls with keys of their own wait for no other.
        session = self._client.policy(self.policy_id)
        expected = NO_VERSION if call.is_refused else None
        optim = Optim(learning_rate=LEARNING_RATE)
        match call.kind:
            case Kind.UPDATE:
                return await session.update(
                    self._groups(call),
                    loss=self._loss(call),
                    optim=optim,
                    expected_version=expected,
                    **key,
                )
            case Kind.FORWARD_BACKWARD:
                return await session.forward_backward(
                    self._groups(call),
                    loss=self._loss(call),
                    expected_version=expected,
                    **key,
                )
            case Kind.OPTIM_STEP:
                seqs = self.notes.seqs
                includes = [seqs[number] for number in call.includes if number in seqs]
                return await session.optim_step(
                    optim=optim, include_seqs=includes, expected_version=expected, **key
                )
            case Kind.DISCARD_GRADIENTS:
                return await session.discard_gradients(**key)
            case Kind.FORWARD:
                return await session.forward(self._groups(call), with_entropy=True, **key)
            case Kind.SAVE_CHECKPOINT:
                return await session.save_checkpoint(call.checkpoint_id, **key)
            case Kind.LOAD_CHECKPOINT:
                return await session.load_checkpoint(call.checkpoint_id, **key)
            case Kind.IMPORT_WEIGHTS:
                return await session.import_weights(
                    import_folder(call, self.seed),
                    mode="full" if call.replaces else "delta",
                    reset_optimizer=call.resets,
                    expected_version=expected,
                    **key,
                )
            case Kind.PUBLISH_VERSION:
                return await session.publish_version(name=NAME, overwrite=True, **key)

    def _groups(self, call: Call) -> list[Group]:
        return [
            group(
                sampled.group_id,
                sampled.prompt,
                [
                    rollout(response=one.response, sampler_logprobs=one.logprobs, reward=one.reward)
                    for one in sampled.rollouts
                ],
            )
            for sampled in groups_of(call, self.seed)
        ]

    def _loss(self, call: Call) -> Loss:
        if not call.from_forward:
            return Loss("grpo", entropy_coefficient=call.entropy_coefficient)
        return Loss("grpo", old_logprobs=FromForward(self.notes.first(call.from_forward)))


def _told(operation: Operation) -> Told:
    end: str = operation.state
    if operation.error is not None and end == "failed":
        end = operation.error.code
    made = operation.step or operation.imported
    version = made.version if made is not None else None
    return Told(operation_id=operation.operation_id, end=end, version=version)
