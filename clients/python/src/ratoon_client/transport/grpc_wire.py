"""The service over gRPC; a connection on which an answer is overdue carries no new call."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ratoon_client.config import ClientConfig
from ratoon_client.errors import (
    RatoonApiError,
    RatoonClientError,
    TransportError,
    UnusableClientError,
    no_answer,
)
from ratoon_client.rpcs import FETCH_WEIGHTS, RequestT, ResponseT, Rpc
from ratoon_client.weights.chunks import check_chunk
from ratoon_client.weights.disk import in_thread
from ratoon_client.wire import error_of
from ratoon_proto.types import WeightFile
from ratoon_proto.v1 import operation_pb2, service_pb2

T = TypeVar("T")
ERROR_TRAILER = "ratoon-error-bin"
# A watch that has nothing new to say for so long is asked for again.
STREAM_TIMEOUT_S = 45.0
_CONNECT_TIMEOUT_S = 10.0
# How long calls may go on, on a connection that others have left.
_GRACE_S = 60.0
_SERVICE = service_pb2.DESCRIPTOR.services_by_name["PolicyService"].full_name
# Statuses that a proxy or a dying process makes without the service having said anything.
_NO_ANSWER = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
    }
)
# Transports that are open, by process and identity: after a fork, gRPC's threads are missing, and
# one that is opened there waits for them for ever.
_OPEN: set[tuple[int, int]] = set()


class GrpcTransport:
    """One channel, made on first use: grpc.aio binds it to the running event loop.

    `credentials` None: without TLS. Raises UnusableClientError in a process that was forked from
    one with an open transport.
    """

    def __init__(
        self, address: str, config: ClientConfig, credentials: grpc.ChannelCredentials | None
    ) -> None:
        process = os.getpid()
        if any(owner != process for owner, _ in tuple(_OPEN)):
            raise UnusableClientError(
                "this process was forked while gRPC was in use: start processes with spawn, close"
                " clients before the fork, or take http://"
            )
        self._address = address
        self._metadata = _metadata(config)
        self._config = config
        self._credentials = credentials
        self._channel = self._open()
        self._mark = process, id(self)
        _OPEN.add(self._mark)
        self._left: dict[grpc.aio.Channel, asyncio.Task[None]] = {}

    async def call(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, *, timeout_s: float
    ) -> ResponseT:
        return await self._unary(rpc, request, rpc.response.FromString, timeout_s)

    async def _unary(
        self,
        rpc: Rpc[RequestT, Any],
        request: RequestT,
        decode: Callable[[bytes], T],
        timeout_s: float,
    ) -> T:
        channel = self._channel
        method = channel.unary_unary(
            f"/{_SERVICE}/{rpc.name}",
            request_serializer=rpc.request.SerializeToString,
            response_deserializer=decode,
        )
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as err:
            if err.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._leave(channel)
            raise self._error(rpc.name, err) from err

    async def stream(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        channel = self._channel
        method = channel.unary_stream(
            f"/{_SERVICE}/{rpc.name}",
            request_serializer=rpc.request.SerializeToString,
            response_deserializer=rpc.response.FromString,
        )
        call = method(request, metadata=self._metadata)
        try:
            messages = aiter(call)
            while True:
                async with asyncio.timeout(STREAM_TIMEOUT_S):
                    message = await anext(messages, None)
                if message is None:
                    return
                yield message
        except grpc.aio.AioRpcError as err:
            raise self._error(rpc.name, err) from err
        except TimeoutError as err:
            self._leave(channel)
            text = f"no message for {STREAM_TIMEOUT_S} s"
            raise TransportError(f"{rpc.name} at {self._address}: {text}") from err
        finally:
            call.cancel()

    async def read_file(
        self,
        policy_id: str,
        version: int,
        file: WeightFile,
        *,
        offset: int,
        length: int,
        timeout_s: float,
    ) -> bytes:
        request = service_pb2.FetchWeightsRequest(
            policy_id=policy_id, digest=file.digest, offset=offset, length=length
        )
        answer = await self._unary(FETCH_WEIGHTS, request, bytes, timeout_s)

        def verified() -> bytes:
            try:
                chunk = service_pb2.FetchWeightsResponse.FromString(answer)
            except DecodeError as err:
                text = f"{len(answer)} bytes that are no chunk of a file"
                raise TransportError(f"{FETCH_WEIGHTS.name} at {self._address}: {text}") from err
            data = chunk.data
            check_chunk(file.name, offset, length, data, chunk.digest)
            return data

        return await in_thread(verified)

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in (self._channel, *self._left)))
        _OPEN.discard(self._mark)

    def _open(self) -> grpc.aio.Channel:
        options = _options(self._config)
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=options)
        return grpc.aio.secure_channel(self._address, self._credentials, options=options)

    def _leave(self, channel: grpc.aio.Channel) -> None:
        """Open another connection: one that a network has forgotten looks like a slow service.

        Calls under way on the old one go on; keepalive alone does not always notice.
        """
        if channel is not self._channel:
            return
        self._channel = self._open()
        closing = asyncio.create_task(channel.close(_GRACE_S))
        self._left[channel] = closing
        closing.add_done_callback(lambda _: self._left.pop(channel, None))

    def _error(self, name: str, err: grpc.aio.AioRpcError) -> RatoonClientError:
        detail = _detail(err)
        if detail is not None:
            return error_of(detail)
        text = err.details() or err.code().name
        if err.code() in _NO_ANSWER:
            return no_answer(f"{name} at {self._address}: {err.code().name}: {text}")
        return RatoonApiError(err.code().name, text)


def _detail(err: grpc.aio.AioRpcError) -> operation_pb2.ErrorDetail | None:
    for key, value in err.trailing_metadata() or ():
        if key == ERROR_TRAILER and isinstance(value, bytes):
            try:
                return operation_pb2.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None


def _metadata(config: ClientConfig) -> tuple[tuple[str, str], ...]:
    return (("authorization", config.authorization),) if config.authorization else ()


def _options(config: ClientConfig) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", int(_CONNECT_TIMEOUT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Clients of one process do not share a connection, and so not its fate.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        # Retries are decided in `caller`, by what the call means.
        ("grpc.enable_retries", 0),
    ]
