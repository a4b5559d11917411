"""What gRPC alone has: streams, callers that leave."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from ratoon.api.grpc.servicer import PolicyServicer
from ratoon.api.grpc.wiring import Refused
from ratoon.errors import ERROR_TABLE, ErrorCode, RatoonError
from ratoon_proto.types import OperationState
from ratoon_proto.v1 import operation_pb2, service_pb2, weights_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceServicer, PolicyServiceStub
from tests.api import requests
from tests.api.conftest import Api
from tests.api.open_gate import OPEN_GATE
from tests.api.wires import SERVICE, grpc_error


def test_the_servicer_has_every_rpc_of_the_contract() -> None:
    for method in SERVICE.methods:
        assert method.name in vars(PolicyServicer)
        assert hasattr(PolicyServiceServicer, method.name)


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
    """Trap 15: a request coroutine owning the update; Serve cancels it when the caller leaves."""
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
    assert api.engine.policies[requests.POLICY].version == 1


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


class _ServeContext:
    """Serve's context: three setters, read back by its proxy along with a message; the caller."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailers: list[tuple[str, bytes]] = []

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, bytes]]) -> None:
        self.trailers = trailing_metadata


async def test_on_serve_a_failed_stream_ends_with_one_empty_message(api: Api) -> None:
    """Serve's proxy reads a context only along with a message: without one the trailer is lost."""
    servicer: Any = PolicyServicer(
        api.service, max_body_bytes=1024, status_needs_message=True, gate=OPEN_GATE
    )
    context = _ServeContext()
    request = service_pb2.WatchOperationRequest(operation_id="absent")
    messages = [message async for message in servicer.WatchOperation(request, context)]
    assert messages == [operation_pb2.Operation()]
    assert context.code == grpc.StatusCode.NOT_FOUND
    ((name, data),) = context.trailers
    assert name == "ratoon-error-bin"
    assert operation_pb2.ErrorDetail.FromString(data).code == "OPERATION_NOT_FOUND"

    context = _ServeContext()
    weights = servicer.WatchWeights(service_pb2.WatchWeightsRequest(), context)
    assert [message async for message in weights] == [weights_pb2.WeightManifest()]
    assert context.code == grpc.StatusCode.INVALID_ARGUMENT


async def test_malformed_requests_say_only_their_size(api: Api) -> None:
    servicer: Any = PolicyServicer(
        api.service, max_body_bytes=1024, status_needs_message=True, gate=OPEN_GATE
    )
    context = _ServeContext()
    error = RatoonError(ErrorCode.MALFORMED_BODY, "17 bytes are no message")
    malformed: object = Refused(error=error, policy_id="")
    answer = await servicer.GetPolicy(malformed, context)
    assert not answer.HasField("spec")
    assert "17 bytes" in context.details


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
