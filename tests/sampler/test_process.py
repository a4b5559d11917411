"""The sampler's process over Ray: started by a request, lost, left and ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

from ratoon.cluster.ray_calls import find_actor
from ratoon.cluster.sampler_process import RaySampler, SamplerSettings
from ratoon.config import RatoonConfig, RayConfig, SamplerConfig
from ratoon.engine.settings import SAMPLER_NAME
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import SampleResult, SamplingParams
from tests.conftest import RayCluster
from tests.sampler.conftest import WEIGHTS
from tests.until import until

pytestmark = pytest.mark.more
LONG = SamplingParams(max_tokens=20_000, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)


async def sampled(sampler: RaySampler) -> SampleResult:
    return await sampler.sample(WEIGHTS, (5, 6, 7), SEEDED)


async def refusal(sampler: RaySampler) -> ErrorCode | None:
    """What a sample is refused with; None: it is answered."""
    try:
        await sampled(sampler)
    except RatoonError as error:
        return error.code
    return None


async def test_a_process_is_started_lost_and_started_anew(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    # Other tests' services leave theirs in the cluster's own namespace, until it is idle.
    namespace = f"{ray_cluster.namespace}-sampler"
    config = RatoonConfig(
        data_root=tmp_path,
        ray=RayConfig(namespace=namespace),
        sampler=SamplerConfig(idle_s=5.0, max_waiting=1, num_threads=1),
    )
    edges = [RaySampler(SamplerSettings.from_config(config)) for _ in range(2)]

    def process() -> Any:
        return find_actor(SAMPLER_NAME, namespace)

    assert process() is None
    first = await sampled(edges[0])
    assert first == await sampled(edges[1])
    left = asyncio.create_task(edges[0].sample(WEIGHTS, (5, 6, 7), LONG))
    while await refusal(edges[1]) is None:
        if left.done():  # The other one had the only place.
            left = asyncio.create_task(edges[0].sample(WEIGHTS, (5, 6, 7), LONG))
    assert await refusal(edges[1]) is ErrorCode.RESOURCE_EXHAUSTED
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    while code := await refusal(edges[1]):
        assert code is ErrorCode.RESOURCE_EXHAUSTED, "until the place of the one that left is free"

    lost = asyncio.create_task(edges[0].sample(WEIGHTS, (5, 6, 7), LONG))
    ray.kill(process(), no_restart=True)
    with pytest.raises(RatoonError) as caught:
        await lost
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    for edge in edges:
        while code := await refusal(edge):
            assert code is ErrorCode.UNAVAILABLE
        assert await sampled(edge) == first
    await until(lambda: process() is None)
