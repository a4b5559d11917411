"""When to ask again, on both wires."""

from __future__ import annotations

import grpc.aio
import pytest

from ratoon.api.http.errors import error_response
from ratoon.errors import ErrorCode, RatoonError, exhausted
from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.api.conftest import Api


def _full() -> RatoonError:
    return exhausted("full", resource="disk", wanted=7, free=-1, limit=5, retry_after_s=12.2)


async def test_both_wires_say_when_to_ask_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse() -> None:
        raise _full()

    monkeypatch.setattr(api.engine, "policies", refuse)
    response = await api.http.client.get("/v1/policies")
    assert (response.status_code, response.headers["retry-after"]) == (429, "13")
    expected = {"resource": "disk", "wanted": "7", "free": "0", "limit": "5", "retry_after_s": "13"}
    assert response.json()["error"]["details"] == expected
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await PolicyServiceStub(api.grpc.channel).ListPolicies(service_pb2.ListPoliciesRequest())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("retry-after", "13") in tuple(caught.value.trailing_metadata() or ())


@pytest.mark.parametrize(
    ("code", "header"),
    [
        (ErrorCode.RESOURCE_EXHAUSTED, "1"),
        (ErrorCode.UNAVAILABLE, "1"),
        (ErrorCode.SEQ_GAP, None),
        (ErrorCode.BODY_TOO_LARGE, None),
    ],
)
def test_what_may_pass_elsewhere_names_no_time(code: ErrorCode, header: str | None) -> None:
    assert error_response(RatoonError(code, "no")).headers.get("retry-after") == header
