"""Decodes rollout groups from the wire, without validating them.

A tensor's size is checked before it is decoded; errors name group and rollout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ratoon.api.convert.checks import at_least, read_enum, required
from ratoon.errors import invalid
from ratoon.rollout.raw import (
    RawGroup,
    RawRollout,
    RawSamplingMask,
    RawSegment,
    SamplerLogprobsKind,
)
from ratoon_proto.codec import CodecError, decode_tensor
from ratoon_proto.v1 import rollout_pb2 as wire
from ratoon_proto.v1.tensor_pb2 import Tensor

# Bytes per element of the widest dtype that a caller may send.
_WIDEST_BYTES = 8
_KINDS = {"tokens": "iu", "values": "f", "flags": "b"}
# Per-token arrays of a rollout.
_ARRAYS: Mapping[Any, str] = MappingProxyType(
    {
        "loss_mask": "flags",
        "sampler_logprobs": "values",
        "old_logprobs": "values",
        "reference_logprobs": "values",
        "advantages": "values",
        "token_weights": "values",
        "returns": "values",
        "old_values": "values",
    }
)


def raw_groups(messages: Iterable[wire.RolloutGroup], *, max_tokens: int) -> list[RawGroup]:
    """Decode groups; no array may have more than `max_tokens` elements.

    Raises INVALID_ARGUMENT naming `groups[g].rollouts[r].<field>`.
    """
    max_bytes = max_tokens * _WIDEST_BYTES
    return [
        RawGroup(
            group_id=message.group_id,
            prompt=_tokens(f"groups[{index}].prompt", message.prompt, max_bytes),
            rollouts=tuple(
                _rollout(f"groups[{index}].rollouts[{number}]", rollout, max_bytes)
                for number, rollout in enumerate(message.rollouts)
            ),
        )
        for index, message in enumerate(messages)
    ]


def _rollout(field: str, message: wire.Rollout, max_bytes: int) -> RawRollout:
    # What is present, by one call: most rollouts have a few of the fields.
    given: dict[str, Any] = {one.name: value for one, value in message.ListFields()}
    arrays = {
        name: _array(f"{field}.{name}", given[name], kind, max_bytes) if name in given else None
        for name, kind in _ARRAYS.items()
    }
    version = given.get("policy_version")
    return RawRollout(
        segments=_segments(field, given, max_bytes),
        **arrays,
        reward=given.get("reward"),
        temperature=given.get("temperature", 1.0),
        sampler_logprobs_kind=read_enum(
            message, "sampler_logprobs_kind", SamplerLogprobsKind, f"{field}.sampler_logprobs_kind"
        ),
        top_p=given.get("top_p"),
        top_k=given.get("top_k"),
        policy_version=(
            None if version is None else at_least(f"{field}.policy_version", version, 0)
        ),
        truncated=message.truncated,
        routed_experts=_sent(f"{field}.routed_experts", given.get("routed_experts")),
        routed_experts_start=message.routed_experts_start,
        sampling_mask=_sampling_mask(field, given.get("sampling_mask"), max_bytes),
        teacher_tokens=_sent(f"{field}.teacher_tokens", given.get("teacher_tokens")),
        teacher_logprobs=_sent(f"{field}.teacher_logprobs", given.get("teacher_logprobs")),
        version_spans=tuple(
            (span.first_token, span.version) for span in given.get("version_spans", ())
        ),
    )


def _segments(field: str, given: Mapping[str, Any], max_bytes: int) -> tuple[RawSegment, ...]:
    if "response" in given:
        tokens = _tokens(f"{field}.response", given["response"], max_bytes)
        return (RawSegment(tokens=tokens, trained=True),)
    if "segments" in given:
        return tuple(
            _segment(f"{field}.segments[{index}]", segment, max_bytes)
            for index, segment in enumerate(given["segments"].segments)
        )
    raise required(f"{field}.response", "response or segments")


def _segment(field: str, message: wire.Segment, max_bytes: int) -> RawSegment:
    if not message.HasField("tokens"):
        raise required(f"{field}.tokens", "the segment's tokens")
    tokens = _tokens(f"{field}.tokens", message.tokens, max_bytes)
    return RawSegment(tokens=tokens, trained=message.trained)


def _tokens(field: str, tensor: Tensor, max_bytes: int) -> NDArray[np.integer]:
    """Token ids; a missing tensor (no dtype, no bytes) is an empty one."""
    if not tensor.dtype and not tensor.data and not tensor.shape:
        return np.empty(0, dtype=np.int32)
    return cast("NDArray[np.integer]", _array(field, tensor, "tokens", max_bytes))


def _sent(field: str, tensor: Tensor | None) -> NDArray[Any] | None:
    """A tensor as it was sent: the bytes are of the message, which is bounded itself."""
    return None if tensor is None else _decoded(field, tensor, len(tensor.data))


def _sampling_mask(
    rollout: str, mask: wire.SamplingMask | None, max_bytes: int
) -> RawSamplingMask | None:
    if mask is None:
        return None
    field = f"{rollout}.sampling_mask"
    arrays: dict[str, Any] = {}
    for name in ("token_ids", "lengths"):
        if not mask.HasField(name):
            raise required(f"{field}.{name}", "a tensor")
        arrays[name] = _array(f"{field}.{name}", getattr(mask, name), "tokens", max_bytes)
    return RawSamplingMask(**arrays, untrain_outside=mask.untrain_outside)


def _array(field: str, tensor: Tensor, kind: str, max_bytes: int) -> NDArray[Any]:
    array = _decoded(field, tensor, max_bytes)
    if array.dtype.kind not in _KINDS[kind]:
        expected = {"tokens": "int32 or int64", "values": "float32 or float64", "flags": "bool"}
        raise invalid(f"{field}.dtype", tensor.dtype, expected[kind])
    if array.ndim != 1:
        raise invalid(f"{field}.shape", f"{array.ndim} dimensions", "one dimension")
    return array


def _decoded(field: str, tensor: Tensor, max_bytes: int) -> NDArray[Any]:
    try:
        return decode_tensor(tensor, max_bytes=max_bytes)
    except CodecError as err:
        raise invalid(f"{field}.{err.part}", err.got, err.expected) from err
