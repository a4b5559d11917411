"""One call with its retries.

Enters a request, leaves its response. Invariant: a request is sent again only where that has the
effect of sending it once, only after a failure that may pass, not before the service says, and only
within the caller's timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from ratoon_client.config import ClientConfig
from ratoon_client.errors import RatoonApiError, TransportError
from ratoon_client.transport.base import Transport
from ratoon_client.wire.rpcs import GET_SERVER_INFO, RequestT, ResponseT, Rpc
from ratoon_proto.v1 import service_pb2

T = TypeVar("T")
_FIRST_WAIT_S = 0.05
_MAX_WAIT_S = 2.0
_LEAST_ATTEMPT_S = 0.5


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later: the service says so, or it has said nothing."""
    if isinstance(error, RatoonApiError):
        return error.retryable
    return isinstance(error, TransportError)


class _Wait(tenacity.wait_random_exponential):
    """Longer after each failure, and no shorter than the service asks for."""

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        outcome = retry_state.outcome
        error = None if outcome is None else outcome.exception()
        asked_s = error.retry_after_s if isinstance(error, RatoonApiError) else 0.0
        return asked_s + super().__call__(retry_state)


class Caller:
    """A transport and the timeouts of a client."""

    def __init__(self, transport: Transport, config: ClientConfig) -> None:
        self.transport = transport
        self.config = config
        self._limits: service_pb2.ServerLimits | None = None
        self._limits_lock = asyncio.Lock()

    async def limits(self) -> service_pb2.ServerLimits:
        """What the service takes; it is asked once."""
        async with self._limits_lock:
            if self._limits is None:
                info = await self.call(GET_SERVER_INFO, service_pb2.GetServerInfoRequest())
                self._limits = info.limits
            return self._limits

    async def chunk_bytes(self) -> int:
        """The longest range of a file that client and service both take."""
        return min((await self.limits()).max_fetch_bytes, self.config.chunk_bytes)

    async def call(
        self,
        rpc: Rpc[RequestT, ResponseT],
        request: RequestT,
        *,
        timeout_s: float | None = None,
        attempt_timeout_s: float | None = None,
    ) -> ResponseT:
        """Times default to the client's. Raises what the last attempt raised."""
        total_s = self.config.timeout_s if timeout_s is None else timeout_s
        attempt_s = (
            self.config.attempt_timeout_s if attempt_timeout_s is None else attempt_timeout_s
        )
        if not rpc.is_idempotent:
            return await self.transport.call(rpc, request, timeout_s=min(total_s, attempt_s))
        return await retried(
            lambda left_s: self.transport.call(rpc, request, timeout_s=min(left_s, attempt_s)),
            timeout_s=total_s,
        )


async def retried(attempt: Callable[[float], Awaitable[T]], *, timeout_s: float) -> T:
    """`attempt`, which is given the seconds left, until it succeeds or must not go on."""
    deadline = time.monotonic() + timeout_s

    async def attempt_now() -> T:
        return await attempt(max(deadline - time.monotonic(), 0.001))

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(may_pass),
        wait=_Wait(multiplier=_FIRST_WAIT_S, max=_MAX_WAIT_S),
        # An attempt with no time for an answer would hide what the service said before.
        stop=tenacity.stop_before_delay(timeout_s - min(_LEAST_ATTEMPT_S, timeout_s / 4)),
        reraise=True,
    )
    return await retrying(attempt_now)
