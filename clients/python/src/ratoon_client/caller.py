"""One call with its retries, and what it needs of a wire.

A request is sent again only where that has the effect of sending it once, after a failure that may
pass, not before the service says, and within the caller's timeout.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import tenacity

from ratoon_client.config import ClientConfig
from ratoon_client.errors import (
    RatoonApiError,
    TlsError,
    TransportError,
    UnusableClientError,
    WrongPortError,
)
from ratoon_client.rpcs import GET_SERVER_INFO, RequestT, ResponseT, Rpc
from ratoon_client.wire import request_message
from ratoon_proto.types import WeightFile
from ratoon_proto.v1 import service_pb2

T = TypeVar("T")
# The longest that a read waits for an operation or a publication under way.
TURN_S = 600.0
_FIRST_WAIT_S = 0.05
_MAX_WAIT_S = 2.0
_LEAST_ATTEMPT_S = 0.5


class Transport(Protocol):
    """One connection, of one event loop."""

    async def call(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, *, timeout_s: float
    ) -> ResponseT: ...

    def stream(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]: ...

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
        """`length` bytes of a version's file. Raises IntegrityError where the wire shows a flaw."""
        ...

    async def close(self) -> None: ...


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed soon: the service says so, or it has said nothing.

    Not where a wait ended behind a missing seq, which is for the caller to send, nor for want of a
    GPU, a policy or memory, for which the service knows no time.
    """
    if isinstance(error, RatoonApiError):
        is_soon = error.code != "RESOURCE_EXHAUSTED" or error.retry_after_s > 0
        return error.retryable and error.code != "SEQ_GAP" and is_soon
    is_final = isinstance(error, TlsError | WrongPortError)
    return isinstance(error, TransportError) and not is_final


def closed() -> UnusableClientError:
    return UnusableClientError("the client is closed")


def check_process(owner: int) -> None:
    """Raises UnusableClientError in a process other than `owner`: a fork copies no threads."""
    if os.getpid() != owner:
        raise UnusableClientError(
            f"the client is of process {owner}, of which this one was forked;"
            " make a client in each process"
        )


class _Wait(tenacity.wait_random_exponential):
    """Longer after each failure, and no shorter than the service asks for."""

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        outcome = retry_state.outcome
        error = None if outcome is None else outcome.exception()
        asked_s = error.retry_after_s if isinstance(error, RatoonApiError) else 0.0
        return asked_s + super().__call__(retry_state)


class Caller:
    """A transport, opened on first use, and the timeouts of a client.

    A service that was there once (`is_reached`) is waited for as long as a call may take; one that
    never was, for the client's `connect_timeout_s`.
    """

    def __init__(
        self,
        open_transport: Callable[[], Transport],
        reach: Callable[[float], Awaitable[None]],
        config: ClientConfig,
    ) -> None:
        """`reach`: returns once something takes a connection, or raises TransportError in time."""
        self._open_transport = open_transport
        self._reach = reach
        self.is_reached = False
        self._transport: Transport | None = None
        self._process = 0
        self._is_closed = False
        self.config = config
        self._limits: service_pb2.ServerLimits | None = None
        self._limits_lock = asyncio.Lock()

    @property
    def transport(self) -> Transport:
        """The connection of the running event loop. Raises UnusableClientError."""
        if self._is_closed:
            raise closed()
        if self._transport is None:
            self._process = os.getpid()
            self._transport = self._open_transport()
        check_process(self._process)
        return self._transport

    async def close(self) -> None:
        """Does nothing in a process that was forked from the client's."""
        self._is_closed = True
        if self._transport is not None and self._process == os.getpid():
            await self._transport.close()

    async def limits(self) -> service_pb2.ServerLimits:
        """What the service takes; it is asked once."""
        async with self._limits_lock:
            if self._limits is None:
                self._limits = (await self.ask(GET_SERVER_INFO)).limits
            return self._limits

    async def chunk_bytes(self) -> int:
        """The longest range of a file that client and service both take."""
        return min((await self.limits()).max_fetch_bytes, self.config.chunk_bytes)

    async def ask(self, rpc: Rpc[Any, ResponseT], **fields: Any) -> ResponseT:
        """Call with a request of these fields; None is absent. Raises InvalidArgumentError, too."""
        return await self.call(rpc, request_message(rpc.request, **fields))

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
        await self._reach_once(total_s)
        if not rpc.is_idempotent:
            return await self.transport.call(rpc, request, timeout_s=min(total_s, attempt_s))
        return await retried(
            lambda left_s: self.transport.call(rpc, request, timeout_s=min(left_s, attempt_s)),
            timeout_s=total_s,
        )

    async def call_in_turn(
        self,
        rpc: Rpc[RequestT, ResponseT],
        request: RequestT,
        *,
        wait_s: float = 0.0,
        attempt_timeout_s: float = TURN_S,
    ) -> ResponseT:
        """A read that waits on the service, for an operation or a publication to end.

        Each try has `wait_s` and `attempt_timeout_s`; the client's timeout bounds when the last one
        begins.
        """
        await self._reach_once(self.config.timeout_s)
        return await retried(
            lambda _: self.transport.call(rpc, request, timeout_s=wait_s + attempt_timeout_s),
            timeout_s=wait_s + self.config.timeout_s,
        )

    async def _reach_once(self, timeout_s: float) -> None:
        """Raises UnusableClientError and TransportError."""
        _ = self.transport
        if not self.is_reached:
            await self._reach(min(self.config.connect_timeout_s, timeout_s))
            self.is_reached = True


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
