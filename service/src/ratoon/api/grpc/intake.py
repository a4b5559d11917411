"""Reads and parses requests: when, how much of each, and how much of all together.

The servicer authorizes the caller before it asks for the message. The message's length is known
before gRPC is asked for it; its bytes are taken from a budget that the call keeps until its answer
is with gRPC. Calls of at most `SMALL_BYTES` take nothing from it, and Health's message is not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from ratoon.api.contract import BATCHES, SERVICE, SMALL_BYTES, body_bound, check_size
from ratoon.api.counts import MalformedError, MessageCounter, named_policy
from ratoon.config import LimitsConfig
from ratoon.edge.budget import EdgeBudget
from ratoon.edge.grpc_proxy import Call
from ratoon.errors import ErrorCode, RatoonError

_MAX_PARSING = 2
_FETCHES = frozenset({"FetchWeights"})
_UNREAD = frozenset({"Health"})


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
    """Reads requests within the budget of their server."""

    def __init__(self, limits: LimitsConfig, budget: EdgeBudget) -> None:
        self._limits = limits
        self._budget = budget
        self._parsing = asyncio.Semaphore(_MAX_PARSING)
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
                self._budget.unsent.hold(caller, limits.max_fetch_bytes)
            )
        try:
            async with asyncio.timeout(limits.max_body_pause_s):
                length = await arrival.length()
        except TimeoutError as err:
            raise _too_slow(limits.max_body_pause_s) from err
        if length is None:
            raise RatoonError(ErrorCode.MALFORMED_BODY, "no request came")
        bound = body_bound(request.rpc, self._budget.bounds.max_body_bytes)
        check_size(request.rpc, length, bound)
        if bound > SMALL_BYTES:
            await request.held.enter_async_context(self._budget.bodies.hold(caller, length))
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
