"""The engine as the wires see it: one object a process, from anywhere in the cluster.

Enters validated values, leaves operations, manifests and bytes. Invariant: every failure is a
`RatoonError`; a call that was begun is not undone by the caller's cancellation. No torch.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from ray import ObjectRef

from ratoon.engine.backends import BackendInfo
from ratoon.engine.crash_points import CrashPoint, make_reach
from ratoon.engine.faults import operation_not_found, policy_not_ready
from ratoon.engine.files import PolicyPaths, read_result
from ratoon.engine.journal import LIFE_KINDS, JournalAwayError
from ratoon.engine.metrics_actor import RayMetricsSink, find_metrics
from ratoon.engine.ray_calls import ActorLostError, ask, find_actor
from ratoon.engine.settings import COORDINATOR_NAME, EngineSettings, controller_name
from ratoon.engine.types import (
    NOBODY,
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
from ratoon.stream.manifest import WeightFile, WeightManifest
from ratoon.stream.versions import file_path, open_chunk, read_manifest

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from ratoon.engine.controller_actor import ControllerActor
    from ratoon.engine.coordinator_actor import CoordinatorActor

    Controller = ActorProxy[ControllerActor]
    Coordinator = ActorProxy[CoordinatorActor]

_LOG = get_logger("client")
_WATCH_S = 10.0
_RECORD_S = 0.25
T = TypeVar("T")


class EngineClient:
    """Made by `connect` in a process that is attached to Ray."""

    def __init__(self, coordinator: Coordinator, settings: EngineSettings) -> None:
        self._coordinator = coordinator
        self._settings = settings
        self._controllers: dict[str, Controller] = {}
        self._metrics = RayMetricsSink(settings.namespace)
        # Of requests, there are more than of anything else: they wait to be sent together.
        self._changes: list[Change] = []
        self._reach = make_reach(settings.crash_points)

    @classmethod
    async def connect(cls, namespace: str) -> EngineClient:
        """Raises UNAVAILABLE where no engine runs under `namespace`."""
        found = find_actor(COORDINATOR_NAME, namespace)
        if found is None:
            raise RatoonError(ErrorCode.UNAVAILABLE, f"no engine runs as {namespace}")
        coordinator = cast("Coordinator", found)
        return cls(coordinator, await _answer(coordinator.settings.remote()))

    async def create_policy(self, spec: PolicySpec) -> Operation:
        """Raises POLICY_EXISTS, RESOURCE_EXHAUSTED, UNSUPPORTED; the same spec is a retry."""
        return await _answer(self._coordinator.create_policy.remote(spec))

    async def delete_policy(self, policy_id: str) -> Operation:
        """Raises POLICY_NOT_FOUND, POLICY_NOT_READY while it is being created, POLICY_FAILED."""
        return await _answer(self._coordinator.delete_policy.remote(policy_id))

    async def get_policy(self, policy_id: str) -> Policy:
        """Raises POLICY_NOT_FOUND."""
        return await _answer(self._coordinator.policy.remote(policy_id))

    async def list_policies(self) -> tuple[Policy, ...]:
        """Oldest first."""
        return await _answer(self._coordinator.policies.remote())

    async def submit(self, submission: Submission) -> Operation:
        """Accept a call durably. Raises as `Controller.submit`, and POLICY_NOT_FOUND."""
        policy_id = submission.policy_id
        self._reach(CrashPoint.INGRESS_BEFORE_SUBMIT)
        operation = await self._call(policy_id, lambda policy: policy.submit.remote(submission))
        self._reach(CrashPoint.INGRESS_AFTER_SUBMIT)
        return operation

    async def get_operation(self, operation_id: str, wait_s: float) -> Operation:
        """The operation once it has ended, or after `wait_s` seconds.

        Raises OPERATION_NOT_FOUND, SEQ_GAP with `details.missing_seq`.
        """
        return await self._operation(
            operation_id,
            lambda policy: policy.get_operation.remote(operation_id, wait_s),
            lambda: self._coordinator.get_operation.remote(operation_id, wait_s),
        )

    async def watch_operation(self, operation_id: str) -> AsyncIterator[Operation]:
        """The operation now and at each change of state or progress, until it has ended."""
        seen = await self.get_operation(operation_id, 0.0)
        yield seen
        while not seen.state.is_final:
            now = await self._change(seen)
            if now != seen:
                yield now
            seen = now

    async def cancel_operation(self, operation_id: str) -> Operation:
        """Ask an operation to stop before it changes weights; one that has ended stays as it is.

        Raises OPERATION_NOT_FOUND, UNSUPPORTED for CreatePolicy and DeletePolicy.
        """
        try:
            policy_id = _policy_of(operation_id)
            return await self._call(
                policy_id, lambda policy: policy.cancel_operation.remote(operation_id)
            )
        except RatoonError as error:
            if error.code not in _NOT_HERE:
                raise
            found = await self.get_operation(operation_id, 0.0)
            if found.state.is_final:
                return found
            if found.kind not in LIFE_KINDS:
                raise
        raise RatoonError(ErrorCode.UNSUPPORTED, f"{found.kind} cannot be cancelled")

    async def put_upload_part(
        self, policy_id: str, upload_id: str, part_index: int, body: bytes, holder: Holder = NOBODY
    ) -> None:
        """Keep a part of a batch. Raises KEY_REUSED for other bytes, BODY_TOO_LARGE."""
        await self._call(
            policy_id,
            lambda policy: policy.put_upload_part.remote(upload_id, part_index, body, holder),
        )

    async def get_upload_parts(self, policy_id: str, upload_id: str, num_parts: int) -> list[bytes]:
        """Parts 0 to num_parts - 1. Raises UPLOAD_NOT_FOUND naming the missing one."""
        return await self._call(
            policy_id, lambda policy: policy.get_upload_parts.remote(upload_id, num_parts)
        )

    async def list_checkpoints(self, policy_id: str) -> tuple[CheckpointInfo, ...]:
        """Callers' own, by seq. Raises POLICY_NOT_FOUND."""
        await self.get_policy(policy_id)
        known = await _answer(self._coordinator.checkpoints.remote(policy_id))
        return tuple(checkpoint.info for checkpoint in known if not checkpoint.is_automatic)

    async def weight_manifest(self, policy_id: str, version: int | None) -> WeightManifest:
        """Of a published version, None: the newest. Raises WEIGHTS_NOT_FOUND."""
        return await self._call(policy_id, lambda policy: policy.weight_manifest.remote(version))

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
        """Absolute path and description of a file of a published version.

        Raises WEIGHTS_NOT_FOUND.
        """

        def read(paths: PolicyPaths) -> tuple[Path, WeightFile]:
            path = file_path(paths.weights, version, name)
            files = read_manifest(paths.weights, version).files
            return path, next(file for file in files if file.name == name)

        return await self._read(policy_id, read)

    async def check_well(self) -> None:
        """Raises UNAVAILABLE where the engine is draining, or does not answer, or its database."""
        await _answer(self._coordinator.check_well.remote())

    async def backends(self) -> tuple[BackendInfo, ...]:
        """Kernel backends on the workers' device."""
        return await _answer(self._coordinator.backends.remote())

    async def metrics_text(self) -> bytes:
        """The totals of all processes, as Prometheus text. Raises UNAVAILABLE."""
        hub = find_metrics(self._settings.namespace)
        if hub is None:
            raise RatoonError(ErrorCode.UNAVAILABLE, "the metrics hub is not there")
        return await _answer(hub.render.remote())

    def record_metrics(self, changes: Sequence[Change]) -> None:
        """Send changes without waiting, those of `_RECORD_S` seconds together."""
        if not self._changes:
            asyncio.get_running_loop().call_later(_RECORD_S, self._send_metrics)
        self._changes += changes

    def _send_metrics(self) -> None:
        changes, self._changes = self._changes, []
        self._metrics.send(changes)

    async def _read(self, policy_id: str, read: Callable[[PolicyPaths], T]) -> T:
        """Read files in a thread; where they are not, say whether the policy is."""
        try:
            paths = self._settings.paths(policy_id)
            return await asyncio.to_thread(read, paths)
        except RatoonError as error:
            if error.code is ErrorCode.WEIGHTS_NOT_FOUND:
                await self.get_policy(policy_id)
            raise

    async def _change(self, seen: Operation) -> Operation:
        operation_id = seen.operation_id
        return await self._operation(
            operation_id,
            lambda policy: policy.watch_operation.remote(seen, _WATCH_S),
            lambda: self._coordinator.watch_operation.remote(seen, _WATCH_S),
        )

    async def _operation(
        self,
        operation_id: str,
        of_policy: Callable[[Controller], ObjectRef[Operation]],
        of_life: Callable[[], ObjectRef[Operation]],
    ) -> Operation:
        """Ask the policy's controller, then the coordinator: a life begins and ends without one."""
        try:
            return await self._call(_policy_of(operation_id), of_policy)
        except RatoonError as error:
            if error.code not in _NOT_HERE:
                raise
        return await _answer(of_life())

    async def _call(self, policy_id: str, call: Callable[[Controller], ObjectRef[T]]) -> T:
        """Call a policy's controller; a handle to one that was replaced is looked up again once."""
        known = self._controllers.get(policy_id)
        if known is not None:
            try:
                return await _typed(call(known))
            except ActorLostError:
                del self._controllers[policy_id]
        found = find_actor(controller_name(policy_id), self._settings.namespace)
        if found is None:
            policy = await self.get_policy(policy_id)
            raise policy_not_ready(policy_id, policy.state, policy.failure)
        controller = self._controllers[policy_id] = cast("Controller", found)
        return await _answer(call(controller))


# What a controller, or its absence, says of an operation that is not its own.
_NOT_HERE = (
    ErrorCode.OPERATION_NOT_FOUND,
    ErrorCode.POLICY_NOT_FOUND,
    ErrorCode.POLICY_NOT_READY,
    ErrorCode.POLICY_FAILED,
    ErrorCode.UNAVAILABLE,
)


def _policy_of(operation_id: str) -> str:
    policy_id, dot, _ = operation_id.rpartition(".")
    if not (policy_id and dot):
        raise operation_not_found(operation_id)
    return policy_id


async def _answer(reference: ObjectRef[T]) -> T:
    """Raises `RatoonError` alone."""
    try:
        return await _typed(reference)
    except ActorLostError as err:
        raise RatoonError(ErrorCode.UNAVAILABLE, "the engine does not answer; try again") from err


async def _typed(reference: ObjectRef[T]) -> T:
    """Raises `RatoonError`, or `ActorLostError` where an actor on the way is lost."""
    try:
        return await ask(reference)
    except (RatoonError, ActorLostError):
        raise
    except JournalAwayError as err:
        raise RatoonError(ErrorCode.UNAVAILABLE, f"{err}; try again") from err
    except Exception as err:
        _LOG.exception("unexpected failure of the engine")
        raise RatoonError(ErrorCode.INTERNAL, f"{type(err).__name__}: {err}") from err
