"""More bytes or more of anything than is allowed, over both wires: refused, and nothing kept."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from tests.api import requests
from tests.api.conftest import MAX_BODY_BYTES, MAX_MESSAGE_BYTES, Api
from tests.api.wires import WireError, http_error


async def test_a_body_over_the_limit_is_refused(api: Api, wire_name: str) -> None:
    await api.create_policy()
    request = requests.update()
    request.batch.groups[0].group_id = "x" * (MAX_BODY_BYTES + 1)
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("Update", request)
    assert caught.value.detail.code == "BODY_TOO_LARGE"
    assert caught.value.status in (413, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert api.engine.log == []


async def test_a_message_over_the_transport_limit_is_refused(api: Api) -> None:
    await api.create_policy()
    request = requests.update()
    request.batch.groups[0].group_id = "x" * (MAX_MESSAGE_BYTES + 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await api.grpc.channel.unary_unary("/ratoon.v1.PolicyService/Update")(
            request.SerializeToString()
        )
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert api.engine.log == []


async def test_bytes_that_lie_about_their_number_are_counted(api: Api) -> None:
    """No Content-Length, or a smaller one: the body is counted as it comes."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 1024 + 1):
            yield b" " * 1024

    response = await api.http.client.post(
        f"/v1/policies/{requests.POLICY}/update",
        content=chunks(),
        headers={"Content-Type": "application/json"},
    )
    assert http_error(response).detail.code == "BODY_TOO_LARGE"
    assert response.status_code == 413


async def test_a_body_where_none_belongs_is_refused(api: Api) -> None:
    """Nobody read it: it was kept, without bound, until the answer."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}"

    for method, path in (
        ("GET", "/v1/policies"),
        ("GET", f"/v1/operations/{requests.POLICY}.1/events"),
        ("DELETE", f"/v1/policies/{requests.POLICY}"),
        ("GET", "/openapi.json"),
    ):
        for content in (chunks(), b"{}"):
            answer = await api.http.client.request(method, path, content=content)
            assert http_error(answer).detail.code == "MALFORMED_BODY", path
            assert "takes no body" in http_error(answer).detail.message


async def test_batches_over_the_counts_are_refused(api: Api, wire_name: str) -> None:
    await api.create_policy()
    too_many = requests.update(batch=requests.groups(api.limits.max_groups + 1))
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("Update", too_many)
    assert (caught.value.detail.code, caught.value.detail.field) == ("BODY_TOO_LARGE", "groups")
    assert api.engine.log == []
