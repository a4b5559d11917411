"""The real service over all its wires: one policy, trained through each of them in turn."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import grpc.aio
import httpx
import numpy as np
import pytest
import xxhash
from safetensors import safe_open

from harness.attacks import http as attacks
from harness.attacks.http import Target
from ratoon_client import (
    ForwardResult,
    Loss,
    Optim,
    Publish,
    PulledWeights,
    RatoonApiError,
    RatoonClient,
    group,
    rollout,
)
from ratoon_client.wire import group_messages
from ratoon_proto.v1 import operation_pb2, service_pb2, training_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.api import requests
from tests.api.wires import GrpcWire, HttpWire, WireError, grpc_error, http_error
from tests.e2e.conftest import WIRES, Wires, finished, next_seq
from tests.running_service import MAX_BODY_BYTES, MAX_MESSAGE_BYTES, MIB, Service
from tests.tiny_models import write_folder

pytestmark = pytest.mark.e2e
POLICY = "e2e"


@pytest.fixture(scope="module")
def policy(tiny_policy: Callable[[str], str]) -> str:
    return tiny_policy(POLICY)


@pytest.mark.parametrize("wire_name", WIRES)
async def test_an_update_over_each_wire_makes_a_version(
    wires: Wires, policy: str, wire_name: str
) -> None:
    wire = wires.named(wire_name)
    seq = await next_seq(wires, policy)
    request = requests.update(seq=seq, policy_id=policy)
    operation = await finished(wire, await wire.call("Update", request))
    assert operation.seq == seq
    assert operation.step.version == seq
    report = operation.step.report
    assert (report.num_groups, report.num_sequences, report.trained_tokens) == (2, 4, 6)
    # The two prompts of 3 tokens are one, and so are the first tokens of the long responses, and
    # the two short responses.
    assert (report.unshared_tokens, report.packed_tokens) == (18, 7)
    assert report.grad_norm > 0
    assert not report.skipped
    for other in map(wires.named, WIRES):
        retried = await other.call("Update", request)
        assert retried.operation_id == operation.operation_id
    assert await next_seq(wires, policy) == seq + 1


@pytest.fixture(scope="module")
def routed_policy(service: Service) -> str:
    """Two layers of four experts, two of a token."""
    assert service.config.models_root is not None
    write_folder(service.config.models_root / "experts", "qwen3_moe")
    spec = requests.spec("experts")
    spec.model_folder = "experts"

    async def create() -> None:
        async with grpc.aio.insecure_channel(service.addresses.grpc) as channel:
            wire = GrpcWire(channel=channel)
            request = service_pb2.CreatePolicyRequest(spec=spec)
            await finished(wire, await wire.call("CreatePolicy", request))

    asyncio.run(create())
    return "experts"


@pytest.mark.parametrize("wire_name", ["gateway", "http"])
async def test_recorded_routes_are_replayed_over_each_wire(
    wires: Wires, routed_policy: str, wire_name: str
) -> None:
    """Two rollouts share all but where one of them was sent elsewhere; a retry has to agree."""
    wire = wires.named(wire_name)
    routes = np.zeros((5, 2, 2), np.uint16)
    routes[:, :, 1] = 3
    other = routes.copy()
    other[2, 1] = [1, 2]
    rollouts = [
        rollout(response=[4, 5, 6], reward=reward, routed_experts=rows)
        for reward, rows in ((1.0, routes), (0.0, other), (0.25, routes[:, :, ::-1]))
    ]
    batch = group_messages([group("g", [1, 2, 3], rollouts)])
    seq = await next_seq(wires, routed_policy)
    request = requests.update(seq=seq, policy_id=routed_policy, batch=batch)
    request.loss.kind = training_pb2.LOSS_KIND_REINFORCE
    operation = await finished(wire, await wire.call("Update", request))
    report = operation.step.report
    assert (report.unshared_tokens, report.packed_tokens) == (18, 10)
    assert report.route_conflicts == 4
    assert 0 < report.route_mismatch <= 1
    assert (await wire.call("Update", request)).operation_id == operation.operation_id
    first = request.batch.groups[0].rollouts[0].routed_experts
    first.data = other.astype(np.uint8).tobytes()
    with pytest.raises(WireError, match="KEY_REUSED"):
        await wire.call("Update", request)
    first.data = np.full(routes.shape, 7, np.uint8).tobytes()
    with pytest.raises(WireError, match=r"rollouts\[0\].routed_experts\[0\]\[0\]\[0\]"):
        await wire.call("Update", request)


async def test_weights_are_pulled_over_both_wires_alike(
    wires: Wires, policy: str, tmp_path: Path
) -> None:
    request = service_pb2.GetWeightManifestRequest(policy_id=policy)
    manifest = await wires.gateway.call("GetWeightManifest", request)
    assert await wires.http.call("GetWeightManifest", request) == manifest
    names = {file.name for file in manifest.files}
    assert {"config.json", "model.safetensors"} <= names
    for file in manifest.files:
        by_grpc, by_http = b"", b""
        while len(by_grpc) < file.size_bytes:
            fetch = service_pb2.FetchWeightsRequest(
                policy_id=policy, digest=file.digest, offset=len(by_grpc), length=MIB
            )
            chunk = await wires.gateway.call("FetchWeights", fetch)
            assert xxhash.xxh3_128_hexdigest(chunk.data) == chunk.digest
            by_grpc += chunk.data
        url = f"/v1/policies/{policy}/weights/{manifest.version}/files/{file.name}"
        while len(by_http) < file.size_bytes:
            # The gateway's come from the file, Serve's through a replica's memory.
            edge = wires.http if len(by_http) % (2 * MIB) else wires.serve_http
            part = await edge.client.get(url, headers={"Range": f"bytes={len(by_http)}-"})
            assert part.headers["etag"] == f'"{file.digest}"'
            by_http += part.content
        assert xxhash.xxh3_128_hexdigest(by_grpc) == file.digest
        assert by_http == by_grpc
        assert (await wires.http.client.get(url)).content == by_grpc
        (tmp_path / file.name).write_bytes(by_grpc)
    config = json.loads((tmp_path / "config.json").read_text())
    with safe_open(tmp_path / "model.safetensors", framework="np") as tensors:
        embedding = tensors.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [config["vocab_size"], config["hidden_size"]]


def test_what_changed_is_pulled_as_a_delta_over_both_wires(
    service: Service, tmp_path: Path
) -> None:
    groups = [
        group(
            "a", [1, 2], [rollout(response=[n], sampler_logprobs=[-5.5], reward=n) for n in (3, 4)]
        )
    ]
    with (
        RatoonClient(service.addresses.grpc) as by_grpc,
        RatoonClient(service.addresses.http) as by_http,
    ):
        publish = Publish("every", deltas=True)
        created = by_grpc.create_policy(
            "e2e-deltas", preset="tiny", dtype="bfloat16", publish=publish, keep_versions=3
        )
        assert created.result().spec.publish.deltas
        try:
            session = by_grpc.policy("e2e-deltas")
            for client, name in ((by_grpc, "grpc"), (by_http, "http")):
                client.pull_weights("e2e-deltas", tmp_path / name)
            for _ in range(2):
                optim = Optim(learning_rate=1e-5)
                session.update(groups, loss=Loss("grpo"), optim=optim).result()
            newest = by_http.weight_manifest("e2e-deltas")
            assert newest.changed_share is not None
            assert 0 < newest.changed_share < 0.5
            whole = by_http.pull_weights("e2e-deltas", tmp_path / "whole")
            for client, name in ((by_grpc, "grpc"), (by_http, "http")):
                pulled = client.pull_weights("e2e-deltas", tmp_path / name)
                assert (pulled.version, pulled.parent_version) == (2, 0)
                assert pulled.fetched_bytes < whole.fetched_bytes / 2
                for file in whole.manifest.files:
                    path = pulled.folder / file.name
                    assert path.read_bytes() == (whole.folder / file.name).read_bytes()
        finally:
            by_grpc.delete_policy("e2e-deltas").result()


async def test_errors_have_their_trailer_over_grpc(wires: Wires, policy: str) -> None:
    wire = wires.gateway
    bad = requests.update(seq=await next_seq(wires, policy), policy_id=policy)
    bad.batch.groups[1].rollouts[0].sampler_logprobs.CopyFrom(requests.floats([-1.0]))
    with pytest.raises(WireError) as caught:
        await wire.call("Update", bad)
    assert caught.value.status == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.detail.field == "groups[1].rollouts[0].sampler_logprobs"
    assert "1 values for 2 response tokens" in caught.value.detail.message

    stub = PolicyServiceStub(wire.channel)
    watch = stub.WatchOperation(service_pb2.WatchOperationRequest(operation_id="e2e.absent"))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await _drained(watch)
    assert grpc_error(failed.value).detail.code == "OPERATION_NOT_FOUND"

    update = wire.channel.unary_unary("/ratoon.v1.PolicyService/Update")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await update(b"\xff\xff\xff")
    assert grpc_error(failed.value).detail.code == "MALFORMED_BODY"
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await update(b"\x0a" + b"\xff" * MAX_MESSAGE_BYTES)
    assert failed.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await next_seq(wires, policy) == bad.key.seq


async def _drained(watch: AsyncIterable[operation_pb2.Operation]) -> None:
    """On Serve's port one empty message comes before the status."""
    async for message in watch:
        assert message == operation_pb2.Operation()


@pytest.mark.parametrize("wire_name", WIRES)
async def test_a_body_over_the_limit_is_refused_and_the_service_lives(
    wires: Wires, policy: str, wire_name: str
) -> None:
    wire = wires.named(wire_name)
    request = requests.update(seq=await next_seq(wires, policy), policy_id=policy)
    request.batch.groups[0].group_id = "x" * (MAX_BODY_BYTES + 1)
    with pytest.raises(WireError) as caught:
        await wire.call("Update", request)
    assert caught.value.detail.code == "BODY_TOO_LARGE"
    assert (await wire.call("Health", service_pb2.HealthRequest())).status == "ok"
    assert await next_seq(wires, policy) == request.key.seq


def test_a_version_that_was_pulled_is_imported_bit_for_bit(service: Service, policy: str) -> None:
    """Train on, import it: its log-probs are there again, over both wires."""
    sampled = rollout(response=[52, 53], sampler_logprobs=[-5.0, -5.5], reward=1.0)
    other = rollout(response=[54], sampler_logprobs=[-5.2], reward=0.0)
    groups, optim = [group("g", [50, 43], [sampled, other])], Optim(learning_rate=1e-2)
    for target in (service.addresses.grpc, service.addresses.http):
        with RatoonClient(target) as client:
            session = client.policy(policy)
            pulled = client.pull_weights(policy, service.config.models_folder / "kept")
            then = client.forward(policy, groups).result()
            assert then.version == pulled.version
            stepped = session.update(groups, loss=Loss("grpo"), optim=optim).result()
            moved = client.forward(policy, groups).result()
            assert _bits(moved) != _bits(then)
            imported = session.import_weights(
                f"kept/version-{pulled.version}", expected_version=stepped.version
            ).result()
            assert (imported.version, imported.dtypes) == (stepped.version + 1, ("F32",))
            now = client.forward(policy, groups).result()
            assert (now.version, _bits(now)) == (imported.version, _bits(then))
            again = client.pull_weights(policy, service.config.models_folder / "kept")
            assert again.version == imported.version
            assert _digests(again) == _digests(pulled)
            seq = session.next_seq()
            for refused in ("kept", "../data", "none"):
                # A folder of folders is a folder, without weights: it fails at its turn.
                with pytest.raises(RatoonApiError, match="model_folder") as caught:
                    session.import_weights(refused).result()
                assert caught.value.code == "INVALID_ARGUMENT"
            assert session.next_seq() == seq + 1
            assert client.get_policy(policy).version == imported.version


def _bits(result: ForwardResult) -> list[bytes]:
    return [array.tobytes() for array in result.logprobs]


def _digests(pulled: PulledWeights) -> dict[str, str]:
    return {file.name: file.digest for file in pulled.manifest.files}


async def test_a_watched_update_ends_on_every_wire(wires: Wires, policy: str) -> None:
    seq = await next_seq(wires, policy)
    blocked = await wires.gateway.call("Update", requests.update(seq=seq + 1, policy_id=policy))
    assert blocked.blocked_by_seq == seq
    request = service_pb2.WatchOperationRequest(operation_id=blocked.operation_id)

    async def by_grpc(wire: GrpcWire) -> list[int]:
        stream = PolicyServiceStub(wire.channel).WatchOperation(request)
        return [operation.state async for operation in stream]

    async def by_events(wire: HttpWire) -> list[str]:
        url = f"/v1/operations/{blocked.operation_id}/events"
        text = (await wire.client.get(url)).text
        return [json.loads(data)["state"] for data in re.findall(r"data: (.*)", text)]

    watchers = [
        asyncio.create_task(by_grpc(wires.gateway)),
        asyncio.create_task(by_events(wires.http)),
        asyncio.create_task(by_events(wires.serve_http)),
    ]
    await asyncio.sleep(0.5)
    await wires.http.call("Update", requests.update(seq=seq, policy_id=policy))
    states, *events = await asyncio.wait_for(asyncio.gather(*watchers), 60)
    queued, done = operation_pb2.OPERATION_STATE_QUEUED, operation_pb2.OPERATION_STATE_DONE
    assert (states[0], states[-1]) == (queued, done)
    assert [(names[0], names[-1]) for names in events] == [("queued", "done")] * 2


@pytest.mark.parametrize("wire_name", WIRES)
async def test_a_gap_that_outlasts_the_wait_names_the_missing_seq(
    wires: Wires, policy: str, wire_name: str
) -> None:
    wire = wires.named(wire_name)
    seq = await next_seq(wires, policy)
    late = await wire.call("Update", requests.update(seq=seq + 1, policy_id=policy))
    request = service_pb2.GetOperationRequest(operation_id=late.operation_id, wait_s=20)
    with pytest.raises(WireError) as caught:
        await wire.call("GetOperation", request)
    assert (caught.value.detail.code, caught.value.detail.retryable) == ("SEQ_GAP", True)
    assert caught.value.detail.details["missing_seq"] == str(seq)
    await wire.call("Update", requests.update(seq=seq, policy_id=policy))
    assert (await finished(wire, late)).step.version > 0


@pytest.mark.parametrize("wire_name", ["http", "serve_http"])
async def test_a_caller_that_leaves_does_not_take_its_update_along(
    wires: Wires, policy: str, wire_name: str
) -> None:
    """Trap 15: Serve cancels a handler when its caller leaves."""
    wire = wires.named(wire_name)
    seq = await next_seq(wires, policy)
    call = asyncio.create_task(wire.call("Update", requests.update(seq=seq, policy_id=policy)))
    poll = asyncio.create_task(
        wire.call(
            "GetOperation",
            service_pb2.GetOperationRequest(operation_id=(await call).operation_id, wait_s=30),
        )
    )
    await asyncio.sleep(0.01)
    poll.cancel()
    await asyncio.gather(poll, return_exceptions=True)
    operation = await finished(wires.gateway, call.result())
    assert operation.seq == seq


async def test_unknown_routes_have_the_one_shape(wires: Wires) -> None:
    for wire in (wires.http, wires.serve_http):
        response = await wire.client.get("/v1/nothing")
        assert http_error(response).detail.code == "ROUTE_NOT_FOUND"
        assert response.status_code == 404


def test_without_keys_a_rebound_name_is_refused(service: Service) -> None:
    headers = {"Host": "evil.example"}
    for address in (service.addresses.http, service.addresses.serve_http):
        url = f"{address}/v1/policies"
        assert httpx.get(url, headers=headers, trust_env=False, timeout=30).status_code == 403
        assert httpx.get(url, trust_env=False, timeout=30).status_code == 200


async def test_the_gateway_keeps_neither_headers_nor_bodies_that_nobody_reads(
    service: Service,
) -> None:
    """Serve's proxy, which was there, read a GET's chunked body into memory until the answer."""
    url = urlsplit(service.addresses.http)
    assert url.hostname is not None
    assert url.port is not None
    target = Target(host=url.hostname, port=url.port)
    body = await target.connect()
    path = f"/v1/operations/{POLICY}.1/events"
    await body.send(attacks.head("GET", path, "Transfer-Encoding: chunked") + b"2\r\n{}\r\n")
    assert await body.answer() == 400
    headers = await target.connect()
    await headers.send(attacks.head("GET", "/v1/health", *["a: b"] * 101))
    assert await headers.answer() == 400
    assert await attacks.endless_header(target, 16 * MIB) < 8 * MIB
    for connection in (body, headers):
        connection.close()
