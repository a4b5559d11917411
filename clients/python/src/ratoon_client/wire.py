"""Between the client's values and the messages of `ratoon.v1`: fields by their names.

Only fields whose names or forms differ are written here by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from ratoon_client.arguments import all_of, check_type
from ratoon_client.errors import IntegrityError, InvalidArgumentError, RatoonApiError
from ratoon_client.rollouts import Group, Rollout
from ratoon_client.rpcs import RequestT
from ratoon_client.values import (
    AdamW,
    ForwardBackwardResult,
    ForwardResult,
    Lora,
    Loss,
    Optim,
    Parallel,
    PolicyOptions,
    Publish,
)
from ratoon_proto.codec import CodecError, decode_tensor, encode_array
from ratoon_proto.fields import FieldError
from ratoon_proto.fill import fill
from ratoon_proto.records import from_proto
from ratoon_proto.types import CheckpointSource, NumericsGuard, StepReport, StepResult
from ratoon_proto.v1 import operation_pb2, policy_pb2, rollout_pb2, training_pb2
from ratoon_proto.v1.tensor_pb2 import Tensor

_OPTION_TYPES: Mapping[str, type] = MappingProxyType(
    {
        "lora": Lora,
        "optimizer": AdamW,
        "publish": Publish,
        "parallel": Parallel,
        "numerics_guard": NumericsGuard,
        "from_checkpoint": CheckpointSource,
    }
)
T = TypeVar("T")
ScalarT = TypeVar("ScalarT", bound=np.generic)
_MAX_TENSOR_BYTES = 2**40


def group_message(group: Group, path: str = "group") -> rollout_pb2.RolloutGroup:
    """`path` names the group in errors."""
    check_type(f"{path}.group_id", group.group_id, str)
    return rollout_pb2.RolloutGroup(
        group_id=group.group_id,
        prompt=encode_array(group.prompt),
        rollouts=[
            _rollout(rollout, f"{path}.rollouts[{index}]")
            for index, rollout in enumerate(group.rollouts)
        ],
    )


def group_messages(groups: Iterable[Group]) -> list[rollout_pb2.RolloutGroup]:
    """Raises InvalidArgumentError naming `groups[3].rollouts[17].reward`, before a byte is sent."""
    every = all_of("groups", groups, Group)
    _check_rewards(every)
    return [group_message(group, f"groups[{index}]") for index, group in enumerate(every)]


def _check_rewards(groups: Iterable[Group]) -> None:
    """Raise where a rollout has no outcome though another has a reward: a scorer returned None."""
    places = [
        (f"groups[{g}].rollouts[{r}]", rollout.outcome)
        for g, group in enumerate(groups)
        for r, rollout in enumerate(group.rollouts)
    ]
    rewarded = next((path for path, outcome in places if isinstance(outcome, float)), None)
    missing = next((path for path, outcome in places if outcome is None), None)
    if rewarded is not None and missing is not None:
        raise InvalidArgumentError(f"{missing}.reward", "None", f"a reward, as in {rewarded}")


def _rollout(rollout: Rollout, path: str) -> rollout_pb2.Rollout:
    message = rollout_pb2.Rollout()
    _fill(message, rollout, path, skip=("content", "outcome"))
    content = "segments" if isinstance(rollout.content, tuple) else "response"
    outcome = "advantages" if isinstance(rollout.outcome, np.ndarray) else "reward"
    _fill(message, {content: rollout.content, outcome: rollout.outcome}, path)
    return message


def loss_message(loss: Loss) -> training_pb2.LossConfig:
    check_type("loss", loss, Loss)
    return _message(training_pb2.LossConfig, loss, "loss")


def optim_message(optim: Optim) -> training_pb2.OptimStepConfig:
    check_type("optim", optim, Optim)
    return _message(training_pb2.OptimStepConfig, optim, "optim")


def request_message(kind: type[RequestT], /, **values: Any) -> RequestT:
    """Make a message of fields by name; None is absent. Raises InvalidArgumentError."""
    return _message(kind, values, "")


def policy_spec_message(policy_id: str, options: PolicyOptions) -> policy_pb2.PolicySpec:
    for name, value in options.items():
        if name not in PolicyOptions.__annotations__:
            names = ", ".join(PolicyOptions.__annotations__)
            raise InvalidArgumentError(name, "an unknown option", f"one of {names}")
        if name in _OPTION_TYPES and value is not None:
            check_type(name, value, _OPTION_TYPES[name])
    values = {name: value for name, value in options.items() if name != "send_folder"}
    return _message(policy_pb2.PolicySpec, {"policy_id": policy_id, **values}, "")


def _message(kind: type[RequestT], values: Any, path: str) -> RequestT:
    message = kind()
    _fill(message, values, path)
    return message


def _fill(message: Message, values: Any, path: str, *, skip: Collection[str] = ()) -> None:
    try:
        fill(message, values, path, skip=skip)
    except FieldError as err:
        raise InvalidArgumentError(err.field, err.got, err.expected) from err


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
    """A Forward's result with its output. Raises IntegrityError where they do not fit."""
    logprobs, entropy = _by_rollout(output)
    offsets = _array(output.offsets, "offsets").astype(np.int64)
    tokens = of_tokens = None
    if output.HasField("teacher_tokens"):
        ids, values = output.teacher_tokens, output.teacher_logprobs
        tokens = _split(_array(ids, "teacher_tokens"), offsets, np.int32, axes=2)
        of_tokens = _split(_array(values, "teacher_logprobs"), offsets, np.float32, axes=2)
    states = None
    if output.HasField("values"):
        states = _split(_array(output.values, "values"), offsets, np.float32)
    return ForwardResult(
        logprobs=logprobs,
        entropy=entropy,
        report=decode(forward.report, StepReport),
        version=forward.version,
        teacher_tokens=tokens,
        teacher_logprobs=of_tokens,
        values=states,
    )


def decode_step(
    output: training_pb2.ForwardOutput | None, step: operation_pb2.StepResult
) -> ForwardBackwardResult:
    """A ForwardBackward's result with its output, if it has one. Raises as `decode_forward`."""
    result = decode(step, StepResult)
    logprobs, entropy = (None, None) if output is None else _by_rollout(output)
    return ForwardBackwardResult(
        version=result.version,
        report=result.report,
        file=result.file,
        logprobs=logprobs,
        entropy=entropy,
    )


def _by_rollout(
    output: training_pb2.ForwardOutput,
) -> tuple[tuple[NDArray[np.float32], ...], tuple[NDArray[np.float32], ...] | None]:
    """Log-probs and entropies, the concatenated arrays split by rollout."""
    offsets = _array(output.offsets, "offsets").astype(np.int64)
    logprobs = _array(output.logprobs, "logprobs")
    entropy = _array(output.entropy, "entropy") if output.HasField("entropy") else None
    answered = _split(logprobs, offsets, np.float32)
    return answered, None if entropy is None else _split(entropy, offsets, np.float32)


def _array(tensor: Tensor, name: str) -> NDArray[Any]:
    try:
        return cast("NDArray[Any]", decode_tensor(tensor, max_bytes=_MAX_TENSOR_BYTES))
    except CodecError as err:
        raise IntegrityError(f"forward output {name}: {err}") from err


def _split(
    array: NDArray[Any],
    offsets: NDArray[np.int64],
    dtype: type[ScalarT],
    *,
    axes: int = 1,
) -> tuple[NDArray[ScalarT], ...]:
    is_of_form = array.ndim == axes and offsets.ndim == 1 and len(offsets) > 0
    if (
        not is_of_form
        or offsets[0] != 0
        or offsets[-1] != len(array)
        or (np.diff(offsets) < 0).any()
    ):
        raise IntegrityError(f"forward output: offsets do not cut {array.size} values")
    bounds = offsets.tolist()
    return tuple(array[start:stop].astype(dtype) for start, stop in pairwise(bounds))
