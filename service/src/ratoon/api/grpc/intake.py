"""Reads and parses requests: when, how much of each, and how much of all together.

The servicer authorizes the caller before it asks for the message. The message's length is known
before gRPC is asked for it; its bytes are taken from a budget that the call keeps until its answer
is with gRPC. Calls of at most `SMALL_BYTES` take nothing from it, and Health's message is not read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from ratoon.api.contract import BATCHES, SERVICE, SMALL_BYTES, body_bound, check_size
from ratoon.api.convert.fields import named_policy
from ratoon.api.counts import MalformedError, MessageCounter
from ratoon.api.grpc.front import Call
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request whose message may not have arrived. `held`: what it holds until it is answered."""

    rpc: str
    messages: AsyncIterator[bytes]
    call: Call
    held: AsyncExitStack


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Replaces a message that must be refused. `policy_id`: the policy it names; "": unknown."""

    error: RatoonError
    policy_id: str


class Intake:
    """Reads requests within the process's bounds; one per server.

    A message with a batch has at most `max_message_bytes`, and at most `limits.max_body_bytes`.
    """

    def __init__(self, limits: LimitsConfig, *, max_message_bytes: int) -> None:
        self._limits = limits
        self._most = min(max_message_bytes, limits.max_body_bytes)
        self._batches = Budget(BATCH_BYTES, resource="request_bytes")
        self._parsing = asyncio.Semaphore(_MAX_PARSING)
        self._unsent = Budget(UNSENT_BYTES, resource="unsent_fetches")
        self._parsers = {one.name: Parser(one.name, limits) for one in SERVICE.methods}

    async def read(self, request: Request, caller: str) -> Message | Refused:
        """The message of an authorized caller, or why its bytes are refused.

        Raises MALFORMED_BODY, BODY_TOO_LARGE, REQUEST_TIMEOUT, RESOURCE_EXHAUSTED.
        """
        request.call.judged()
        parser = self._parsers[request.rpc]
        if request.rpc in _UNREAD:
            return parser.parse(b"")
        data = await self._bytes(request, caller)
        if request.rpc not in BATCHES:
            return parser.parse(data)
        # Few at once, as parsing is what allocates memory.
        async with self._parsing:
            return await asyncio.to_thread(parser.parse, data)

    async def _bytes(self, request: Request, caller: str) -> bytes:
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
        bound = body_bound(request.rpc, self._most)
        check_size(request.rpc, length, bound)
        if bound > SMALL_BYTES:
            await request.held.enter_async_context(self._batches.hold(caller, length))
        return await self._whole(request)

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


class Parser:
    """Parses requests of one RPC. It counts a batch's objects before any are made."""

    def __init__(self, rpc: str, limits: LimitsConfig) -> None:
        self._descriptor = SERVICE.methods_by_name[rpc].input_type
        self._class = GetMessageClass(self._descriptor)
        self._counter = MessageCounter(self._descriptor, limits) if rpc in BATCHES else None

    def parse(self, data: bytes) -> Message | Refused:
        """The message, or the error of bytes that do not parse or hold too many objects."""
        try:
            if self._counter is not None:
                self._counter.count(data)
            return self._class.FromString(data)
        except (DecodeError, MalformedError):
            error = RatoonError(
                ErrorCode.MALFORMED_BODY,
                f"the request's {len(data)} bytes are not a message of its type",
                got=f"{len(data)} bytes",
                expected="a serialized request",
            )
        except RatoonError as err:
            error = err
        return Refused(error=error, policy_id=named_policy(self._descriptor, data))


def _too_slow(seconds: float) -> RatoonError:
    return RatoonError(
        ErrorCode.REQUEST_TIMEOUT,
        f"the request did not come within {seconds:g} s",
        got="a part of it",
        expected=f"all of it, without a pause of {seconds:g} s",
    )
