"""Value classes against the messages that they are made from."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

from ratoon_proto import types
from ratoon_proto.fields import FieldError, fields_of, is_map
from ratoon_proto.fill import to_proto
from ratoon_proto.records import from_proto
from ratoon_proto.v1 import (
    operation_pb2,
    policy_pb2,
    rollout_pb2,
    sampling_pb2,
    service_pb2,
    training_pb2,
    weights_pb2,
)

_FILES = (
    operation_pb2,
    policy_pb2,
    rollout_pb2,
    sampling_pb2,
    service_pb2,
    training_pb2,
    weights_pb2,
)
_MESSAGES: dict[str, type[Message]] = {
    name: GetMessageClass(message)
    for file in _FILES
    for name, message in file.DESCRIPTOR.message_types_by_name.items()
}
_CLASSES: dict[str, Any] = {
    name: value for name, value in inspect.getmembers(types, is_dataclass) if name in _MESSAGES
}
# Messages that hold tensors, and a call's own request and response, are read by hand.
_WITHOUT_CLASS = {
    "ForwardOutput",
    "OperationKey",
    "Rollout",
    "RolloutBatch",
    "RolloutGroup",
    "Segment",
    "SegmentList",
}


def _filled(message: Message, numbers: Iterator[int], member: int) -> Message:
    """`message` with another value in each field; of each oneof the member of that number."""
    for field in fields_of(message.DESCRIPTOR):
        oneof = field.containing_oneof
        others = [] if oneof is None else list(oneof.fields)
        is_chosen = len(others) < 2 or others[member % len(others)].name == field.name
        if is_chosen and field.name not in ("inline", "forward"):
            _set(message, field, numbers, member)
    return message


def _set(message: Message, field: FieldDescriptor, numbers: Iterator[int], member: int) -> None:
    if is_map(field):
        getattr(message, field.name)["key"] = str(next(numbers))
    elif field.message_type is not None:
        if field.is_repeated:
            _filled(getattr(message, field.name).add(), numbers, member)
            return
        child = getattr(message, field.name)
        child.SetInParent()
        if isinstance(child, Timestamp):
            child.FromDatetime(datetime.fromtimestamp(next(numbers) + 0.5, UTC))
        else:
            _filled(child, numbers, member)
    elif field.is_repeated:
        getattr(message, field.name).extend([_value(field, next(numbers)) for _ in range(2)])
    else:
        setattr(message, field.name, _value(field, next(numbers)))


def _value(field: FieldDescriptor, number: int) -> Any:
    if field.enum_type is not None:
        return 1 + number % (len(field.enum_type.values) - 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return f"text {number}"
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    return number + 0.5 if field.type == FieldDescriptor.TYPE_DOUBLE else number


def test_every_message_but_those_of_calls_and_tensors_has_a_class() -> None:
    of_calls = {name for name in _MESSAGES if name.endswith(("Request", "Response"))}
    assert _MESSAGES.keys() - _CLASSES.keys() == of_calls | _WITHOUT_CLASS


@pytest.mark.parametrize("name", sorted(_CLASSES))
def test_a_message_is_the_same_after_it_was_a_value(name: str) -> None:
    for member in range(7):
        message = _filled(_MESSAGES[name](), itertools.count(1), member)
        for is_request in (False, True):
            value = from_proto(message, _CLASSES[name], is_request=is_request)
            assert to_proto(_MESSAGES[name], value) == message


@pytest.mark.parametrize("name", sorted(_CLASSES))
def test_an_empty_answer_has_every_field_that_has_no_default(name: str) -> None:
    """What an older service does not say is zero, empty or None, and never an error."""
    message: Any = _MESSAGES[name]()
    value = from_proto(message, _CLASSES[name])
    descriptor: Descriptor = message.DESCRIPTOR
    for field in fields(value):
        wire = descriptor.fields_by_name.get(field.name)
        if wire is not None and not wire.has_presence and wire.enum_type is None:
            given = getattr(value, field.name)
            assert not given or wire.name in ("num_workers", "num_samples"), field.name


def _loss(**values: Any) -> training_pb2.LossConfig:
    return training_pb2.LossConfig(kind=training_pb2.LOSS_KIND_GRPO, **values)


@pytest.mark.parametrize(
    ("message", "field", "got"),
    [
        (training_pb2.LossConfig(), "loss.kind", "nothing"),
        (
            _loss(kl=training_pb2.KlConfig(kind=training_pb2.KL_KIND_K1)),
            "loss.kl.coefficient",
            "nothing",
        ),
        (_loss(token_weight=77), "loss.token_weight", "enum value 77"),
        (_loss(old_logprobs=training_pb2.OldLogprobs()), "loss.old_logprobs.kind", "nothing"),
        (
            _loss(overlong_penalty=training_pb2.OverlongPenalty(max_tokens=1)),
            "loss.overlong_penalty.scale",
            "nothing",
        ),
    ],
)
def test_a_request_is_refused_by_field(
    message: training_pb2.LossConfig, field: str, got: str
) -> None:
    with pytest.raises(FieldError) as caught:
        from_proto(message, types.LossConfig, "loss", is_request=True)
    assert (caught.value.field, caught.value.got) == (field, got)


def test_an_enum_value_of_a_newer_service_is_unspecified() -> None:
    """It is of the enum's class and among none of its lists, and it survives a copy."""
    operation = from_proto(
        operation_pb2.Operation(state=77),  # pyright: ignore[reportArgumentType]
        types.Operation,
    )
    assert isinstance(operation.state, types.OperationState)
    assert (operation.state, operation.is_final) == ("unspecified", False)
    assert "unspecified" not in [str(state) for state in types.OperationState]
    assert types.OperationState(operation.state) == operation.state
    with pytest.raises(ValueError, match="no_such"):
        types.OperationState("no_such")


def test_defaults_are_those_of_the_proto_files() -> None:
    message = policy_pb2.PolicySpec(policy_id="p")
    spec = from_proto(message, types.PolicySpec, is_request=True)
    assert spec == types.PolicySpec("p")
    assert spec.optimizer == types.AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01)
    assert (spec.recovery, spec.deterministic, spec.keep_versions) == ("replay", True, 2)
    assert (spec.parallel.num_workers, spec.numerics_guard.max_skipped_in_row) == (1, 5)
    assert from_proto(training_pb2.StepReport(), types.StepReport) == types.StepReport()


def test_text_and_lists_become_what_the_class_declares() -> None:
    loss = types.LossConfig("grpo", old_logprobs="on_policy", token_weight="per_token")
    assert loss.kind is types.LossKind.GRPO
    assert loss.old_logprobs == types.OldLogprobs(types.OldLogprobsKind.ON_POLICY)
    assert loss.token_weight is types.TokenWeight.PER_TOKEN
    assert types.LoraTuning(8, 16.0, target_modules=["q_proj"]).target_modules == ("q_proj",)
    assert types.LoraTuning(8, 16.0, target_modules="all-linear").target_modules == ("all-linear",)
    wrong = types.LossConfig("grop")  # pyright: ignore[reportArgumentType]
    with pytest.raises(FieldError, match=r"loss\.kind: got 'grop', expected one of grpo,"):
        to_proto(training_pb2.LossConfig, wrong, "loss")
    of_another = types.LossConfig("grpo", overlong=loss)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FieldError, match=r"loss\.overlong: .*a value of type OverlongFilter, a"):
        to_proto(training_pb2.LossConfig, of_another, "loss")
