"""What gRPC alone has: streams, callers that leave."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from ratoon.edge.turns import MAX_UNJUDGED
from ratoon.errors import ERROR_TABLE
from ratoon_proto.types import OperationState
from ratoon_proto.v1 import operation_pb2, service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceServicer, PolicyServiceStub
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import SERVICE, grpc_error


async def test_every_rpc_of_the_contract_is_answered(api: Api) -> None:
    """Each by an answer or an error of the service, never by gRPC's own UNIMPLEMENTED."""
    for method in SERVICE.methods:
        assert hasattr(PolicyServiceServicer, method.name)
        make: Any = api.grpc.channel.unary_stream
        stream = make(f"/{SERVICE.full_name}/{method.name}")(b"", timeout=10)
        with contextlib.suppress(StopAsyncIteration, grpc.aio.AioRpcError):
            await anext(aiter(stream))
        assert await stream.code() != grpc.StatusCode.UNIMPLEMENTED, method.name


def test_every_row_of_the_table_has_a_grpc_status() -> None:
    assert {row.grpc for row in ERROR_TABLE.values()} <= {code.name for code in grpc.StatusCode}


async def test_an_error_has_code_message_and_trailer(api: Api) -> None:
    stub = PolicyServiceStub(api.grpc.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetPolicy(service_pb2.GetPolicyRequest(policy_id="absent"))
    error = grpc_error(caught.value)
    assert error.status == grpc.StatusCode.NOT_FOUND
    assert error.detail == operation_pb2.ErrorDetail(
        code="POLICY_NOT_FOUND", message="no policy absent", field="policy_id"
    )
    assert caught.value.details() == error.detail.message


async def test_watch_ends_with_the_operation(api: Api) -> None:
    await api.create_policy()
    api.engine.hold = True
    operation = await api.grpc.call("Update", requests.update())
    stub = PolicyServiceStub(api.grpc.channel)
    watch = stub.WatchOperation(
        service_pb2.WatchOperationRequest(operation_id=operation.operation_id)
    )
    states: list[int] = []
    async for change in watch:
        states.append(change.state)
        if len(states) == 1:
            await api.engine.release()
    assert states == [operation_pb2.OPERATION_STATE_QUEUED, operation_pb2.OPERATION_STATE_DONE]


async def test_watching_nothing_is_not_found(api: Api) -> None:
    stub = PolicyServiceStub(api.grpc.channel)
    watch = stub.WatchOperation(service_pb2.WatchOperationRequest(operation_id="x"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(watch))
    assert grpc_error(caught.value).detail.code == "OPERATION_NOT_FOUND"


async def test_a_caller_that_leaves_does_not_take_its_update_along(api: Api) -> None:
    """Trap 15: a request coroutine that owns the update is cancelled when its caller leaves."""
    await api.create_policy()
    api.engine.submit_delay_s = 0.2
    stub = PolicyServiceStub(api.grpc.channel)
    call = stub.Update(requests.update())
    await asyncio.wait_for(api.engine.has_submission.wait(), timeout=30)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert api.engine.log == []
    for _ in range(500):
        await asyncio.sleep(0.02)
        if api.engine.log:
            break
    assert api.engine.known_policies[requests.POLICY].version == 1


async def test_a_watcher_that_leaves_does_not_cancel(api: Api) -> None:
    """Trap 15, from the reader's side."""
    await api.create_policy()
    api.engine.hold = True
    operation = await api.grpc.call("Update", requests.update())
    watch = PolicyServiceStub(api.grpc.channel).WatchOperation(
        service_pb2.WatchOperationRequest(operation_id=operation.operation_id)
    )
    await anext(aiter(watch))
    watch.cancel()
    await asyncio.sleep(0.1)
    held = api.engine.operations[operation.operation_id]
    assert held.state is OperationState.QUEUED
    await api.engine.release()
    assert api.engine.operations[operation.operation_id].state is OperationState.DONE


async def test_an_unknown_method_is_unimplemented_and_takes_no_place(api: Api) -> None:
    """Its place is given back: more of them than places are all answered."""
    call = api.grpc.channel.unary_unary(f"/{SERVICE.full_name}/Nothing")
    for _ in range(2 * MAX_UNJUDGED):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_progress_of_a_running_operation_is_passed_on(api: Api) -> None:
    await api.create_policy()
    api.engine.hold = True
    operation = await api.grpc.call("Update", requests.update())
    queued = api.engine.operations[operation.operation_id]
    progress = replace(queued.progress, micro_batches_done=2, micro_batches_planned=9, eta_s=1.5)
    await api.engine.set(
        replace(queued, state=OperationState.RUNNING, started_at=2.25, progress=progress)
    )
    get = service_pb2.GetOperationRequest(operation_id=operation.operation_id)
    running = await api.grpc.call("GetOperation", get)
    assert running.state == operation_pb2.OPERATION_STATE_RUNNING
    assert running.started_at.ToNanoseconds() == 2_250_000_000
    assert not running.HasField("finished_at")
    assert (running.progress.micro_batches_done, running.progress.eta_s) == (2, 1.5)
