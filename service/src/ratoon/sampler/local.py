"""Samples in this process, one wave after the other, on a thread of its own.

In: requests of any number of policies. Out: their sequences. Models are read when they are first
asked for, and the one that was asked for the longest ago is dropped for another.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ratoon.errors import ErrorCode, RatoonError, described
from ratoon.log import get_logger
from ratoon.model.spec import ModelSpec
from ratoon.sampler.model import SampledModel, base_key
from ratoon.sampler.port import Weights, check_waiting
from ratoon.sampler.run import run_wave
from ratoon.sampler.waves import Job, Share, take_wave
from ratoon_proto.types import SampleResult, SamplingParams

_LOG = get_logger("sampler")


class LocalSampler:
    """A `port.Sampler`, on one event loop."""

    def __init__(
        self,
        *,
        models_root: Path,
        device: str,
        max_waiting: int,
        max_rows: int,
        max_cache_bytes: int,
        max_models: int,
    ) -> None:
        """`max_waiting`: requests, beyond which others are refused. `max_rows`, `max_cache_bytes`:
        sequences of a wave, and bytes of their keys and values."""
        self._models_root, self._device = models_root, torch.device(device)
        self._max_waiting, self._max_rows = max_waiting, max_rows
        self._max_cache_bytes, self._max_models = max_cache_bytes, max_models
        self._models: dict[ModelSpec, SampledModel] = {}
        self._jobs: dict[Job, asyncio.Future[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="waves")
        self._running: asyncio.Task[None] | None = None

    async def sample(
        self, weights: Weights, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> SampleResult:
        """See `port.Sampler`."""
        check_waiting(len(self._jobs), self._max_waiting, "sampler")
        job = Job(weights=weights, prompt=prompt, sampling=sampling)
        loop = asyncio.get_running_loop()
        done = self._jobs[job] = loop.create_future()
        if self._running is None or self._running.done():
            self._running = loop.create_task(self._run())
        try:
            await done
        finally:
            # The wave that has it goes on without its rows.
            job.is_cancelled = True
            self._jobs.pop(job, None)
        return SampleResult(
            sequences=tuple(job.done[index] for index in range(sampling.num_samples)),
            version=weights.version,
            prompt_logprobs=job.prompt_logprobs,
            topk_prompt_tokens=job.topk_tokens,
            topk_prompt_logprobs=job.topk_logprobs,
            target_logprobs=job.target_logprobs,
        )

    async def close(self) -> None:
        """Requests that wait are cancelled; the wave that runs ends with its next token."""
        for done in self._jobs.values():
            done.cancel()
        for job in self._jobs:
            job.is_cancelled = True
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        self._thread.shutdown()

    async def _run(self) -> None:
        """Waves until nothing waits."""
        loop = asyncio.get_running_loop()
        while waiting := [job for job in self._jobs if job.num_left and not job.is_cancelled]:
            wave = list[Share]()
            try:
                await loop.run_in_executor(self._thread, self._run_next, waiting, wave)
            except Exception as err:  # noqa: BLE001 - whatever it is, its requests are told
                failure = _failure(err)
                # Where no wave was made the model is at fault, and with it the first request.
                for job in {share.job for share in wave} or {waiting[0]}:
                    self._end(job, failure)
                continue
            for job in {share.job for share in wave}:
                if len(job.done) == job.sampling.num_samples:
                    self._end(job, None)

    def _run_next(self, waiting: list[Job], wave: list[Share]) -> None:
        """On the thread: take the next wave, into `wave`, and run it."""
        weights = waiting[0].weights
        model = self._model(weights.model)

        def most_rows(num_tokens: int) -> int:
            fit = self._max_cache_bytes // max(num_tokens * model.cache_bytes_per_token, 1)
            return max(1, min(fit, self._max_rows))

        wave += take_wave(waiting, most_rows)
        with model.become(weights):
            run_wave(model, wave)

    def _model(self, spec: ModelSpec) -> SampledModel:
        key = base_key(spec)
        model = self._models.pop(key, None)
        if model is None:
            while len(self._models) >= self._max_models:
                del self._models[next(iter(self._models))]
            model = SampledModel(spec, self._models_root, self._device)
            _LOG.info("model read", device=str(self._device), models=len(self._models) + 1)
        self._models[key] = model
        return model

    def _end(self, job: Job, failure: RatoonError | None) -> None:
        done = self._jobs.pop(job, None)
        job.is_cancelled = True
        if done is None or done.done():
            return
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(failure)


def _failure(err: Exception) -> RatoonError:
    if isinstance(err, RatoonError):
        return err
    if isinstance(err, torch.OutOfMemoryError | MemoryError):
        text = "the sampler's device has no memory for the request: ask for fewer or shorter ones"
        return RatoonError(ErrorCode.RESOURCE_EXHAUSTED, text)
    _LOG.error("wave failed", exc_info=err)
    return RatoonError(ErrorCode.INTERNAL, described(err))
