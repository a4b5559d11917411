"""Write the value classes of `ratoon.v1`: a frozen dataclass for each message that has one, a
`StrEnum` for each enum, with the comments of the .proto files as docstrings.

python scripts/proto_types.py DESCRIPTOR_SET COMMENTS, where protoc made the first and
scripts/proto_comments.py the second. Messages without a class are requests and responses of calls,
those that stand flat in JSON, and those that hold tensors, which are read as arrays.

How a field is declared follows from the .proto file alone:

- A `required` field has no default.
- A field with a `default_value` has that default.
- Any other field with presence, and an enum in a request, is None where it is absent.
- A repeated field is a tuple, and a oneof that is `one_field` a union of its messages' classes.
- In messages that requests carry, required fields and a first field `kind` may be given by
  position.
- A message that has one required field, an enum, may be given as that enum's text.
- What is left is always there in answers, so it has no default, except in messages that requests
  carry and in those marked `from_zero`, where proto3's zero is the default.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from google.protobuf import descriptor_pb2, timestamp_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

from ratoon_proto import bases
from ratoon_proto.fields import (
    default_text,
    enum_names,
    fields_of,
    is_flat,
    is_from_zero,
    is_map,
    is_one_field,
    is_required,
)

_PACKAGE = "ratoon.v1"
_WIDTH = 100
_SCALARS: Mapping[int, tuple[str, str]] = {
    FieldDescriptor.TYPE_BOOL: ("bool", "False"),
    FieldDescriptor.TYPE_BYTES: ("bytes", 'b""'),
    FieldDescriptor.TYPE_DOUBLE: ("float", "0.0"),
    FieldDescriptor.TYPE_FLOAT: ("float", "0.0"),
    FieldDescriptor.TYPE_INT32: ("int", "0"),
    FieldDescriptor.TYPE_INT64: ("int", "0"),
    FieldDescriptor.TYPE_STRING: ("str", '""'),
    FieldDescriptor.TYPE_UINT64: ("int", "0"),
}
_HEADER = '''\
"""Values of `ratoon.v1`, made by scripts/proto_types.py from the .proto files: do not edit.

Times are in UTC. `ratoon_proto.records` reads values from messages, and `ratoon_proto.fill` writes
messages from values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from ratoon_proto import bases
'''


@dataclass(frozen=True, kw_only=True)
class Member:
    """One field of a class.

    `given` is the type of the argument, wider than `kind` where callers may give text or a list;
    `default` is source text, "" for none; `converter` is the one for `bases.as_declared`.
    """

    name: str
    kind: str
    given: str
    default: str
    converter: str
    doc: str


class Writer:
    """Writes the classes of one package; `comments` are by full name."""

    def __init__(self, pool: DescriptorPool, files: Iterable[Any], comments: Mapping[str, str]):
        self._comments = comments
        descriptors = [pool.FindFileByName(file.name) for file in files]
        self._enums: list[EnumDescriptor] = [
            enum for file in descriptors for enum in file.enum_types_by_name.values()
        ]
        self._messages: list[Descriptor] = [
            message for file in descriptors for message in file.message_types_by_name.values()
        ]
        calls = pool.FindServiceByName(f"{_PACKAGE}.PolicyService").methods
        requested = [message for call in calls for message in _below(call.input_type)]
        self._requested = {message.full_name for message in requested}
        self._requested_enums = {
            field.enum_type.full_name
            for message in requested
            for field in fields_of(message)
            if field.enum_type is not None
        }
        self._written: set[str] = set()

    def source(self) -> str:
        """The whole module."""
        parts = [_HEADER, *map(self._enum, self._enums)]
        for message in self._messages:
            parts += self._with_parts(message)
        return "\n\n".join(parts)

    def _with_parts(self, message: Descriptor) -> Iterator[str]:
        """The class of a message after those that it needs, each once."""
        if message.name in self._written or not _has_class(message):
            return
        self._written.add(message.name)
        for field in fields_of(message):
            if field.message_type is not None and _is_ours(field.message_type):
                yield from self._with_parts(field.message_type)
        yield self._class(message)

    def _enum(self, enum: EnumDescriptor) -> str:
        names = enum_names(enum)
        lines = [f"class {enum.name}({_bases(enum.name, 'WireEnum')}):"]
        doc = _docstring(self._comments[enum.full_name])
        doc.append("")
        for name in names:
            value = f"{enum.values_by_number[0].name.removesuffix('UNSPECIFIED')}{name.upper()}"
            doc_of_value = self._comments.get(f"{enum.full_name}.{value}", "")
            doc += [f'    {name.upper()} = "{name}"', *_docstring(doc_of_value)]
        if enum.full_name not in self._requested_enums:
            return "\n".join([*lines, *doc, ""])
        literal = _call(f"{enum.name}Name = Literal[", [f'"{name}"' for name in names], "]", 0)
        return "\n".join([*lines, *doc, "", "", *literal, ""])

    def _class(self, message: Descriptor) -> str:
        is_request = message.full_name in self._requested
        members = list(self._members(message, is_request=is_request))
        by_position = [
            member
            for index, member in enumerate(members)
            if is_request and (not member.default or (index == 0 and member.name == "kind"))
        ]
        by_name = [m for m in members if m not in by_position]
        options = "frozen=True, slots=True" + ("" if by_position else ", kw_only=True")
        parents = _bases(message.name)
        lines = [f"@dataclass({options})", f"class {message.name}{parents and f'({parents})'}:"]
        doc = self._comments.get(message.full_name, "")
        lines += [*_docstring(doc), *([""] if members else [])]
        for member in by_position:
            lines += _declared(member)
        if by_position and by_name:
            lines.append("    _: KW_ONLY")
        for member in by_name:
            lines += _declared(member)
        if any(member.converter for member in members):
            lines += _constructor(by_position, by_name)
        return "\n".join([*lines, ""])

    def _members(self, message: Descriptor, *, is_request: bool) -> Iterator[Member]:
        seen: set[str] = set()
        for field in fields_of(message):
            oneof = field.containing_oneof
            if oneof is None or not is_one_field(oneof):
                if oneof is None or field.message_type is None or _has_class(field.message_type):
                    yield self._member(field, is_request=is_request)
            elif oneof.name not in seen:
                seen.add(oneof.name)
                arms = cast("Iterable[Any]", oneof.fields)
                kind = " | ".join([*(arm.message_type.name for arm in arms), "None"])
                yield Member(
                    name=oneof.name, kind=kind, given=kind, default="None", converter="", doc=""
                )

    def _member(self, field: FieldDescriptor, *, is_request: bool) -> Member:
        kind, zero = self._kind(field)
        given, converter = kind, ""
        if is_request and (enum := _only_enum(field)) is not None:
            given, converter = f"{kind} | {enum.name}Name", kind
        default = self._default(field, zero, is_request=is_request)
        if field.is_repeated and not is_map(field):
            kind = f"tuple[{kind}, ...]"
            given, converter = (f"Sequence[{given}]", "tuple") if is_request else (kind, "")
        if default == "None":
            kind, given = f"{kind} | None", f"{given} | None"
        doc = self._comments.get(field.full_name, "")
        return Member(
            name=field.name, kind=kind, given=given, default=default, converter=converter, doc=doc
        )

    def _kind(self, field: FieldDescriptor) -> tuple[str, str]:
        """The type of one value of a field, and its zero; "" where there is none."""
        if is_map(field):
            return "Mapping[str, str]", ""
        if field.enum_type is not None:
            return field.enum_type.name, ""
        if field.message_type is not None:
            is_time = field.message_type.full_name == "google.protobuf.Timestamp"
            return "datetime" if is_time else field.message_type.name, ""
        return _SCALARS[field.type]

    def _default(self, field: FieldDescriptor, zero: str, *, is_request: bool) -> str:
        starts_empty = is_request or is_from_zero(cast("Descriptor", field.containing_type))
        if is_required(field):
            return ""
        if text := default_text(field):
            return _literal(field, text)
        if field.is_repeated:
            return "()" if starts_empty else ""
        if field.has_presence or (is_request and field.enum_type is not None):
            return "None"
        return zero if starts_empty else ""


def _only_enum(field: FieldDescriptor) -> EnumDescriptor | None:
    """The enum whose text may stand for a field's value."""
    if field.message_type is None or field.is_repeated:
        return field.enum_type
    required = [each for each in fields_of(field.message_type) if is_required(each)]
    return required[0].enum_type if len(required) == 1 else None


def _literal(field: FieldDescriptor, text: str) -> str:
    if field.is_repeated:
        return "()"
    if field.message_type is not None:
        return f"{field.message_type.name}()"
    if field.enum_type is not None:
        return f"{field.enum_type.name}.{text.upper()}"
    kind, _ = _SCALARS[field.type]
    return repr({"bool": json.loads, "int": int, "float": float}[kind](text))


def _below(message: Descriptor) -> Iterator[Descriptor]:
    yield message
    for field in fields_of(message):
        if field.message_type is not None:
            yield from _below(field.message_type)


def _has_class(message: Descriptor) -> bool:
    is_of_call = message.name.endswith(("Request", "Response"))
    return not is_of_call and not is_flat(message) and not _holds_tensors(message)


def _holds_tensors(message: Descriptor) -> bool:
    """Whether a message cannot be without tensors; one of a oneof is left out of its class."""
    if message.name == "Tensor":
        return True
    return any(
        field.message_type is not None
        and field.containing_oneof is None
        and _is_ours(field.message_type)
        and _holds_tensors(field.message_type)
        for field in fields_of(message)
    )


def _is_ours(message: Descriptor) -> bool:
    return message.full_name.startswith(f"{_PACKAGE}.") and not message.GetOptions().map_entry


def _bases(name: str, *more: str) -> str:
    methods = [f"{name}Methods"] if hasattr(bases, f"{name}Methods") else []
    return ", ".join(f"bases.{base}" for base in [*methods, *more])


def _docstring(text: str) -> list[str]:
    """A docstring below a class, a field or a member; none without a comment."""
    if not text:
        return []
    text = text.replace("\\", "\\\\")
    if len(text) + 10 <= _WIDTH:
        return [f'    """{text}"""']
    body = textwrap.wrap(
        text, _WIDTH, initial_indent='    """', subsequent_indent="    ", break_long_words=False
    )
    return [*body, '    """']


def _declared(member: Member) -> list[str]:
    default = f" = {member.default}" if member.default else ""
    line = f"    {member.name}: {member.kind}{default}"
    if len(line) > _WIDTH:
        first, *others = member.kind.split(" | ")
        arms = [f"        {first}", *(f"        | {other}" for other in others)]
        return [f"    {member.name}: (", *arms, f"    ){default}", *_docstring(member.doc)]
    return [line, *_docstring(member.doc)]


def _constructor(by_position: list[Member], by_name: list[Member]) -> list[str]:
    """What a type checker is told of arguments that may be text or lists, and what they become."""
    parameters = ["self", *map(_parameter, by_position)]
    if by_name:
        parameters += ["*", *map(_parameter, by_name)]
    converters = [f"{m.name}={m.converter}" for m in [*by_position, *by_name] if m.converter]
    return [
        "",
        "    if TYPE_CHECKING:",
        "",
        *_call("def __init__(", parameters, ") -> None: ...", 8),
        "",
        "    def __post_init__(self) -> None:",
        *_call("bases.as_declared(", ["self", *converters], ")", 8),
    ]


def _parameter(member: Member) -> str:
    return f"{member.name}: {member.given}" + (f" = {member.default}" if member.default else "")


def _call(start: str, items: list[str], end: str, indent: int) -> list[str]:
    """One line, or one item a line."""
    line = f"{' ' * indent}{start}{', '.join(items)}{end}"
    if len(line) <= _WIDTH:
        return [line]
    listed = [f"{' ' * (indent + 4)}{item}," for item in items]
    return [f"{' ' * indent}{start}", *listed, f"{' ' * indent}{end}"]


def main() -> None:
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(sys.argv[1]).read_bytes()).file
    comments = json.loads(Path(sys.argv[2]).read_text("utf-8"))
    pool = DescriptorPool()
    for known in (descriptor_pb2, timestamp_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    left = list(files)
    while left:  # A file is added after those that it imports.
        known_names = {file.name for file in files} - {file.name for file in left}
        ready = [
            file
            for file in left
            if all(name in known_names or not name.startswith("ratoon") for name in file.dependency)
        ]
        for file in ready:
            pool.AddSerializedFile(file.SerializeToString())
        left = [file for file in left if file not in ready]
    sys.stdout.write(Writer(pool, files, comments).source())


if __name__ == "__main__":
    main()
