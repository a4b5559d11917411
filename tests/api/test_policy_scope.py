"""A key of some policies and a request about another: 403 before anything else is said of it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import grpc.aio
import pytest

from ratoon.auth import audit
from ratoon.auth.keys import Scope
from ratoon_proto.v1 import policy_pb2, service_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.guarded import Guarded
from tests.api.wires import HTTP_ALONE, OTHER_ROUTES, ROUTES, SERVICE, grpc_error, http_error

MINE, OTHER, NOWHERE = requests.POLICY, "tiny-2", "tiny-3"
DENIED = ("PERMISSION_DENIED", "the API key does not allow this call")
# Routes about one policy.
PATHS = sorted(
    (method, path)
    for method, path in {*ROUTES.values(), *OTHER_ROUTES.values(), *HTTP_ALONE}
    if "{policy_id}" in path or "{operation_id}" in path
)
# Every number and digest of these is wrong, and so are the parameters.
WRONG = "?wait=now&offset=-1&length=0&known_version=x&bogus=1"


def _url(path: str, policy_id: str) -> str:
    path = path.replace("{policy_id}", policy_id).replace("{operation_id}", f"{policy_id}.x y")
    return re.sub(r"\{\w+\}", "-1", path) + WRONG


async def _unread() -> AsyncIterator[bytes]:
    pytest.fail("the body was read")
    yield b""


@pytest.fixture
async def key(api: Api, guarded: Guarded) -> str:
    """For `MINE` alone, beside a policy that there is."""
    await api.create_policy()
    await api.create_policy(policy_id=OTHER)
    return guarded.key(Scope.ADMIN, (MINE,), reads_rollouts=True)


async def test_the_path_is_judged_before_parameters_and_body(
    guarded: Guarded, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were parsed first: a bad one was a 422, which says more than the key may know."""
    # A host's refusals beyond these are only counted.
    monkeypatch.setattr(audit, "REFUSALS_A_MINUTE", 10 * len(PATHS))
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for method, path in PATHS:
        has_body = method in ("POST", "PUT")
        for name in (OTHER, NOWHERE, "No Id"):
            response = await guarded.client.request(
                method,
                _url(path, name),
                headers=headers,
                content=_unread() if has_body else None,
            )
            assert response.status_code == 403, path
            if method != "HEAD":
                detail = http_error(response).detail
                assert (detail.code, detail.message) == DENIED
        mine = await guarded.client.request(
            method, _url(path, MINE), headers=headers, content=b"{" if has_body else None
        )
        assert mine.status_code in (400, 422), path
    refused = [line for line in guarded.audit() if line["outcome"] == "PERMISSION_DENIED"]
    assert [line["policy_id"] for line in refused] == [OTHER, NOWHERE, "?"] * len(PATHS)


BAD_SPECS = [
    '{"spec": {"policy_id": "%s", "bogus": 1}}',
    '{"bogus": 1, "spec": {"policy_id": "%s", "preset": 7}}',
    '{"spec": {"policy_id": "%s", "preset": "tiny", "model_folder": "real"}}',
    '{"spec": {"policy_id": "%s", "preset": "no such preset"}}',
]


async def test_a_policy_in_a_bad_body_is_judged_first(guarded: Guarded, key: str) -> None:
    for content_type, bad in (("application/json", 422), ("text/plain", 400)):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": content_type}
        for body, (name, status) in product(BAD_SPECS, ((OTHER, 403), (NOWHERE, 403), (MINE, bad))):
            response = await guarded.client.post(
                "/v1/policies", headers=headers, content=body % name
            )
            assert response.status_code == status, body
            if status == 403:
                detail = http_error(response).detail
                assert (detail.code, detail.message) == DENIED
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    # A body that names no policy is refused for what it is.
    for body in ("", "{", "[]", "{}", '{"spec": 3}', '{"spec": {"policy_id": 3}}'):
        response = await guarded.client.post("/v1/policies", headers=headers, content=body)
        assert response.status_code in (400, 422), body


def _named(rpc: str, name: str) -> Any:
    """A request of `rpc` about the policy."""
    request: Any = getattr(service_pb2, SERVICE.methods_by_name[rpc].input_type.name)()
    fields = request.DESCRIPTOR.fields_by_name
    if "spec" in fields:
        request.spec.CopyFrom(policy_pb2.PolicySpec(policy_id=name, preset="tiny"))
    elif "operation_id" in fields:
        request.operation_id = f"{name}.1"
    else:
        request.policy_id = name
    return request


async def _refused(guarded: Guarded, key: str, rpc: str, data: bytes) -> tuple[str, str]:
    method = SERVICE.methods_by_name[rpc]
    make = guarded.channel.unary_stream if method.server_streaming else guarded.channel.unary_unary
    metadata = (("authorization", f"Bearer {key}"),)
    call: Any = make(f"/{SERVICE.full_name}/{rpc}")(data, metadata=metadata)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (anext(aiter(call)) if method.server_streaming else call)
    detail = grpc_error(caught.value).detail
    return detail.code, detail.message


ABOUT_ONE = [
    method.name
    for method in SERVICE.methods
    if {"policy_id", "operation_id", "spec"} & set(method.input_type.fields_by_name)
]


async def test_damaged_bytes_are_judged_by_the_policy_that_they_name(
    guarded: Guarded, key: str
) -> None:
    """They were MALFORMED_BODY, whoever's policy they were about."""
    for rpc, damage in product(ABOUT_ONE, (b"\xff", b"\x0a\x7f", b"\xf2\xff\x7f\x05ab")):
        for name in (OTHER, NOWHERE):
            data = _named(rpc, name).SerializeToString() + damage
            assert await _refused(guarded, key, rpc, data) == DENIED, (rpc, damage)
        data = _named(rpc, MINE).SerializeToString() + damage
        assert (await _refused(guarded, key, rpc, data))[0] == "MALFORMED_BODY", (rpc, damage)
        assert (await _refused(guarded, key, rpc, damage))[0] == "MALFORMED_BODY", (rpc, damage)


async def test_a_policy_of_another_ones_checkpoint_is_denied(
    api: Api, guarded: Guarded, key: str
) -> None:
    """A key that is not for the source would read its weights in the policy that it makes."""
    num_policies = len(api.engine.known_policies)
    for name in (OTHER, NOWHERE, "No Id"):
        request = _named("CreatePolicy", MINE)
        request.spec.from_checkpoint.policy_id = name
        request.spec.from_checkpoint.checkpoint_id = "sft"
        data = request.SerializeToString()
        assert await _refused(guarded, key, "CreatePolicy", data) == DENIED
        response = await guarded.client.post(
            "/v1/policies",
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
            json={
                "spec": {
                    "policy_id": MINE,
                    "preset": "tiny",
                    "from_checkpoint": {"policy_id": name, "checkpoint_id": "sft"},
                }
            },
        )
        detail = http_error(response).detail
        assert (detail.code, detail.message) == DENIED
    assert len(api.engine.known_policies) == num_policies


async def test_too_much_for_a_policy_of_others_is_denied(guarded: Guarded, key: str) -> None:
    """The number of groups was judged first."""
    for name, code in ((OTHER, DENIED[0]), (NOWHERE, DENIED[0]), (MINE, "BODY_TOO_LARGE")):
        request = requests.update(batch=requests.groups(9), policy_id=name)
        assert (await _refused(guarded, key, "Update", request.SerializeToString()))[0] == code


async def test_a_spec_that_is_cut_is_judged_by_its_name(guarded: Guarded, key: str) -> None:
    for name, code in ((OTHER, DENIED[0]), (MINE, "MALFORMED_BODY")):
        data = _named("CreatePolicy", name).SerializeToString()[:-1]
        assert (await _refused(guarded, key, "CreatePolicy", data))[0] == code


async def test_a_teacher_is_a_policy_that_the_key_is_for(guarded: Guarded, key: str) -> None:
    for term in ("distillation", "kl"):
        for name in (OTHER, NOWHERE):
            request = requests.update()
            getattr(request.loss, term).teachers.add(policy_id=name)
            assert await _refused(guarded, key, "Update", request.SerializeToString()) == DENIED
            asked = service_pb2.ForwardBackwardRequest(
                policy_id=MINE, key=request.key, batch=request.batch, loss=request.loss
            )
            data = asked.SerializeToString()
            assert await _refused(guarded, key, "ForwardBackward", data) == DENIED
