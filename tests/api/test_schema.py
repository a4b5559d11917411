"""JSON models against the messages that they mirror, and the translation between the two."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import fields
from enum import StrEnum
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.message_factory import GetMessageClass
from pydantic import BaseModel

from ratoon.api.convert.enums import DEFAULTS, from_wire, optional_from_wire, to_wire
from ratoon.api.convert.report import report_message
from ratoon.api.http import schema
from ratoon.api.http.schema.base import WireModel
from ratoon.api.http.wire import to_json
from ratoon.engine import types
from ratoon.errors import RatoonError
from ratoon.model import spec
from ratoon.rollout import raw
from ratoon.stream import manifest
from ratoon.train import config
from ratoon.train.report import step_report as report
from ratoon.train.report.step_report import LayerGradNorm, PhaseSeconds, SelfCheckReport, StepReport
from ratoon_proto.v1 import (
    operation_pb2,
    policy_pb2,
    rollout_pb2,
    service_pb2,
    tensor_pb2,
    training_pb2,
    weights_pb2,
)

FILES = (
    operation_pb2,
    policy_pb2,
    rollout_pb2,
    service_pb2,
    tensor_pb2,
    training_pb2,
    weights_pb2,
)
MESSAGES: dict[str, Descriptor] = {
    name: message
    for file in FILES
    for name, message in file.DESCRIPTOR.message_types_by_name.items()
}
ENUMS: dict[str, EnumDescriptor] = {
    name: enum for file in FILES for name, enum in file.DESCRIPTOR.enum_types_by_name.items()
}
# In the path instead of the body.
IN_PATH = {"policy_id", "upload_id", "part_index", "checkpoint_id"}
LOAD = "LoadCheckpointRequest"


def _models() -> dict[str, type[WireModel]]:
    found: dict[str, type[WireModel]] = {}
    for module in pkgutil.iter_modules(schema.__path__):
        loaded = importlib.import_module(f"{schema.__name__}.{module.name}")
        found |= {
            name: value
            for name, value in vars(loaded).items()
            if inspect.isclass(value) and issubclass(value, WireModel) and value is not WireModel
        }
    return found


MODELS = _models()


def test_models_and_messages_have_the_same_names() -> None:
    # The error body is an envelope of HTTP alone.
    assert set(MODELS) - {"ErrorBody"} <= set(MESSAGES)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"ErrorBody"}))
def test_model_has_the_fields_of_its_message(name: str) -> None:
    model, message = MODELS[name], MESSAGES[name]
    expected = set(message.fields_by_name)
    for parent in {parent for parent, _ in model.flattened.values()}:
        expected.remove(parent)
    expected |= set(model.flattened)
    if name.endswith("Request"):
        expected -= IN_PATH - ({"checkpoint_id"} if name == "SaveCheckpointRequest" else set())
    assert set(model.model_fields) == expected
    for field, (parent, child) in model.flattened.items():
        inner = message.fields_by_name[parent].message_type
        assert inner is not None
        assert child in inner.fields_by_name
        assert field in model.model_fields


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_are_frozen_and_closed(name: str) -> None:
    settings = MODELS[name].model_config
    assert settings.get("frozen") is True
    assert settings.get("extra") == "forbid"


def _internal_enums() -> dict[str, type[StrEnum]]:
    modules = (types, spec, raw, manifest, config, report)
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, StrEnum) and value is not StrEnum
    }


INTERNAL = _internal_enums()
# Members that one side has on purpose and the other has not.
ONE_SIDED = {("ModelDtype", "FLOAT64"), ("OperationKind", "IMPORT_WEIGHTS")}


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_wire_enums_are_the_internal_ones(name: str) -> None:
    prefix = ENUMS[name].values_by_number[0].name.removesuffix("UNSPECIFIED")
    wire = {value.name.removeprefix(prefix) for value in ENUMS[name].values} - {"UNSPECIFIED"}
    own = {member.name for member in INTERNAL[name]} - {"UNSPECIFIED"}
    assert {(name, member) for member in wire ^ own} <= ONE_SIDED


def test_enums_go_there_and_back() -> None:
    for member in config.LossKind:
        number = to_wire(training_pb2.LossKind, member)
        assert from_wire("f", number, training_pb2.LossKind, config.LossKind) is member


def test_every_unset_enum_has_its_one_default() -> None:
    assert from_wire("f", 0, policy_pb2.Recovery, types.Recovery) is types.Recovery.REPLAY
    assert optional_from_wire("f", 0, policy_pb2.Recovery, types.Recovery) is None
    with pytest.raises(RatoonError, match=r"loss\.kind: got nothing, expected one of grpo,"):
        from_wire("loss.kind", 0, training_pb2.LossKind, config.LossKind)
    for enum, member in DEFAULTS.items():
        assert isinstance(member, enum)


def test_reports_have_the_fields_of_their_message() -> None:
    assert {field.name for field in fields(StepReport)} == set(
        training_pb2.StepReport.DESCRIPTOR.fields_by_name
    )
    assert {field.name for field in fields(PhaseSeconds)} == set(
        training_pb2.PhaseSeconds.DESCRIPTOR.fields_by_name
    )
    assert {field.name for field in fields(SelfCheckReport)} == set(
        training_pb2.SelfCheckReport.DESCRIPTOR.fields_by_name
    )


def test_every_field_of_a_report_arrives() -> None:
    values: dict[str, Any] = {}
    for index, field in enumerate(fields(StepReport)):
        kind = str(field.type)
        if kind == "PhaseSeconds":
            values[field.name] = PhaseSeconds(
                plan=1.0, forward=2.0, backward=3.0, optimizer=4.0, publish=5.0
            )
        elif kind.startswith("SelfCheckReport"):
            values[field.name] = SelfCheckReport(
                sequence=3,
                tokens=4,
                logprob_max_difference=0.5,
                logprob_mean_difference=0.25,
                gradient_difference=0.125,
                worst_parameter="w",
                exceeds_limits=True,
                seconds=2.0,
            )
        elif "LayerGradNorm" in kind:
            values[field.name] = (LayerGradNorm(layer="a", norm=1.5),)
        elif kind.startswith("tuple"):
            values[field.name] = ("a", "b")
        elif kind == "bool":
            values[field.name] = True
        else:
            values[field.name] = float(index) if "float" in kind else index
    message = report_message(StepReport(**values))
    for name, value in values.items():
        if name == "seconds":
            assert (message.seconds.plan, message.seconds.publish) == (1.0, 5.0)
        elif name == "self_check":
            for part in fields(SelfCheckReport):
                if part.name == "worst_parameter_difference":
                    assert not message.self_check.HasField("worst_parameter_difference")
                else:
                    assert getattr(message.self_check, part.name) == getattr(value, part.name)
        elif name == "layer_grad_norms":
            (norm,) = message.layer_grad_norms
            assert (norm.layer, norm.norm) == ("a", 1.5)
        elif name == "warnings":
            assert list(message.warnings) == ["a", "b"]
        else:
            assert getattr(message, name) == value, name
    empty = report_message(StepReport())
    absent = {
        field.name for field in fields(StepReport) if getattr(StepReport(), field.name) is None
    }
    assert absent.isdisjoint(field.name for field, _ in empty.ListFields())


RESPONSES = sorted(name for name in MODELS if not name.endswith("Request") and name != "ErrorBody")


@pytest.mark.parametrize("name", RESPONSES)
def test_an_empty_message_has_every_key_in_json(name: str) -> None:
    message = GetMessageClass(MESSAGES[name])()
    body: type[BaseModel] = MODELS[name]
    flattened = set(MODELS[name].flattened)
    assert set(to_json(message)) - flattened == set(body.model_fields) - flattened


def test_json_of_a_message_is_plain() -> None:
    report = training_pb2.StepReport(loss=float("nan"), kl=float("inf"), num_groups=2)
    result = operation_pb2.Operation(
        operation_id="op",
        kind=operation_pb2.OPERATION_KIND_OPTIM_STEP,
        state=operation_pb2.OPERATION_STATE_DONE,
        seq=2**53 + 1,
        step=operation_pb2.StepResult(version=3, report=report),
    )
    result.created_at.FromNanoseconds(1_500_000_000)
    data: Any = to_json(result)
    assert data["kind"] == "optim_step"
    assert data["seq"] == 2**53 + 1
    assert data["created_at"] == "1970-01-01T00:00:01.500Z"
    assert data["finished_at"] is None
    assert (data["step"]["report"]["loss"], data["step"]["report"]["kl"]) == (None, None)
    assert data["step"]["report"]["num_groups"] == 2
    detail = operation_pb2.ErrorDetail(code="X", details={"missing_seq": "2"})
    assert to_json(detail)["details"] == {"missing_seq": "2"}
    tensor = tensor_pb2.Tensor(dtype="uint8", shape=[2], data=b"\xff\x00")
    assert to_json(tensor) == {"dtype": "uint8", "shape": [2], "data": "/wA="}
