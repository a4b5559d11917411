"""The controller's process: a detached actor around `controller.Controller`.

Enters calls from clients, leaves operations. Invariant: it needs nothing but its arguments and the
journal to go on after a restart, which it does by itself. No torch is imported here.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import time

import ray

from ratoon.engine.archive import ArchivedBodyFiles, open_archive
from ratoon.engine.controller import Controller
from ratoon.engine.crash_points import make_reach
from ratoon.engine.faults import policy_not_ready
from ratoon.engine.files import BodyFiles
from ratoon.engine.metrics_actor import RayMetricsSink
from ratoon.engine.policy_run import PolicyRun, Ports
from ratoon.engine.ray_ports import RayJournal, RayWorker
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import Holder, Operation, PolicySpec, Submission
from ratoon.garbage import freeze_garbage
from ratoon.log import configure_logging, get_logger
from ratoon.stream.manifest import WeightManifest
from ratoon.train.spec import TrainerSpec

_LOG = get_logger("controller")
_SWEEP_S = 60.0


class ControllerActor:
    """Shell of `Controller`. It calls its own `start`, so that it goes on after a restart."""

    def __init__(self, settings: EngineSettings, spec: PolicySpec, trainer: TrainerSpec) -> None:
        configure_logging(settings.log_level)
        paths = settings.paths(spec.policy_id)
        archive = open_archive(settings.storage_url, paths)
        run = PolicyRun(
            spec=spec,
            trainer=trainer,
            ports=Ports(
                journal=RayJournal(settings.namespace),
                worker=RayWorker(spec.policy_id, settings, on_gpu=trainer.device != "cpu"),
                metrics=RayMetricsSink(settings.namespace),
                now=time.time,
            ),
            limits=settings.limits,
            checkpoints=settings.checkpoints,
            paths=paths,
            bodies=ArchivedBodyFiles(paths, archive) if settings.storage_url else BodyFiles(paths),
            archive=archive,
            reach=make_reach(settings.crash_points),
        )
        self._policy_id = spec.policy_id
        self._controller = Controller(run)
        self._started: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        freeze_garbage()
        ray.get_runtime_context().current_actor.start.remote()

    @ray.method
    async def start(self) -> None:
        """Own the policy; the first call starts, the others wait for it. Raises `RatoonError`."""
        await self._start()

    @ray.method
    async def close(self, grace_s: float) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._controller.close(grace_s)

    @ray.method
    async def drain(self, grace_s: float) -> None:
        await self._controller.drain(grace_s)

    @ray.method
    async def submit(self, submission: Submission) -> Operation:
        await self._start()
        return await self._controller.submit(submission)

    @ray.method
    async def get_operation(self, operation_id: str, wait_s: float) -> Operation:
        self._check_started()
        return await self._controller.get_operation(operation_id, wait_s)

    @ray.method
    async def watch_operation(self, seen: Operation, wait_s: float) -> Operation:
        self._check_started()
        return await self._controller.watch_operation(seen, wait_s)

    @ray.method
    async def cancel_operation(self, operation_id: str) -> Operation:
        await self._start()
        return await self._controller.cancel_operation(operation_id)

    @ray.method
    async def put_upload_part(
        self, upload_id: str, part_index: int, body: bytes, holder: Holder
    ) -> None:
        await self._start()
        await self._controller.put_upload_part(upload_id, part_index, body, holder)

    @ray.method
    async def get_upload_parts(self, upload_id: str, num_parts: int) -> list[bytes]:
        await self._start()
        return await self._controller.get_upload_parts(upload_id, num_parts)

    @ray.method
    async def weight_manifest(self, version: int | None) -> WeightManifest:
        await self._start()
        return await self._controller.weight_manifest(version)

    async def _start(self) -> None:
        if self._started is None:
            self._started = asyncio.get_running_loop().create_task(self._controller.start())
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        try:
            await asyncio.shield(self._started)
        except Exception:
            self._started = None  # The next caller tries again.
            raise

    def _check_started(self) -> None:
        """A question is not held up by a start; the coordinator answers it meanwhile."""
        if self._started is None or not self._started.done():
            raise policy_not_ready(self._policy_id, self._controller.state)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self._controller.sweep()
            except Exception:  # noqa: BLE001 - what is not deleted now is deleted later
                _LOG.exception("sweep failed")
