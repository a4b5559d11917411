"""Backpressure on requests: what is read of them, when, and how much in all.

A handler runs before its message is read, so that the servicer authorizes the caller first. The
message's length is known before gRPC is asked for it; its bytes are taken from a budget that the
call keeps until its answer is with gRPC. Calls of at most `SMALL_BYTES` take nothing from it, and
Health's message is not read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from ratoon.api.contract import BATCHES, SMALL_BYTES, body_bound, check_size
from ratoon.api.grpc.front import Call, Front
from ratoon.api.grpc.status import set_status
from ratoon.config import LimitsConfig
from ratoon.errors import ErrorCode, RatoonError, exhausted

# Per process: batches being read or validated, and file chunks waiting for their readers.
BATCH_BYTES = 256 * 2**20
UNSENT_BYTES = 128 * 2**20
_MAX_PARSING = 2
_FETCHES = frozenset({"FetchWeights"})
_UNREAD = frozenset({"Health"})
# How long a call waits for its share, and when to retry if there was none.
_PLACE_S = 10.0
_RETRY_S = 1.0


class Budget:
    """Bytes that calls hold: a limit in all, and half of it per caller."""

    def __init__(self, most: int, *, resource: str) -> None:
        self._most = most
        self._resource = resource
        self._taken: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, caller: str, num_bytes: int) -> AsyncGenerator[None, None]:
        """Hold the bytes for the block. Raises RESOURCE_EXHAUSTED after `_PLACE_S`."""
        try:
            # `asyncio.wait_for` of Python 3.11 loses a cancel that comes with the result.
            async with asyncio.timeout(_PLACE_S):
                await self._take(caller, num_bytes)
        except TimeoutError as err:
            raise self._none(num_bytes) from err
        try:
            yield
        finally:
            self._taken[caller] -= num_bytes
            async with self._changed:
                self._changed.notify_all()

    async def _take(self, caller: str, num_bytes: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(caller, num_bytes))
            self._taken[caller] += num_bytes

    def _has_room(self, caller: str, num_bytes: int) -> bool:
        """A request larger than its caller's half is admitted if nothing else is held."""
        self._taken += Counter()  # Drops callers without any.
        own, total = self._taken[caller], self._taken.total()
        fits = total + num_bytes <= self._most and own + num_bytes <= self._most // 2
        return fits or not total

    def _none(self, num_bytes: int) -> RatoonError:
        return exhausted(
            f"{self._taken.total()} bytes of other calls are in memory",
            resource=self._resource,
            wanted=num_bytes,
            free=0,
            limit=self._most,
            retry_after_s=_RETRY_S,
        )


class Intake(grpc.aio.ServerInterceptor):
    """Wraps each handler in one over byte streams, so that waiting for messages is done here."""

    def __init__(self, front: Front, limits: LimitsConfig, *, max_message_bytes: int) -> None:
        self._front = front
        self._limits = limits
        self._max_message_bytes = max_message_bytes
        self._batches = Budget(BATCH_BYTES, resource="request_bytes")
        self._parsing = asyncio.Semaphore(_MAX_PARSING)
        self._unsent = Budget(UNSENT_BYTES, resource="unsent_fetches")

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        if handler is None:
            nobodys = self._front.named(metadata)
            if nobodys is not None:
                nobodys.end()
            return None
        rpc = str(handler_call_details.method).rpartition("/")[2]

        async def serve(messages: AsyncIterator[bytes], context: Any) -> None:
            call = self._front.named(metadata)
            if call is None:
                error = RatoonError(ErrorCode.UNAVAILABLE, "the call's connection has ended")
                set_status(context, error)
                return
            async with AsyncExitStack() as held:
                held.callback(call.end)
                request = Request(rpc, handler.request_deserializer, messages, call, held, self)
                await _answered(handler, request, _Context(context, call.arrival.host))

        return grpc.stream_stream_rpc_method_handler(serve)

    async def read(self, request: Request, caller: str) -> bytes:
        """Raises MALFORMED_BODY, BODY_TOO_LARGE, REQUEST_TIMEOUT, RESOURCE_EXHAUSTED."""
        arrival, limits = request.call.arrival, self._limits
        if request.rpc in _FETCHES:
            await request.held.enter_async_context(
                self._unsent.hold(caller, limits.max_fetch_bytes)
            )
        try:
            async with asyncio.timeout(limits.max_body_pause_s):
                length = await arrival.length()
        except TimeoutError as err:
            raise _too_slow(limits.max_body_pause_s) from err
        if length is None:
            raise RatoonError(ErrorCode.MALFORMED_BODY, "no request came")
        bound = body_bound(request.rpc, self._max_message_bytes)
        check_size(request.rpc, length, bound)
        if bound > SMALL_BYTES:
            await request.held.enter_async_context(self._batches.hold(caller, length))
        return await self._whole(request)

    async def parsed(self, parse: Callable[[bytes], Any], data: bytes) -> Any:
        """Parse in a thread. Few at once, as parsing is what allocates memory."""
        async with self._parsing:
            return await asyncio.to_thread(parse, data)

    async def _whole(self, request: Request) -> bytes:
        """Read the message, within limits on its total time and on each pause."""
        loop = asyncio.get_running_loop()
        ends_at, pause_s = loop.time() + self._limits.max_body_s, self._limits.max_body_pause_s
        reading = asyncio.ensure_future(anext(request.messages, None))
        try:
            before = -1
            while not reading.done():
                if before == request.call.arrival.num_bytes:
                    raise _too_slow(pause_s)
                before = request.call.arrival.num_bytes
                left_s = ends_at - loop.time()
                if left_s <= 0:
                    raise _too_slow(self._limits.max_body_s)
                await asyncio.wait({reading}, timeout=min(pause_s, left_s))
        finally:
            reading.cancel()
        data = reading.result()
        if data is None:
            raise RatoonError(ErrorCode.MALFORMED_BODY, "no request came")
        return data


class Request:
    """A request that may not have arrived; `read` returns it, once its caller is authorized."""

    def __init__(
        self,
        rpc: str,
        parse: Callable[[bytes], Any],
        messages: AsyncIterator[bytes],
        call: Call,
        held: AsyncExitStack,
        intake: Intake,
    ) -> None:
        self.rpc = rpc
        self.messages = messages
        self.call = call
        self.held = held
        self._parse = parse
        self._intake = intake

    async def read(self, caller: str) -> Any:
        """The message, or a `Refused`. Raises as `Intake.read`."""
        self.call.judged()
        if self.rpc in _UNREAD:
            return self._parse(b"")
        data = await self._intake.read(self, caller)
        if self.rpc not in BATCHES:
            return self._parse(data)
        return await self._intake.parsed(self._parse, data)


class _Context:
    """gRPC's context with the caller's host as peer, which gRPC sees as this process."""

    def __init__(self, context: Any, host: str) -> None:
        self._context = context
        self._host = host

    def peer(self) -> str:
        return self._host

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def _answered(handler: Any, request: Request, context: Any) -> None:
    """Send the answer or answers. An error status is on the context already."""
    if handler.unary_unary is None:
        async for answer in handler.unary_stream(request, context):
            await context.write(handler.response_serializer(answer))
        return
    answer = handler.response_serializer(await handler.unary_unary(request, context))
    if context.code() in (None, 0, grpc.StatusCode.OK):
        # Not cancellable: gRPC cannot take back what it has begun to send.
        await context.write(answer)


def _too_slow(seconds: float) -> RatoonError:
    return RatoonError(
        ErrorCode.REQUEST_TIMEOUT,
        f"the request did not come within {seconds:g} s",
        got="a part of it",
        expected=f"all of it, without a pause of {seconds:g} s",
    )
