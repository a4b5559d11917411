"""API keys at the gate: the table of scopes, both wires, what a refusal says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.message_factory import GetMessageClass

from ratoon.api.contract import call_name
from ratoon.api.gate import OF_NO_POLICY, build_gate, policy_of
from ratoon.api.http.access import call_of
from ratoon.api.http.app import create_app
from ratoon.auth.access import CALL_SCOPES
from ratoon.auth.keys import KeyFile, Scope
from ratoon.config import AuthConfig, RatoonConfig
from ratoon_proto.v1 import operation_pb2, service_pb2
from tests.api import requests
from tests.api.conftest import MAX_BODY_BYTES, Api
from tests.api.guarded import MESSAGE_BYTES, Guarded, refusal
from tests.api.wires import (
    HTTP_ALONE,
    OTHER_ROUTES,
    ROUTES,
    SERVICE,
    grpc_error,
    http_error,
)

MINE, OTHER, NOWHERE = requests.POLICY, "tiny-2", "tiny-3"
UNKNOWN_KEY = f"ratoon_{'0' * 12}_{'0' * 64}"


def _empty(rpc: str) -> Any:
    return GetMessageClass(SERVICE.methods_by_name[rpc].input_type)()


def test_every_rpc_has_a_row_and_no_row_is_for_nothing() -> None:
    rpcs = {call_name(method.name) for method in SERVICE.methods}
    others = {call for call in CALL_SCOPES if call.startswith("tinker_")}
    assert rpcs == set(CALL_SCOPES) - {"metrics", "api_document", "page"} - others
    assert [call for call, scope in CALL_SCOPES.items() if scope is None] == [
        "health",
        "api_document",
        "page",
        "tinker_health",
    ]


def test_every_request_names_its_policy_or_is_of_none() -> None:
    """A new call whose policy the gate cannot find would be closed to every key of some."""
    for method in SERVICE.methods:
        if call_name(method.name) in OF_NO_POLICY:
            continue
        request: Any = _empty(method.name)
        match method.name:
            case "CreatePolicy":
                request.spec.policy_id = MINE
            case "GetOperation" | "WatchOperation" | "CancelOperation":
                request.operation_id = f"{MINE}.17"
            case _:
                request.policy_id = MINE
        assert policy_of(request) == MINE


async def test_every_route_maps_to_a_row(guarded: Guarded) -> None:
    """Without a key each route but the free ones is refused: none is missing in the gate."""
    document = (await guarded.client.get("/openapi.json")).json()
    named = {(m.upper(), path) for path, ms in document["paths"].items() for m in ms}
    assert named == set(ROUTES.values()) | set(OTHER_ROUTES.values()) | HTTP_ALONE
    for method, path in sorted(named):
        url = path.replace("{version}", "0").replace("{part_index}", "0")
        response = await guarded.client.request(method, url.replace("{", "").replace("}", ""))
        if path == "/v1/health":
            assert response.status_code == 200
            continue
        assert response.status_code == 401, path
        assert method == "HEAD" or http_error(response).detail.code == "UNAUTHENTICATED", path
        assert response.headers["www-authenticate"] == "Bearer"
        operation = document["paths"][path][method.lower()]
        assert call_of(operation["operationId"]) in CALL_SCOPES
    for path in ("/docs", "/redoc", "/", "/page/main.js"):
        assert (await guarded.client.get(path)).status_code == 200
    assert (await guarded.client.get("/nowhere")).status_code == 404


async def test_every_rpc_is_refused_without_a_key(guarded: Guarded) -> None:
    for method in SERVICE.methods:
        # Any call may be made as a stream, of one answer.
        make: Any = guarded.channel.unary_stream(f"/{SERVICE.full_name}/{method.name}")
        call = anext(aiter(make(b"")))
        if method.name == "Health":
            assert service_pb2.HealthResponse.FromString(await call).status == "ok"
            continue
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert grpc_error(caught.value).status is grpc.StatusCode.UNAUTHENTICATED, method.name


async def test_a_stranger_is_refused_before_the_request_is_read(guarded: Guarded) -> None:
    """More than the server takes would be RESOURCE_EXHAUSTED where it was read."""
    call = guarded.channel.unary_unary(f"/{SERVICE.full_name}/Update")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(bytes(2 * MESSAGE_BYTES))
    assert grpc_error(caught.value).status is grpc.StatusCode.UNAUTHENTICATED
    body = bytes(2 * MAX_BODY_BYTES)
    response = await guarded.client.post(f"/v1/policies/{MINE}/update", content=body)
    assert http_error(response).detail.code == "UNAUTHENTICATED"


async def test_what_is_no_key_is_refused(guarded: Guarded) -> None:
    for text in (UNKNOWN_KEY, "x", "ratoon_", f"{UNKNOWN_KEY}0", "ratoon_ü", "Bearer", " "):
        headers = [(b"Authorization", f"Bearer {text}".encode())]
        response = await guarded.client.get("/v1/info", headers=headers)
        assert (response.status_code, http_error(response).detail.code) == (401, "UNAUTHENTICATED")
        assert text.strip() in ("", "x", "Bearer") or text not in response.text
        is_key = text == UNKNOWN_KEY
        said = "unknown, revoked" if is_key else "what came with the call is no API key"
        assert said in response.text
    assert "no API key came" in (await guarded.client.get("/v1/info")).text
    key = guarded.key(Scope.READ)
    for scheme, status in (("Bearer", 200), ("bEARER", 200), ("Basic", 401), ("", 401)):
        headers = {"Authorization": f"{scheme} {key}"}
        assert (await guarded.client.get("/v1/info", headers=headers)).status_code == status


async def test_a_scope_includes_those_before_it(api: Api, guarded: Guarded, wire_name: str) -> None:
    await api.create_policy()
    calls = (
        ("GetPolicy", service_pb2.GetPolicyRequest(policy_id=MINE)),
        ("Update", requests.update()),
        ("CreatePolicy", service_pb2.CreatePolicyRequest(spec=requests.spec(OTHER))),
    )
    denied = 403 if wire_name == "http" else grpc.StatusCode.PERMISSION_DENIED
    for scope, num_allowed in ((Scope.READ, 1), (Scope.TRAIN, 2)):
        wire = guarded.wire(wire_name, guarded.key(scope))
        for number, (rpc, request) in enumerate(calls):
            if number < num_allowed:
                await wire.call(rpc, request)
            else:
                assert (await refusal(wire, rpc, request))[:2] == ("PERMISSION_DENIED", denied)
    admin = guarded.wire(wire_name, guarded.key(Scope.ADMIN))
    await admin.call("GetPolicy", calls[0][1])
    await admin.call(*calls[2])


async def test_a_policy_of_others_is_refused_alike_whether_there_is_one(
    api: Api, guarded: Guarded, wire_name: str
) -> None:
    await api.create_policy()
    await api.create_policy(policy_id=OTHER)
    wire = guarded.wire(wire_name, guarded.key(Scope.ADMIN, (MINE,)))
    for rpc in ("GetPolicy", "DeletePolicy", "ListCheckpoints", "GetWeightManifest"):
        answers = set[tuple[str, int | grpc.StatusCode, str]]()
        for name in (OTHER, NOWHERE):
            request = _empty(rpc)
            request.policy_id = name
            answers.add(await refusal(wire, rpc, request))
        ((code, _, message),) = answers
        assert code == "PERMISSION_DENIED"
        assert OTHER not in message
    for name in (OTHER, NOWHERE):
        request = service_pb2.CreatePolicyRequest(spec=requests.spec(name))
        assert (await refusal(wire, "CreatePolicy", request))[0] == "PERMISSION_DENIED"
        await_it = service_pb2.GetOperationRequest(operation_id=f"{name}.1")
        assert (await refusal(wire, "GetOperation", await_it))[0] == "PERMISSION_DENIED"
        update = requests.update(policy_id=name)
        assert (await refusal(wire, "Update", update))[0] == "PERMISSION_DENIED"
    listed = await wire.call("ListPolicies", service_pb2.ListPoliciesRequest())
    assert [policy.spec.policy_id for policy in listed.policies] == [MINE]
    assert sorted(api.engine.known_policies) == [MINE, OTHER]


async def test_streams_and_files_of_others_are_refused(api: Api, guarded: Guarded) -> None:
    await api.create_policy()
    await api.create_policy(policy_id=OTHER)
    key = guarded.key(Scope.READ, (MINE,))
    headers = {"Authorization": f"Bearer {key}", "Range": "bytes=0-3"}
    for name, status in ((MINE, 206), (OTHER, 403), (NOWHERE, 403)):
        url = f"/v1/policies/{name}/weights/0/files/model.safetensors"
        assert (await guarded.client.get(url, headers=headers)).status_code == status
    events = f"/v1/operations/{OTHER}.1/events"
    assert (await guarded.client.get(events, headers=headers)).status_code == 403
    wire = guarded.wire("grpc", key)
    watch = wire.channel.unary_stream(  # pyright: ignore[reportAttributeAccessIssue]
        f"/{SERVICE.full_name}/WatchOperation",
        request_serializer=service_pb2.WatchOperationRequest.SerializeToString,
        response_deserializer=operation_pb2.Operation.FromString,
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(watch(service_pb2.WatchOperationRequest(operation_id=f"{OTHER}.1"))))
    assert grpc_error(caught.value).status is grpc.StatusCode.PERMISSION_DENIED


async def test_revoked_and_expired_keys_are_refused_at_once(
    guarded: Guarded, wire_name: str
) -> None:
    """No restart, and no second of grace: another process writes the file."""
    key = guarded.key(Scope.READ)
    wire = guarded.wire(wire_name, key)
    info = service_pb2.GetServerInfoRequest()
    await wire.call("GetServerInfo", info)
    KeyFile(guarded.root).revoke(key.split("_")[1], time.time())
    revoked = await refusal(wire, "GetServerInfo", info)
    late = guarded.wire(wire_name, guarded.key(Scope.READ, expires_at=time.time() - 1))
    unknown = guarded.wire(wire_name, UNKNOWN_KEY)
    wrong = guarded.wire(wire_name, f"{key[:-64]}{'0' * 64}")
    assert revoked[0] == "UNAUTHENTICATED"
    for other in (late, unknown, wrong):
        assert await refusal(other, "GetServerInfo", info) == revoked


async def test_a_file_of_keys_that_cannot_be_read_lets_nobody_in(
    guarded: Guarded, wire_name: str
) -> None:
    wire = guarded.wire(wire_name, guarded.key(Scope.ADMIN))
    (guarded.root / "access" / "keys.json").write_text('{"format": 1, "keys": [{}]}')
    code, _, message = await refusal(wire, "GetServerInfo", service_pb2.GetServerInfoRequest())
    assert (code, message) == ("UNAVAILABLE", "the API keys cannot be read")


async def test_metrics_follow_their_own_setting(api: Api, guarded: Guarded) -> None:
    statuses: list[int] = []
    for key in (guarded.key(Scope.READ), guarded.key(Scope.ADMIN, (MINE,))):
        headers = {"Authorization": f"Bearer {key}"}
        statuses.append((await guarded.client.get("/metrics", headers=headers)).status_code)
    assert statuses == [200, 403]
    config = RatoonConfig(data_root=guarded.root, auth=AuthConfig(required=True, metrics="free"))
    app = create_app(api.service, api.limits, gate=build_gate(config))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/v1/info")).status_code == 401


async def test_without_keys_other_machines_are_refused(api: Api, tmp_path: Path) -> None:
    """Under `serve deploy` Serve's port may listen on all interfaces whatever is configured."""
    gate = build_gate(RatoonConfig(data_root=tmp_path / "data"))
    app = create_app(api.service, api.limits, gate=gate)
    answers: dict[str, int] = {}
    for host in ("127.0.0.1", "::1", "10.0.0.7", "", "localhost.example"):
        transport = httpx.ASGITransport(app, client=(host, 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers[host] = (await client.get("/v1/info")).status_code
            assert (await client.get("/v1/health")).status_code == 200
    assert answers == {
        "127.0.0.1": 200,
        "::1": 200,
        "10.0.0.7": 401,
        "": 401,
        "localhost.example": 401,
    }
