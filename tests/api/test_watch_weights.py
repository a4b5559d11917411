"""Waiting for a version of the weights: by long poll on both wires, and by their streams."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import grpc_error, http_error, refused_by

EVENTS = f"/v1/policies/{requests.POLICY}/weights/events"


def asked(**changes: float) -> service_pb2.GetWeightManifestRequest:
    return service_pb2.GetWeightManifestRequest(policy_id=requests.POLICY, **changes)  # pyright: ignore[reportArgumentType]


async def test_a_manifest_is_waited_for(api: Api, wire_name: str) -> None:
    await api.create_policy()
    wire = api.wire(wire_name)
    assert (await wire.call("GetWeightManifest", asked())).version == 0
    waits = [
        asyncio.create_task(wire.call("GetWeightManifest", asked(wait_s=1.0, **which)))
        for which in ({"known_version": 0}, {"version": 1})
    ]
    await asyncio.sleep(0.05)
    await api.grpc.call("Update", requests.update())
    assert [(await wait).version for wait in waits] == [1, 1]


async def test_a_delta_is_asked_for_by_the_version_that_it_begins_with(
    api: Api, wire_name: str
) -> None:
    await api.create_policy()
    wire = api.wire(wire_name)
    for which in ({}, {"delta_from": 0}, {"version": 0, "delta_from": 7}):
        await wire.call("GetWeightManifest", asked(**which))
    assert api.engine.deltas_from == [None, 0, 7]


async def test_a_wait_ends_without_the_version(api: Api, wire_name: str) -> None:
    await api.create_policy()
    wire = api.wire(wire_name)
    known = await wire.call("GetWeightManifest", asked(known_version=0, wait_s=0.02))
    assert known.version == 0
    refused = await refused_by(wire, "GetWeightManifest", asked(version=5, wait_s=0.02))
    assert refused.detail.code == "WEIGHTS_NOT_FOUND"


async def test_what_cannot_be_waited_for_is_refused(api: Api, wire_name: str) -> None:
    await api.create_policy()
    for field, request in (
        ("known_version", asked(known_version=-1)),
        ("known_version", asked(known_version=1, version=1)),
        ("wait_s", asked(wait_s=-0.5)),
        ("delta_from", asked(delta_from=-1)),
    ):
        refused = await refused_by(api.wire(wire_name), "GetWeightManifest", request)
        assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)


async def test_a_stream_tells_of_each_version(api: Api) -> None:
    await api.create_policy()
    stub = PolicyServiceStub(api.grpc.channel)
    watch = stub.WatchWeights(service_pb2.WatchWeightsRequest(policy_id=requests.POLICY))
    versions: list[int] = []
    async for manifest in watch:
        assert manifest.files
        versions.append(manifest.version)
        if len(versions) == 3:
            watch.cancel()
            break
        await api.grpc.call("Update", requests.update(seq=len(versions)))
    assert versions == [0, 1, 2]


async def test_events_tell_of_each_version(api: Api) -> None:
    """The stream has no end: that of its policy is one."""
    await api.create_policy()
    reading = asyncio.create_task(api.http.client.get(EVENTS, params={"known_version": 0}))
    await api.grpc.call("Update", requests.update())
    await asyncio.sleep(0.1)
    del api.engine.known_policies[requests.POLICY]
    events = (await reading).text.strip().split("\n\n")
    names = [event.split("\n")[0] for event in events]
    assert names == ["event: weights", "event: error"]
    weights, error = (json.loads(event.split("data: ")[1]) for event in events)
    assert weights["version"] == 1
    assert error["error"]["code"] == "POLICY_NOT_FOUND"


async def test_no_policy_is_watched_in_vain(api: Api) -> None:
    answer = await api.http.client.get(EVENTS)
    assert (answer.status_code, http_error(answer).detail.code) == (404, "POLICY_NOT_FOUND")
    watch = PolicyServiceStub(api.grpc.channel).WatchWeights(
        service_pb2.WatchWeightsRequest(policy_id=requests.POLICY)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(watch))
    assert grpc_error(caught.value).detail.code == "POLICY_NOT_FOUND"
