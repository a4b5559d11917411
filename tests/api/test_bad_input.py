"""Bad input over both wires: a typed error that names the field, nothing applied, service alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from ratoon.errors import ERROR_TABLE, ErrorCode, RatoonError
from ratoon_proto.codec import encode_array
from ratoon_proto.types import PolicyState
from ratoon_proto.v1 import rollout_pb2, service_pb2, training_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import WireError

Update = service_pb2.UpdateRequest
Rollout = rollout_pb2.Rollout


def _batch(*rollouts: Rollout) -> Update:
    return requests.update(batch=[requests.group("a", *rollouts)])


def _with(change: Callable[[Update], object]) -> Update:
    request = requests.update()
    change(request)
    return request


def _second_rollout(**changes: Any) -> Update:
    request = requests.update()
    rollout = request.batch.groups[1].rollouts[1]
    for name, value in changes.items():
        if isinstance(value, float | int):
            setattr(rollout, name, value)
        else:
            getattr(rollout, name).CopyFrom(value)
    return request


def _lying_tensor(**changes: Any) -> Update:
    request = requests.update()
    tensor = request.batch.groups[0].rollouts[0].response
    for name, value in changes.items():
        if name == "shape":
            del tensor.shape[:]
            tensor.shape.extend(value)
        else:
            setattr(tensor, name, value)
    return request


CASES: dict[str, tuple[Update, str]] = {
    "no groups": (requests.update(batch=[]), "groups"),
    "empty group": (requests.update(batch=[requests.group("a")]), "groups[0].rollouts"),
    "R = 0 everywhere": (
        _batch(Rollout(response=requests.tokens([]), reward=1.0)),
        "groups",
    ),
    "short log-probs": (
        _second_rollout(sampler_logprobs=requests.floats([])),
        "groups[1].rollouts[1].sampler_logprobs",
    ),
    "long loss mask": (
        _second_rollout(loss_mask=encode_array(np.array([True, True]))),
        "groups[1].rollouts[1].loss_mask",
    ),
    "NaN log-prob": (
        _second_rollout(sampler_logprobs=requests.floats([float("nan")])),
        "groups[1].rollouts[1].sampler_logprobs[0]",
    ),
    "infinite reward": (
        _second_rollout(reward=float("inf")),
        "groups[1].rollouts[1].reward",
    ),
    "token outside the vocabulary": (
        _second_rollout(response=requests.tokens([256])),
        "groups[1].rollouts[1].response[0]",
    ),
    "negative token": (
        _second_rollout(response=requests.tokens([-1])),
        "groups[1].rollouts[1].response[0]",
    ),
    "sequence longer than the model": (
        _batch(requests.rollout([7] * 62)),
        "groups[0].rollouts[0]",
    ),
    "float tokens": (
        _second_rollout(response=requests.floats([1.0])),
        "groups[1].rollouts[1].response.dtype",
    ),
    "two-dimensional tokens": (
        _lying_tensor(shape=[1, 2]),
        "groups[0].rollouts[0].response.shape",
    ),
    "dtype that lies about its size": (
        _lying_tensor(dtype="int64"),
        "groups[0].rollouts[0].response.data",
    ),
    "shape that lies about its size": (
        _lying_tensor(shape=[3]),
        "groups[0].rollouts[0].response.data",
    ),
    "no content": (_batch(Rollout(reward=1.0)), "groups[0].rollouts[0].response"),
    "no reward": (
        _batch(Rollout(response=requests.tokens([1]), sampler_logprobs=requests.floats([-1.0]))),
        "groups[0].rollouts[0].reward",
    ),
    "two groups of one name": (
        requests.update(batch=[requests.groups(1)[0], requests.groups(1)[0]]),
        "groups[1].group_id",
    ),
    "raw log-probs at another temperature unsaid": (
        _second_rollout(temperature=0.5),
        "groups[1].rollouts[1].sampler_logprobs_kind",
    ),
    "no key": (_with(lambda request: request.ClearField("key")), "key.seq"),
    "a request id under client sequencing": (
        _with(lambda request: setattr(request.key, "request_id", "x")),
        "key.request_id",
    ),
    "seq 0": (_with(lambda request: setattr(request.key, "seq", 0)), "key.seq"),
    "no source": (_with(lambda request: request.ClearField("batch")), "source"),
    "no clip for this loss": (
        _with(
            lambda request: request.loss.CopyFrom(
                training_pb2.LossConfig(kind=training_pb2.LOSS_KIND_REINFORCE, clip_low=0.1)
            )
        ),
        "loss.clip_low",
    ),
    "a divisor that disagrees": (
        _with(lambda request: setattr(request.optim, "divide_by", training_pb2.DIVIDE_BY_TOKENS)),
        "optim.divide_by",
    ),
    "negative learning rate": (
        _with(lambda request: setattr(request.optim, "learning_rate", -1.0)),
        "optim.learning_rate",
    ),
    "reference of a policy without one": (
        _with(
            lambda request: request.loss.kl.CopyFrom(
                training_pb2.KlConfig(
                    kind=training_pb2.KL_KIND_K3,
                    coefficient=0.1,
                    reference=training_pb2.REFERENCE_KIND_FROZEN,
                )
            )
        ),
        "loss.kl.reference",
    ),
    "no learning rate": (
        _with(lambda request: request.optim.ClearField("learning_rate")),
        "optim.learning_rate",
    ),
    "a KL without a coefficient": (
        _with(
            lambda request: request.loss.kl.CopyFrom(
                training_pb2.KlConfig(
                    kind=training_pb2.KL_KIND_K3, reference=training_pb2.REFERENCE_KIND_GIVEN
                )
            )
        ),
        "loss.kl.coefficient",
    ),
    "a mask without a bound": (
        _with(
            lambda request: request.loss.correction_mask.CopyFrom(
                training_pb2.CorrectionMask(level=training_pb2.CORRECTION_LEVEL_GEOMETRIC, high=1.1)
            )
        ),
        "loss.correction_mask.low",
    ),
    "a penalty without a scale": (
        _with(
            lambda request: request.loss.overlong_penalty.CopyFrom(
                training_pb2.OverlongPenalty(max_tokens=4, buffer_tokens=2)
            )
        ),
        "loss.overlong_penalty.scale",
    ),
    "negative expected version": (
        _with(lambda request: setattr(request, "expected_version", -1)),
        "expected_version",
    ),
    "upload id that is a path": (
        _with(
            lambda request: request.upload.CopyFrom(
                rollout_pb2.UploadedBatch(upload_id="../x", num_parts=1)
            )
        ),
        "upload.upload_id",
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_bad_batch_is_refused_whole(api: Api, wire_name: str, case: str) -> None:
    await api.create_policy()
    request, field = CASES[case]
    if wire_name == "http":
        # `key` is two plain fields there.
        field = field.removeprefix("key.")
    wire = api.wire(wire_name)
    with pytest.raises(WireError) as caught:
        await wire.call("Update", request)
    detail = caught.value.detail
    assert wire_name == "grpc" or "key." not in detail.message
    assert detail.code == "INVALID_ARGUMENT", detail
    assert detail.field == field, detail
    assert field in detail.message
    assert not detail.retryable
    assert caught.value.status in (422, grpc.StatusCode.INVALID_ARGUMENT)
    assert api.engine.log == []
    assert (await wire.call("Update", requests.update())).step.version == 1


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
            "GetWeightManifest",
            service_pb2.GetWeightManifestRequest(policy_id=requests.POLICY, version=9),
            "WEIGHTS_NOT_FOUND",
        ),
    ]
    missing_upload = requests.update()
    missing_upload.upload.upload_id, missing_upload.upload.num_parts = "never-sent", 2
    calls.append(("Update", missing_upload, "UPLOAD_NOT_FOUND"))
    for rpc, request, code in calls:
        with pytest.raises(WireError) as caught:
            await wire.call(rpc, request)
        assert caught.value.detail.code == code
        row = ERROR_TABLE[ErrorCode(code)]
        assert caught.value.status in (row.http, grpc.StatusCode[row.grpc])
    assert api.engine.log == []


async def test_a_reused_seq_with_another_payload_is_refused(api: Api, wire_name: str) -> None:
    """Trap 9: a retried POST is the first operation again, never a second step."""
    await api.create_policy()
    wire = api.wire(wire_name)
    first = await wire.call("Update", requests.update())
    assert (await wire.call("Update", requests.update())).operation_id == first.operation_id
    other = requests.update()
    other.optim.learning_rate = 0.5
    with pytest.raises(WireError) as caught:
        await wire.call("Update", other)
    assert caught.value.detail.code == "KEY_REUSED"
    assert caught.value.status in (409, grpc.StatusCode.ALREADY_EXISTS)
    assert len(api.engine.log) == 1
    assert api.engine.policies[requests.POLICY].version == 1


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
        with pytest.raises(WireError) as caught:
            await api.grpc.call("Update", _with(change))
        assert (caught.value.detail.code, caught.value.detail.field) == ("INVALID_ARGUMENT", field)
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
        with pytest.raises(WireError) as caught:
            await api.wire(wire_name).call("UploadPart", request)
        assert (caught.value.detail.code, caught.value.detail.field) == ("INVALID_ARGUMENT", field)
    lying = service_pb2.UploadPartRequest()
    lying.CopyFrom(good)
    lying.groups[0].prompt.dtype = "float32"
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("UploadPart", lying)
    assert caught.value.detail.field == "groups[0].prompt.dtype"
    assert api.engine.uploads == {}


async def test_a_policy_that_is_not_ready_takes_no_batch(api: Api, wire_name: str) -> None:
    await api.create_policy()
    policy = api.engine.policies[requests.POLICY]
    api.engine.policies[requests.POLICY] = replace(policy, state=PolicyState.CREATING, info=None)
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("Update", requests.update())
    assert caught.value.detail.code == "POLICY_NOT_READY"
    assert caught.value.detail.retryable


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
        with pytest.raises(WireError) as caught:
            await api.grpc.call("FetchWeights", request)
        assert (caught.value.detail.code, caught.value.detail.field) == ("INVALID_ARGUMENT", field)
    beyond = service_pb2.FetchWeightsRequest(
        policy_id=requests.POLICY, digest=digest, offset=10, length=1
    )
    with pytest.raises(WireError) as caught:
        await api.grpc.call("FetchWeights", beyond)
    assert caught.value.status == grpc.StatusCode.OUT_OF_RANGE


async def test_an_unexpected_exception_says_nothing_of_itself(
    api: Api, wire_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(api.engine, "list_policies", broken)
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("ListPolicies", service_pb2.ListPoliciesRequest())
    assert caught.value.detail.code == "INTERNAL"
    assert caught.value.status in (500, grpc.StatusCode.INTERNAL)
    assert "secret" not in caught.value.detail.message


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

    monkeypatch.setattr(api.engine, "list_policies", verbose)
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("ListPolicies", service_pb2.ListPoliciesRequest())
    assert caught.value.detail.code == "UNAVAILABLE"
    assert caught.value.detail.message.startswith("\N{SNOWMAN}\\ud800")
