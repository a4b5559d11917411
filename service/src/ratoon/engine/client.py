"""The engine as the wires see it: one object per process, from anywhere in the cluster.

Every failure is a `RatoonError`. Cancelling a caller does not undo a call that has begun.
`cluster.remote.connect` makes one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ratoon.engine.crash_points import CrashPoint, make_reach
from ratoon.engine.files.paths import PolicyPaths, read_result
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import (
    NOBODY,
    Acknowledgement,
    CheckpointInfo,
    Holder,
    Operation,
    Policy,
    PolicySpec,
    Submission,
)
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger
from ratoon.metrics import Change
from ratoon.stream.manifest import WeightManifest
from ratoon.stream.versions import file_path, open_chunk, read_manifest
from ratoon_proto.types import BackendInfo, GradientManifest, WeightFile

if TYPE_CHECKING:
    from ratoon.engine.engine import Engine

_LOG = get_logger("client")
_WATCH_S = 10.0
_RECORD_S = 0.25
T = TypeVar("T")


class EngineClient:
    """`engine`: in this process, or a proxy to another one whose calls raise only `RatoonError`."""

    def __init__(self, engine: Engine, settings: EngineSettings) -> None:
        self._engine = engine
        self._settings = settings
        # Requests outnumber all other changes, so their samples are batched.
        self._changes: list[Change] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._reach = make_reach(settings.crash_points)

    async def create_policy(self, spec: PolicySpec) -> Operation:
        """Raises POLICY_EXISTS, RESOURCE_EXHAUSTED, UNSUPPORTED; the same spec is a retry."""
        return await self._engine.create_policy(spec)

    async def delete_policy(self, policy_id: str) -> Operation:
        """Raises POLICY_NOT_FOUND, POLICY_NOT_READY while it is being created, POLICY_FAILED."""
        return await self._engine.delete_policy(policy_id)

    async def get_policy(self, policy_id: str) -> Policy:
        """Raises POLICY_NOT_FOUND."""
        return await self._engine.policy(policy_id)

    async def list_policies(self) -> tuple[Policy, ...]:
        """Oldest first."""
        return await self._engine.policies()

    async def submit(self, submission: Submission) -> Operation:
        """Accept a call durably. Raises as `Controller.submit`, and POLICY_NOT_FOUND."""
        self._reach(CrashPoint.INGRESS_BEFORE_SUBMIT)
        operation = await self._engine.submit(submission)
        self._reach(CrashPoint.INGRESS_AFTER_SUBMIT)
        return operation

    async def get_operation(self, operation_id: str, wait_s: float) -> Operation:
        """The operation once it has ended, or after `wait_s` seconds.

        Raises OPERATION_NOT_FOUND, SEQ_GAP with `details.missing_seq`.
        """
        return await self._engine.get_operation(operation_id, wait_s)

    async def watch_operation(self, operation_id: str) -> AsyncIterator[Operation]:
        """The operation now and at each change of state or progress, until it has ended."""
        seen = await self.get_operation(operation_id, 0.0)
        yield seen
        while not seen.state.is_final:
            now = await self._engine.watch_operation(seen, _WATCH_S)
            if now != seen:
                yield now
            seen = now

    async def cancel_operation(self, operation_id: str) -> Operation:
        """Ask an operation to stop before it changes weights; one that has ended stays as it is.

        Raises OPERATION_NOT_FOUND, UNSUPPORTED for CreatePolicy and DeletePolicy.
        """
        return await self._engine.cancel_operation(operation_id)

    async def put_upload_part(
        self, policy_id: str, upload_id: str, part_index: int, body: bytes, holder: Holder = NOBODY
    ) -> None:
        """Store a part of a batch. Raises KEY_REUSED for other bytes, BODY_TOO_LARGE."""
        await self._engine.put_upload_part(policy_id, upload_id, part_index, body, holder)

    async def get_upload_parts(self, policy_id: str, upload_id: str, num_parts: int) -> list[bytes]:
        """Parts 0 to num_parts - 1. Raises UPLOAD_NOT_FOUND naming the missing one."""
        return await self._engine.get_upload_parts(policy_id, upload_id, num_parts)

    async def list_checkpoints(self, policy_id: str) -> tuple[CheckpointInfo, ...]:
        """Callers' own checkpoints, by seq. Raises POLICY_NOT_FOUND."""
        known = await self._engine.checkpoints(policy_id)
        return tuple(checkpoint.info for checkpoint in known if not checkpoint.is_automatic)

    async def weight_manifest(
        self,
        policy_id: str,
        version: int | None,
        known_version: int | None = None,
        wait_s: float = 0.0,
    ) -> WeightManifest:
        """Manifest of a published version, None: the newest; see `Controller.weight_manifest`."""
        return await self._engine.weight_manifest(policy_id, version, known_version, wait_s)

    async def watch_weights(
        self, policy_id: str, known_version: int | None
    ) -> AsyncIterator[WeightManifest]:
        """The newest manifest, once it is not of `known_version`, then each time it is another."""
        while True:
            try:
                newest = await self.weight_manifest(policy_id, None, known_version, _WATCH_S)
            except RatoonError as error:
                if error.code is not ErrorCode.WEIGHTS_NOT_FOUND:
                    raise
                continue  # Nothing is published yet.
            if newest.version != known_version:
                known_version = newest.version
                yield newest

    async def ack_weights(self, policy_id: str, ack: Acknowledgement) -> int | None:
        """Note what a receiver serves and holds; returns the newest published version.

        Raises POLICY_NOT_FOUND, POLICY_NOT_READY, WEIGHTS_NOT_FOUND, RESOURCE_EXHAUSTED.
        """
        return await self._engine.ack_weights(policy_id, ack)

    async def gradient_manifest(self, policy_id: str, names: tuple[str, ...]) -> GradientManifest:
        """Write gradient sums as a result file. Raises as `Controller.read_gradients`."""
        return await self._engine.gradient_manifest(policy_id, names)

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

        return await self._read(policy_id, read)

    async def weight_file(self, policy_id: str, version: int, name: str) -> tuple[Path, WeightFile]:
        """Absolute path and description of a file of a version.

        A version that is being written is waited for, as by `weight_manifest`. Raises
        WEIGHTS_NOT_FOUND where there is none, or it is damaged and cannot be written again.
        """

        def read(paths: PolicyPaths) -> tuple[Path, WeightFile]:
            path = file_path(paths.weights, version, name, policy_id)
            files = read_manifest(paths.weights, version, policy_id).fetchable
            return path, next(file for file in files if file.name == name)

        try:
            return await self._read(policy_id, read)
        except RatoonError as error:
            if error.field != "version":
                raise
        await self.weight_manifest(policy_id, version)
        return await self._read(policy_id, read)

    async def check_well(self) -> None:
        """Raises UNAVAILABLE where the engine drains, or it or its database does not answer."""
        await self._engine.check_well()

    async def backends(self) -> tuple[BackendInfo, ...]:
        """Kernel backends on the workers' device."""
        return await self._engine.backends()

    async def metrics_text(self) -> bytes:
        """The totals of all processes, as Prometheus text. Raises UNAVAILABLE."""
        return await self._engine.metrics_text()

    def record_metrics(self, changes: Sequence[Change]) -> None:
        """Send changes without waiting, batched over `_RECORD_S` seconds."""
        if not self._changes:
            asyncio.get_running_loop().call_later(_RECORD_S, self._send_metrics)
        self._changes += changes

    def _send_metrics(self) -> None:
        changes, self._changes = self._changes, []
        sending = asyncio.get_running_loop().create_task(self._record(tuple(changes)))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _record(self, changes: tuple[Change, ...]) -> None:
        """Samples that cannot be sent are dropped."""
        with suppress(RatoonError):
            await self._engine.record_metrics(changes)

    async def _read(self, policy_id: str, read: Callable[[PolicyPaths], T]) -> T:
        """Read files in a thread. Raises POLICY_NOT_FOUND where the policy is missing as well."""
        try:
            paths = self._settings.paths(policy_id)
            return await asyncio.to_thread(read, paths)
        except RatoonError as error:
            if error.code is ErrorCode.WEIGHTS_NOT_FOUND:
                await self.get_policy(policy_id)
            raise
