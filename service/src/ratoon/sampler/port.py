"""What a sampler is asked, and by whom: the edges ask, a process of its own answers.

In: weights, which never change, a prompt and how to draw. Out: sequences with the log-probs of
their tokens. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ratoon.model.spec import ModelSpec
from ratoon_proto.types import SampleResult, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights to sample from: those of a published version, or what a policy began with.

    `version`, `folder` None: the base, with adapters off. `digest` tells versions of one number
    apart, of which a LoadCheckpoint may make several. `max_tokens`: the longest sequence.
    """

    policy_id: str
    model: ModelSpec
    max_tokens: int
    version: int | None
    folder: Path | None
    digest: str


class Sampler(Protocol):
    """`local.LocalSampler` and `remote.EngineSampler`; cancelling a call ends what it asked for.

    `sample` takes validated arguments, with `max_tokens` set. It raises INVALID_ARGUMENT for texts
    to stop at without a tokenizer, RESOURCE_EXHAUSTED with too many requests waiting, and
    UNAVAILABLE where weights or engine are away; a caller may ask again then.
    """

    async def sample(
        self, weights: Weights, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> SampleResult: ...

    async def close(self) -> None: ...
