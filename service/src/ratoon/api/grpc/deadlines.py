"""Bounds on unary calls of the gateway: time to send the request, places for what waits to be read.

Enters the handler of a unary call, leaves one that reads and writes the same bytes as a stream of
one message, for there the waiting is ours. Invariant: a request comes within its time or is
refused, and a chunk of a file is read only once its answer has a place among the unsent, which it
keeps until gRPC has sent it or the connection ends (`server`: it has an age).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from ratoon.api.grpc.access import host_of
from ratoon.api.grpc.status import set_status
from ratoon.errors import ErrorCode, RatoonError, exhausted

_FETCHES = ("FetchWeights", "FetchGradients")
# How long a fetch waits for its place, and when to ask again where there was none.
_PLACE_S = 10.0
_RETRY_S = 1.0


class Places:
    """For answers that wait for their readers: so many in all, and half of them for one host."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_of_host = max(most // 2, 1)
        self._taken: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def one(self, host: str) -> AsyncGenerator[None, None]:
        """A place for the length of the block. Raises RESOURCE_EXHAUSTED after `_PLACE_S`."""
        try:
            await asyncio.wait_for(self._take(host), _PLACE_S)
        except TimeoutError as err:
            raise self._none() from err
        try:
            yield
        finally:
            self._taken[host] -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _take(self, host: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_one(host))
            self._taken[host] += 1

    def _has_one(self, host: str) -> bool:
        self._taken += Counter()  # Hosts without any are forgotten.
        return self._taken.total() < self._most and self._taken[host] < self._most_of_host

    def _none(self) -> RatoonError:
        return exhausted(
            f"{self._taken.total()} chunks of files are on their way to their readers",
            resource="unsent_fetches",
            wanted=1,
            free=0,
            limit=self._most,
            retry_after_s=_RETRY_S,
        )


class CallDeadlines(grpc.aio.ServerInterceptor):
    """`receive_s` seconds for a request to come; `max_unsent_fetches` chunks at once."""

    def __init__(self, *, receive_s: float, max_unsent_fetches: int) -> None:
        self._receive_s = receive_s
        self._places = Places(max_unsent_fetches)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        is_fetch = str(handler_call_details.method).endswith(_FETCHES)

        async def bounded(requests: AsyncIterator[Any], context: Any) -> None:
            try:
                if not is_fetch:
                    await self._answer(handler, requests, context)
                    return
                async with self._places.one(host_of(str(context.peer()))):
                    await self._answer(handler, requests, context)
            except RatoonError as error:
                set_status(context, error)

        # The answer is bytes by then: while it waits for its reader there is one copy less of it.
        return grpc.stream_stream_rpc_method_handler(
            bounded, request_deserializer=handler.request_deserializer
        )

    async def _answer(self, handler: Any, requests: AsyncIterator[Any], context: Any) -> None:
        """Raises MALFORMED_BODY, REQUEST_TIMEOUT."""
        try:
            request = await asyncio.wait_for(anext(requests), self._receive_s)
        except StopAsyncIteration as err:
            raise RatoonError(ErrorCode.MALFORMED_BODY, "no request came") from err
        except TimeoutError as err:
            raise self._too_slow() from err
        answer = handler.response_serializer(await handler.unary_unary(request, context))
        if context.code() in (None, 0, grpc.StatusCode.OK):
            # Not to be given up: what gRPC has begun to send it cannot take back.
            await context.write(answer)

    def _too_slow(self) -> RatoonError:
        return RatoonError(
            ErrorCode.REQUEST_TIMEOUT,
            f"the request did not come within {self._receive_s:g} s",
            got="a part of it",
            expected=f"all of it within {self._receive_s:g} s",
        )
