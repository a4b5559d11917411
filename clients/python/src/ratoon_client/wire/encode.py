"""The client's values to messages; what is None is absent.

A field that a value has and its message has not is our bug and fails loudly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ratoon_client.arguments import all_of, check_type
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.loss import FromForward, Loss, Optim, OverlongFilter, OverlongPenalty
from ratoon_client.policy_options import AdamW, Lora, NumericsGuard, PolicyOptions, Publish
from ratoon_client.rollouts import Group, Rollout
from ratoon_client.wire.enums import enum_number
from ratoon_proto.codec import encode_array
from ratoon_proto.v1 import policy_pb2, rollout_pb2, training_pb2

_OPTION_TYPES: Mapping[str, type] = MappingProxyType(
    {"lora": Lora, "optimizer": AdamW, "publish": Publish, "numerics_guard": NumericsGuard}
)


def group_message(group: Group) -> rollout_pb2.RolloutGroup:
    check_type("group_id", group.group_id, str)
    return rollout_pb2.RolloutGroup(
        group_id=group.group_id,
        prompt=encode_array(group.prompt),
        rollouts=[_rollout(rollout) for rollout in group.rollouts],
    )


def group_messages(groups: Iterable[Group]) -> list[rollout_pb2.RolloutGroup]:
    return [group_message(group) for group in all_of("groups", groups, Group)]


def _rollout(rollout: Rollout) -> rollout_pb2.Rollout:
    message = rollout_pb2.Rollout()
    if isinstance(rollout.content, tuple):
        message.segments.SetInParent()
        for segment in rollout.content:
            added = message.segments.segments.add(tokens=encode_array(segment.tokens))
            _set(added, "trained", segment.trained, "rollout.segments.trained")
    else:
        message.response.CopyFrom(encode_array(rollout.content))
    match rollout.outcome:
        case None:
            pass
        case np.ndarray() as advantages:
            message.advantages.CopyFrom(encode_array(advantages))
        case reward:
            message.reward = reward
    for name in (
        "loss_mask",
        "sampler_logprobs",
        "old_logprobs",
        "reference_logprobs",
        "token_weights",
    ):
        array = getattr(rollout, name)
        if array is not None:
            getattr(message, name).CopyFrom(encode_array(array))
    for name in (
        "temperature",
        "sampler_logprobs_kind",
        "top_p",
        "top_k",
        "policy_version",
        "truncated",
    ):
        _set(message, name, getattr(rollout, name), f"rollout.{name}")
    return message


def loss_message(loss: Loss) -> training_pb2.LossConfig:
    check_type("loss", loss, Loss)
    message = training_pb2.LossConfig()
    _copy(message, loss, "loss", skip=("old_logprobs", "overlong"))
    match loss.old_logprobs:
        case None:
            pass
        case FromForward(operation_id=operation_id):
            _set(message.old_logprobs, "kind", "from_forward", "loss.old_logprobs")
            path = "loss.old_logprobs.operation_id"
            _set(message.old_logprobs, "forward_operation_id", operation_id, path)
        case kind:
            _set(message.old_logprobs, "kind", kind, "loss.old_logprobs")
    match loss.overlong:
        case None:
            pass
        case OverlongFilter():
            message.overlong_filter.SetInParent()
        case OverlongPenalty() as penalty:
            _copy(message.overlong_penalty, penalty, "loss.overlong")
        case other:  # pyright: ignore[reportUnnecessaryComparison] - callers need not check types
            raise InvalidArgumentError(
                "loss.overlong", repr(other), "an OverlongFilter, an OverlongPenalty or None"
            )
    return message


def optim_message(optim: Optim) -> training_pb2.OptimStepConfig:
    check_type("optim", optim, Optim)
    message = training_pb2.OptimStepConfig()
    _copy(message, optim, "optim")
    return message


def policy_spec_message(policy_id: str, options: PolicyOptions) -> policy_pb2.PolicySpec:
    message = policy_pb2.PolicySpec(policy_id=policy_id)
    if "preset" in options and "model_folder" in options:
        raise InvalidArgumentError("model_folder", "preset and model_folder", "one of them")
    for name, value in options.items():
        if name not in PolicyOptions.__annotations__:
            names = ", ".join(PolicyOptions.__annotations__)
            raise InvalidArgumentError(name, "an unknown option", f"one of {names}")
        match name:
            case "num_workers":
                _set(message.parallel, name, value, name)
            case name if name in _OPTION_TYPES:
                check_type(name, value, _OPTION_TYPES[name])
                getattr(message, name).SetInParent()
                _copy(getattr(message, name), value, name)
            case _:
                _set(message, name, value, name)
    return message


def _copy(message: Message, value: Any, path: str, *, skip: Sequence[str] = ()) -> None:
    """Every field of a dataclass into the field of its name."""
    for field in fields(value):
        item, place = getattr(value, field.name), f"{path}.{field.name}"
        # Absent, it would be 0 to the service.
        if item is None and field.default is MISSING:
            raise InvalidArgumentError(place, "None", "a value: there is no default")
        if field.name not in skip:
            _set(message, field.name, item, place)


def _set(message: Message, name: str, value: Any, path: str) -> None:
    if value is None:
        return
    field = cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[name])
    try:
        if field.message_type is not None:
            getattr(message, name).SetInParent()
            _copy(getattr(message, name), value, path)
        elif field.is_repeated and isinstance(value, str):
            raise InvalidArgumentError(path, repr(value)[:80], "a list")
        elif field.is_repeated:
            getattr(message, name).extend(value)
        elif field.enum_type is not None:
            setattr(message, name, enum_number(field.enum_type, str(value), field=path))
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, KeyError) as err:
        if isinstance(err, InvalidArgumentError):
            raise
        raise InvalidArgumentError(path, repr(value)[:80], f"a value of {name}'s type") from err
