"""Bodies that are no messages, or not quite: refused with the place, nothing applied."""

from __future__ import annotations

import json
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import grpc_error, http_error


@pytest.mark.parametrize(
    "body",
    [b"{", b"", b"\xff\xfe", b"nonsense", b"[" * 10_000, b'{"seq": 1e}', b"\x00"],
    ids=["cut", "empty", "no UTF-8", "a word", "deep", "half a number", "zero byte"],
)
async def test_malformed_json_is_refused(api: Api, body: bytes) -> None:
    await api.create_policy()
    response = await api.http.client.post(
        f"/v1/policies/{requests.POLICY}/update",
        content=body,
        headers={"Content-Type": "application/json"},
    )
    error = http_error(response)
    expected = ("INVALID_ARGUMENT", 422) if body == b"" else ("MALFORMED_BODY", 400)
    assert (error.detail.code, response.status_code) == expected
    assert api.engine.log == []


@pytest.mark.parametrize(
    "content_type",
    ["application/x-www-form-urlencoded", "text/json", "json", "application/", "", None],
)
@pytest.mark.parametrize("path", ["/v1/policies", f"/v1/policies/{requests.POLICY}/update"])
async def test_a_body_that_is_not_sent_as_json_is_refused(
    api: Api, path: str, content_type: str | None
) -> None:
    """As curl's `-d` sends it."""
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = await api.http.client.post(path, content=b"{}", headers=headers)
    error = http_error(response)
    assert (error.detail.code, response.status_code) == ("MALFORMED_BODY", 400)
    assert error.detail.field == "Content-Type"
    assert error.detail.got == (f"'{content_type}'" if content_type else "nothing")


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
async def test_json_has_several_names(api: Api, content_type: str) -> None:
    response = await api.http.client.post(
        "/v1/policies", content=b"{}", headers={"Content-Type": content_type}
    )
    assert http_error(response).detail.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("rpc", ["Update", "WatchOperation", "FetchWeights"])
async def test_malformed_bytes_are_refused(api: Api, rpc: str) -> None:
    """gRPC's own answer would be INTERNAL, without the error's detail."""
    method = f"/ratoon.v1.PolicyService/{rpc}"
    is_stream = rpc == "WatchOperation"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (
            anext(aiter(api.grpc.channel.unary_stream(method)(b"\xff\xff\xff")))
            if is_stream
            else api.grpc.channel.unary_unary(method)(b"\xff\xff\xff")
        )
    error = grpc_error(caught.value)
    assert (error.detail.code, error.status) == (
        "MALFORMED_BODY",
        grpc.StatusCode.INVALID_ARGUMENT,
    )


STRICT_JSON: dict[str, tuple[dict[str, Any], str]] = {
    "seq as text": ({"seq": "1"}, "seq"),
    "seq as true": ({"seq": True}, "seq"),
    "seq with a fraction": ({"seq": 1.5}, "seq"),
    "seq over 64 bits": ({"seq": 2**63}, "seq"),
    "an unknown field": ({"sequence": 1}, "sequence"),
    "both keys": ({"request_id": "x"}, "request_id"),
    "both sources": ({"upload": {"upload_id": "x", "num_parts": 1}}, "upload"),
    "an unknown loss": ({"loss": {"kind": "GRPO"}}, "loss.kind"),
    "a number as text": ({"optim": {"learning_rate": "1e-3"}}, "optim.learning_rate"),
    "no learning rate": ({"optim": {}}, "optim.learning_rate"),
    "null for a body": ({"loss": None}, "loss"),
    "two overlong rules": (
        {
            "loss": {
                "kind": "dapo",
                "overlong_filter": {},
                "overlong_penalty": {"max_tokens": 4, "buffer_tokens": 2, "scale": 1},
            }
        },
        "loss.overlong_penalty",
    ),
}


@pytest.mark.parametrize("case", STRICT_JSON)
async def test_json_is_taken_literally(api: Api, case: str) -> None:
    await api.create_policy()
    changes, field = STRICT_JSON[case]
    good = {
        "seq": 1,
        "batch": {"groups": [{"group_id": "g", "prompt": [1], "rollouts": [ROLLOUT]}]},
        "loss": {"kind": "grpo"},
        "optim": {"learning_rate": 1e-3},
    }
    await _refused(api, {**good, **changes}, field)


ROLLOUT = {"response": [1, 2], "sampler_logprobs": [-1, -2.5], "reward": 1}
STRICT_ROLLOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "true among tokens": ({"response": [1, True]}, "response[1]"),
    "text among tokens": ({"response": ["1", 2]}, "response[0]"),
    "a fraction among tokens": ({"response": [1, 2.5]}, "response[1]"),
    "a token over 32 bits": ({"response": [1, 2**40]}, "response[1]"),
    "a token over 64 bits": ({"response": [1, 2**70]}, "response[1]"),
    "null among log-probs": ({"sampler_logprobs": [-1, None]}, "sampler_logprobs[1]"),
    "numbers in a mask": ({"loss_mask": [1, 0]}, "loss_mask[0]"),
    "an unknown dtype": (
        {"response": {"dtype": "int8", "shape": [2], "data": "AAA="}},
        "response.dtype",
    ),
    "data that is no base64": (
        {"response": {"dtype": "int32", "shape": [2], "data": "%%%"}},
        "response.data",
    ),
    "a shape below zero": (
        {"response": {"dtype": "int32", "shape": [-2], "data": ""}},
        "response.shape[0]",
    ),
    "both response and segments": (
        {"segments": [{"tokens": [1], "trained": True}]},
        "segments",
    ),
    "both reward and advantages": ({"advantages": [1, 2]}, "advantages"),
    "an infinite reward": ({"reward": float("inf")}, "reward"),
    "truncated as text": ({"truncated": "yes"}, "truncated"),
}


@pytest.mark.parametrize("case", STRICT_ROLLOUTS)
async def test_json_rollouts_are_taken_literally(api: Api, case: str) -> None:
    await api.create_policy()
    changes, field = STRICT_ROLLOUTS[case]
    body = {
        "seq": 1,
        "batch": {
            "groups": [
                {"group_id": "g", "prompt": [1], "rollouts": [ROLLOUT, {**ROLLOUT, **changes}]}
            ]
        },
        "loss": {"kind": "grpo"},
        "optim": {"learning_rate": 1e-3},
    }
    await _refused(api, body, f"groups[0].rollouts[1].{field}")


async def _refused(api: Api, body: dict[str, Any], field: str) -> None:
    response = await api.http.client.post(
        f"/v1/policies/{requests.POLICY}/update",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    error = http_error(response)
    assert (error.detail.code, response.status_code) == ("INVALID_ARGUMENT", 422)
    assert error.detail.field == field, error.detail
    assert api.engine.log == []
