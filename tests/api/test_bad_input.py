"""Bad input over both wires: a typed error, nothing applied, the service alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
import xxhash

from ratoon.errors import ERROR_TABLE, ErrorCode, RatoonError
from ratoon_proto.types import PolicyState
from ratoon_proto.v1 import service_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import SERVICE, grpc_error, http_error, refused_by

Update = service_pb2.UpdateRequest


async def test_unknown_names_are_not_found(api: Api, wire_name: str) -> None:
    await api.create_policy()
    wire = api.wire(wire_name)
    calls: list[tuple[str, Any, str]] = [
        ("Update", requests.update(policy_id="absent"), "POLICY_NOT_FOUND"),
        ("GetPolicy", service_pb2.GetPolicyRequest(policy_id="absent"), "POLICY_NOT_FOUND"),
        ("DeletePolicy", service_pb2.DeletePolicyRequest(policy_id="absent"), "POLICY_NOT_FOUND"),
        ("GetOperation", service_pb2.GetOperationRequest(operation_id="x"), "OPERATION_NOT_FOUND"),
        (
            "CancelOperation",
            service_pb2.CancelOperationRequest(operation_id="x"),
            "OPERATION_NOT_FOUND",
        ),
        (
            "DeleteCheckpoint",
            service_pb2.DeleteCheckpointRequest(policy_id=requests.POLICY, checkpoint_id="gone"),
            "CHECKPOINT_NOT_FOUND",
        ),
        (
            "GetWeightManifest",
            service_pb2.GetWeightManifestRequest(policy_id=requests.POLICY, version=9),
            "WEIGHTS_NOT_FOUND",
        ),
        (
            "GetWeightManifest",
            service_pb2.GetWeightManifestRequest(policy_id=requests.POLICY, name="gone"),
            "WEIGHTS_NOT_FOUND",
        ),
        (
            "DeleteVersion",
            service_pb2.DeleteVersionRequest(policy_id=requests.POLICY, name="gone"),
            "WEIGHTS_NOT_FOUND",
        ),
    ]
    missing_upload = requests.update()
    missing_upload.upload.upload_id, missing_upload.upload.num_parts = "never-sent", 2
    calls.append(("Update", missing_upload, "UPLOAD_NOT_FOUND"))
    for rpc, request, code in calls:
        refused = await refused_by(wire, rpc, request)
        assert refused.detail.code == code
        row = ERROR_TABLE[ErrorCode(code)]
        assert refused.status in (row.http, grpc.StatusCode[row.grpc])
    assert api.engine.log == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "a\nb", "é", "x" * 65, "x" * 10_240])
async def test_a_versions_name_that_is_none_is_refused(api: Api, wire_name: str, name: str) -> None:
    await api.create_policy()
    wire, policy_id = api.wire(wire_name), requests.POLICY
    key = service_pb2.OperationKey(seq=1)
    calls = [
        (
            "PublishVersion",
            service_pb2.PublishVersionRequest(policy_id=policy_id, key=key, name=name),
        )
    ]
    # An empty one asks for the newest; the others are no part of a path.
    if name not in ("", ".", "..", "a/b", "a\nb"):
        by_name = service_pb2.GetWeightManifestRequest(policy_id=policy_id, name=name)
        delete = service_pb2.DeleteVersionRequest(policy_id=policy_id, name=name)
        calls += [("GetWeightManifest", by_name), ("DeleteVersion", delete)]
    for rpc, request in calls:
        refused = await refused_by(wire, rpc, request)
        assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", "name"), rpc
        assert len(refused.detail.message) < 400
    assert api.engine.log == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ttl_s": 0.0}, "ttl_s"),
        ({"ttl_s": -1.0}, "ttl_s"),
        ({"ttl_s": float("inf")}, "ttl_s"),
    ],
)
async def test_a_versions_lifetime_is_above_zero(
    api: Api, fields: dict[str, Any], field: str
) -> None:
    await api.create_policy()
    request = service_pb2.PublishVersionRequest(
        policy_id=requests.POLICY, key=service_pb2.OperationKey(seq=1), name="a", **fields
    )
    refused = await refused_by(api.wire("grpc"), "PublishVersion", request)
    assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)


async def test_a_version_has_a_number_or_a_name(api: Api, wire_name: str) -> None:
    await api.create_policy()
    for other in ({"version": 0}, {"known_version": 0}):
        request = service_pb2.GetWeightManifestRequest(policy_id=requests.POLICY, name="a", **other)
        refused = await refused_by(api.wire(wire_name), "GetWeightManifest", request)
        assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", "name")


async def test_a_reused_seq_with_another_payload_is_refused(api: Api, wire_name: str) -> None:
    """Trap 9: a retried POST is the first operation again, never a second step."""
    await api.create_policy()
    wire = api.wire(wire_name)
    first = await wire.call("Update", requests.update())
    assert (await wire.call("Update", requests.update())).operation_id == first.operation_id
    other = requests.update()
    other.optim.learning_rate = 0.5
    refused = await refused_by(wire, "Update", other)
    assert refused.detail.code == "KEY_REUSED"
    assert refused.status in (409, grpc.StatusCode.ALREADY_EXISTS)
    assert len(api.engine.log) == 1
    assert api.engine.known_policies[requests.POLICY].version == 1


async def test_operations_in_any_order_of_arrival_run_in_seq_order(
    api: Api, wire_name: str
) -> None:
    """Trap 12: real clients send seq 2, 3, 4, 1."""
    await api.create_policy()
    wire = api.wire(wire_name)
    answers = {seq: await wire.call("Update", requests.update(seq=seq)) for seq in (2, 3, 4, 1)}
    assert [answers[seq].blocked_by_seq for seq in (2, 3, 4)] == [1, 1, 1]
    versions = [
        (
            await wire.call(
                "GetOperation",
                service_pb2.GetOperationRequest(operation_id=answers[seq].operation_id),
            )
        ).step.version
        for seq in (1, 2, 3, 4)
    ]
    assert versions == [1, 2, 3, 4]


async def test_unknown_enum_numbers_are_refused(api: Api) -> None:
    """proto3 carries any number; JSON has no number to carry."""
    await api.create_policy()
    changes: list[tuple[Callable[[Update], object], str]] = [
        (lambda request: setattr(request.loss, "kind", 99), "loss.kind"),
        (lambda request: setattr(request.loss, "kind", 0), "loss.kind"),
        (lambda request: setattr(request.loss, "token_weight", 7), "loss.token_weight"),
        (lambda request: setattr(request.loss, "shared_tokens", -1), "loss.shared_tokens"),
        (lambda request: setattr(request.optim, "divide_by", 42), "optim.divide_by"),
        (
            lambda request: setattr(
                request.batch.groups[0].rollouts[1], "sampler_logprobs_kind", 3
            ),
            "groups[0].rollouts[1].sampler_logprobs_kind",
        ),
    ]
    for change, field in changes:
        request = requests.update()
        change(request)
        refused = await refused_by(api.grpc, "Update", request)
        assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)
    assert api.engine.log == []


async def test_bad_parts_are_refused_when_they_come(api: Api, wire_name: str) -> None:
    await api.create_policy()
    good = service_pb2.UploadPartRequest(
        policy_id=requests.POLICY, upload_id="u", part_index=0, groups=requests.groups(1)
    )
    for name, value, field in (
        ("upload_id", "a.b", "upload_id"),
        ("part_index", -1, "part_index"),
        ("policy_id", "UPPER", "policy_id"),
    ):
        request = service_pb2.UploadPartRequest()
        request.CopyFrom(good)
        setattr(request, name, value)
        refused = await refused_by(api.wire(wire_name), "UploadPart", request)
        assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)
    lying = service_pb2.UploadPartRequest()
    lying.CopyFrom(good)
    lying.groups[0].prompt.dtype = "float32"
    refused = await refused_by(api.wire(wire_name), "UploadPart", lying)
    assert refused.detail.field == "groups[0].prompt.dtype"
    assert api.engine.uploads == {}


async def test_pieces_of_a_model_arrive_and_bad_ones_are_refused(api: Api, wire_name: str) -> None:
    """The policy need not exist."""
    data = bytes(api.limits.max_body_bytes // 2)
    digest = xxhash.xxh3_128_hexdigest(data)
    good = service_pb2.SendModelFileRequest(
        policy_id=requests.POLICY, digest=digest, size_bytes=len(data), offset=0, data=data
    )
    for name, value in (
        ("policy_id", "UPPER"),
        ("digest", "z" + digest[1:]),
        ("digest", digest.upper()),
        ("size_bytes", -1),
        ("offset", -1),
    ):
        request = service_pb2.SendModelFileRequest()
        request.CopyFrom(good)
        setattr(request, name, value)
        refused = await refused_by(api.wire(wire_name), "SendModelFile", request)
        assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", name)
    assert api.engine.sent == {}
    answer = await api.wire(wire_name).call("SendModelFile", good)
    assert answer.num_bytes == len(data)
    assert api.engine.sent == {(requests.POLICY, digest): data}


async def test_a_policy_that_is_not_ready_takes_no_batch(api: Api, wire_name: str) -> None:
    await api.create_policy()
    policies = api.engine.known_policies
    creating = replace(policies[requests.POLICY], state=PolicyState.CREATING, info=None)
    policies[requests.POLICY] = creating
    refused = await refused_by(api.wire(wire_name), "Update", requests.update())
    assert refused.detail.code == "POLICY_NOT_READY"
    assert refused.detail.retryable


async def test_fetch_bounds(api: Api) -> None:
    await api.create_policy()
    digest = api.engine.add_file(b"0123456789")
    most = api.limits.max_fetch_bytes
    for changes, field in (
        ({"length": 0}, "length"),
        ({"length": most + 1}, "length"),
        ({"offset": -1}, "offset"),
        ({"digest": "../../etc/passwd"}, "digest"),
    ):
        fields: dict[str, Any] = {"digest": digest, "offset": 0, "length": 4, **changes}
        request = service_pb2.FetchWeightsRequest(policy_id=requests.POLICY, **fields)
        refused = await refused_by(api.grpc, "FetchWeights", request)
        assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)
    beyond = service_pb2.FetchWeightsRequest(
        policy_id=requests.POLICY, digest=digest, offset=10, length=1
    )
    refused = await refused_by(api.grpc, "FetchWeights", beyond)
    assert refused.status == grpc.StatusCode.OUT_OF_RANGE


async def test_an_unexpected_exception_says_nothing_of_itself(
    api: Api, wire_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(api.engine, "policies", broken)
    refused = await refused_by(
        api.wire(wire_name), "ListPolicies", service_pb2.ListPoliciesRequest()
    )
    assert refused.detail.code == "INTERNAL"
    assert refused.status in (500, grpc.StatusCode.INTERNAL)
    assert "secret" not in refused.detail.message


async def test_a_long_error_still_fits_the_trailer(
    api: Api, wire_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC drops the call where metadata is over 8 KiB."""

    async def verbose() -> None:
        text = "\N{SNOWMAN}\ud800" * 10_000
        details = {f"key-{index}": text for index in range(100)}
        raise RatoonError(
            ErrorCode.UNAVAILABLE, text, field=text, got=text, expected=text, details=details
        )

    monkeypatch.setattr(api.engine, "policies", verbose)
    refused = await refused_by(
        api.wire(wire_name), "ListPolicies", service_pb2.ListPoliciesRequest()
    )
    assert refused.detail.code == "UNAVAILABLE"
    assert refused.detail.message.startswith("\N{SNOWMAN}\\ud800")


async def test_malformed_json_is_refused(api: Api) -> None:
    await api.create_policy()
    path = f"/v1/policies/{requests.POLICY}/update"
    headers = {"Content-Type": "application/json"}
    deep = b"[" * 10_000
    for body in (b"{", b"", b"[]", b"\xff\xfe", b"nonsense", deep, b'{"seq": 1e}', b"\x00"):
        response = await api.http.client.post(path, content=body, headers=headers)
        is_json = body in (b"", b"[]")
        expected = ("INVALID_ARGUMENT", 422) if is_json else ("MALFORMED_BODY", 400)
        assert (http_error(response).detail.code, response.status_code) == expected, body
    assert api.engine.log == []


async def test_a_body_that_is_not_sent_as_json_is_refused(api: Api) -> None:
    """As curl's `-d` sends it."""
    form = "application/x-www-form-urlencoded"
    for path in ("/v1/policies", f"/v1/policies/{requests.POLICY}/update"):
        for content_type in (form, "text/json", "json", "application/", "", None):
            headers = {} if content_type is None else {"Content-Type": content_type}
            response = await api.http.client.post(path, content=b"{}", headers=headers)
            error = http_error(response)
            assert (error.detail.code, response.status_code) == ("MALFORMED_BODY", 400)
            assert error.detail.field == "Content-Type"
            assert error.detail.got == (f"'{content_type}'" if content_type else "nothing")
    for name in ("application/json; charset=utf-8", "Application/JSON", "application/x+json"):
        response = await api.http.client.post(
            "/v1/policies", content=b"{}", headers={"Content-Type": name}
        )
        assert http_error(response).detail.code == "INVALID_ARGUMENT"


async def test_malformed_bytes_are_refused_by_their_size(api: Api) -> None:
    """gRPC's own answer would be INTERNAL, without the error's detail."""
    for rpc in ("Update", "GetPolicy", "WatchOperation", "FetchWeights"):
        # Any call may be made as a stream, of one answer.
        call: Any = api.grpc.channel.unary_stream(f"/{SERVICE.full_name}/{rpc}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call(b"\xff" * 17)))
        error = grpc_error(caught.value)
        assert error.status is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.detail.code, error.detail.got) == ("MALFORMED_BODY", "17 bytes")
        assert "xff" not in error.detail.message
