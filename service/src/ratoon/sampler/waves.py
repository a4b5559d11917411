"""Which of the waiting requests are sampled together. Imports no torch.

In: jobs in their order of arrival. Out: a wave, of one version and one length bucket, as rows that
each sample one sequence. A job with a seed has its waves for itself, so that its rows meet the same
rows whenever it is asked, and round alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ratoon.sampler.port import Weights
from ratoon_proto.types import SampledSequence, SamplingParams

# Shorter prompts of a wave are padded, by fewer tokens than this.
BUCKET = 64


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A request; `done` has its sequences by index. `num_begun`: those that a wave has taken."""

    weights: Weights
    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_begun: int = 0
    is_cancelled: bool = False
    done: dict[int, SampledSequence] = field(default_factory=dict[int, SampledSequence])
    prompt_logprobs: tuple[float, ...] = ()
    topk_tokens: tuple[int, ...] = ()
    topk_logprobs: tuple[float, ...] = ()
    target_logprobs: tuple[float, ...] = ()

    @property
    def max_tokens(self) -> int:
        """Most tokens of one of its sequences, its prompt included."""
        most = self.sampling.max_tokens
        assert most is not None, "set by whoever validates"
        return len(self.prompt) + most

    @property
    def num_left(self) -> int:
        return self.sampling.num_samples - self.num_begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Samples of one job that a wave computes."""

    job: Job
    samples: range


def take_wave(waiting: Iterable[Job], most_rows: Callable[[int], int]) -> list[Share]:
    """Take a wave that begins with the first job, and mark what it has taken as begun.

    `most_rows`: how many sequences of so many tokens there is memory for, at least one.
    """
    first: Job | None = None
    wave, rows, longest = list[Share](), 0, 0
    for job in waiting:
        first = first or job
        if not _fits(job, first):
            continue
        most = most_rows(max(longest, job.max_tokens))
        taken = min(job.num_left, most - rows)
        if taken <= 0:
            continue
        samples = range(job.num_begun, job.num_begun + taken)
        wave.append(Share(job=job, samples=samples))
        job.num_begun += taken
        rows, longest = rows + taken, max(longest, job.max_tokens)
        if job.sampling.seed is not None:
            break
    return wave


def draws(job: Job, sample: int) -> Iterator[float]:
    """Uniform numbers in [0, 1), one a token, of one of the job's sequences."""
    seed = job.sampling.seed
    words = None if seed is None else (seed % 2**64, sample)
    generator = np.random.default_rng(words)
    while True:
        yield float(generator.random())


def _fits(job: Job, first: Job) -> bool:
    if job is first:
        return True
    is_seeded = job.sampling.seed is not None or first.sampling.seed is not None
    return not is_seeded and job.weights == first.weights and _bucket(job) == _bucket(first)


def _bucket(job: Job) -> int:
    return (len(job.prompt) - 1) // BUCKET
