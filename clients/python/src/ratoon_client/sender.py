"""Sequenced calls of one producer to one policy: their batches, and their keys.

A call's groups go in the request, or in parts of whole groups ahead of it. An upload is named by
its content: the same groups again are the same parts.

States of a sender: unknown (before the first call and after `resync`), then following the service.
A seq is counted as taken only once the service has accepted it, and two calls never wait for an
answer under one seq.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import xxhash

from ratoon_client import rpcs
from ratoon_client.arguments import check_type
from ratoon_client.caller import Caller
from ratoon_client.errors import InvalidArgumentError, RatoonApiError
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.rollouts import Group
from ratoon_client.rpcs import UPLOAD_PART
from ratoon_client.wire import group_messages, request_message
from ratoon_proto.v1 import operation_pb2, policy_pb2, rollout_pb2, service_pb2

SequencedRpc = rpcs.Rpc[Any, operation_pb2.Operation]
OperationKey = service_pb2.OperationKey
# Services take it whole, unless their max_body_bytes is some 128 KiB or less: they are not asked.
_SMALL_BYTES = 64 * 1024
BatchRequest = (
    service_pb2.UpdateRequest | service_pb2.ForwardBackwardRequest | service_pb2.ForwardRequest
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A call without its key."""

    digest: bytes
    has_batch: bool


class Sender:
    """Sends calls one at a time, each under a key; `AsyncPolicySession` says which."""

    def __init__(self, caller: Caller, policy_id: str, *, consume: bool = False) -> None:
        """`consume`: a call that is refused for what it says takes its key all the same."""
        self._caller = caller
        self._policy_id = policy_id
        self._consume = consume
        self._lock = asyncio.Lock()
        self._next_seq: int | None = None
        # Seqs beyond the next that calls have named and the service has accepted.
        self._taken: set[int] = set()
        self._is_server_sequenced = False
        # Keys of calls that may have been accepted without an answer.
        self._unanswered: dict[_Said, str] = {}

    async def next_seq(self) -> int:
        """The seq of the next call; 0 under server sequencing."""
        async with self._lock:
            return await self._known_seq()

    async def resync(self) -> int:
        """Forget what was counted, and ask the service for the next seq."""
        async with self._lock:
            self._next_seq = None
            self._taken.clear()
            self._unanswered.clear()
            return await self._known_seq()

    async def send(
        self, rpc: SequencedRpc, request: Any, key: OperationKey | None
    ) -> AsyncOperationHandle[Any]:
        """Send a request that is complete but for its key; None is the sender's own key."""
        if key is not None and key.WhichOneof("key") == "request_id":
            handle = await self._send_with(key, rpc, request)
            self._forget_alike()
            return handle
        async with self._lock:
            is_counted = key is None
            if key is None:
                key = OperationKey(seq=await self._known_seq())
                if self._is_server_sequenced:
                    return await self._send_by_request_id(rpc, request)
            try:
                handle = await self._send_with(key, rpc, request)
            except RatoonApiError as error:
                if is_counted and error.code == "KEY_REUSED":
                    raise _counted_elsewhere(error) from error
                raise
            self._taken.add(key.seq)
            self._advance()
            return handle

    async def _send_by_request_id(
        self, rpc: SequencedRpc, request: Any
    ) -> AsyncOperationHandle[Any]:
        # A request may be as large as a message can be.
        said = await asyncio.to_thread(_said, rpc, request)
        request_id = self._unanswered.setdefault(said, uuid.uuid4().hex)
        try:
            handle = await self._send_with(OperationKey(request_id=request_id), rpc, request)
        except RatoonApiError as error:
            # A try before the last may have been taken, unless it is refused whenever it comes.
            if not error.retryable:
                del self._unanswered[said]
            raise
        del self._unanswered[said]
        self._forget_alike()
        return handle

    async def _send_with(
        self, key: OperationKey, rpc: SequencedRpc, request: Any
    ) -> AsyncOperationHandle[Any]:
        request.key.CopyFrom(key)
        request.key.consume = self._consume
        return AsyncOperationHandle(self._caller, await self._caller.call(rpc, request))

    def _advance(self) -> None:
        """Pass over seqs that the service has accepted, once the next one is known."""
        if self._next_seq is not None:
            while self._next_seq in self._taken:
                self._next_seq += 1
            self._taken = {seq for seq in self._taken if seq > self._next_seq}

    def _forget_alike(self) -> None:
        """The next OptimStep after other calls is another step, whatever became of the last."""
        self._unanswered = {said: key for said, key in self._unanswered.items() if said.has_batch}

    async def _known_seq(self) -> int:
        if self._next_seq is None:
            policy = await self._caller.ask(rpcs.GET_POLICY, policy_id=self._policy_id)
            self._is_server_sequenced = policy.spec.sequencing == policy_pb2.SEQUENCING_SERVER
            self._next_seq = 0 if self._is_server_sequenced else policy.next_seq
            self._advance()
        return self._next_seq


def operation_key(seq: int | None, request_id: str | None) -> OperationKey | None:
    """The key that a caller names, at most one of the two. Raises InvalidArgumentError."""
    if seq is not None and request_id is not None:
        raise InvalidArgumentError("request_id", "seq and request_id", "one of them")
    if seq is not None:
        check_type("seq", seq, Integral)
        return request_message(OperationKey, seq=seq)
    if request_id is not None:
        check_type("request_id", request_id, str)
        return OperationKey(request_id=request_id)
    return None


def _said(rpc: SequencedRpc, request: Any) -> _Said:
    said = rpc.name.encode() + request.SerializeToString(deterministic=True)
    has_batch = "source" in request.DESCRIPTOR.oneofs_by_name
    return _Said(digest=xxhash.xxh3_128_digest(said), has_batch=has_batch)


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


async def set_batch(caller: Caller, request: BatchRequest, groups: Sequence[Group]) -> None:
    """Put groups into a request, or upload them and name the upload there.

    Threads encode, copy and hash the groups: a large batch would hold up the event loop.
    """
    messages = await asyncio.to_thread(group_messages, groups)
    upload = await _uploaded(caller, request.policy_id, messages)
    if upload is None:
        await asyncio.to_thread(request.batch.groups.extend, messages)
        request.batch.SetInParent()
    else:
        request.upload.CopyFrom(upload)


async def _uploaded(
    caller: Caller, policy_id: str, groups: list[rollout_pb2.RolloutGroup]
) -> rollout_pb2.UploadedBatch | None:
    """Upload groups where client or service want them cut; None: they go with the call."""
    config = caller.config
    size_bytes = sum(group.ByteSize() for group in groups)
    if size_bytes <= min(config.upload_above_bytes, _SMALL_BYTES):
        return None
    # A body in base64 is a third larger than its bytes.
    most_bytes = (await caller.limits()).max_body_bytes // 2
    if size_bytes <= min(config.upload_above_bytes, most_bytes):
        return None
    part_bytes = min(config.part_bytes, most_bytes)
    upload_id = await asyncio.to_thread(_name, groups, part_bytes)
    num_parts = 0
    for part in split_parts(groups, part_bytes):
        request = service_pb2.UploadPartRequest(
            policy_id=policy_id, upload_id=upload_id, part_index=num_parts, groups=part
        )
        await caller.call(UPLOAD_PART, request)
        num_parts += 1
    return rollout_pb2.UploadedBatch(upload_id=upload_id, num_parts=num_parts)


def _name(groups: Iterable[rollout_pb2.RolloutGroup], part_bytes: int) -> str:
    """32 hexadecimal digits; other parts of the same groups have another."""
    state = xxhash.xxh3_128(part_bytes.to_bytes(8, "little"))
    for group in groups:
        state.update(group.ByteSize().to_bytes(8, "little"))
        state.update(group.SerializeToString(deterministic=True))
    return state.hexdigest()


def split_parts(
    groups: Iterable[rollout_pb2.RolloutGroup], part_bytes: int
) -> Iterator[list[rollout_pb2.RolloutGroup]]:
    """Runs of groups of at most `part_bytes`; a larger group is a part of its own."""
    part: list[rollout_pb2.RolloutGroup] = []
    size_bytes = 0
    for group in groups:
        group_bytes = group.ByteSize()
        if part and size_bytes + group_bytes > part_bytes:
            yield part
            part, size_bytes = [], 0
        part.append(group)
        size_bytes += group_bytes
    if part:
        yield part
