"""The sampler's process: started by the first request, ended when none has come for a while.

It is a detached actor of its own, on the head, or with a GPU that no policy has. It has no state
that outlives it: a request that it loses is UNAVAILABLE, and the next one starts it anew. Processes
that look the actor up import this module, so samplers are imported when they are first needed.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray import ObjectRef
from ray.actor import exit_actor

from ratoon.cluster.bootstrap import connect
from ratoon.cluster.placement import ON_HEAD, free_gpus_by_node
from ratoon.cluster.ray_calls import ActorLostError, ask, find_actor
from ratoon.cluster.worker_start import WORKER_ENVIRONMENT
from ratoon.config import RatoonConfig, SamplerConfig
from ratoon.engine.client import Engine, EngineClient
from ratoon.engine.settings import SAMPLER_NAME
from ratoon.errors import ErrorCode, RatoonError, described, exhausted
from ratoon.garbage import frozen_imports
from ratoon.log import configure_logging, get_logger
from ratoon.model.spec import ModelSpec
from ratoon.sampler.port import BaseFacts, Sampler, Weights
from ratoon_proto.types import ReceiverInfo, SampleResult, SamplingParams

if TYPE_CHECKING:
    from ray.actor import ActorProxy


_T = TypeVar("_T")
# All requests that wait for a wave are calls under way.
_MAX_CONCURRENCY = 100_000
_LOOKS_PER_IDLE = 10
_RETRY_S = 5.0
_LOG = get_logger("sampler")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """What the process is started with; paths are absolute."""

    namespace: str
    log_level: str
    models_root: Path
    # Files of adapters that engines have loaded.
    copies: Path
    sampler: SamplerConfig

    @classmethod
    def from_config(cls, config: RatoonConfig) -> SamplerSettings:
        return cls(
            namespace=config.ray.namespace,
            log_level=config.log_level,
            models_root=config.models_folder,
            copies=config.data_root.absolute() / "sampler",
            sampler=config.sampler,
        )


class SamplerActor:
    """Samplers by base, and the time of the last request."""

    def __init__(self, settings: SamplerSettings) -> None:
        configure_logging(settings.log_level)
        self._settings = settings
        self._engines = {each.base: each for each in settings.sampler.engines}
        # By base; "": the one of this process.
        self._samplers: dict[str, Sampler] = {}
        self._making = asyncio.Lock()
        self._client: EngineClient | None = None
        self._num_open, self._seen_at = 0, time.monotonic()
        ray.get_runtime_context().current_actor.end_when_idle.remote()

    @ray.method
    async def sample(
        self, weights: Weights, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> SampleResult:
        """See `Sampler.sample`."""
        self._num_open += 1
        try:
            sampler = await self._sampler(weights)
            return await sampler.sample(weights, prompt, sampling)
        finally:
            self._num_open -= 1
            self._seen_at = time.monotonic()

    @ray.method
    async def facts(self, model: ModelSpec) -> BaseFacts:
        """See `AnySampler.facts`."""
        self._seen_at = time.monotonic()
        return await asyncio.to_thread(self._facts, model)

    def _facts(self, model: ModelSpec) -> BaseFacts:
        with frozen_imports():
            from ratoon.sampler.model import base_facts
        return base_facts(model, self._settings.models_root)

    @ray.method
    async def end_when_idle(self) -> None:
        """Return never: the process ends."""
        idle_s, left_s = self._settings.sampler.idle_s, 0.0
        while left_s >= 0:
            await asyncio.sleep(left_s + idle_s / _LOOKS_PER_IDLE)
            seen_at = time.monotonic() if self._num_open else self._seen_at
            left_s = seen_at + idle_s - time.monotonic()
        _LOG.info("sampler ends", idle_s=idle_s)
        for sampler in self._samplers.values():
            await sampler.close()
        exit_actor()

    async def _sampler(self, weights: Weights) -> Sampler:
        engine = self._engines.get(weights.base)
        key = "" if engine is None else weights.base
        async with self._making:
            if key not in self._samplers:
                if engine is None:
                    made = await asyncio.to_thread(self._make_local)
                else:
                    from ratoon.sampler.remote import EngineSampler

                    made = EngineSampler(
                        engine,
                        receivers=self._receivers,
                        copies=self._settings.copies,
                        max_waiting=self._settings.sampler.max_waiting,
                    )
                self._samplers[key] = made
        return self._samplers[key]

    def _make_local(self) -> Sampler:
        started = time.perf_counter()
        with frozen_imports():
            import torch

            from ratoon.sampler.local import LocalSampler
        config = self._settings.sampler
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        _LOG.info("sampler imported", imports_s=round(time.perf_counter() - started, 3))
        return LocalSampler(
            models_root=self._settings.models_root,
            device=config.device,
            max_waiting=config.max_waiting,
            max_rows=config.max_rows,
            max_cache_bytes=config.max_cache_bytes,
            max_models=config.max_models,
        )

    async def _receivers(self, policy_id: str) -> tuple[ReceiverInfo, ...]:
        client = self._client = self._client or await connect(self._settings.namespace)
        return (await client.call(Engine.list_versions, policy_id)).receivers


class RaySampler:
    """A `port.AnySampler` over the actor, in a process connected to Ray."""

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        self._actor: ActorProxy[SamplerActor] | None = None

    async def sample(
        self, weights: Weights, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> SampleResult:
        """See `Sampler.sample`. Raises RESOURCE_EXHAUSTED too, where it has no GPU."""
        actor = await self._found()
        reference = actor.sample.remote(weights, prompt, sampling)
        return await self._answer(cast("ObjectRef[SampleResult]", reference))

    async def facts(self, model: ModelSpec) -> BaseFacts:
        """See `AnySampler.facts`. Raises as `sample`."""
        actor = await self._found()
        return await self._answer(cast("ObjectRef[BaseFacts]", actor.facts.remote(model)))

    async def close(self) -> None:
        """The process is not this one's: it serves others too."""

    async def _found(self) -> ActorProxy[SamplerActor]:
        self._actor = self._actor or await asyncio.to_thread(self._find_or_make)
        return self._actor

    async def _answer(self, reference: ObjectRef[_T]) -> _T:
        try:
            return await ask(reference)
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RatoonError:
            raise
        except ActorLostError as err:
            self._actor = None
            text = "the sampler's process has ended; ask again, and it is started anew"
            raise RatoonError(ErrorCode.UNAVAILABLE, text) from err
        except Exception as err:
            _LOG.exception("unexpected failure of the sampler")
            raise RatoonError(ErrorCode.INTERNAL, described(err)) from err

    def _find_or_make(self) -> ActorProxy[SamplerActor]:
        settings = self._settings
        found = find_actor(SAMPLER_NAME, settings.namespace)
        if found is not None:
            return cast("ActorProxy[SamplerActor]", found)
        options: dict[str, Any] = {"resources": ON_HEAD}
        if settings.sampler.device != "cpu":
            free = max(free_gpus_by_node().values(), default=0.0)
            if free < 1:
                raise exhausted(
                    "the sampler wants a GPU of its own, and none is free",
                    resource="GPU",
                    wanted=1,
                    free=int(free),
                    limit=1,
                    retry_after_s=_RETRY_S,
                )
            options = {"num_gpus": 1}
        actor = ray.remote(num_cpus=0)(SamplerActor).options(
            name=SAMPLER_NAME,
            namespace=settings.namespace,
            lifetime="detached",
            get_if_exists=True,
            max_concurrency=_MAX_CONCURRENCY,
            runtime_env={"env_vars": WORKER_ENVIRONMENT},
            **options,
        )
        return actor.remote(settings)
