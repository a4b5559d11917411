"""Looks at the bytes of a request before it is parsed: how many objects, and whose policy.

An empty message takes two bytes on the wire and a hundred in memory; a JSON value takes two and
eighty. So messages are counted by type, and all their fields together; in JSON, brackets and commas
are counted. Which policy a request names is read from bytes that do not parse too: a caller who may
not know of the policy is told so before anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor

from ratoon.api.convert.checks import policy_of_operation
from ratoon.config import LimitsConfig
from ratoon.errors import ErrorCode, RatoonError

# Tensors and segments per batch; fields of all its messages, with the elements of packed ones.
MAX_PARTS = 2**20
MAX_FIELDS = 2**22
MAX_JSON_VALUES = 2**22
MAX_JSON_OBJECTS = 2**18
_NAMES = {"RolloutGroup": "groups", "Rollout": "rollouts"}
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
# Encoders write fields by number, and the policy's is the first: a million others after it are not
# walked through.
_MAX_FIELDS = 64


class MalformedError(Exception):
    """The bytes are not a protobuf message."""


@dataclass(slots=True)
class _Kind:
    """A message type, with its message fields and its packed numeric fields.

    `name` is what callers call such messages, `most` the limit per request.
    """

    name: str
    most: int
    children: dict[int, _Kind] = field(default_factory=dict["int", "_Kind"])
    packed: frozenset[int] = frozenset()


class MessageCounter:
    """Counts the messages in requests of one type. `limits` bound groups and rollouts."""

    def __init__(self, descriptor: Descriptor, limits: LimitsConfig) -> None:
        most = {"RolloutGroup": limits.max_groups, "Rollout": limits.max_sequences}
        self._root = _kind(descriptor, most)

    def count(self, data: bytes) -> int:
        """Return the number of messages in `data`. Raises BODY_TOO_LARGE, `MalformedError`."""
        counts: Counter[str] = Counter()
        try:
            self._walk(data, 0, len(data), self._root, counts)
        except IndexError as err:
            raise MalformedError from err
        return counts.total() - counts[""]

    def _walk(self, data: bytes, at: int, end: int, kind: _Kind, counts: Counter[str]) -> None:
        """Count the messages of one message and those below; `counts[""]` counts fields.

        It avoids calls, as it holds the interpreter.
        """
        children, packed = kind.children, kind.packed
        num_fields = counts[""]
        while at < end:
            num_fields += 1
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = varint(data, at - 1)
            wire_type = tag & 7
            if wire_type == BYTES:
                size = data[at]
                at += 1
                if size > 127:
                    size, at = varint(data, at - 1)
                stop = at + size
                if stop > end:
                    raise MalformedError
                child = children.get(tag >> 3)
                if child is not None:
                    number = counts[child.name] + 1
                    if number > child.most:
                        raise _too_many(child.name, child.most)
                    counts[child.name] = number
                    if size:
                        counts[""] = num_fields
                        self._walk(data, at, stop, child, counts)
                        num_fields = counts[""]
                elif tag >> 3 in packed:
                    num_fields += size
                at = stop
            elif wire_type == VARINT:
                at = varint(data, at)[1]
            elif wire_type in (FIXED32, FIXED64):
                at += 4 if wire_type == FIXED32 else 8
            else:
                raise MalformedError
            if num_fields > MAX_FIELDS:
                raise _too_many("fields", MAX_FIELDS)
        counts[""] = num_fields
        if at != end:
            raise MalformedError


def check_json(body: bytes) -> None:
    """Check the number of objects and values in JSON. Raises BODY_TOO_LARGE.

    Commas and brackets within strings count too; there are few.
    """
    num_objects = body.count(b"{")
    if num_objects > MAX_JSON_OBJECTS:
        raise _too_many("JSON objects", MAX_JSON_OBJECTS)
    if num_objects + body.count(b"[") + body.count(b",") > MAX_JSON_VALUES:
        raise _too_many("JSON values", MAX_JSON_VALUES)


def _kind(descriptor: Descriptor, most: Mapping[str, int]) -> _Kind:
    """Build the kind of a message type. Recursion ends, as request messages are not recursive."""
    fields = list(descriptor.fields)
    return _Kind(
        name=_NAMES.get(descriptor.name, f"{descriptor.name.lower()}s"),
        most=most.get(descriptor.name, MAX_PARTS),
        children={one.number: _kind(one.message_type, most) for one in fields if one.message_type},
        packed=frozenset(
            one.number
            for one in fields
            if one.is_repeated and one.cpp_type not in (one.CPPTYPE_STRING, one.CPPTYPE_MESSAGE)
        ),
    )


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at `at` and the index after it. Raises IndexError, `MalformedError`."""
    byte = data[at]
    at += 1
    if byte < 128:
        return byte, at
    value, shift = byte & 127, 7
    while byte >= 128:
        if shift > 63:
            raise MalformedError
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
    return value, at


def _too_many(what: str, most: int) -> RatoonError:
    return RatoonError(
        ErrorCode.BODY_TOO_LARGE,
        f"groups: got more than {most} {what}, expected at most {most}: send the batch in parts, "
        "its arrays as tensors",
        field="groups",
        got=f"more than {most} {what}",
        expected=f"at most {most}",
    )


def named_policy(request: Descriptor, data: bytes) -> str:
    """The policy that a request's first fields name, up to the damage; "": none."""
    fields = request.fields_by_name
    if "spec" in fields:
        spec = fields["spec"]
        assert spec.message_type is not None
        return named_policy(spec.message_type, b"".join(_values(data, spec.number, is_cut=True)))
    for name in ("policy_id", "operation_id"):
        if name in fields:
            found = _values(data, fields[name].number, is_cut=False)[-1:]
            text = b"".join(found).decode(errors="replace")
            return policy_of_operation(text) if name == "operation_id" else text
    return ""


def _values(data: bytes, number: int, *, is_cut: bool) -> list[bytes]:
    """Values of a field of strings or messages; a last one that is cut only if `is_cut`."""
    found: list[bytes] = []
    at = 0
    try:
        for _ in range(_MAX_FIELDS):
            if at >= len(data):
                break
            tag, at = varint(data, at)
            match tag & 7:
                case kind if kind == BYTES:
                    size, at = varint(data, at)
                    if tag >> 3 == number and (is_cut or at + size <= len(data)):
                        found.append(data[at : at + size])
                    at += size
                case kind if kind == VARINT:
                    _, at = varint(data, at)
                case kind if kind in (FIXED32, FIXED64):
                    at += 4 if kind == FIXED32 else 8
                case _:
                    break
    except (IndexError, MalformedError):
        pass
    return found
