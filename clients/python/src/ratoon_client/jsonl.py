"""Grouped rollouts as JSON lines, one group a line.

    {"group_id": "a", "prompt": [1, 2], "rollouts": [{"response": [3], "sampler_logprobs": [-0.5],
     "reward": 1.0}]}
    {"group_id": "b", "rollouts": [{"reward": 0.0, "segments": [{"role": "user", "text": "..."}]}]}

A rollout takes the arguments of `rollout()` by name; its segments are `{"tokens", "trained"}` or
`{"role", "text"}`, whose text becomes UTF-8 bytes where the caller says that tokens are bytes, and
is trained where the role is `assistant`. An error names the line and the field, and a key that is
not known is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from ratoon_client.errors import InvalidArgumentError
from ratoon_client.rollouts import Group, Rollout, Segment, group, rollout
from ratoon_proto.types import VersionSpan

TRAINED_ROLE = "assistant"
_GROUP_KEYS = frozenset({"group_id", "prompt", "rollouts"})
_ARRAYS = frozenset(
    {
        "response",
        "loss_mask",
        "sampler_logprobs",
        "old_logprobs",
        "reference_logprobs",
        "advantages",
        "token_weights",
        "routed_experts",
        "sampling_mask",
        "teacher_tokens",
        "teacher_logprobs",
        "returns",
        "old_values",
    }
)
_SCALARS: dict[str, tuple[type, ...]] = {
    "reward": (int, float),
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "routed_experts_start": (int,),
    "policy_version": (int,),
    "truncated": (bool,),
    "sampler_logprobs_kind": (str,),
}
_ROLLOUT_KEYS = _ARRAYS | _SCALARS.keys() | {"segments", "version_spans"}


def read_jsonl(path: Path, *, byte_tokens: bool) -> list[Group]:
    """The groups of a file. Raises OSError, and InvalidArgumentError with the line's number."""
    with path.open(encoding="utf-8") as lines:
        return parse_jsonl(lines, byte_tokens=byte_tokens)


def parse_jsonl(lines: Iterable[str], *, byte_tokens: bool) -> list[Group]:
    """Lines without anything on them are skipped."""
    return [
        _parse_line(line, f"line {number}", byte_tokens=byte_tokens)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parse_line(line: str, place: str, *, byte_tokens: bool) -> Group:
    try:
        data = json.loads(line)
    except ValueError as err:
        raise InvalidArgumentError(place, repr(line.strip()[:40]), f"JSON ({err})") from err
    record = _object(place, data, _GROUP_KEYS)
    if "group_id" not in record or not isinstance(record["group_id"], str):
        raise InvalidArgumentError(f"{place}: group_id", record.get("group_id", "none"), "a text")
    rollouts = [
        _rollout(f"{place}: rollouts[{index}]", item, byte_tokens=byte_tokens)
        for index, item in enumerate(_list(f"{place}: rollouts", record.get("rollouts", [])))
    ]
    try:
        return group(record["group_id"], record.get("prompt", []), rollouts)
    except InvalidArgumentError as err:
        raise InvalidArgumentError(f"{place}: {err.field}", err.got, err.expected) from err


def _rollout(place: str, data: Any, *, byte_tokens: bool) -> Rollout:
    record = _object(place, data, _ROLLOUT_KEYS)
    for name, types in _SCALARS.items():
        value = record.get(name)
        is_number = isinstance(value, bool) and bool not in types
        if value is not None and (is_number or not isinstance(value, types)):
            raise InvalidArgumentError(f"{place}.{name}", repr(value)[:40], types[-1].__name__)
    for name in _ARRAYS & record.keys():
        _list(f"{place}.{name}", record[name])
    if "segments" in record:
        record["segments"] = _segments(
            f"{place}.segments", record["segments"], byte_tokens=byte_tokens
        )
    if "version_spans" in record:
        record["version_spans"] = _spans(f"{place}.version_spans", record["version_spans"])
    try:
        return rollout(**record)
    except InvalidArgumentError as err:
        raise InvalidArgumentError(f"{place}.{err.field}", err.got, err.expected) from err


def _segments(place: str, data: Any, *, byte_tokens: bool) -> Sequence[Segment]:
    segments: list[Segment] = []
    for index, item in enumerate(_list(place, data)):
        where = f"{place}[{index}]"
        record = _object(where, item, frozenset({"tokens", "trained", "role", "text"}))
        match record:
            case {"tokens": _, "trained": bool() as trained, **rest} if not rest:
                tokens = _list(f"{where}.tokens", record["tokens"])
                segments.append(Segment(tokens, trained))
            case {"role": str() as role, "text": str() as text, **rest} if not rest:
                if not byte_tokens:
                    raise InvalidArgumentError(where, "text", "tokens, or --byte-tokens")
                tokens = np.frombuffer(text.encode(), np.uint8)
                segments.append(Segment(tokens, role == TRAINED_ROLE))
            case _:
                keys = ", ".join(record) or "nothing"
                raise InvalidArgumentError(where, keys, "tokens and trained, or role and text")
    return segments


def _spans(place: str, data: Any) -> Sequence[VersionSpan]:
    spans: list[VersionSpan] = []
    for index, item in enumerate(_list(place, data)):
        match _object(f"{place}[{index}]", item, frozenset({"first_token", "version"})):
            case {"first_token": int() as first_token, "version": int() as version}:
                spans.append(VersionSpan(first_token, version))
            case record:
                got = ", ".join(record) or "nothing"
                raise InvalidArgumentError(f"{place}[{index}]", got, "first_token and version")
    return spans


def _object(place: str, data: Any, keys: frozenset[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InvalidArgumentError(place, type(data).__name__, "a JSON object")
    record = cast("dict[str, Any]", data)
    for key in record:
        if key not in keys:
            raise InvalidArgumentError(f"{place}: {key}", "a key", "one of " + ", ".join(keys))
    return dict(record)


def _list(place: str, data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise InvalidArgumentError(place, type(data).__name__, "a list")
    return cast("list[Any]", data)
