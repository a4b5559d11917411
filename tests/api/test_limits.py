"""More bytes or more of anything than is allowed: refused, and nothing kept."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from ratoon.api import counts
from ratoon.api.contract import SERVICE
from ratoon.api.grpc.intake import Parser, Refused
from ratoon.api.http import bodies
from ratoon.api.http.schema import body_of
from ratoon.config import LimitsConfig
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.v1 import rollout_pb2, service_pb2
from tests.api import requests
from tests.api.conftest import MAX_BODY_BYTES, MAX_MESSAGE_BYTES, Api
from tests.api.served_process import MIB
from tests.api.wires import http_error, refused_by


async def test_a_body_over_the_limit_is_refused(api: Api, wire_name: str) -> None:
    await api.create_policy()
    request = requests.update()
    request.batch.groups[0].group_id = "x" * (MAX_BODY_BYTES + 1)
    refused = await refused_by(api.wire(wire_name), "Update", request)
    assert refused.detail.code == "BODY_TOO_LARGE"
    assert refused.status in (413, grpc.StatusCode.RESOURCE_EXHAUSTED)
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
    refused = await refused_by(api.wire(wire_name), "Update", too_many)
    assert (refused.detail.code, refused.detail.field) == ("BODY_TOO_LARGE", "groups")
    assert api.engine.log == []


LIMITS = LimitsConfig()
UPDATE_BODY: Any = body_of(SERVICE.methods_by_name["Update"])
# Bounds of a whole batch are tested at this part of them, with as much less.
PART = 32
BATCHED = ["Update", "ForwardBackward", "Forward", "UploadPart"]


def _field(number: int, data: bytes) -> bytes:
    size, varint = len(data), b""
    while size >= 128:
        varint, size = varint + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + varint + bytes([size]) + data


def _request(rpc: str, groups: bytes) -> bytes:
    """`groups`: the fields of a batch, which an upload has without one."""
    if rpc == "UploadPart":
        return groups.replace(b"\x0a", b"\x22")
    return _field(3, groups)


EMPTY_GROUPS = b"\x0a\x00" * MIB
EMPTY_ROLLOUTS = _field(1, b"\x1a\x00" * MIB)
EMPTY_SEGMENTS = _field(1, _field(3, _field(2, b"\x0a\x00" * (4 * MIB // PART))))
EMPTY_TENSORS = _field(1, _field(3, b"\x0a\x00\x12\x00" * (2 * MIB // PART)))
UNKNOWN = _field(1, b"\x78\x00" * (5 * MIB // PART))
SHAPE = _field(1, _field(2, _field(2, b"\x01" * (5 * MIB // PART))))


@pytest.mark.parametrize(
    ("rpc", "groups"),
    [
        *((rpc, EMPTY_GROUPS) for rpc in BATCHED),
        ("Update", EMPTY_ROLLOUTS),
        ("Update", EMPTY_SEGMENTS),
        ("Update", EMPTY_TENSORS),
        ("Update", UNKNOWN),
        ("Update", SHAPE),
    ],
    ids=[*BATCHED, "rollouts", "segments", "tensors", "unknown", "shape"],
)
def test_objects_are_counted_in_the_bytes(
    rpc: str, groups: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 MiB of empty groups were 56 MiB of objects, as many rollouts 124."""
    for bound in ("MAX_PARTS", "MAX_FIELDS"):
        monkeypatch.setattr(counts, bound, getattr(counts, bound) // PART)
    refused = Parser(rpc, LIMITS).parse(_request(rpc, groups))
    assert isinstance(refused, Refused)
    assert refused.error.code is ErrorCode.BODY_TOO_LARGE


class _CountedBytes(bytes):
    """Bytes that count how often one of them is read."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def test_a_refused_body_is_not_read_to_its_end() -> None:
    """The search for its policy took 0.8 s of every 2 MiB, in which nobody else was answered."""
    data = _CountedBytes(_request("UploadPart", EMPTY_GROUPS))
    parsed = Parser("UploadPart", LIMITS).parse(data)
    assert isinstance(parsed, Refused)
    assert parsed.policy_id == ""
    assert data.num_reads < 8 * LIMITS.max_groups


@pytest.mark.parametrize("data", [b"\x0b", b"\x1a\x05\x0a", b"\x1a\x80", b"\xff" * 12, b"\x1a"])
def test_bytes_that_are_no_message_are_malformed(data: bytes) -> None:
    refused = Parser("Update", LIMITS).parse(data)
    assert isinstance(refused, Refused)
    assert refused.error.code is ErrorCode.MALFORMED_BODY
    assert refused.error.got == f"{len(data)} bytes"


@pytest.mark.parametrize("rpc", BATCHED)
def test_what_is_within_bounds_is_parsed_as_it_is(rpc: str) -> None:
    batch = rollout_pb2.RolloutBatch(groups=requests.groups(5))
    message: Any = {
        "Update": service_pb2.UpdateRequest(policy_id="p" * 300, batch=batch),
        "ForwardBackward": service_pb2.ForwardBackwardRequest(batch=batch, expected_version=2**40),
        "Forward": service_pb2.ForwardRequest(batch=batch),
        "UploadPart": service_pb2.UploadPartRequest(groups=batch.groups),
    }[rpc]
    assert Parser(rpc, LIMITS).parse(message.SerializeToString()) == message


@pytest.mark.parametrize(
    "body",
    [
        b'{"batch": {"groups": [' + b"{}," * MIB + b"{}]}}",
        b'{"batch": {"groups": [{"prompt": [' + b"1," * 5 * MIB + b"1]}]}}",
        b"[" * 5 * MIB,
    ],
    ids=["groups", "tokens", "open"],
)
def test_json_is_counted_too(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RatoonError) as caught:
            bodies._parsed(UPDATE_BODY, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code is ErrorCode.BODY_TOO_LARGE
    assert peak < MIB


def test_one_wrong_group_is_said_of_many() -> None:
    """Each was an error, all of which were kept to say the first: 3 MiB of them were 1.6 GiB."""
    body = b'{"batch": {"groups": [' + b"{}," * 30_000 + b"{}]}}"
    tracemalloc.start()
    try:
        with pytest.raises(RatoonError) as caught:
            bodies._parsed(UPDATE_BODY, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.field == "groups[0].group_id"
    assert peak < 5 * MIB
