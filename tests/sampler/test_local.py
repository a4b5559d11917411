"""The sampler of this process: requests that come and leave while waves run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase
from ratoon.sampler import local
from ratoon.sampler.local import LocalSampler
from ratoon.sampler.model import SampledModel
from ratoon.sampler.run import run_wave
from ratoon.sampler.waves import Share
from ratoon_proto.types import SamplingParams
from tests.sampler.conftest import WEIGHTS
from tests.until import until

PROMPT = (5, 6, 7)


@pytest.fixture(name="waves")
def waves_fixture(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Numbers of rows by job, of each wave that runs from now on."""
    waves: list[list[int]] = []

    def run(model: SampledModel, wave: list[Share]) -> None:
        waves.append([len(share.samples) for share in wave])
        run_wave(model, wave)

    monkeypatch.setattr(local, "run_wave", run)
    return waves


@pytest.fixture(name="sampler")
async def sampler_fixture(tmp_path: Path) -> AsyncIterator[LocalSampler]:
    sampler = LocalSampler(
        models_root=tmp_path,
        device="cpu",
        max_waiting=8,
        max_rows=6,
        max_cache_bytes=2**30,
        max_models=1,
    )
    yield sampler
    await sampler.close()


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 3, "ignore_eos": True, **changes})


async def test_requests_that_wait_are_sampled_together(
    sampler: LocalSampler, waves: list[list[int]]
) -> None:
    """The first wave has the first request alone, if the others come while its model is read."""
    asked = [sampler.sample(WEIGHTS, PROMPT, params(num_samples=n)) for n in (1, 2, 9, 1)]
    results = await asyncio.gather(*asked)
    assert [len(result.sequences) for result in results] == [1, 2, 9, 1]
    assert sum(map(sum, waves)) == 13
    assert max(map(sum, waves)) <= 6
    assert len(waves) <= 4
    drawn = {sequence.tokens for result in results for sequence in result.sequences}
    assert len(drawn) > 8


async def test_a_seed_repeats_whatever_else_is_asked(sampler: LocalSampler) -> None:
    seeded = params(num_samples=7, seed=5)
    first = await sampler.sample(WEIGHTS, PROMPT, seeded)
    others = [sampler.sample(WEIGHTS, PROMPT, params(num_samples=2)) for _ in range(4)]
    again, *_ = await asyncio.gather(sampler.sample(WEIGHTS, PROMPT, seeded), *others)
    assert first == again


async def test_requests_are_bounded_and_can_leave(
    sampler: LocalSampler, waves: list[list[int]]
) -> None:
    long = params(max_tokens=4096)
    asked = [asyncio.create_task(sampler.sample(WEIGHTS, PROMPT, long)) for _ in range(8)]
    await until(lambda: waves)
    with pytest.raises(RatoonError) as refused:
        await sampler.sample(WEIGHTS, PROMPT, params())
    assert refused.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert refused.value.details["resource"] == "sampler_requests"
    for task in asked:
        task.cancel()
    gone = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in gone)
    async with asyncio.timeout(60):
        assert (await sampler.sample(WEIGHTS, PROMPT, params())).sequences


async def test_a_failure_is_its_requests_alone(
    sampler: LocalSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_model = replace(WEIGHTS.model, base=FolderBase(folder="/nonexistent"))
    lost = sampler.sample(replace(WEIGHTS, model=no_model), PROMPT, params())
    fine = sampler.sample(WEIGHTS, PROMPT, params())
    failed, result = await asyncio.gather(lost, fine, return_exceptions=True)
    assert isinstance(failed, RatoonError)
    assert not isinstance(result, BaseException)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(local, "run_wave", fail)
    with pytest.raises(RatoonError) as caught:
        await sampler.sample(WEIGHTS, PROMPT, params())
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    monkeypatch.undo()
    assert (await sampler.sample(WEIGHTS, PROMPT, params())).sequences
