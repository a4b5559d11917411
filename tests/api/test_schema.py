"""JSON models against the messages that they mirror, and the translation between the two."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass

from ratoon.api.contract import SERVICE
from ratoon.api.convert.checks import read_enum
from ratoon.api.http.schema import body_of, model_of
from ratoon.api.submissions import loss_request
from ratoon.errors import RatoonError
from ratoon.model import spec
from ratoon.rollout import raw
from ratoon_proto import types
from ratoon_proto.fields import list_dtype
from ratoon_proto.json_form import to_json
from ratoon_proto.v1 import (
    operation_pb2,
    policy_pb2,
    rollout_pb2,
    sampling_pb2,
    service_pb2,
    tensor_pb2,
    training_pb2,
    weights_pb2,
)

FILES = (
    operation_pb2,
    policy_pb2,
    rollout_pb2,
    sampling_pb2,
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
# Fields that are in the path instead of the body.
IN_PATH = {"policy_id", "digest", "upload_id", "part_index", "checkpoint_id"}
# Messages whose fields JSON has in place of the message itself.
FLAT = {"key": {"seq", "request_id", "consume"}, "segments": {"segments"}}
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


def test_models_have_the_fields_of_their_messages_and_no_others() -> None:
    for name, model in MODELS.items():
        expected: set[str] = set()
        for field in MESSAGES[name].fields_by_name:
            is_flat = name in BODIES or name == "Rollout"
            expected |= FLAT.get(field, {field}) if is_flat else {field}
        if name in BODIES:
            expected -= IN_PATH - ({"checkpoint_id"} if name == "SaveCheckpointRequest" else set())
        assert set(model.model_fields) == expected, name
        assert model.model_config.get("frozen") is True
        assert model.model_config.get("extra") == "forbid"


# What a request is refused without; a rule of the contract, so it stands here a second time.
REQUIRED = {
    "AckWeightsRequest": {"receiver_id"},
    "CheckpointSource": {"policy_id", "checkpoint_id"},
    "CorrectionMask": {"level", "low", "high"},
    "CreatePolicyRequest": {"spec"},
    "DistillationConfig": {"divergence"},
    "ForwardBackwardRequest": {"loss"},
    "GetGradientManifestRequest": {"names"},
    "KlConfig": {"kind", "coefficient", "reference"},
    "LearningRateSchedule": {"kind", "learning_rate"},
    "LoraTuning": {"rank", "alpha"},
    "LossConfig": {"kind"},
    "OldLogprobs": {"kind"},
    "OptimStepRequest": {"optim"},
    "OverlongPenalty": {"max_tokens", "buffer_tokens", "scale"},
    "ParameterGroup": {"pattern"},
    "PolicySpec": {"policy_id"},
    "RolloutBatch": {"groups"},
    "RolloutCorrection": {"mode", "level", "high"},
    "RolloutGroup": {"group_id"},
    "SampleRequest": {"prompt"},
    "SamplingMask": {"token_ids", "lengths"},
    "Segment": {"tokens"},
    "SentModel": {"files"},
    "StalenessConfig": {"max_versions", "action"},
    "Teacher": {"policy_id"},
    "Tensor": {"dtype"},
    "UpdateRequest": {"loss", "optim"},
    "UploadPartRequest": {"groups"},
    "UploadedBatch": {"upload_id", "num_parts"},
    "VersionSpan": {"first_token", "version"},
}


def test_a_request_is_refused_without_what_has_no_default() -> None:
    for name in IN_BODIES | BODIES:
        fields = MODELS[name].model_fields
        required = {field for field in fields if fields[field].is_required()}
        assert required == REQUIRED.get(name, set()), name


def test_plain_lists_are_taken_where_the_contract_says_so() -> None:
    lists = {
        (message.name, field.name): list_dtype(field)
        for message in MESSAGES.values()
        for field in message.fields
        if list_dtype(field)
    }
    floats = (
        "sampler_logprobs", "old_logprobs", "reference_logprobs", "advantages", "token_weights",
        "returns", "old_values",
    )  # fmt: skip
    assert lists == {
        ("SamplingMask", "token_ids"): "int32",
        ("SamplingMask", "lengths"): "int32",
        ("Segment", "tokens"): "int32",
        ("Rollout", "response"): "int32",
        ("Rollout", "loss_mask"): "bool",
        ("RolloutGroup", "prompt"): "int32",
        **{("Rollout", name): "float32" for name in floats},
    }


def test_the_document_says_what_the_contract_says() -> None:
    """Descriptions come from the comments of the .proto files."""
    report = MODELS["StepReport"].model_json_schema()
    assert report["description"].startswith("Figures of one ForwardBackward or Update, or of")
    assert "k3 estimate" in report["properties"]["sampler_kl"]["description"]
    kinds = MODELS["KlConfig"].model_json_schema()["$defs"]["KlKind"]
    assert kinds["enum"] == ["k1", "k2", "k3", "k1_plus", "k3_plus"]
    assert "`k1`: logp - ref." in kinds["description"]
    assert all(model.model_json_schema().get("description") for model in MODELS.values())


def test_enums_of_the_services_own_have_the_values_of_the_contract() -> None:
    """One is for proofs too, the other says that nothing was said."""
    assert {*spec.ModelDtype} == {*types.ModelDtype, "float64"}
    assert {*raw.SamplerLogprobsKind} == {*types.SamplerLogprobsKind, "unspecified"}


def test_unset_and_unknown_enums_are_the_default_or_refused() -> None:
    empty = rollout_pb2.Rollout()
    kind = read_enum(empty, "sampler_logprobs_kind", raw.SamplerLogprobsKind, "f")
    assert kind is raw.SamplerLogprobsKind.UNSPECIFIED
    request = service_pb2.ImportWeightsRequest()
    assert read_enum(request, "mode", types.ImportMode, "mode") is types.ImportMode.FULL
    request.mode = 99  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RatoonError, match=r"mode: got enum value 99, expected one of full, delta"):
        read_enum(request, "mode", types.ImportMode, "mode")
    with pytest.raises(RatoonError, match=r"loss\.kind: got nothing, expected one of grpo,"):
        loss_request(training_pb2.LossConfig())
    with pytest.raises(RatoonError, match=r"loss\.kind: got enum value 99, expected one of grpo,"):
        loss_request(training_pb2.LossConfig(kind=99))  # pyright: ignore[reportArgumentType]


def test_an_answer_has_every_field() -> None:
    for name, message in _reached(ANSWERS).items():
        assert set(to_json(GetMessageClass(message)())) == set(MODELS[name].model_fields), name
        fields = MODELS[name].model_fields.values()
        assert name in IN_BODIES or all(field.is_required() for field in fields), name


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
