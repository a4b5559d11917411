"""The handle of anything asynchronous on the service, its progress bar and its result.

Waiting is a loop of reads, so neither a dropped connection nor a caller that leaves changes what
the service does. A result that is kept as a file is fetched and verified before it is read.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import aclosing, contextmanager
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import DecodeError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ratoon_client.arguments import check_seconds
from ratoon_client.caller import Caller, may_pass
from ratoon_client.errors import (
    IntegrityError,
    RatoonApiError,
    RatoonClientError,
    ResultTimeoutError,
)
from ratoon_client.rpcs import CANCEL_OPERATION, GET_OPERATION, WATCH_OPERATION
from ratoon_client.values import Checkpoint, OperationResult
from ratoon_client.weights.calls import fetch_result_file
from ratoon_client.wire import decode, decode_forward, decode_step, error_of, request_message
from ratoon_proto.types import ImportResult, NamedVersion, Operation, Policy, StepResult
from ratoon_proto.v1 import operation_pb2, service_pb2, training_pb2

ResultT = TypeVar("ResultT")
# Seconds of one long poll: more than the 30 that a service waits behind a missing seq, which it may
# count anew for each poll, and less than the 60 after which proxies cut a connection.
POLL_S = 40.0
# A wait that is longer is drawn, one at a time: bars of several would overwrite each other.
_LONG_S = 3.0
_DRAWING = threading.Lock()


class AsyncOperationHandle(Generic[ResultT]):
    """The handle of one operation; it holds the newest state seen."""

    def __init__(self, caller: Caller, message: operation_pb2.Operation) -> None:
        self._caller = caller
        self._newest = message

    @property
    def operation_id(self) -> str:
        """The operation's id, by which `client.operation` finds it again."""
        return self._newest.operation_id

    @property
    def seq(self) -> int:
        """The operation's place in its policy's order; 0: it has none."""
        return self._newest.seq

    async def status(self) -> Operation:
        """Read the operation as it stands."""
        return decode(await self._get(0.0, timeout_s=self._caller.config.timeout_s), Operation)

    async def wait(self, timeout_s: float | None = None) -> Operation:
        """Wait until the operation has ended, in whatever way.

        Args:
            timeout_s: Seconds to wait; None: as long as it takes.

        Raises:
            ResultTimeoutError, RatoonApiError or TransportError: As for `result`, but not where
                the operation failed.
        """
        return decode(await self._wait(timeout_s), Operation)

    async def result(
        self, timeout_s: float | None = None, *, progress: bool | None = None
    ) -> ResultT:
        """Wait for what the operation makes.

        Args:
            timeout_s: Seconds to wait; None: as long as it takes.
            progress: Whether to draw a bar on standard error. Default: while a wait is longer than
                three seconds, if standard error is a terminal.

        Raises:
            RatoonApiError: The operation failed or was cancelled. SEQ_GAP: the wait ended behind a
                missing seq, which `details["missing_seq"]` names and which may still be sent.
            ResultTimeoutError: `timeout_s` is over; the operation goes on.
            TransportError: The service has not answered for the client's `timeout_s`.
        """
        if progress is None and sys.stderr.isatty():
            final = await self._wait_beside(timeout_s, self._draw_late())
        else:
            final = await (self._drawn_wait(timeout_s) if progress else self._wait(timeout_s))
        return cast("ResultT", await outcome(self._caller, final))

    async def watch(self) -> AsyncGenerator[Operation, None]:
        """Follow the operation as it changes, through lost connections.

        Yields:
            The operation now, then after each change, up to its end.
        """
        request = service_pb2.WatchOperationRequest(operation_id=self.operation_id)
        failing_since: float | None = None
        while True:
            try:
                stream = self._caller.transport.stream(WATCH_OPERATION, request)
                async with aclosing(stream):
                    async for message in stream:
                        failing_since = None
                        self._newest = message
                        state = decode(message, Operation)
                        yield state
                        if state.is_final:
                            return
            except RatoonClientError as error:
                failing_since = failing_since or time.monotonic()
                is_over = time.monotonic() - failing_since > self._caller.config.timeout_s
                if is_over or not may_pass(error):
                    raise
            await asyncio.sleep(0.2)

    async def cancel(self) -> Operation:
        """Stop the operation before its optimizer step; one that has ended stays as it is."""
        self._newest = await self._caller.ask(CANCEL_OPERATION, operation_id=self.operation_id)
        return decode(self._newest, Operation)

    async def _drawn_wait(self, timeout_s: float | None) -> operation_pb2.Operation:
        """Wait and draw; only drawing uses the watch, which has no end behind a missing seq."""
        with progress_bar() as show:
            final = await self._wait_beside(timeout_s, self._draw(show))
            show(decode(final, Operation))
            return final

    async def _wait_beside(
        self, timeout_s: float | None, drawing: Coroutine[Any, Any, None]
    ) -> operation_pb2.Operation:
        task = asyncio.create_task(drawing)
        try:
            return await self._wait(timeout_s)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _draw_late(self) -> None:
        """Draw once the wait is long, unless another one is drawn, and leave nothing behind."""
        await asyncio.sleep(_LONG_S)
        if _DRAWING.acquire(blocking=False):
            try:
                with progress_bar(is_transient=True) as show:
                    await self._draw(show)
            finally:
                _DRAWING.release()

    async def _draw(self, show: Callable[[Operation], None]) -> None:
        async with aclosing(self.watch()) as states:
            async for state in states:
                show(state)

    async def _wait(self, timeout_s: float | None) -> operation_pb2.Operation:
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, most=math.inf)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not decode(self._newest, Operation).is_final:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise self._timed_out(timeout_s)
            wait_s = min(POLL_S, left_s)
            patience_s = wait_s + self._caller.config.timeout_s
            # A poll whose answer is late by a little is no failure of the caller's deadline.
            await self._get(wait_s, timeout_s=min(patience_s, left_s + 1.0))
        return self._newest

    async def _get(self, wait_s: float, *, timeout_s: float) -> operation_pb2.Operation:
        self._newest = await get_operation(
            self._caller, self.operation_id, wait_s, timeout_s=timeout_s
        )
        return self._newest

    def _timed_out(self, timeout_s: float | None) -> ResultTimeoutError:
        state = decode(self._newest, Operation).state
        return ResultTimeoutError(f"operation {self.operation_id} is {state} after {timeout_s} s")


async def get_operation(
    caller: Caller, operation_id: str, wait_s: float, *, timeout_s: float
) -> operation_pb2.Operation:
    """Read an operation once it has ended, or as it stands after `wait_s` seconds."""
    return await caller.call(
        GET_OPERATION,
        request_message(GET_OPERATION.request, operation_id=operation_id, wait_s=wait_s),
        timeout_s=timeout_s,
        attempt_timeout_s=wait_s + caller.config.attempt_timeout_s,
    )


async def outcome(caller: Caller, message: operation_pb2.Operation) -> OperationResult:
    """Raises RatoonApiError where the operation failed or was cancelled."""
    match message.WhichOneof("result"):
        case "error":
            raise error_of(message.error)
        case "policy":
            return decode(message.policy, Policy)
        case "step" if decode(message, Operation).kind == "forward_backward":
            return decode_step(await _output(caller, message, message.step), message.step)
        case "step":
            return decode(message.step, StepResult)
        case "checkpoint":
            return decode(message.checkpoint, Checkpoint)
        case "imported":
            return decode(message.imported, ImportResult)
        case "named_version":
            return decode(message.named_version, NamedVersion)
        case "forward":
            output = await _output(caller, message, message.forward)
            return decode_forward(output or training_pb2.ForwardOutput(), message.forward)
        case _:
            pass
    state = decode(message, Operation).state
    if state == "done":
        return None
    raise RatoonApiError(state.upper(), f"operation {message.operation_id} is {state}")


async def _output(
    caller: Caller,
    message: operation_pb2.Operation,
    result: operation_pb2.ForwardResult | operation_pb2.StepResult,
) -> training_pb2.ForwardOutput | None:
    """The result's log-probs, which are fetched where they are a file; None: it has none."""
    match result.WhichOneof("output"):
        case "inline":
            return result.inline
        case "file":
            file = result.file
        case _:
            return None
    data = await fetch_result_file(caller, message.policy_id, file.digest, file.size_bytes)
    try:
        return training_pb2.ForwardOutput.FromString(data)
    except DecodeError as err:
        raise IntegrityError(f"result file {file.digest} is no ForwardOutput") from err


@contextmanager
def progress_bar(*, is_transient: bool = False) -> Generator[Callable[[Operation], None]]:
    """Gives the function to call with every state. `is_transient`: the bar goes at its end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=is_transient) as bar:
        task = bar.add_task("waiting", total=None, rate="")

        def show(operation: Operation) -> None:
            progress = operation.progress
            bar.update(
                task,
                description=describe(operation),
                total=progress.micro_batches_planned or None,
                completed=progress.micro_batches_done,
                rate=f"{progress.tokens_per_second:,.0f} tokens/s",
            )

        yield show


def describe(operation: Operation) -> str:
    """One line without numbers that change quickly."""
    text = f"{operation.kind} {operation.state}"
    if operation.blocked_by_seq:
        text += f", waits for seq {operation.blocked_by_seq}"
    return text
