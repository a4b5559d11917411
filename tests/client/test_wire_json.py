"""The client's JSON against the service's own conversion, message by message."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

from ratoon.api.http.bodies import fill_request
from ratoon_client import Kl, Loss, Optim, OverlongPenalty
from ratoon_client.transport.http_wire import ROUTES
from ratoon_client.wire import loss_message, optim_message
from ratoon_proto.codec import DTYPES
from ratoon_proto.json_form import from_json, to_json, to_request_json
from ratoon_proto.v1 import operation_pb2, service_pb2, weights_pb2
from ratoon_proto.v1.tensor_pb2 import Tensor
from tests.api.wires import OTHER_ROUTES
from tests.api.wires import ROUTES as SERVICE_ROUTES
from tests.client.fake_http import BODIES

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["PolicyService"]
_ANSWERS = (
    operation_pb2.Operation,
    service_pb2.ListPoliciesResponse,
    service_pb2.ListCheckpointsResponse,
    service_pb2.ServerInfo,
    weights_pb2.WeightManifest,
)


def filled(message: Message, rng: random.Random) -> None:
    """Random valid values in a random choice of fields; enum values are never `unspecified`."""
    if isinstance(message, Tensor):
        size = rng.randrange(4)
        message.dtype = rng.choice(list(DTYPES))
        message.shape.append(size)
        message.data = b"\1" * (size * DTYPES[message.dtype].itemsize)
        return
    if isinstance(message, Timestamp):
        message.seconds, message.nanos = rng.randrange(2**31), rng.randrange(10**9)
        return
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.3:
            continue
        if field.containing_oneof and message.WhichOneof(field.containing_oneof.name):
            continue
        if field.message_type and field.message_type.GetOptions().map_entry:
            getattr(message, field.name).update({"missing_seq": "3"})
        elif field.message_type and field.is_repeated:
            for _ in range(rng.randrange(3)):
                filled(getattr(message, field.name).add(), rng)
        elif field.message_type:
            getattr(message, field.name).SetInParent()
            filled(getattr(message, field.name), rng)
        elif field.is_repeated:
            value = _scalar(field, rng)
            getattr(message, field.name).extend([value] * rng.randrange(3))
        else:
            setattr(message, field.name, _scalar(field, rng))


def _scalar(field: Any, rng: random.Random) -> Any:
    if field.enum_type:
        return rng.choice([number for number in field.enum_type.values_by_number if number])
    kinds = {
        field.TYPE_DOUBLE: lambda: rng.choice([0.0, -1.5, 1e300, 0.1]),
        field.TYPE_BOOL: lambda: rng.random() < 0.5,
        field.TYPE_STRING: lambda: rng.choice(["", "Zürich", "a-1"]),
        field.TYPE_BYTES: lambda: rng.randbytes(5),
        field.TYPE_INT32: lambda: rng.choice([0, 7, 2**31 - 1]),
        field.TYPE_INT64: lambda: rng.choice([0, 7, 2**62 + 1]),
        field.TYPE_UINT64: lambda: rng.choice([0, 7, 2**63 + 1]),
    }
    return kinds[field.type]()


def _completed(message: Any) -> None:
    """What JSON bodies must have, and no key of neither kind, which JSON cannot say."""
    has_key = "key" in message.DESCRIPTOR.fields_by_name
    if has_key and message.key.WhichOneof("key") is None:
        message.ClearField("key")
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.enum_type and not field.is_repeated and not value:
            setattr(message, field.name, 1)
        required = {"learning_rate", "coefficient", "scale"}
        if message.DESCRIPTOR.name == "CorrectionMask":
            required |= {"low", "high"}
        if field.name in required and not message.HasField(field.name):
            setattr(message, field.name, 0.0)
        if field.name in ("loss", "optim", "spec", "tokens") and field.message_type:
            value.SetInParent()
        if message.DESCRIPTOR.name == "SamplingMask" and field.message_type:
            value.SetInParent()
        children = value if field.is_repeated else [value]
        if not field.message_type or field.message_type.GetOptions().map_entry:
            continue
        for child in children if field.is_repeated or message.HasField(field.name) else []:
            if isinstance(child, Tensor) and not child.dtype:
                child.dtype = "int32"
                child.shape.append(0)
            _completed(child)


@pytest.mark.parametrize("name", sorted(BODIES))
def test_a_body_is_read_by_the_service_as_the_message_it_was(name: str):
    rng = random.Random(name)
    request_type = GetMessageClass(_SERVICE.methods_by_name[name].input_type)
    for _ in range(60):
        request = request_type()
        filled(request, rng)
        _completed(request)
        path_fields = ROUTES[name].fields
        body = BODIES[name].model_validate(to_request_json(request, skip=path_fields))
        received = request_type()
        fill_request(received, body)
        for field in path_fields:
            setattr(received, field, getattr(request, field))
        assert received == request


@pytest.mark.parametrize("answer", _ANSWERS)
def test_an_answer_of_the_service_is_the_message_it_was(answer: type[Message]):
    rng = random.Random(answer.DESCRIPTOR.name)
    for _ in range(60):
        message = answer()
        filled(message, rng)
        assert from_json(answer, to_json(message)) == message


def test_a_number_that_is_not_finite_is_nan_and_an_absent_one_stays_absent():
    message = operation_pb2.Operation()
    message.step.report.seconds.forward = math.inf
    message.step.report.loss = math.inf
    report = from_json(operation_pb2.Operation, to_json(message)).step.report
    assert math.isnan(report.seconds.forward)
    # As of every figure that may be absent: JSON has one null for both.
    assert not report.HasField("loss")
    assert not report.HasField("kl")
    assert report.truncated_fraction == 0.0


def test_fields_and_names_of_a_newer_service_are_passed_over():
    data = {"operation_id": "op-1", "kind": "teleport", "state": "done", "colour": {"r": 1}}
    message = from_json(operation_pb2.Operation, data)
    assert (message.operation_id, message.kind) == ("op-1", 0)
    assert message.state == operation_pb2.OPERATION_STATE_DONE


@pytest.mark.parametrize("data", [[], {"seq": "7"}, {"progress": 3}, {"created_at": "now"}, "x"])
def test_an_answer_of_another_form_is_no_answer(data):
    with pytest.raises(ValueError, match="no Operation"):
        from_json(operation_pb2.Operation, data)


def test_routes_are_those_of_the_service():
    ours = {name: (route.method, route.path) for name, route in ROUTES.items()}
    assert ours == SERVICE_ROUTES | OTHER_ROUTES


def test_a_zero_is_sent() -> None:
    """The service takes what is left out for forgotten."""
    message = optim_message(Optim(learning_rate=0.0))
    assert message.HasField("learning_rate")
    assert to_request_json(message)["learning_rate"] == 0.0
    assert optim_message(Optim(learning_rate=1e-3, max_grad_norm=0.0)).HasField("max_grad_norm")
    kl = Kl("k3", coefficient=0.0, reference="given")
    penalty = OverlongPenalty(max_tokens=4, buffer_tokens=2, scale=0.0)
    loss = loss_message(Loss("grpo", kl=kl, overlong=penalty))
    assert loss.kl.HasField("coefficient")
    assert loss.overlong_penalty.HasField("scale")
