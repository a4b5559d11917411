"""`ratoon.v1.PolicyService` over gRPC.

The gateway calls methods with `grpc.aio`'s context, a Serve replica with Serve's own. The latter
reaches the caller only along with a message, so on Serve a failed stream ends with one empty
message before its status.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ratoon.api.chunk import FileChunk, Serialized
from ratoon.api.contract import SERVICE, call_name
from ratoon.api.gate import ANSWERED, NO_ANSWER, AuthorizedCall, Gate
from ratoon.api.grpc.access import presented_of
from ratoon.api.grpc.intake import Request
from ratoon.api.grpc.status import CallContext, as_ratoon_error, set_status
from ratoon.api.grpc.wiring import Refused, sized
from ratoon.api.service import PolicyService
from ratoon.errors import ErrorCode, RatoonError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rpc:
    """`call`: the service's method, and its row in the gate's table."""

    name: str
    call: str
    response: type[Message]


class _Outcome:
    """How a request ended; CANCELLED until then."""

    code = grpc.StatusCode.CANCELLED


class PolicyServicer:
    """Has the service, its gate, and a method per RPC of the same name.

    `max_body_bytes` bounds the serialized size of a request with a batch.
    """

    def __init__(
        self,
        service: PolicyService,
        *,
        max_body_bytes: int,
        status_needs_message: bool,
        gate: Gate,
    ) -> None:
        self._service = service
        self._gate = gate
        self._max_body_bytes = max_body_bytes
        self._status_needs_message = status_needs_message

    async def answer(
        self, rpc: _Rpc, request: Message | Refused | Request, context: CallContext
    ) -> Message | Serialized:
        """The response, or an empty one that gRPC drops for the status of `context`."""
        with self._measured(rpc.call) as outcome:
            try:
                with self._authorized(rpc.call, context) as authorized:
                    message = await self._message(rpc, request, authorized)
                    call = getattr(self._service, rpc.call)
                    answer = await self._gate.run(authorized, call, message)
            except Exception as error:  # noqa: BLE001 - the border of the process
                outcome.code = set_status(context, as_ratoon_error(error, rpc.call))
                return rpc.response()
            outcome.code = grpc.StatusCode.OK
        return await Serialized.of(answer) if isinstance(answer, FileChunk) else answer

    async def stream(
        self, rpc: _Rpc, request: Message | Refused | Request, context: CallContext
    ) -> AsyncGenerator[Message, None]:
        with self._measured(rpc.call) as outcome:
            try:
                with self._authorized(rpc.call, context) as authorized:
                    message = await self._message(rpc, request, authorized)
                    call = getattr(self._service, rpc.call)
                    async with aclosing(self._gate.stream(authorized, call, message)) as answers:
                        async for answer in answers:
                            yield answer
                outcome.code = grpc.StatusCode.OK
            except Exception as error:  # noqa: BLE001 - the border of the process
                outcome.code = set_status(context, as_ratoon_error(error, rpc.call))
                if self._status_needs_message:
                    yield rpc.response()

    async def _message(
        self, rpc: _Rpc, request: Message | Refused | Request, authorized: AuthorizedCall
    ) -> Message:
        """The request, read now if it has not arrived yet; its policy is judged before it is."""
        if isinstance(request, Request):
            request = cast("Message | Refused", await request.read(authorized.caller.name))
        if not isinstance(request, Refused):
            self._gate.check(authorized, request)
        elif request.policy_id:
            self._gate.check_policy(authorized, request.policy_id)
        return sized(request, rpc.name, self._max_body_bytes)

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
    def _authorized(self, call: str, context: CallContext) -> Generator[AuthorizedCall, None, None]:
        """Enter the gate and leave it. Raises what `Gate.enter` raises."""
        authorized = self._gate.enter(call, presented_of(context))
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


def _unary(rpc: _Rpc) -> Callable[..., Any]:
    async def method(
        self: PolicyServicer, request: Message | Refused | Request, grpc_context: CallContext
    ) -> Message | Serialized:
        return await self.answer(rpc, request, grpc_context)

    return method


def _streaming(rpc: _Rpc) -> Callable[..., Any]:
    async def method(
        self: PolicyServicer, request: Message | Refused | Request, grpc_context: CallContext
    ) -> AsyncGenerator[Message, None]:
        async with aclosing(self.stream(rpc, request, grpc_context)) as messages:
            async for message in messages:
                yield message

    return method


def _add_methods() -> None:
    """Serve looks methods up on the class, by the names of RPCs."""
    for one in SERVICE.methods:
        response = GetMessageClass(one.output_type)
        rpc = _Rpc(name=one.name, call=call_name(one.name), response=response)
        method = (_streaming if one.server_streaming else _unary)(rpc)
        method.__name__, method.__qualname__ = one.name, f"PolicyServicer.{one.name}"
        setattr(PolicyServicer, one.name, method)


_add_methods()
