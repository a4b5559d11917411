"""Reads which policy a request is about from bytes that do not parse.

A caller who may not know of the policy is told so before anything else, also of damaged bytes.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

from ratoon.api.convert.checks import policy_of_operation
from ratoon.api.counts import BYTES, FIXED32, FIXED64, VARINT, MalformedError, varint

# Encoders write fields by number, and the policy's is the first: a million others after it are not
# walked through.
_MAX_FIELDS = 64


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
