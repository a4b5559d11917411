"""Where a call's groups go: in the request, or in parts of whole groups ahead of it.

An upload is named by its content: the same groups again are the same parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

import xxhash

from ratoon_client.caller import Caller
from ratoon_client.rollouts import Group
from ratoon_client.wire.encode import group_messages
from ratoon_client.wire.rpcs import UPLOAD_PART
from ratoon_proto.v1 import rollout_pb2, service_pb2

# Services take it whole, unless their max_body_bytes is some 128 KiB or less: they are not asked.
_SMALL_BYTES = 64 * 1024
BatchRequest = (
    service_pb2.UpdateRequest | service_pb2.ForwardBackwardRequest | service_pb2.ForwardRequest
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
