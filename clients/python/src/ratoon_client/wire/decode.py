"""Messages to the client's values, field by field of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from numpy.typing import NDArray

from ratoon_client import results
from ratoon_client.errors import IntegrityError, RatoonApiError
from ratoon_client.policy_options import NumericsGuard
from ratoon_client.wire.enums import enum_name
from ratoon_proto.codec import CodecError, decode_tensor
from ratoon_proto.v1 import operation_pb2, policy_pb2, service_pb2, training_pb2, weights_pb2
from ratoon_proto.v1.tensor_pb2 import Tensor

T = TypeVar("T")
_MAX_TENSOR_BYTES = 2**40

_TYPES: Mapping[str, type[Any]] = MappingProxyType(
    {
        message.DESCRIPTOR.full_name: value
        for message, value in (
            (policy_pb2.LoraTuning, results.LoraTuning),
            (policy_pb2.AdamWConfig, results.AdamWConfig),
            (policy_pb2.PublishConfig, results.PublishConfig),
            (policy_pb2.ParallelLayout, results.ParallelLayout),
            (policy_pb2.NumericsGuard, NumericsGuard),
            (policy_pb2.PolicySpec, results.PolicySpec),
            (policy_pb2.Policy, results.Policy),
            (operation_pb2.Progress, results.Progress),
            (operation_pb2.ErrorDetail, results.ErrorDetail),
            (operation_pb2.CheckpointInfo, results.Checkpoint),
            (operation_pb2.StepResult, results.StepResult),
            (operation_pb2.Operation, results.Operation),
            (training_pb2.PhaseSeconds, results.PhaseSeconds),
            (training_pb2.SelfCheckReport, results.SelfCheckReport),
            (training_pb2.LayerGradNorm, results.LayerGradNorm),
            (training_pb2.StepReport, results.StepReport),
            (weights_pb2.WeightFile, results.WeightFile),
            (weights_pb2.WeightManifest, results.WeightManifest),
            (service_pb2.BackendInfo, results.BackendInfo),
            (service_pb2.ServerLimits, results.ServerLimits),
            (service_pb2.ServerInfo, results.ServerInfo),
            (service_pb2.HealthResponse, results.Health),
        )
    }
)


def decode(message: Message, value_type: type[T]) -> T:
    """The value of `value_type`, which is the one that belongs to the message.

    Raises IntegrityError for what no service of this version says: an unknown enum value, a time
    that is none.
    """
    try:
        value = _decode(message)
    except (ValueError, OverflowError, OSError) as err:
        raise IntegrityError(f"the answer is no {value_type.__name__}: {err}") from err
    assert isinstance(value, value_type)
    return value


def error_of(detail: operation_pb2.ErrorDetail) -> RatoonApiError:
    return RatoonApiError(
        detail.code,
        detail.message,
        field=detail.field,
        got=detail.got,
        expected=detail.expected,
        retryable=detail.retryable,
        details=dict(detail.details),
    )


def decode_forward(
    output: training_pb2.ForwardOutput, forward: operation_pb2.ForwardResult
) -> results.ForwardResult:
    """Split the concatenated arrays by rollout. Raises IntegrityError where they do not fit."""
    offsets = _array(output.offsets, "offsets").astype(np.int64)
    logprobs = _array(output.logprobs, "logprobs")
    entropy = _array(output.entropy, "entropy") if output.HasField("entropy") else None
    return results.ForwardResult(
        logprobs=_split(logprobs, offsets),
        entropy=None if entropy is None else _split(entropy, offsets),
        report=decode(forward.report, results.StepReport),
        version=forward.version,
    )


def _array(tensor: Tensor, name: str) -> NDArray[Any]:
    try:
        return cast("NDArray[Any]", decode_tensor(tensor, max_bytes=_MAX_TENSOR_BYTES))
    except CodecError as err:
        raise IntegrityError(f"forward output {name}: {err}") from err


def _split(array: NDArray[Any], offsets: NDArray[np.int64]) -> tuple[NDArray[np.float32], ...]:
    are_flat = array.ndim == offsets.ndim == 1 and len(offsets) > 0
    if not are_flat or offsets[0] != 0 or offsets[-1] != len(array) or (np.diff(offsets) < 0).any():
        raise IntegrityError(f"forward output: offsets do not cut {array.size} values")
    bounds = offsets.tolist()
    return tuple(array[start:stop].astype(np.float32) for start, stop in pairwise(bounds))


def _decode(message: Message) -> Any:
    value_type = _TYPES[message.DESCRIPTOR.full_name]
    values: dict[str, Any] = {}
    for field in cast("Iterable[Field[Any]]", fields(value_type)):
        descriptor = cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[field.name])
        is_absent = descriptor.has_presence and not message.HasField(field.name)
        if not (is_absent and field.default is not MISSING):
            values[field.name] = _value(descriptor, getattr(message, field.name))
    return value_type(**values)


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return tuple(_single(field, item) for item in value)
    return _single(field, value)


def _single(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return datetime.fromtimestamp(value.seconds + value.nanos * 1e-9, tz=UTC)
    if isinstance(value, Message):
        return _decode(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    return value
