"""One producer's sequenced calls to one policy.

States: unknown (before the first call and after `resync`), then following the service. A seq is
counted as taken only once the service has accepted it, and two calls never wait for an answer under
one seq.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from ratoon_client import calls
from ratoon_client.caller import Caller
from ratoon_client.custom_loss import WEIGHTED, CustomLoss, weighted
from ratoon_client.errors import RatoonApiError
from ratoon_client.loss import Loss, Optim
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.results import (
    Checkpoint,
    ForwardResult,
    ImportMode,
    ImportResult,
    StepResult,
)
from ratoon_client.rollouts import Group
from ratoon_client.wire.encode import request_message
from ratoon_client.wire.rpcs import GET_POLICY
from ratoon_proto.v1 import policy_pb2, service_pb2

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A call without its key."""

    digest: bytes
    has_batch: bool


class AsyncPolicySession:
    """Under client sequencing it counts seqs, under server sequencing it makes a request_id a call.

    After a TransportError it is unknown whether the call was accepted. The session keeps its key:
    the same call again is the same operation; of calls without a batch, which are alike each time,
    under server sequencing only until another one is accepted. Under client sequencing another call
    is refused with KEY_REUSED then; `resync` forgets keys, and asks the service for the next free
    seq.
    """

    def __init__(self, caller: Caller, policy_id: str) -> None:
        self._caller = caller
        self._policy_id = policy_id
        self._lock = asyncio.Lock()
        self._next_seq: int | None = None
        # By calls with seqs of their own, beyond the next.
        self._taken: set[int] = set()
        self._is_server_sequenced = False
        # Of calls that may have been accepted without an answer.
        self._unanswered: dict[_Said, str] = {}

    @property
    def policy_id(self) -> str:
        return self._policy_id

    async def next_seq(self) -> int:
        """The seq of the next call; 0 under server sequencing."""
        async with self._lock:
            return await self._known_seq()

    async def resync(self) -> int:
        """Forget what was counted and ask the service. Gives the next seq."""
        async with self._lock:
            self._next_seq = None
            self._taken.clear()
            self._unanswered.clear()
            return await self._known_seq()

    async def update(
        self,
        groups: Sequence[Group],
        *,
        loss: Loss,
        optim: Optim,
        expected_version: int | None = None,
        seq: int | None = None,
    ) -> AsyncOperationHandle[StepResult]:
        """Forward and backward over all groups, then one optimizer step."""
        call = await calls.update(
            self._caller,
            self._policy_id,
            groups,
            loss=loss,
            optim=optim,
            expected_version=expected_version,
        )
        return await self._send(call, seq)

    async def forward_backward(
        self,
        groups: Sequence[Group],
        *,
        loss: Loss,
        expected_version: int | None = None,
        seq: int | None = None,
    ) -> AsyncOperationHandle[StepResult]:
        """Add the gradients of a batch to the window."""
        call = await calls.forward_backward(
            self._caller, self._policy_id, groups, loss=loss, expected_version=expected_version
        )
        return await self._send(call, seq)

    async def forward_backward_custom(
        self, groups: Sequence[Group], *, loss_of: CustomLoss
    ) -> tuple[float, AsyncOperationHandle[StepResult]]:
        """Add the gradient of the caller's own loss to the window; the loss, and the handle.

        Two calls, with two keys: a Forward, which is waited for, and a ForwardBackward with
        `cross_entropy` and the token weights that have the gradient of `loss_of`, which runs in a
        thread. Its gradient is a sum: an OptimStep divides it by nothing unless told otherwise.
        Raises InvalidArgumentError where `loss_of` gives no loss and gradients. Where another
        producer has stepped in between, the handle's operation fails with VERSION_MISMATCH.
        """
        forward = await (await self.forward(groups)).result()
        loss, batch = await asyncio.to_thread(weighted, groups, forward.logprobs, loss_of)
        handle = await self.forward_backward(batch, loss=WEIGHTED, expected_version=forward.version)
        return loss, handle

    async def optim_step(
        self,
        *,
        optim: Optim,
        include_seqs: Sequence[int] = (),
        expected_version: int | None = None,
        seq: int | None = None,
    ) -> AsyncOperationHandle[StepResult]:
        """Divide, clip and apply the window's gradients."""
        call = calls.optim_step(
            self._policy_id,
            optim=optim,
            expected_version=expected_version,
            include_seqs=include_seqs,
        )
        return await self._send(call, seq)

    async def discard_gradients(self, *, seq: int | None = None) -> AsyncOperationHandle[None]:
        """End the window without a step."""
        return await self._send(calls.discard_gradients(self._policy_id), seq)

    async def forward(
        self,
        groups: Sequence[Group],
        *,
        with_entropy: bool = False,
        use_reference: bool = False,
        expected_version: int | None = None,
        seq: int | None = None,
    ) -> AsyncOperationHandle[ForwardResult]:
        """Log-probs at this point of the sequence; `client.forward` reads the newest version."""
        call = await calls.forward(
            self._caller,
            self._policy_id,
            groups,
            with_entropy=with_entropy,
            use_reference=use_reference,
            expected_version=expected_version,
        )
        return await self._send(call, seq)

    async def save_checkpoint(
        self, checkpoint_id: str = "", *, seq: int | None = None
    ) -> AsyncOperationHandle[Checkpoint]:
        """Without an id the service names it from seq and version."""
        return await self._send(calls.save_checkpoint(self._policy_id, checkpoint_id), seq)

    async def load_checkpoint(
        self, checkpoint_id: str, *, seq: int | None = None
    ) -> AsyncOperationHandle[Checkpoint]:
        return await self._send(calls.load_checkpoint(self._policy_id, checkpoint_id), seq)

    async def import_weights(
        self,
        folder: str,
        *,
        mode: ImportMode = "full",
        reset_optimizer: bool = False,
        expected_version: int | None = None,
        seq: int | None = None,
    ) -> AsyncOperationHandle[ImportResult]:
        """Replace the weights by a folder's below the server's models root, or add those."""
        call = calls.import_weights(
            self._policy_id,
            folder,
            mode=mode,
            reset_optimizer=reset_optimizer,
            expected_version=expected_version,
        )
        return await self._send(call, seq)

    async def _send(
        self, call: calls.Call[ResultT], seq: int | None
    ) -> AsyncOperationHandle[ResultT]:
        async with self._lock:
            next_seq = await self._known_seq()
            if self._is_server_sequenced and seq is None:
                return await self._send_by_request_id(call)
            taken = next_seq if seq is None else seq
            try:
                handle = await call.send(self._caller, calls.operation_key(taken, None))
            except RatoonApiError as error:
                if seq is None and error.code == "KEY_REUSED":
                    raise _counted_elsewhere(error) from error
                raise
            if taken >= next_seq:
                self._taken.add(taken)
            while self._next_seq in self._taken:
                self._taken.remove(self._next_seq)
                self._next_seq += 1
            return handle

    async def _send_by_request_id(self, call: calls.Call[ResultT]) -> AsyncOperationHandle[ResultT]:
        said = call.rpc.name.encode() + call.request.SerializeToString(deterministic=True)
        this = _Said(digest=xxhash.xxh3_128_digest(said), has_batch=call.has_batch)
        request_id = self._unanswered.setdefault(this, uuid.uuid4().hex)
        try:
            handle = await call.send(self._caller, calls.Key(request_id=request_id))
        except RatoonApiError as error:
            # A try before the last may have been taken, unless it is refused whenever it comes.
            if not error.retryable:
                del self._unanswered[this]
            raise
        del self._unanswered[this]
        # The next OptimStep after other calls is another step, whatever became of the last one.
        self._unanswered = {one: key for one, key in self._unanswered.items() if one.has_batch}
        return handle

    async def _known_seq(self) -> int:
        if self._next_seq is None:
            request = request_message(service_pb2.GetPolicyRequest, policy_id=self._policy_id)
            policy = await self._caller.call(GET_POLICY, request)
            self._is_server_sequenced = policy.spec.sequencing == policy_pb2.SEQUENCING_SERVER
            self._next_seq = 0 if self._is_server_sequenced else policy.next_seq
        return self._next_seq


def _counted_elsewhere(error: RatoonApiError) -> RatoonApiError:
    """Another call has the seq that the session has counted to: with what to do."""
    text = (
        "another producer took it, as ratoonctl does, or a call of this session that was not"
        " answered: resync() asks the service for the next free seq"
    )
    return RatoonApiError(
        error.code,
        f"{error.message}; {text}",
        field=error.field,
        got=error.got,
        expected=error.expected,
        retryable=error.retryable,
        details=error.details,
    )
