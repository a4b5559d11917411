"""Messages to the client's values, which have the names of their fields."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from ratoon_client.errors import IntegrityError, RatoonApiError
from ratoon_client.values import ForwardResult
from ratoon_proto.codec import CodecError, decode_tensor
from ratoon_proto.records import from_proto
from ratoon_proto.types import StepReport
from ratoon_proto.v1 import operation_pb2, training_pb2
from ratoon_proto.v1.tensor_pb2 import Tensor

T = TypeVar("T")
_MAX_TENSOR_BYTES = 2**40


def decode(message: Message, value_type: type[T]) -> T:
    """Read an answer. Raises IntegrityError for what no service says, as a time out of range."""
    try:
        return from_proto(message, value_type)
    except (ValueError, OverflowError, OSError) as err:
        raise IntegrityError(f"the answer is no {value_type.__name__}: {err}") from err


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
) -> ForwardResult:
    """Split the concatenated arrays by rollout. Raises IntegrityError where they do not fit."""
    offsets = _array(output.offsets, "offsets").astype(np.int64)
    logprobs = _array(output.logprobs, "logprobs")
    entropy = _array(output.entropy, "entropy") if output.HasField("entropy") else None
    return ForwardResult(
        logprobs=_split(logprobs, offsets),
        entropy=None if entropy is None else _split(entropy, offsets),
        report=decode(forward.report, StepReport),
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
