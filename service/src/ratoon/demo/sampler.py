"""The demo's rollout system: the service's sampler, on weights pulled through the public client.

It samples at temperature 1 from the full distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ratoon.demo.task import Query, tokens
from ratoon.model.folder import ModelFolder
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon.model.support import read_config
from ratoon.sampler.model import SampledModel
from ratoon.sampler.port import Weights
from ratoon.sampler.run import run_wave
from ratoon.sampler.waves import Job, Share
from ratoon_proto.types import FullTuning, SampledSequence, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Response token ids int32 [R] and their log-probs float32 [R] at temperature 1."""

    query: Query
    response: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @property
    def text(self) -> bytes:
        """The response as bytes; tokens that are not bytes are dropped."""
        return bytes(int(token) for token in self.response if token < 256)


class Sampler:
    """Owns one model and the seeds of its samples; not safe across threads."""

    def __init__(
        self, *, preamble: str, max_new_tokens: int, seed: int, device: str = "cpu"
    ) -> None:
        self._preamble, self._max_new_tokens = preamble, max_new_tokens
        self._device = torch.device(device)
        self._seeds = np.random.default_rng(seed)
        self._loaded: tuple[SampledModel, Weights] | None = None
        self.version = -1

    def load(self, folder: Path, version: int) -> None:
        """Sample from the weights in `folder` (config.json and safetensors files) from now on.

        Raises what `read_config` and `SampledModel` raise.
        """
        if self._loaded is None:
            spec = _spec_of(folder)
            model = SampledModel(spec, folder.parent, self._device)
        else:
            model, before = self._loaded
            spec = before.model
        weights = Weights(
            policy_id="",
            base=folder.name,
            model=spec,
            version=version,
            folder=folder,
            digest=str(version),
        )
        self._loaded, self.version = (model, weights), version

    def sample(self, queries: Sequence[Query], num_samples: int) -> list[list[Sample]]:
        """`num_samples` responses to each query, in one wave."""
        assert self._loaded is not None, "load a version first"
        model, weights = self._loaded
        jobs = [
            Job(
                weights=weights,
                prompt=tuple(tokens(self._preamble + query.text)),
                sampling=SamplingParams(
                    num_samples=num_samples,
                    max_tokens=self._max_new_tokens,
                    seed=int(self._seeds.integers(2**63)),
                    ignore_eos=True,
                ),
            )
            for query in queries
        ]
        with model.become(weights):
            run_wave(model, [Share(job=job, samples=range(num_samples)) for job in jobs])
        return [
            [_sample(query, job.done[index]) for index in range(num_samples)]
            for query, job in zip(queries, jobs, strict=True)
        ]


def _spec_of(folder: Path) -> ModelSpec:
    config, _ = read_config(ModelFolder.of(folder))
    return ModelSpec(
        base=FolderBase(folder=str(folder)),
        tuning=FullTuning(),
        dtype=ModelDtype(str(config.dtype).removeprefix("torch.")),
        seed=0,
    )


def _sample(query: Query, sequence: SampledSequence) -> Sample:
    return Sample(
        query=query,
        response=np.array(sequence.tokens, np.int32),
        logprobs=np.array(sequence.logprobs, np.float32),
    )
