"""The processes of policies on a Ray cluster.

Enters specs, leaves running controllers, which make their workers. Invariant: what a policy needs
is counted before it is asked for.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, cast

import ray

from ratoon.engine.controller_actor import ControllerActor
from ratoon.engine.placement import check_free_gpu, end_worker
from ratoon.engine.ray_calls import ActorLostError, ask, find_actor, kill_actor
from ratoon.engine.settings import EngineSettings, controller_name
from ratoon.engine.types import PolicySpec, ReferencePolicy
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger
from ratoon.model.spec import ModelDtype
from ratoon.train.config import OptimizerStates
from ratoon.train.spec import TrainerSpec

if TYPE_CHECKING:
    from ray.actor import ActorProxy

_LOG = get_logger("fleet")
_GRACE_S = 10.0
# Long polls wait inside a controller.
_MAX_CONCURRENCY = 10_000


class RayFleet:
    """`Fleet` with one detached controller and one detached worker a policy."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:0": a GPU worker sees its own GPU only."""
        device = self._settings.device
        if device == "auto":
            return "cuda:0" if _total_gpus() > 0 else "cpu"
        return "cuda:0" if device == "cuda" else device

    async def check(self, spec: PolicySpec) -> None:
        if spec.num_workers != 1:
            raise RatoonError(
                ErrorCode.UNSUPPORTED,
                f"parallel.num_workers: got {spec.num_workers}, expected 1",
                field="parallel.num_workers",
                got=str(spec.num_workers),
                expected="1",
            )
        if self.device != "cpu":
            await check_free_gpu()

    async def start(self, spec: PolicySpec) -> None:
        controller = (
            ray.remote(ControllerActor)
            .options(
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=_MAX_CONCURRENCY,
                name=controller_name(spec.policy_id),
                namespace=self._settings.namespace,
                lifetime="detached",
                get_if_exists=True,
            )
            .remote(self._settings, spec, self._trainer(spec))
        )
        await ask(controller.start.remote())

    async def stop(self, policy_id: str) -> None:
        namespace = self._settings.namespace
        found = find_actor(controller_name(policy_id), namespace)
        if found is not None:
            controller = cast("ActorProxy[ControllerActor]", found)
            try:
                await asyncio.wait_for(ask(controller.close.remote(_GRACE_S)), 2 * _GRACE_S)
            except (ActorLostError, TimeoutError) as err:
                _LOG.warning("controller did not close", policy_id=policy_id, reason=str(err))
        await self.end(policy_id)

    async def drain(self, policy_id: str, grace_s: float) -> None:
        found = find_actor(controller_name(policy_id), self._settings.namespace)
        if found is None:
            return
        controller = cast("ActorProxy[ControllerActor]", found)
        try:
            await asyncio.wait_for(ask(controller.drain.remote(grace_s)), grace_s + _GRACE_S)
        except (ActorLostError, TimeoutError) as err:
            _LOG.warning("controller did not drain", policy_id=policy_id, reason=str(err))

    async def end(self, policy_id: str) -> None:
        """End the processes without a word, as a crash would."""
        namespace = self._settings.namespace
        await kill_actor(controller_name(policy_id), namespace)
        await end_worker(policy_id, namespace)

    async def release(self, policy_id: str) -> None:
        await end_worker(policy_id, self._settings.namespace)

    def _trainer(self, spec: PolicySpec) -> TrainerSpec:
        # Wider weights are their own masters.
        is_bf16 = spec.model.dtype is ModelDtype.BFLOAT16
        return TrainerSpec(
            model=spec.model,
            optimizer=spec.optimizer,
            deterministic=spec.deterministic,
            micro_batch_tokens=spec.micro_batch_tokens,
            keep_reference=spec.reference is not ReferencePolicy.NONE,
            attention_backend=spec.attention_backend,
            device=self.device,
            num_threads=self._settings.num_threads or _cores(),
            optimizer_states=self._settings.optimizer_states if is_bf16 else OptimizerStates.FP32,
            host_activation_bytes=self._settings.host_activation_bytes,
            self_check_every=self._settings.self_check_every,
            guard=spec.numerics_guard,
        )


def _cores() -> int:
    """Those that this process may use; where the system does not say (macOS), those it has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _total_gpus() -> float:
    return float(ray.cluster_resources().get("GPU", 0.0))
