"""How every other process reaches the engine: one `EngineClient` per process.

`client.call(Engine.submit, ...)` runs `Engine.submit` in the engine's process. Every failure is a
`RatoonError`. Cancelling a caller does not undo a call that has begun. `connect`, beside the
engine's actor, makes a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ratoon.engine.commands import SentBody, Submission
from ratoon.engine.crash_points import CrashPoint, make_reach
from ratoon.engine.files.paths import PolicyPaths, read_result
from ratoon.engine.files.rollouts import read_rollout, read_rollouts
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import Operation
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger
from ratoon.method_call import MethodCall, MethodNames
from ratoon.metrics import Change
from ratoon.rollout.serial import BatchBytes, batch_digest, buffers_of
from ratoon.stream.files import temporary_name, write_synced
from ratoon.stream.manifest import WeightManifest
from ratoon.stream.versions import find_named, open_chunk
from ratoon_proto.types import WeightFile
from ratoon_proto.v1.rollout_pb2 import KeptRollout, StepRollouts

if TYPE_CHECKING:
    from ratoon.engine.engine import Engine as Engine  # noqa: PLC0414 - its callers take it from here
else:
    # The module of the class imports the database, which only the engine's process opens.
    Engine = MethodNames()

_LOG = get_logger("client")
_WATCH_S = 10.0
_RECORD_S = 0.25
# Ray carries a call of 100 KiB as it is; a larger one goes through its store, which copies it four
# times and has room for few.
_SMALL_BYTES = 64 * 1024
# How often the engine hears that files of a policy are read.
_NOTE_S = 10.0
_MAX_NOTED = 1024
P = ParamSpec("P")
T = TypeVar("T")


class EngineClient:
    """Calls the engine, and reads the files of its policies."""

    def __init__(
        self, send: Callable[[MethodCall[Awaitable[Any]]], Awaitable[Any]], settings: EngineSettings
    ) -> None:
        """`send`: brings a call to the engine and its answer back; raises only `RatoonError`."""
        self._send = send
        self._settings = settings
        # Requests outnumber all other changes, so their samples are batched.
        self._changes: list[Change] = []
        self._begun: set[asyncio.Task[Any]] = set()
        # When the engine has last heard of a read, by policy.
        self._noted: dict[str, float] = {}
        self._reach = make_reach(settings.crash_points)

    async def call(
        self,
        method: Callable[Concatenate[Engine, P], Awaitable[T]],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Call a method of the engine. Raises its `RatoonError`, and UNAVAILABLE."""
        return await self._send(MethodCall.of(method, *args, **options))

    def paths(self, policy_id: str) -> PolicyPaths:
        """Where the policy's files are. Raises INVALID_ARGUMENT for an id that is no plain name."""
        return self._settings.paths(policy_id)

    async def submit(self, submission: Submission) -> Operation:
        """See `Engine.submit`. Names the body by its digest; a large one goes ahead as a file."""
        self._reach(CrashPoint.INGRESS_BEFORE_SUBMIT)
        body, file = submission.body, None
        if len(body) > _SMALL_BYTES:
            digest, file = await asyncio.gather(
                asyncio.to_thread(batch_digest, body),
                asyncio.to_thread(self._written, submission.policy_id, body),
            )
            submission = submission.named(digest)
        elif body:
            submission = submission.named(batch_digest(body))
        if file is None:
            submission = replace(submission, body=bytes(body))
        else:
            sent = SentBody(name=file.name, num_bytes=len(body))
            submission = replace(submission, body=b"", sent=sent)
        try:
            operation = await self.call(Engine.submit, submission)
        finally:
            if file is not None:
                await asyncio.to_thread(file.unlink, missing_ok=True)
        self._reach(CrashPoint.INGRESS_AFTER_SUBMIT)
        return operation

    def _written(self, policy_id: str, body: bytes | BatchBytes) -> Path | None:
        """Write a body beside the policy's others. None: the engine finds out why it cannot be.

        The engine syncs the file itself, in no time once its bytes are on the disk.
        """
        file = temporary_name(self.paths(policy_id).bodies / "sent")
        try:
            write_synced(file, *buffers_of(body))
        except OSError:
            with suppress(OSError):
                file.unlink(missing_ok=True)
            return None
        return file

    async def watch_operation(self, operation_id: str) -> AsyncIterator[Operation]:
        """The operation now and at each change of state or progress, until it has ended."""
        seen = await self.call(Engine.get_operation, operation_id, 0.0)
        yield seen
        while not seen.state.is_final:
            now = await self.call(Engine.watch_operation, seen, _WATCH_S)
            if now != seen:
                yield now
            seen = now

    async def watch_weights(
        self, policy_id: str, known_version: int | None
    ) -> AsyncIterator[WeightManifest]:
        """The newest manifest, once it is not of `known_version`, then each time it is another."""
        while True:
            try:
                newest = await self.call(
                    Engine.weight_manifest, policy_id, None, known_version, _WATCH_S
                )
            except RatoonError as error:
                if error.code is not ErrorCode.WEIGHTS_NOT_FOUND:
                    raise
                continue  # Nothing is published yet.
            if newest.version != known_version:
                known_version = newest.version
                yield newest

    async def fetch_chunk(self, policy_id: str, digest: str, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length) of a weights file or a result, fewer at its end.

        Raises WEIGHTS_NOT_FOUND, RANGE_NOT_SATISFIABLE, INVALID_ARGUMENT.
        """
        most = self._settings.limits.max_fetch_bytes
        if not 1 <= length <= most:
            raise invalid("length", length, f"1 to {most}")

        def read(paths: PolicyPaths) -> bytes:
            data = read_result(paths, digest, offset, length)
            return open_chunk(paths.weights, digest, offset, length) if data is None else data

        return await self._read_written(policy_id, read)

    async def weight_file(self, policy_id: str, version: int, name: str) -> tuple[Path, WeightFile]:
        """Absolute path and description of a file of a version.

        A version that is being written is waited for, as by `weight_manifest`. Raises
        WEIGHTS_NOT_FOUND where there is none, or it is damaged and cannot be written again.
        """

        def read(paths: PolicyPaths) -> tuple[Path, WeightFile]:
            return find_named(paths.weights, version, name, policy_id)

        return await self._read_written(policy_id, read)

    async def _read_written(self, policy_id: str, read: Callable[[PolicyPaths], T]) -> T:
        """Read a file, once the version that it is of is written."""
        try:
            return await self._read(policy_id, read)
        except RatoonError as error:
            if error.field != "version" or error.code is not ErrorCode.WEIGHTS_NOT_FOUND:
                raise
            version = int(error.got or "")
        await self.call(Engine.weight_manifest, policy_id, version)
        return await self._read(policy_id, read)

    async def rollouts(self, policy_id: str, seq: int) -> StepRollouts:
        """Kept rollouts of a step, without columns. Raises POLICY_NOT_FOUND, ROLLOUTS_NOT_FOUND."""
        return await self._read(policy_id, lambda paths: read_rollouts(paths.rollouts, seq))

    async def rollout(self, policy_id: str, seq: int, group: int, rollout: int) -> KeptRollout:
        """One of them whole, but for its text. Raises as `rollouts`."""
        return await self._read(
            policy_id, lambda paths: read_rollout(paths.rollouts, seq, group, rollout)
        )

    def record_metrics(self, changes: Sequence[Change]) -> None:
        """Send changes without waiting, batched over `_RECORD_S` seconds."""
        if not self._changes:
            asyncio.get_running_loop().call_later(_RECORD_S, self._send_metrics)
        self._changes += changes

    def _send_metrics(self) -> None:
        changes, self._changes = self._changes, []
        self._begin(self._record(tuple(changes)))

    async def finish(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call that changes something; it runs to its end even if its caller leaves."""
        return await asyncio.shield(self._begin(call))

    def _begin(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a call that perhaps nobody waits for."""
        task = asyncio.get_running_loop().create_task(call)
        self._begun.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._begun.discard(task)
        # If the caller has left, nobody else retrieves the exception.
        if not task.cancelled():
            task.exception()

    async def _record(self, changes: tuple[Change, ...]) -> None:
        """Samples that cannot be sent are dropped."""
        with suppress(RatoonError):
            await self.call(Engine.record_metrics, changes)

    async def _note_call(self, policy_id: str) -> None:
        """Tell the engine of reads that it does not see, which is lost where it is away."""
        with suppress(RatoonError):
            await self.call(Engine.note_call, policy_id)

    async def _read(self, policy_id: str, read: Callable[[PolicyPaths], T]) -> T:
        """Read files in a thread. Raises POLICY_NOT_FOUND where the policy is missing as well."""
        now = asyncio.get_running_loop().time()
        if now >= self._noted.get(policy_id, -_NOTE_S) + _NOTE_S:
            if len(self._noted) >= _MAX_NOTED:
                self._noted.clear()
            self._noted[policy_id] = now
            self._begin(self._note_call(policy_id))
        try:
            return await asyncio.to_thread(read, self.paths(policy_id))
        except RatoonError as error:
            if error.code in (ErrorCode.WEIGHTS_NOT_FOUND, ErrorCode.ROLLOUTS_NOT_FOUND):
                await self.call(Engine.policy, policy_id)
            raise
