"""Engine values as JSON text and back, for the journal's columns and the payload hash.

Objects are stored under a tag rather than a class name: a class may be renamed or moved, its tag
may not. `from_text(to_text(v)) == v`, and only the classes below are ever built.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from functools import cache
from typing import Any, cast

from google.protobuf.message import Message

from ratoon.engine.commands import COMMANDS, Command, ForwardCommand, RefusedCommand
from ratoon.engine.types import (
    CheckpointInfo,
    FailedResult,
    ForwardResult,
    NamedVersion,
    Policy,
    PolicyResult,
    PolicySpec,
)
from ratoon.engine.worker.tasks import Choices, TeacherAnswer
from ratoon.model.spec import FolderBase, ModelInfo, ModelSpec, PresetBase
from ratoon.rollout.packed import MicroBatch, Stage, UpdatePlan
from ratoon_proto import types as proto
from ratoon_proto.v1 import operation_pb2, policy_pb2, training_pb2

_TAG = "$"

# Tags are on disk and in payload hashes: never change one, or give it to another class.
TAGS: dict[str, type] = {
    "policy": Policy,
    "policy_spec": PolicySpec,
    "publish": proto.PublishConfig,
    "parallel": proto.ParallelLayout,
    "model": ModelSpec,
    "model_info": ModelInfo,
    "base.preset": PresetBase,
    "base.folder": FolderBase,
    "weight_file": proto.WeightFile,
    "tuning.full": proto.FullTuning,
    "tuning.lora": proto.LoraTuning,
    "adamw": proto.AdamWConfig,
    "schedule": proto.LearningRateSchedule,
    "muon": proto.MuonConfig,
    "parameter_group": proto.ParameterGroup,
    "checkpoint_source": proto.CheckpointSource,
    "numerics_guard": proto.NumericsGuard,
    **{f"command.{command.kind}": command for command in COMMANDS},
    "command.refused": RefusedCommand,
    "choices": Choices,
    "teacher_answer": TeacherAnswer,
    "plan": UpdatePlan,
    "micro_batch": MicroBatch,
    "stage": Stage,
    "loss": proto.LossConfig,
    "optim": proto.OptimStepConfig,
    "old_logprobs": proto.OldLogprobs,
    "kl": proto.KlConfig,
    "correction": proto.RolloutCorrection,
    "correction_mask": proto.CorrectionMask,
    "overlong.filter": proto.OverlongFilter,
    "overlong.penalty": proto.OverlongPenalty,
    "staleness": proto.StalenessConfig,
    "distillation": proto.DistillationConfig,
    "teacher": proto.Teacher,
    "value": proto.ValueLossConfig,
    "result.policy": PolicyResult,
    "result.step": proto.StepResult,
    "result_file": proto.ResultFile,
    "result.forward": ForwardResult,
    "result.checkpoint": CheckpointInfo,
    "result.named_version": NamedVersion,
    "result.import": proto.ImportResult,
    "result.empty": proto.EmptyResult,
    "result.failed": FailedResult,
    "report": proto.StepReport,
    "seconds": proto.PhaseSeconds,
    "self_check": proto.SelfCheckReport,
    "tensor_grad_norm": proto.TensorGradNorm,
    "router": proto.RouterReport,
    "warning": proto.StepWarning,
    "offender": proto.Offender,
    "group_report": proto.GroupReport,
    "bad_rollout": proto.BadRollout,
}
_TAG_OF = {cls: tag for tag, cls in TAGS.items()}


def _from(message: type[Message], number: int) -> frozenset[str]:
    """Names of the message's fields with this number or a higher one."""
    return frozenset(field.name for field in message.DESCRIPTOR.fields if field.number >= number)


# Fields that came after values had been hashed: left out at their default, so that a value without
# them has the text that it had. A message's next field is among them by its number.
_ADDED: dict[type, frozenset[str]] = {
    ForwardCommand: frozenset({"num_teacher_tokens", "with_teacher_logprobs"}),
    Choices: frozenset({"teachers"}),
    ModelSpec: frozenset({"value_head"}),
    proto.LossConfig: _from(training_pb2.LossConfig, 36),
    proto.KlConfig: _from(training_pb2.KlConfig, 5),
    proto.DistillationConfig: _from(training_pb2.DistillationConfig, 4),
    proto.StepResult: _from(operation_pb2.StepResult, 5),
    proto.StepReport: frozenset({"teacher_kl", "teacher_mass", "policy_mass"})
    | _from(training_pb2.StepReport, 111),
    proto.LoraTuning: _from(policy_pb2.LoraTuning, 4),
    proto.PublishConfig: _from(policy_pb2.PublishConfig, 4),
}
_PLAIN = (bool, int, float, str)


def to_text(value: object) -> str:
    """Canonical JSON of a value: sorted names, no spaces, non-finite floats as in Python."""
    return json.dumps(_encode(value), sort_keys=True, separators=(",", ":"))


def from_text(text: str) -> object:
    """Inverse of `to_text` for a tagged object. Raises `ValueError` for text that fits no class."""
    return _decode(object, json.loads(text))


def payload_hash(command: Command) -> str:
    """SHA-256 of the validated command, which names its body by digest: 64 hexadecimal digits.

    It excludes the key, so a retry over another wire or by an upload in parts hashes the same.
    """
    return hash_text(to_text(command))


def hash_text(text: str) -> str:
    """SHA-256 of a text, 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _encode(value: object) -> object:
    cls = type(value)
    if value is None or cls in _PLAIN:
        return value
    if cls in _TAG_OF:
        added, found = _added(cls), {name: getattr(value, name) for name in _names(cls)}
        items = {
            name: _encode(item)
            for name, item in found.items()
            if name not in added or item != added[name]
        }
        return {_TAG: _TAG_OF[cls], **items}
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, tuple | list):
        return [_encode(item) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        return {name: _encode(item) for name, item in mapping.items()}
    if isinstance(value, int | float | str):
        return value
    raise TypeError(f"{cls} has no tag")


def _decode(hint: Any, value: object) -> object:
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        return _decode_object(mapping) if _TAG in mapping else mapping
    if isinstance(value, list):
        item_hint, _ = _rebuilt(hint)
        items = cast("list[object]", value)
        return items if item_hint is None else tuple(_decode(item_hint, item) for item in items)
    if isinstance(value, str):
        _, enum = _rebuilt(hint)
        return value if enum is None else enum(value)
    return value


def _decode_object(mapping: dict[str, object]) -> object:
    tag = str(mapping[_TAG])
    if tag not in TAGS:
        raise ValueError(f"no such tag: {tag}")
    cls = TAGS[tag]
    hints = _hints(cls)
    unknown = mapping.keys() - hints.keys() - {_TAG}
    if unknown:
        raise ValueError(f"{tag} has no {sorted(unknown)}")
    build = cast("Callable[..., object]", cls)
    return build(
        **{name: _decode(hints[name], item) for name, item in mapping.items() if name != _TAG}
    )


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


@cache
def _added(cls: type) -> dict[str, object]:
    """Defaults of the fields of `_ADDED`."""
    names = _ADDED.get(cls, frozenset())
    return {field.name: field.default for field in fields(cls) if field.name in names}


@cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a class's fields; its class attributes are not stored."""
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in _names(cls)}


@cache
def _rebuilt(hint: Any) -> tuple[Any, type[StrEnum] | None]:
    """What JSON's lists and texts were: the type of a tuple's items, and an enum; None: the same.

    `hint`: a type, or a union with at most one of each.
    """
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    arms = typing.get_args(hint) if is_union else (hint,)
    tuples = (typing.get_args(arm)[0] for arm in arms if typing.get_origin(arm) is tuple)
    enums = (arm for arm in arms if isinstance(arm, type) and issubclass(arm, StrEnum))
    return next(tuples, None), next(enums, None)
