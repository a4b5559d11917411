"""Sample over both wires: what reaches the sampler, what is refused, and who leaves."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, cast

import pytest

from ratoon.auth.keys import Scope
from ratoon.stream.versions import version_folder
from ratoon_proto.v1 import sampling_pb2, service_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.fake_engine import FakeSampler
from tests.api.guarded import Guarded, refusal
from tests.api.wires import refused_by
from tests.until import until


def asked(
    prompt: tuple[int, ...] = (5, 6, 7),
    *,
    version: int | None = None,
    base: bool = False,
    **sampling: Any,
) -> service_pb2.SampleRequest:
    return service_pb2.SampleRequest(
        policy_id=requests.POLICY,
        version=version,
        base=base,
        prompt=prompt,
        sampling=sampling_pb2.SamplingParams(**sampling),
    )


def sampler_of(api: Api) -> FakeSampler:
    return cast("FakeSampler", api.service._sampler)


async def test_a_sample_over_both_wires(api: Api, wire_name: str) -> None:
    await api.create_policy()
    request = asked(num_samples=2, prompt_logprobs=True, seed=-3, max_tokens=9, temperature=0.0)
    result = await api.wire(wire_name).call("Sample", request)
    sequence = sampling_pb2.SampledSequence(
        tokens=[5, 6, 7], logprobs=[-0.5] * 3, stop_reason=sampling_pb2.STOP_REASON_STOP
    )
    assert [*result.sequences] == [sequence] * 2
    assert math.isnan(result.prompt_logprobs[0])
    assert [*result.prompt_logprobs[1:]] == [-0.25] * 2
    ((weights, prompt, sampling),) = sampler_of(api).asked
    assert prompt == (5, 6, 7)
    assert (sampling.seed, sampling.max_tokens, sampling.temperature) == (-3, 9, 0.0)
    assert weights.version == result.version == 0
    root = api.engine.paths(requests.POLICY).weights
    assert weights.folder == version_folder(root, 0)
    assert weights.base == "tiny"
    assert weights.digest


async def test_the_base_has_no_version(api: Api, wire_name: str) -> None:
    await api.create_policy()
    result = await api.wire(wire_name).call("Sample", asked(base=True))
    assert not result.HasField("version")
    ((weights, _, sampling),) = sampler_of(api).asked
    assert (weights.version, weights.folder) == (None, None)
    assert sampling.max_tokens == 61, "what 64 tokens leave"


@pytest.mark.parametrize(
    ("request_of", "field"),
    [
        (asked(()), "prompt"),
        (asked((5, 256)), "prompt[1]"),
        (asked((-1,)), "prompt[0]"),
        (asked((1,) * 64), "prompt"),
        (asked(version=-1), "version"),
        (asked(version=0, base=True), "version"),
        (asked(num_samples=-1), "sampling.num_samples"),
        (asked(num_samples=2**20 + 1), "sampling"),
        (asked(num_samples=2**18, max_tokens=8), "sampling.max_tokens"),
        (asked(max_tokens=0), "sampling.max_tokens"),
        (asked(max_tokens=62), "sampling.max_tokens"),
        (asked(temperature=-0.5), "sampling.temperature"),
        (asked(temperature=math.inf), "sampling.temperature"),
        (asked(top_k=-1), "sampling.top_k"),
        (asked(top_p=0.0), "sampling.top_p"),
        (asked(top_p=1.5), "sampling.top_p"),
        (asked(stop_token_ids=[3, 300]), "sampling.stop_token_ids[1]"),
        (asked(stop=["x", ""]), "sampling.stop[1]"),
        (asked(stop=["x" * 1025]), "sampling.stop[0]"),
        (asked(stop=["x"] * 65), "sampling.stop"),
        (asked(topk_prompt_logprobs=257), "sampling.topk_prompt_logprobs"),
        (asked(target_places=[1], target_tokens=[]), "sampling.target_places"),
        (asked(target_places=[1, 0], target_tokens=[5, 5]), "sampling.target_places[1]"),
        (asked(target_places=[3], target_tokens=[5]), "sampling.target_places[0]"),
        (asked(target_places=[1], target_tokens=[256]), "sampling.target_tokens[0]"),
    ],
)
async def test_what_is_wrong_is_named(
    api: Api, request_of: service_pb2.SampleRequest, field: str
) -> None:
    await api.create_policy()
    refused = await refused_by(api.grpc, "Sample", request_of)
    assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)
    assert not sampler_of(api).asked


async def test_no_policy_and_no_version(api: Api, wire_name: str) -> None:
    wire = api.wire(wire_name)
    assert (await refused_by(wire, "Sample", asked())).detail.code == "POLICY_NOT_FOUND"
    await api.create_policy()
    assert (await refused_by(wire, "Sample", asked(version=7))).detail.code == "WEIGHTS_NOT_FOUND"


async def test_samples_are_for_readers(api: Api, guarded: Guarded, wire_name: str) -> None:
    await api.create_policy()
    reader = guarded.wire(wire_name, guarded.key(Scope.READ, (requests.POLICY,)))
    assert (await reader.call("Sample", asked())).sequences
    other = guarded.wire(wire_name, guarded.key(Scope.ADMIN, ("other",)))
    assert (await refusal(other, "Sample", asked()))[0] == "PERMISSION_DENIED"


async def test_a_caller_that_leaves_ends_its_sample(api: Api) -> None:
    await api.create_policy()
    sampler = sampler_of(api)
    sampler.hold = True
    call = asyncio.create_task(api.grpc.call("Sample", asked()))
    await until(lambda: sampler.asked)
    call.cancel()
    async with asyncio.timeout(20):
        await sampler.cancelled.wait()


async def test_a_caller_that_leaves_ends_its_sample_over_http(api: Api) -> None:
    await api.create_policy()
    sampler, has_left = sampler_of(api), asyncio.Event()
    sampler.hold = True
    parts = [json.dumps({"prompt": [5, 6, 7]}).encode()]

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(_message: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/v1/policies/{requests.POLICY}/sample",
        "query_string": b"",
        "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    call = asyncio.create_task(api.app(scope, receive, send))
    await until(lambda: sampler.asked)
    has_left.set()
    await asyncio.gather(sampler.cancelled.wait(), call)
