"""Sequenced calls, complete but for their key.

All that takes time, encoding and uploads, is done here, before the call takes a seq.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Generic, TypeVar

from ratoon_client.arguments import check_type
from ratoon_client.caller import Caller
from ratoon_client.errors import InvalidArgumentError
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
from ratoon_client.upload import batch_source
from ratoon_client.wire import rpcs
from ratoon_client.wire.encode import (
    group_messages,
    loss_message,
    optim_message,
    request_message,
)
from ratoon_proto.v1 import operation_pb2, rollout_pb2, service_pb2

ResultT = TypeVar("ResultT")
Key = service_pb2.OperationKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[ResultT]):
    """`request` is of the type that `rpc` takes; `ResultT` is what its operation makes."""

    rpc: rpcs.Rpc[Any, operation_pb2.Operation]
    request: Any

    @property
    def has_batch(self) -> bool:
        return "source" in self.request.DESCRIPTOR.oneofs_by_name

    async def send(self, caller: Caller, key: Key | None) -> AsyncOperationHandle[ResultT]:
        if key is not None:
            self.request.key.CopyFrom(key)
        return AsyncOperationHandle(caller, await caller.call(self.rpc, self.request))


def operation_key(seq: int | None, request_id: str | None) -> Key | None:
    """At most one of the two. Raises InvalidArgumentError."""
    if seq is not None and request_id is not None:
        raise InvalidArgumentError("request_id", "seq and request_id", "one of them")
    if seq is not None:
        check_type("seq", seq, Integral)
        return request_message(Key, seq=seq)
    if request_id is not None:
        check_type("request_id", request_id, str)
        return Key(request_id=request_id)
    return None


async def update(
    caller: Caller,
    policy_id: str,
    groups: Sequence[Group],
    *,
    loss: Loss,
    optim: Optim,
    expected_version: int | None,
) -> Call[StepResult]:
    request = request_message(
        service_pb2.UpdateRequest,
        policy_id=policy_id,
        loss=loss_message(loss),
        optim=optim_message(optim),
        expected_version=expected_version,
    )
    await _set_source(caller, request, groups)
    return Call(rpc=rpcs.UPDATE, request=request)


async def forward_backward(
    caller: Caller,
    policy_id: str,
    groups: Sequence[Group],
    *,
    loss: Loss,
    expected_version: int | None,
) -> Call[StepResult]:
    request = request_message(
        service_pb2.ForwardBackwardRequest,
        policy_id=policy_id,
        loss=loss_message(loss),
        expected_version=expected_version,
    )
    await _set_source(caller, request, groups)
    return Call(rpc=rpcs.FORWARD_BACKWARD, request=request)


async def forward(
    caller: Caller,
    policy_id: str,
    groups: Sequence[Group],
    *,
    with_entropy: bool,
    use_reference: bool,
    expected_version: int | None,
) -> Call[ForwardResult]:
    request = request_message(
        service_pb2.ForwardRequest,
        policy_id=policy_id,
        with_entropy=with_entropy,
        use_reference=use_reference,
        expected_version=expected_version,
    )
    await _set_source(caller, request, groups)
    return Call(rpc=rpcs.FORWARD, request=request)


def optim_step(
    policy_id: str, *, optim: Optim, expected_version: int | None, include_seqs: Sequence[int]
) -> Call[StepResult]:
    request = request_message(
        service_pb2.OptimStepRequest,
        policy_id=policy_id,
        optim=optim_message(optim),
        expected_version=expected_version,
        include_seqs=include_seqs,
    )
    return Call(rpc=rpcs.OPTIM_STEP, request=request)


def discard_gradients(policy_id: str) -> Call[None]:
    request = request_message(service_pb2.DiscardGradientsRequest, policy_id=policy_id)
    return Call(rpc=rpcs.DISCARD_GRADIENTS, request=request)


def save_checkpoint(policy_id: str, checkpoint_id: str) -> Call[Checkpoint]:
    request = request_message(
        service_pb2.SaveCheckpointRequest, policy_id=policy_id, checkpoint_id=checkpoint_id
    )
    return Call(rpc=rpcs.SAVE_CHECKPOINT, request=request)


def load_checkpoint(policy_id: str, checkpoint_id: str) -> Call[Checkpoint]:
    request = request_message(
        service_pb2.LoadCheckpointRequest, policy_id=policy_id, checkpoint_id=checkpoint_id
    )
    return Call(rpc=rpcs.LOAD_CHECKPOINT, request=request)


def import_weights(
    policy_id: str,
    folder: str,
    *,
    mode: ImportMode,
    reset_optimizer: bool,
    expected_version: int | None,
) -> Call[ImportResult]:
    request = request_message(
        service_pb2.ImportWeightsRequest,
        policy_id=policy_id,
        model_folder=folder,
        mode=mode,
        reset_optimizer=reset_optimizer,
        expected_version=expected_version,
    )
    return Call(rpc=rpcs.IMPORT_WEIGHTS, request=request)


async def _set_source(
    caller: Caller,
    request: service_pb2.UpdateRequest
    | service_pb2.ForwardBackwardRequest
    | service_pb2.ForwardRequest,
    groups: Sequence[Group],
) -> None:
    messages = await asyncio.to_thread(group_messages, groups)
    match await batch_source(caller, request.policy_id, messages):
        case rollout_pb2.RolloutBatch() as batch:
            request.batch.CopyFrom(batch)
        case upload:
            request.upload.CopyFrom(upload)
