"""`ratoon.v1.PolicyService` over gRPC: each RPC's handler, and the status of a failed call.

A handler starts before its message is read. The gate authorizes the caller first, then the intake
reads the message, then the service is called.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from ratoon.api.answers import FileChunk
from ratoon.api.contract import SERVICE, call_name
from ratoon.api.convert.errors import cut, detail_of, internal_error
from ratoon.api.gate import ANSWERED, NO_ANSWER, AuthorizedCall, Gate
from ratoon.api.grpc.intake import Intake, Refused, Request
from ratoon.api.service import PolicyService
from ratoon.auth.access import Presented
from ratoon.edge.grpc_proxy import GrpcProxy
from ratoon.errors import ERROR_TABLE, ErrorCode, RatoonError
from ratoon.log import get_logger

# A serialized `ErrorDetail`.
ERROR_TRAILER = "ratoon-error-bin"
# Whole seconds, as HTTP's header.
RETRY_AFTER_TRAILER = "retry-after"
_AUTHORIZATION = "authorization"

_log = get_logger("grpc")


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
