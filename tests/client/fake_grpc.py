"""The fake service over real gRPC, on a thread with its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc.aio
from google.protobuf.message_factory import GetMessageClass

from ratoon_client.blocking import LoopThread
from ratoon_proto.v1 import operation_pb2, service_pb2
from tests.client.fake_service import FakeService, LostAnswerError, RefusalError

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["PolicyService"]
_STATUS = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "KEY_REUSED": grpc.StatusCode.ALREADY_EXISTS,
    "POLICY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "SEQ_GAP": grpc.StatusCode.ABORTED,
    "RESOURCE_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
}


@contextmanager
def serving_grpc(service: FakeService, port: int = 0) -> Iterator[str]:
    """Gives `grpc://host:port`."""
    loop = LoopThread()
    server, port = loop.run(_start(service, port))
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        loop.run(server.stop(0))
        loop.stop()


async def _start(service: FakeService, port: int) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server()
    handlers: dict[str, Any] = {}
    for method in _SERVICE.methods:
        make = grpc.unary_unary_rpc_method_handler
        call: Any = _unary(service, method.name)
        if method.server_streaming:
            make, call = grpc.unary_stream_rpc_method_handler, _stream(service, method.name)
        handlers[method.name] = make(
            call,
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=_serialized,
        )
    generic = grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


def _serialized(message: Any) -> bytes:
    return message.SerializeToString()


def _unary(service: FakeService, name: str) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if name == "FetchWeights":
                await asyncio.to_thread(service.slow_chunk)
            if name == "GetWeightManifest":  # It may wait for a version, and others are answered.
                return await asyncio.to_thread(service.handle, name, request)
            return service.handle(name, request)
        except (RefusalError, LostAnswerError) as error:
            await _abort(context, error)

    return call


def _stream(service: FakeService, name: str) -> Any:
    async def call(
        request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[operation_pb2.Operation]:
        try:
            while True:
                operation = service.handle(name, request)
                assert isinstance(operation, operation_pb2.Operation)
                yield operation
                if operation.state >= operation_pb2.OPERATION_STATE_DONE:
                    return
                await asyncio.sleep(0.01)
        except (RefusalError, LostAnswerError) as error:
            await _abort(context, error)

    return call


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> None:
    if isinstance(error, RefusalError):
        trailer = (("ratoon-error-bin", error.detail.SerializeToString()),)
        code = _STATUS.get(error.detail.code, grpc.StatusCode.NOT_FOUND)
        await context.abort(code, error.detail.message, trailer)
    # As a proxy or a dying process would: a status and nothing of ours.
    await context.abort(grpc.StatusCode.UNAVAILABLE, "connection lost")
