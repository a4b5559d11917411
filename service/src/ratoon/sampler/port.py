"""What a sampler is asked, and by whom: the edges ask, a process of its own answers.

In: weights, which never change, a prompt and how to draw. Out: sequences with the log-probs of
their tokens. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ratoon.errors import exhausted
from ratoon.model.spec import ModelSpec
from ratoon_proto.types import SampleResult, SamplingParams

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights to sample from: those of a published version, or what a policy began with.

    `policy_id` "": a base alone, of no policy. `base`: the preset, or the folder below the models
    root. `version`, `folder` None: the base's own, with adapters off. `digest` tells versions of
    one number apart, of which a LoadCheckpoint may make several.
    """

    policy_id: str
    base: str
    model: ModelSpec
    version: int | None
    folder: Path | None
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFacts:
    """What a request for a base is checked against, as `ModelInfo` is for a policy."""

    vocab_size: int
    max_sequence_tokens: int
    media_tokens: Mapping[str, int]


def check_waiting(num_waiting: int, most: int, what: str) -> None:
    """Raises RESOURCE_EXHAUSTED where as many requests as may wait for `what` do so."""
    if num_waiting >= most:
        raise exhausted(
            f"{num_waiting} requests wait for the {what}",
            resource="sampler_requests",
            wanted=1,
            free=0,
            limit=most,
            retry_after_s=_RETRY_S,
        )


class Sampler(Protocol):
    """`local.LocalSampler` and `remote.EngineSampler`; cancelling a call ends what it asked for.

    `sample` takes validated arguments, with `max_tokens` set, and texts to stop at only where the
    base has a tokenizer. It raises RESOURCE_EXHAUSTED with too many requests waiting, UNAVAILABLE
    where weights or engine are away, so that a caller may ask again, and what an engine refuses.
    """

    async def sample(
        self, weights: Weights, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> SampleResult: ...

    async def close(self) -> None: ...


class AnySampler(Sampler, Protocol):
    """A sampler of every base: `cluster.sampler_process.RaySampler`."""

    async def facts(self, model: ModelSpec) -> BaseFacts:
        """Facts of the model's base. Raises what its configuration is refused with."""
        ...
