"""What HTTP alone has: ranges, events, framework errors, the OpenAPI document."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ratoon.api.http.files import PART, WHOLE, choose_range
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationState, Progress
from ratoon_proto.v1 import service_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import HTTP_ALONE, OTHER_ROUTES, ROUTES, SERVICE, http_error

FILE = bytes(range(256)) * 8
ETAG = f'"{xxhash.xxh3_128_hexdigest(FILE)}"'
URL = f"/v1/policies/{requests.POLICY}/weights/0/files/model.safetensors"


async def _get(api: Api, url: str = URL, **headers: str) -> httpx.Response:
    return await api.http.client.get(url, headers=headers)


async def test_a_file_is_pulled_by_ranges_of_serve(api: Api) -> None:
    """Trap 16: an answer never holds more than max_fetch_bytes, however much was asked for.

    Serve's response streams have no back-pressure: its proxy would hold what a stalled reader has
    not read. What the gateway sends from the file itself is in test_files_sent.
    """
    await api.create_policy()
    pieces: list[bytes] = []
    offset = 0
    while offset < len(FILE):
        response = await _get(api, Range=f"bytes={offset}-")
        assert response.status_code == 206
        stop = offset + len(response.content)
        assert response.headers["content-range"] == f"bytes {offset}-{stop - 1}/{len(FILE)}"
        assert response.headers["etag"] == ETAG
        assert 0 < len(response.content) <= api.limits.max_fetch_bytes
        pieces.append(response.content)
        offset = stop
    assert b"".join(pieces) == FILE
    assert len(pieces) == len(FILE) / api.limits.max_fetch_bytes


async def test_a_range_is_answered_with_its_bytes(api: Api) -> None:
    await api.create_policy()
    for header, start, stop in (
        ("bytes=0-0", 0, 1),
        ("bytes=5-9", 5, 10),
        ("bytes=2040-9999", 2040, 2048),
        ("bytes=-3", 2045, 2048),
    ):
        response = await _get(api, Range=header)
        assert (response.status_code, response.content) == (206, FILE[start:stop]), header
        assert response.headers["content-range"] == f"bytes {start}-{stop - 1}/2048"
    # Ranges outside the file, and the whole file, which is over the bound of Serve.
    for header in ("bytes=2048-", "bytes=9-3", "bytes=-0", f"bytes={10**19 - 1}-", ""):
        response = await _get(api, **({"Range": header} if header else {}))
        assert http_error(response).detail.code == "RANGE_NOT_SATISFIABLE", header
        assert response.status_code == 416
        assert response.headers["content-range"] == "bytes */2048"


async def test_a_small_file_comes_whole(api: Api) -> None:
    (api.weights / "config.json").write_bytes(b"{}")
    (api.weights / "additional_chat_templates").mkdir()
    (api.weights / "additional_chat_templates/rag.jinja").write_bytes(b"{{ x }}")
    await api.create_policy()
    within = await _get(
        api, URL.replace("model.safetensors", "additional_chat_templates/rag.jinja")
    )
    assert (within.status_code, within.content) == (200, b"{{ x }}")
    for name in ("additional_chat_templates/%2e%2e/config.json", "others/rag.jinja", "a//b"):
        refused = await _get(api, URL.replace("model.safetensors", name))
        assert http_error(refused).detail.field == "name", name
    url = URL.replace("model.safetensors", "config.json")
    response = await _get(api, url)
    assert (response.status_code, response.content) == (200, b"{}")
    assert response.headers["accept-ranges"] == "bytes"
    # Several ranges are not served; a range of another version is none.
    for headers in (
        {"Range": "bytes=0-0,1-1"},
        {"If-Range": '"older"', "Range": "bytes=1-"},
    ):
        whole = await _get(api, url, **headers)
        assert (whole.status_code, whole.content) == (200, b"{}"), headers


async def test_what_the_caller_has_is_not_sent_again(api: Api) -> None:
    await api.create_policy()
    for header in (ETAG, f'"other", W/{ETAG}', "*"):
        response = await _get(api, **{"If-None-Match": header})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == ETAG
    other = await _get(api, **{"If-None-Match": '"other"', "Range": "bytes=0-1"})
    assert other.status_code == 206


async def test_the_head_of_a_file_is_that_of_the_whole(api: Api) -> None:
    await api.create_policy()
    whole = await api.http.client.head(URL, headers={"Range": "bytes=0-1"})
    assert (whole.status_code, whole.content) == (200, b"")
    assert whole.headers["content-length"] == str(len(FILE))
    assert (whole.headers["etag"], whole.headers["accept-ranges"]) == (ETAG, "bytes")
    known = await api.http.client.head(URL, headers={"If-None-Match": ETAG})
    assert (known.status_code, known.headers["etag"]) == (304, ETAG)
    absent = await api.http.client.head(URL.replace("model", "absent"))
    assert absent.status_code == 404


async def test_a_file_that_is_gone_is_not_found(api: Api) -> None:
    await api.create_policy()
    for name, status, code in (
        ("absent", 404, "WEIGHTS_NOT_FOUND"),
        ("additional_chat_templates%2fabsent.jinja", 404, "WEIGHTS_NOT_FOUND"),
        ("..%2f..%2fetc%2fpasswd", 422, "INVALID_ARGUMENT"),
    ):
        response = await _get(api, URL.replace("model.safetensors", name))
        assert (response.status_code, http_error(response).detail.code) == (status, code), name


@given(
    size=st.integers(0, 50),
    first=st.one_of(st.none(), st.integers(0, 60)),
    last=st.one_of(st.none(), st.integers(0, 60)),
    most=st.integers(1, 60),
)
def test_ranges_agree_with_slices(
    size: int, first: int | None, last: int | None, most: int
) -> None:
    data = bytes(range(size))
    header = f"bytes={'' if first is None else first}-{'' if last is None else last}"
    if first is not None:
        wanted = data[first:] if last is None else data[first : last + 1]
    else:
        wanted = data if last is None else data[max(size - last, 0) :]
    try:
        choice = choose_range(
            range_header=header,
            if_range=None,
            if_none_match=None,
            size_bytes=size,
            digest="d",
            max_bytes=most,
        )
    except RatoonError as error:
        assert error.code is ErrorCode.RANGE_NOT_SATISFIABLE
        assert not wanted or (first is last is None and size > most)
        return
    if choice.status == PART:
        assert data[choice.start : choice.stop] == wanted[:most] != b""
    else:
        assert (choice.status, choice.start, choice.stop) == (WHOLE, 0, size)
        assert wanted == data


async def test_result_files_come_by_digest(api: Api) -> None:
    await api.create_policy()
    data = np.random.default_rng(1).bytes(1500)
    digest = api.engine.add_file(data)
    url = f"/v1/policies/{requests.POLICY}/files/{digest}"
    first = await api.http.client.get(url, params={"offset": 0, "length": 1024})
    rest = await api.http.client.get(url, params={"offset": 1024, "length": 1024})
    assert first.content + rest.content == data
    assert rest.headers["ratoon-chunk-digest"] == xxhash.xxh3_128_hexdigest(data[1024:])
    too_long = await api.http.client.get(url, params={"offset": 0, "length": 1025})
    assert http_error(too_long).detail.field == "length"


async def _events(api: Api, operation_id: str) -> list[tuple[str, dict[str, Any]]]:
    response = await api.http.client.get(f"/v1/operations/{operation_id}/events")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", response.text)
    return [(name, json.loads(data)) for name, data in found]


async def test_events_follow_an_operation_to_its_end(api: Api) -> None:
    await api.create_policy()
    api.engine.hold = True
    operation = await api.grpc.call("Update", requests.update())
    # The first request of an application builds its routes.
    await api.http.client.get("/v1/health")
    watching = asyncio.create_task(_events(api, operation.operation_id))
    await asyncio.sleep(0.05)
    running = api.engine.operations[operation.operation_id]
    progress = Progress(micro_batches_done=1, micro_batches_planned=4, tokens_per_second=10.0)
    await api.engine.set(replace(running, state=OperationState.RUNNING, progress=progress))
    await asyncio.sleep(0.4)
    await api.engine.release()
    events = await asyncio.wait_for(watching, 10)
    assert [name for name, _ in events] == ["operation"] * len(events)
    assert [data["state"] for _, data in events] == ["queued", "running", "done"]
    assert events[1][1]["progress"]["micro_batches_planned"] == 4
    last = events[-1][1]
    assert last["step"]["version"] == 1
    # Not finite: JSON has no number for it.
    assert last["step"]["report"]["ratio_max"] is None
    assert last["error"] is None


async def test_watching_nothing_is_an_ordinary_error(api: Api) -> None:
    response = await api.http.client.get("/v1/operations/absent/events")
    assert http_error(response).detail.code == "OPERATION_NOT_FOUND"
    assert response.status_code == 404


async def test_the_framework_answers_in_the_one_shape(api: Api) -> None:
    client = api.http.client
    policy_id = requests.POLICY
    cases = [
        (await client.get("/v1/nothing"), 404, "ROUTE_NOT_FOUND"),
        (await client.get("/v1/policies/"), 404, "ROUTE_NOT_FOUND"),
        (await client.patch("/v1/policies"), 405, "METHOD_NOT_ALLOWED"),
        (await client.get("/v1/operations/a?wait_s=nan"), 422, "INVALID_ARGUMENT"),
        (await client.get("/v1/operations/a?wait_s=-1"), 422, "INVALID_ARGUMENT"),
        (await client.get(f"/v1/policies/{policy_id}/weights/x"), 422, "INVALID_ARGUMENT"),
        (await client.get(f"/v1/policies/{policy_id}/weights/-1"), 422, "INVALID_ARGUMENT"),
        (await client.post("/v1/policies", content="a=b"), 400, "MALFORMED_BODY"),
        (await client.post("/v1/policies", json=[]), 422, "INVALID_ARGUMENT"),
    ]
    for response, status, code in cases:
        assert (response.status_code, http_error(response).detail.code) == (status, code)


async def test_a_tinker_script_is_told_the_setting_of_its_wire(api: Api) -> None:
    """Red before: "Not Found", of a wire that the service has."""
    response = await api.http.client.get("/api/v1/healthz")
    detail = http_error(response).detail
    assert (response.status_code, detail.code) == (404, "ROUTE_NOT_FOUND")
    assert "tinker.enabled" in detail.message


async def test_an_engine_that_is_away_makes_the_server_unwell(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> None:
        raise RatoonError(ErrorCode.UNAVAILABLE, "the engine does not answer")

    monkeypatch.setattr(api.engine, "check_well", away)
    response = await api.http.client.get("/v1/health")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert "does not answer" in http_error(response).detail.message
    health = await api.grpc.call("Health", service_pb2.HealthRequest())
    assert health.status == "engine: the engine does not answer"


async def test_metrics_are_the_engines(api: Api) -> None:
    response = await api.http.client.get("/metrics")
    assert response.content == await api.engine.metrics_text()
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_binary_json_arrays_are_base64(api: Api) -> None:
    await api.create_policy()
    tokens = np.array([4, 5], "<i4")
    tensor = {"dtype": "int32", "shape": [2], "data": base64.b64encode(tokens.tobytes()).decode()}
    body = {
        "seq": 1.0,
        "batch": {
            "groups": [
                {
                    "group_id": "g",
                    "prompt": [1],
                    "rollouts": [{"response": tensor, "sampler_logprobs": [-1, -2], "reward": 1}],
                }
            ]
        },
        "loss": {"kind": "grpo"},
        "optim": {"learning_rate": 1},
    }
    response = await api.http.client.post(f"/v1/policies/{requests.POLICY}/update", json=body)
    assert response.status_code == 202
    assert response.json()["seq"] == 1


async def test_openapi_names_the_calls_and_no_others(api: Api) -> None:
    document = (await api.http.client.get("/openapi.json")).json()
    named = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    mirrored = set(ROUTES.values()) | set(OTHER_ROUTES.values())
    assert named == mirrored | HTTP_ALONE
    assert {method.name for method in SERVICE.methods} == {*ROUTES, *OTHER_ROUTES}


async def test_openapi_examples_are_accepted(api: Api) -> None:
    """Every request body's example does what it shows."""
    document = (await api.http.client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    (spec,) = schemas["CreatePolicyRequest"]["examples"]
    created = await api.http.client.post("/v1/policies", json=spec)
    assert created.status_code == 202
    url = f"/v1/policies/{spec['spec']['policy_id']}"
    bodies = {
        "/update": "UpdateRequest",
        "/forward": "ForwardRequest",
        "/checkpoints": "SaveCheckpointRequest",
        "/checkpoints/after-warmup/load": "LoadCheckpointRequest",
        "/discard_gradients": "DiscardGradientsRequest",
        "/optim_step": "OptimStepRequest",
        "/weights": "ImportWeightsRequest",
    }
    for path, name in bodies.items():
        (body,) = schemas[name]["examples"]
        response = await api.http.client.post(f"{url}{path}", json=body)
        assert response.status_code == 202, (name, response.text)
    part = await api.http.client.put(
        f"{url}/uploads/batch-17/parts/0", json=schemas["UploadPartRequest"]["examples"][0]
    )
    assert part.status_code == 200


async def test_an_unknown_parameter_is_refused(api: Api) -> None:
    for method, path, known in (
        ("GET", "/v1/operations/p.1?wait=30", "one of wait_s"),
        ("GET", "/v1/operations/p.1/events?wait=30", "no parameter"),
        (
            "GET",
            f"/v1/policies/p/files/{'0' * 32}?offset=0&length=1&wait=30",
            "one of length, offset",
        ),
        ("POST", "/v1/operations/p.1/cancel?wait=30", "no parameter"),
        (
            "GET",
            "/v1/policies/p/weights/latest?wait=30",
            "one of delta_from, known_version, name, wait_s",
        ),
        ("GET", "/metrics?wait=30", "no parameter"),
    ):
        detail = http_error(await api.http.client.request(method, path)).detail
        assert (detail.code, detail.field, detail.got) == ("INVALID_ARGUMENT", "wait", "'30'")
        assert detail.expected == known, path
