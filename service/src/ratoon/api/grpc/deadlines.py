"""Time limits of unary calls on the gateway: to send the request, and to take the answer.

Enters the handler of a unary call, leaves one that reads and writes the same bytes as a stream of
one message, for there the waiting is ours. Invariant: what a caller that sends or reads slowly, or
not at all, costs is bounded in time, and what is answered to all of them together in bytes: a
chunk of a file is read only where its answer has a place among the unsent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from ratoon.api.grpc.status import set_status
from ratoon.errors import ErrorCode, RatoonError, exhausted

_FETCHES = ("FetchWeights", "FetchGradients")
_RETRY_S = 1.0


class CallDeadlines(grpc.aio.ServerInterceptor):
    """Times in seconds. `max_unsent_fetches` of files are answered at once."""

    def __init__(self, *, receive_s: float, send_s: float, max_unsent_fetches: int) -> None:
        self._receive_s = receive_s
        self._send_s = send_s
        self._free_fetches = self._max_fetches = max_unsent_fetches

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
            if is_fetch and not self._free_fetches:
                set_status(context, self._no_place())
                return
            self._free_fetches -= is_fetch
            try:
                await self._answer(handler.unary_unary, requests, context)
            finally:
                self._free_fetches += is_fetch

        return grpc.stream_stream_rpc_method_handler(
            bounded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _answer(
        self,
        call: Callable[[Any, Any], Awaitable[Message]],
        requests: AsyncIterator[Any],
        context: Any,
    ) -> None:
        try:
            request = await asyncio.wait_for(anext(requests), self._receive_s)
        except StopAsyncIteration:
            set_status(context, RatoonError(ErrorCode.MALFORMED_BODY, "no request came"))
            return
        except TimeoutError:
            set_status(context, too_slow(self._receive_s))
            return
        answer = await call(request, context)
        if context.code() in (None, 0, grpc.StatusCode.OK):
            # A reader that takes no more is let go: the call ends with an error.
            await asyncio.wait_for(context.write(answer), self._send_s)

    def _no_place(self) -> RatoonError:
        return exhausted(
            f"{self._max_fetches} chunks of files are on their way",
            resource="unsent_fetches",
            wanted=1,
            free=0,
            limit=self._max_fetches,
            retry_after_s=_RETRY_S,
        )


def too_slow(within_s: float) -> RatoonError:
    """A request that takes longer to come than it may."""
    return RatoonError(
        ErrorCode.REQUEST_TIMEOUT,
        f"the request did not come within {within_s:g} s",
        got="a part of it",
        expected=f"all of it within {within_s:g} s",
    )
