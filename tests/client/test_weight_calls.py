"""Calls about weights, one by one: watches, acknowledgements, chunks and gradients."""

from __future__ import annotations

import numpy as np
import pytest

from ratoon_client import (
    IntegrityError,
    InvalidArgumentError,
    RatoonApiError,
    RatoonClient,
    SampledSequence,
    SamplingParams,
    StopReason,
)
from ratoon_proto.v1 import sampling_pb2, service_pb2
from tests.client.fake_service import CHUNK_BYTES, FakeService, Fault, LostAnswerError, RefusalError

CONFIG_JSON = b'{"model_type": "llama"}'


@pytest.fixture(autouse=True)
def _published(service: FakeService) -> None:
    service.publish(1, {"config.json": CONFIG_JSON})


def test_versions_are_watched_through_lost_answers(service: FakeService, client: RatoonClient):
    service.publish(4, {"a": b"1"})
    service.faults = [
        Fault(name="GetWeightManifest", error=LostAnswerError()),
        Fault(name="GetWeightManifest", error=RefusalError("WEIGHTS_NOT_FOUND", field="version")),
    ]
    versions: list[int] = []
    for newest in client.watch_weights("p", known_version=3):
        versions.append(newest.version)
        if newest.version == 7:
            break
        # Who is slow gets the newest alone.
        for version in (newest.version + 1, newest.version + 2, newest.version + 3):
            service.publish(version, {"a": b"1"})
    assert versions == [4, 7]


def test_a_watch_ends_with_its_policy(client: RatoonClient):
    with pytest.raises(RatoonApiError, match="POLICY_NOT_FOUND"):
        next(client.watch_weights("nobody"))


def test_gradients_are_a_file(service: FakeService, client: RatoonClient):
    manifest = client.gradient_manifest("p", ["model.norm.weight", "lm_head.weight"])
    assert (manifest.version, manifest.seqs, manifest.trained_tokens) == (3, (4, 6), 7)
    data = client.fetch_file("p", manifest.file)
    assert data == b"model.norm.weight lm_head.weight" * 50
    assert len(data) > CHUNK_BYTES
    service.tamper = lambda data, _: b"\0" * len(data)
    with pytest.raises(IntegrityError):
        client.fetch_file("p", manifest.file)
    with pytest.raises(InvalidArgumentError, match=r"names\[0\]"):
        client.gradient_manifest("p", [3])  # pyright: ignore[reportArgumentType]


def test_samples_are_of_a_version_or_the_base(service: FakeService, client: RatoonClient):
    service.faults = [
        Fault(name="Sample", error=LostAnswerError()),
        Fault(name="Sample", error=RefusalError("UNAVAILABLE", retryable=True)),
    ]
    sampling = SamplingParams(num_samples=2, temperature=0.5, stop=["x"], seed=3)
    result = client.sample("p", np.array([5, 6]), sampling)
    whole = SampledSequence(tokens=(5, 6), logprobs=(-0.5, -0.5), stop_reason=StopReason.LENGTH)
    assert (result.version, result.sequences) == (7, (whole, whole))
    assert client.sample("p", [5], version=2).version == 2
    assert client.sample("p", [5], base=True).version is None
    asked = [request for name, request in service.requests if name == "Sample"]
    assert asked[0] == service_pb2.SampleRequest(
        policy_id="p",
        prompt=[5, 6],
        sampling=sampling_pb2.SamplingParams(
            num_samples=2, temperature=0.5, top_p=1.0, stop=["x"], seed=3
        ),
    )
    with pytest.raises(InvalidArgumentError, match=r"prompt\[1\]"):
        client.sample("p", [1, 2**31])
    with pytest.raises(InvalidArgumentError, match="sampling"):
        client.sample("p", [1], {"seed": 3})  # pyright: ignore[reportArgumentType]


def test_a_receiver_says_what_it_serves_and_holds(service: FakeService, client: RatoonClient):
    service.faults = [Fault(name="AckWeights", error=LostAnswerError())]
    newest = client.weight_manifest("p").version
    assert client.ack_weights("p", "r", version=1, holds_version=2, hold_s=30.0) == newest
    assert client.ack_weights("p", "r", version=2) == newest
    asked = [request for name, request in service.requests if name == "AckWeights"]
    whole = service_pb2.AckWeightsRequest(
        policy_id="p", receiver_id="r", version=1, holds_version=2, hold_s=30.0
    )
    serving = service_pb2.AckWeightsRequest(policy_id="p", receiver_id="r", version=2)
    assert asked == [whole, whole, serving]
    service.policies["p"].weights.clear()
    assert client.ack_weights("p", "r") is None
    with pytest.raises(InvalidArgumentError, match="hold_s"):
        client.ack_weights("p", "r", holds_version=1, hold_s=-1.0)


def test_a_single_chunk_is_fetched_and_verified(service: FakeService, client: RatoonClient):
    (file,) = [f for f in client.weight_manifest("p").files if f.name == "config.json"]
    assert client.fetch_weights("p", file.digest, offset=2, length=5) == CONFIG_JSON[2:7]
    service.tamper = lambda data, _: b"\0" * len(data)
    with pytest.raises(IntegrityError):
        client.fetch_weights("p", file.digest, offset=2, length=5)
