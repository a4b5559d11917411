"""JSON models against the messages that they mirror, and the translation between the two."""

from __future__ import annotations

import inspect
from dataclasses import fields
from enum import StrEnum
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.message_factory import GetMessageClass

from ratoon.api.contract import SERVICE
from ratoon.api.convert.enums import DEFAULTS, from_wire
from ratoon.api.convert.loss import loss_request
from ratoon.api.convert.records import write
from ratoon.api.http.schema.models import body_of, model_of
from ratoon.engine import types
from ratoon.errors import RatoonError
from ratoon.model import spec
from ratoon.rollout import raw
from ratoon.stream import manifest
from ratoon.train import config
from ratoon.train.report import step_report as report
from ratoon.train.report.step_report import (
    PhaseSeconds,
    RouterReport,
    SelfCheckReport,
    SkipReason,
    StepReport,
    TensorGradNorm,
)
from ratoon_proto.fields import list_dtype
from ratoon_proto.json_form import to_json
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
# Fields that are in the path instead of the body.
IN_PATH = {"policy_id", "upload_id", "part_index", "checkpoint_id"}
# Messages whose fields JSON has in place of the message itself.
FLAT = {"key": {"seq", "request_id"}, "segments": {"segments"}}
BODIES: dict[str, Any] = {
    method.input_type.name: body for method in SERVICE.methods if (body := body_of(method))
}
ANSWERS = [method.output_type for method in SERVICE.methods]


def _reached(roots: list[Descriptor]) -> dict[str, Descriptor]:
    found: dict[str, Descriptor] = {}
    for message in roots:
        if message.full_name.startswith("ratoon.v1.") and not message.GetOptions().map_entry:
            found[message.name] = message
            found |= _reached([one.message_type for one in message.fields if one.message_type])
    return found


IN_BODIES = {
    name: message
    for name, message in _reached([MESSAGES[name] for name in BODIES]).items()
    if name not in BODIES and name not in ("OperationKey", "SegmentList")
}
MODELS: dict[str, Any] = (
    {name: model_of(message) for name, message in _reached(ANSWERS).items()}
    | {name: model_of(message) for name, message in IN_BODIES.items()}
    | BODIES
)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_model_has_the_fields_of_its_message(name: str) -> None:
    expected: set[str] = set()
    for field in MESSAGES[name].fields_by_name:
        expected |= FLAT.get(field, {field}) if name in BODIES or name == "Rollout" else {field}
    if name in BODIES:
        expected -= IN_PATH - ({"checkpoint_id"} if name == "SaveCheckpointRequest" else set())
    assert set(MODELS[name].model_fields) == expected


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_are_frozen_and_closed(name: str) -> None:
    settings = MODELS[name].model_config
    assert settings.get("frozen") is True
    assert settings.get("extra") == "forbid"


# What a request is refused without; a rule of the contract, so it stands here a second time.
REQUIRED = {
    "AckWeightsRequest": {"receiver_id"},
    "CorrectionMask": {"level", "low", "high"},
    "CreatePolicyRequest": {"spec"},
    "ForwardBackwardRequest": {"loss"},
    "GetGradientManifestRequest": {"names"},
    "KlConfig": {"kind", "coefficient", "reference"},
    "LoraTuning": {"rank", "alpha"},
    "LossConfig": {"kind"},
    "OldLogprobs": {"kind"},
    "OptimStepConfig": {"learning_rate"},
    "OptimStepRequest": {"optim"},
    "OverlongPenalty": {"max_tokens", "buffer_tokens", "scale"},
    "PolicySpec": {"policy_id"},
    "RolloutBatch": {"groups"},
    "RolloutCorrection": {"mode", "level", "high"},
    "RolloutGroup": {"group_id"},
    "Segment": {"tokens"},
    "StalenessConfig": {"max_versions", "action"},
    "Tensor": {"dtype"},
    "UpdateRequest": {"loss", "optim"},
    "UploadPartRequest": {"groups"},
    "UploadedBatch": {"upload_id", "num_parts"},
    "VersionSpan": {"first_token", "version"},
}


@pytest.mark.parametrize("name", sorted(IN_BODIES | BODIES))
def test_a_request_is_refused_without_what_has_no_default(name: str) -> None:
    fields = MODELS[name].model_fields
    assert {field for field in fields if fields[field].is_required()} == REQUIRED.get(name, set())


@pytest.mark.parametrize("name", sorted(_reached(ANSWERS).keys() - IN_BODIES.keys()))
def test_an_answer_has_every_field(name: str) -> None:
    assert all(field.is_required() for field in MODELS[name].model_fields.values())


def test_plain_lists_are_taken_where_the_contract_says_so() -> None:
    lists = {
        (message.name, field.name): list_dtype(field)
        for message in MESSAGES.values()
        for field in message.fields
        if list_dtype(field)
    }
    floats = (
        "sampler_logprobs", "old_logprobs", "reference_logprobs", "advantages", "token_weights"
    )  # fmt: skip
    assert lists == {
        ("Segment", "tokens"): "int32",
        ("Rollout", "response"): "int32",
        ("Rollout", "loss_mask"): "bool",
        ("RolloutGroup", "prompt"): "int32",
        **{("Rollout", name): "float32" for name in floats},
    }


def test_the_document_says_what_the_contract_says() -> None:
    """Descriptions come from the comments of the .proto files."""
    report = MODELS["StepReport"].model_json_schema()
    assert report["description"].startswith("What one ForwardBackward, Update or OptimStep did;")
    assert "k3 estimate" in report["properties"]["sampler_kl"]["description"]
    kinds = MODELS["KlConfig"].model_json_schema()["$defs"]["KlKind"]
    assert kinds["enum"] == ["k1", "k2", "k3", "k1_plus", "k3_plus"]
    assert "`k1`: logp - ref." in kinds["description"]
    assert all(model.model_json_schema().get("description") for model in MODELS.values())


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
        request = config.LossRequest(kind=member)
        message = write(training_pb2.LossConfig(), request, skip={"overlong"})
        assert loss_request(message).kind is member


def test_every_unset_enum_has_its_one_default() -> None:
    empty = policy_pb2.PolicySpec()
    assert from_wire(empty, "recovery", types.Recovery, "f") is types.Recovery.REPLAY
    with pytest.raises(RatoonError, match=r"loss\.kind: got nothing, expected one of grpo,"):
        loss_request(training_pb2.LossConfig())
    with pytest.raises(RatoonError, match=r"loss\.kind: got enum value 99, expected one of grpo,"):
        loss_request(training_pb2.LossConfig(kind=99))  # pyright: ignore[reportArgumentType]
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
                plan=1.0, forward=2.0, backward=3.0, optimizer=4.0, publish=5.0, digest=6.0
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
        elif "TensorGradNorm" in kind:
            values[field.name] = (TensorGradNorm(name="a", norm=1.5, max_abs=0.5),)
        elif "RouterReport" in kind:
            values[field.name] = (
                RouterReport(layer=3, max_load=1.5, unused_experts=2, entropy=0.5),
            )
        elif kind.startswith("tuple[float"):
            values[field.name] = (1.5, 2.5)
        elif kind.startswith("tuple"):
            values[field.name] = ("a", "b")
        elif kind == "bool":
            values[field.name] = True
        elif kind.startswith("SkipReason"):
            values[field.name] = SkipReason.REFERENCE_KL
        else:
            values[field.name] = float(index) if "float" in kind else index
    message = write(training_pb2.StepReport(), StepReport(**values))
    for name, value in values.items():
        if name == "seconds":
            assert (message.seconds.plan, message.seconds.digest) == (1.0, 6.0)
        elif name == "self_check":
            for part in fields(SelfCheckReport):
                if part.name == "worst_parameter_difference":
                    assert not message.self_check.HasField("worst_parameter_difference")
                else:
                    assert getattr(message.self_check, part.name) == getattr(value, part.name)
        elif name == "tensor_grad_norms":
            (norm,) = message.tensor_grad_norms
            assert (norm.name, norm.norm, norm.max_abs) == ("a", 1.5, 0.5)
        elif name == "routers":
            (router,) = message.routers
            assert (router.layer, router.max_load) == (3, 1.5)
            assert (router.unused_experts, router.entropy) == (2, 0.5)
        elif name == "skip_reason":
            assert message.skip_reason == training_pb2.SKIP_REASON_REFERENCE_KL
        elif name == "warnings":
            assert list(message.warnings) == ["a", "b"]
        elif name == "rank_seconds":
            assert list(message.rank_seconds) == [1.5, 2.5]
        else:
            assert getattr(message, name) == value, name
    empty = write(training_pb2.StepReport(), StepReport())
    absent = {
        field.name for field in fields(StepReport) if getattr(StepReport(), field.name) is None
    }
    assert absent.isdisjoint(field.name for field, _ in empty.ListFields())


@pytest.mark.parametrize("name", sorted(_reached(ANSWERS)))
def test_an_empty_message_has_every_key_in_json(name: str) -> None:
    assert set(to_json(GetMessageClass(MESSAGES[name])())) == set(MODELS[name].model_fields)


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
