"""`ratoon.v1.PolicyService` over gRPC: its server, each RPC's handler, a failed call's status.

A handler starts before its message is read. The gate authorizes the caller first, then the intake
reads the message, then the service is called. The server stands behind its `GrpcProxy`: a taken
port is an error, never shared, and idle connections are closed.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from ratoon.api.answers import FileChunk, cut, detail_of, internal_error
from ratoon.api.contract import SERVICE, call_name
from ratoon.api.gate import ANSWERED, NO_ANSWER, ROOM_TO_REFUSE, AuthorizedCall, Gate
from ratoon.api.grpc.intake import Intake, Refused, Request
from ratoon.api.service import PolicyService
from ratoon.auth.access import Presented
from ratoon.config import LimitsConfig
from ratoon.edge.budget import EdgeBounds, EdgeBudget
from ratoon.edge.grpc_proxy import GrpcProxy
from ratoon.errors import ERROR_TABLE, ErrorCode, RatoonError
from ratoon.log import get_logger

# A connection carries any number of calls, so fewer are needed than over HTTP/1.
GRPC_BOUNDS = EdgeBounds(max_connections=2048, max_connections_of_host=1024)
# Half of each byte budget is the most that one caller holds.
_MOST_OF_ONE = 0.5
# A dead peer is noticed within 40 s. Every connection ends after ten minutes, plus two for calls
# under way; clients reconnect by themselves, and stalled readers are dropped.
_CONNECTION_OPTIONS = (
    # gRPC inflates a whole message before it checks the size: a few KiB could become many GiB.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Bytes that a call may send before its message is asked for. Bandwidth probing would raise it
    # to megabytes.
    ("grpc.http2.lookahead_bytes", 16 * 1024),
    ("grpc.http2.bdp_probe", 0),
    # Longer frames are fewer: each costs the proxy two microseconds.
    ("grpc.http2.max_frame_size", 256 * 1024),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_connection_age_ms", 600_000),
    ("grpc.max_connection_age_grace_ms", 120_000),
)
# A serialized `ErrorDetail`.
ERROR_TRAILER = "ratoon-error-bin"
# Whole seconds, as HTTP's header.
RETRY_AFTER_TRAILER = "retry-after"
_AUTHORIZATION = "authorization"
_log = get_logger("grpc")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGrpc:
    """A started gRPC server; `port` is the bound one."""

    server: grpc.aio.Server
    proxy: GrpcProxy
    port: int

    async def stop(self, grace_s: float | None) -> None:
        """Refuse new calls, and answer those under way within `grace_s` seconds."""
        self.proxy.close()
        await self.server.stop(grace_s)
        self.proxy.abort()
        shutil.rmtree(self.proxy.upstream.parent, ignore_errors=True)


async def start_grpc(
    service: PolicyService,
    limits: LimitsConfig,
    *,
    gate: Gate,
    host: str,
    port: int,
    max_message_bytes: int,
    bounds: EdgeBounds = GRPC_BOUNDS,
    context: ssl.SSLContext | None = None,
) -> RunningGrpc:
    """Serve `service` on `host`; port 0 picks a free one. `context` None: without TLS.

    A message with a batch has at most `max_message_bytes`, and at most `limits.max_body_bytes`.
    Raises OSError where the port is taken.
    """
    most = min(max_message_bytes, limits.max_body_bytes)
    budget = EdgeBudget(replace(bounds, max_body_bytes=most), most_of_one=_MOST_OF_ONE)
    # The folder is open to this user only, and its path short: a socket path has at most 107 bytes.
    socket = Path(tempfile.mkdtemp(prefix="ratoon-")) / "grpc"
    proxy = GrpcProxy(socket, context, budget)
    intake = Intake(limits, budget)
    server = grpc.aio.server(
        maximum_concurrent_rpcs=limits.max_requests_in_flight + ROOM_TO_REFUSE,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.server_handshake_timeout_ms", int(bounds.headers_s * 1000)),
            *_CONNECTION_OPTIONS,
        ],
    )
    server.add_generic_rpc_handlers((PolicyServicer(service, gate, intake, proxy),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    running = RunningGrpc(server=server, proxy=proxy, port=port)
    try:
        return replace(running, port=await proxy.listen(host, port))
    except OSError:
        await running.stop(None)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rpc:
    """An RPC's name, and the service's method, which is also its row in the gate's table."""

    name: str
    call: str
    is_stream: bool


class _Outcome:
    """Status with which a request ended; CANCELLED until then."""

    code = grpc.StatusCode.CANCELLED


class PolicyServicer(grpc.GenericRpcHandler):
    """Handles all RPCs as streams of bytes, so that reading and writing messages is done here."""

    def __init__(
        self, service: PolicyService, gate: Gate, intake: Intake, proxy: GrpcProxy
    ) -> None:
        self._service = service
        self._gate = gate
        self._intake = intake
        self._proxy = proxy
        self._rpcs = {
            f"/{SERVICE.full_name}/{one.name}": _Rpc(
                name=one.name, call=call_name(one.name), is_stream=one.server_streaming
            )
            for one in SERVICE.methods
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Called by gRPC for each call; returns None for an unknown method."""
        metadata = handler_call_details.invocation_metadata or ()
        rpc = self._rpcs.get(str(handler_call_details.method))
        if rpc is None:
            unknown = self._proxy.named(metadata)
            if unknown is not None:
                unknown.end()
            return None

        async def serve(messages: AsyncIterator[bytes], context: Any) -> None:
            call = self._proxy.named(metadata)
            if call is None:
                error = RatoonError(ErrorCode.UNAVAILABLE, "the call's connection has ended")
                set_status(context, error)
                return
            presented = Presented(authorization=_authorization(metadata), peer=call.arrival.host)
            async with AsyncExitStack() as held:
                held.callback(call.end)
                request = Request(rpc=rpc.name, messages=messages, call=call, held=held)
                if not rpc.is_stream:
                    await self._answer(rpc, request, context, presented)
                    return
                async with aclosing(self._answers(rpc, request, context, presented)) as answers:
                    async for answer in answers:
                        await context.write(answer)

        return grpc.stream_stream_rpc_method_handler(serve)

    async def _answer(
        self, rpc: _Rpc, request: Request, context: Any, presented: Presented
    ) -> None:
        """Send the response, or set the error's status."""
        with self._measured(rpc.call) as outcome:
            try:
                with self._authorized(rpc.call, presented) as authorized:
                    message = await self._read(request, authorized)
                    call = getattr(self._service, rpc.call)
                    answer = await self._gate.run(authorized, call, message)
            except Exception as error:  # noqa: BLE001 - the border of the process
                outcome.code = set_status(context, _as_ratoon_error(error, rpc.call))
                return
            outcome.code = grpc.StatusCode.OK
        if isinstance(answer, FileChunk):
            # Megabytes would block the event loop.
            data = await asyncio.to_thread(answer.SerializeToString)
        else:
            data = answer.SerializeToString()
        # Not cancellable: gRPC cannot take back what it has begun to send.
        await context.write(data)

    async def _answers(
        self, rpc: _Rpc, request: Request, context: Any, presented: Presented
    ) -> AsyncGenerator[bytes, None]:
        """Serialized responses of a stream, which ends with an error's status if it fails."""
        with self._measured(rpc.call) as outcome:
            try:
                with self._authorized(rpc.call, presented) as authorized:
                    message = await self._read(request, authorized)
                    call = getattr(self._service, rpc.call)
                    async with aclosing(self._gate.stream(authorized, call, message)) as answers:
                        async for answer in answers:
                            yield answer.SerializeToString()
                outcome.code = grpc.StatusCode.OK
            except Exception as error:  # noqa: BLE001 - the border of the process
                outcome.code = set_status(context, _as_ratoon_error(error, rpc.call))

    async def _read(self, request: Request, authorized: AuthorizedCall) -> Message:
        """The request's message. A policy that the key is not for is refused before bad bytes."""
        read = await self._intake.read(request, authorized.caller.name)
        if not isinstance(read, Refused):
            return read
        if read.policy_id:
            self._gate.check_policy(authorized, read.policy_id)
        raise read.error

    @contextmanager
    def _measured(self, method: str) -> Generator[_Outcome, None, None]:
        """Count one request; CANCELLED if its caller left."""
        outcome, start = _Outcome(), time.perf_counter()
        try:
            yield outcome
        finally:
            self._service.record_request(
                transport="grpc",
                method=method,
                code=outcome.code.name,
                seconds=time.perf_counter() - start,
            )

    @contextmanager
    def _authorized(self, call: str, presented: Presented) -> Generator[AuthorizedCall, None, None]:
        """Enter the gate and leave it. Raises what `Gate.enter` raises."""
        authorized = self._gate.enter(call, presented)
        outcome = NO_ANSWER
        try:
            yield authorized
            outcome = ANSWERED
        except RatoonError as error:
            outcome = str(error.code)
            raise
        except Exception:
            outcome = str(ErrorCode.INTERNAL)
            raise
        finally:
            self._gate.leave(authorized, "", outcome)


def set_status(context: Any, error: RatoonError) -> grpc.StatusCode:
    """End the call of gRPC's `context` with `error`; returns the status.

    The trailers carry the whole error, and when to retry.
    """
    code = grpc.StatusCode[ERROR_TABLE[error.code].grpc]
    context.set_code(code)
    context.set_details(cut(error.message))
    trailers: list[tuple[str, str | bytes]] = [
        (ERROR_TRAILER, detail_of(error).SerializeToString())
    ]
    if error.retry_after_s is not None:
        trailers.append((RETRY_AFTER_TRAILER, str(error.retry_after_s)))
    context.set_trailing_metadata(trailers)
    return code


def _as_ratoon_error(error: Exception, call: str) -> RatoonError:
    """`error` itself, or INTERNAL for an unexpected one, whose text is only logged."""
    if isinstance(error, RatoonError):
        return error
    _log.error("call failed", call=call, exc_info=error)
    return internal_error()


def _authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for name, value in metadata:
        if name == _AUTHORIZATION:
            return str(value)
    return ""
