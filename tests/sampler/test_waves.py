"""Which requests share a wave, and the numbers that they draw."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.sampler.port import Weights
from ratoon.sampler.waves import BUCKET, Job, Share, draws, take_wave
from ratoon_proto.types import FullTuning, SamplingParams

SPEC = ModelSpec(
    base=PresetBase(name="tiny"), tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=0
)
WEIGHTS = Weights(
    policy_id="p", base="tiny", model=SPEC, version=1, folder=None, digest="of version 1"
)


def job(
    num_prompt: int = 3,
    num_samples: int = 1,
    max_tokens: int = 5,
    seed: int | None = None,
    weights: Weights = WEIGHTS,
) -> Job:
    sampling = SamplingParams(num_samples=num_samples, max_tokens=max_tokens, seed=seed)
    return Job(weights=weights, prompt=(1,) * num_prompt, sampling=sampling)


def waves(jobs: list[Job], most_tokens: int) -> list[list[tuple[int, range]]]:
    """All waves of `jobs`, with the places of their jobs; rows have `most_tokens` together."""
    taken: list[list[Share]] = []
    while waiting := [each for each in jobs if each.num_left]:
        taken.append(take_wave(waiting, lambda length: max(1, most_tokens // length)))
    return [[(jobs.index(share.job), share.samples) for share in wave] for wave in taken]


def test_a_wave_has_one_version_and_one_bucket() -> None:
    other = replace(WEIGHTS, version=2, digest="of version 2")
    again = replace(WEIGHTS, digest="of version 1 after a LoadCheckpoint")
    jobs = [
        job(),
        job(BUCKET),
        job(BUCKET + 1),
        job(weights=other),
        job(2),
        job(weights=again),
        job(2 * BUCKET),
    ]
    one = range(1)
    assert waves(jobs, 10_000) == [
        [(0, one), (1, one), (4, one)],
        [(2, one), (6, one)],
        [(3, one)],
        [(5, one)],
    ]


def test_a_wave_fits_the_memory_and_leaves_no_sample_out() -> None:
    """A sequence takes 8 tokens, the long one 24, of which not even one fits."""
    jobs = [job(num_samples=3), job(num_samples=5), job(max_tokens=21), job(num_samples=1)]
    assert waves(jobs, 32) == [
        [(0, range(3)), (1, range(1))],
        [(1, range(1, 5))],
        [(2, range(1))],
        [(3, range(1))],
    ]
    assert waves([job(num_samples=2)], 7) == [[(0, range(1))], [(0, range(1, 2))]]


def test_a_seed_has_its_waves_for_itself() -> None:
    """Rounding would depend on what else is in the wave."""
    one, two = range(1), range(2)
    jobs = [job(), job(num_samples=2, seed=1), job(), job(seed=1), job()]
    assert waves(jobs, 10_000) == [[(0, one), (2, one), (4, one)], [(1, two)], [(3, one)]]


def test_draws_are_of_seed_and_sample() -> None:
    def first(seed: int | None, sample: int) -> list[float]:
        return list(islice(draws(job(seed=seed), sample), 4))

    assert first(1, 0) == first(1, 0)
    different = [first(1, 0), first(1, 1), first(-1, 0), first(2**63 - 1, 0), first(None, 0)]
    assert len({*map(tuple, [*different, first(None, 0)])}) == 6
    assert all(0 <= value < 1 for values in different for value in values)
