"""Options of a command from the fields of a message, so that a command takes what the call takes.

Names, types and help are those of the .proto file: `kl.coefficient` is `--kl-coefficient`, and the
field `kind` of a message has the message's own name, `--kl`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast

import typer
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.markup import escape

from ratoon_client.errors import InvalidArgumentError
from ratoon_proto.fields import (
    FieldError,
    comment,
    default_text,
    enum_names,
    fields_of,
    is_map,
    is_required,
)
from ratoon_proto.fill import to_proto
from ratoon_proto.records import from_proto

T = TypeVar("T")
_NUMBERS: Mapping[int, type] = {
    FieldDescriptor.TYPE_DOUBLE: float,
    FieldDescriptor.TYPE_INT32: int,
    FieldDescriptor.TYPE_INT64: int,
    FieldDescriptor.TYPE_UINT64: int,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldOption:
    """Option for the field at `path`, the names of messages and of the field from the root on."""

    path: tuple[str, ...]
    name: str
    field: FieldDescriptor

    @property
    def parameter(self) -> str:
        """Name of the option's parameter in Python."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def is_switch(self) -> bool:
        """Whether the option stands for a message without fields, by being there."""
        return self.field.message_type is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOptions:
    """What a command takes of a message.

    Attributes:
        message: The message's class.
        names: Names of options, by path, where those of the fields are too long; of a message the
            prefix of its fields' options, "" for none.
        skip: Paths of fields without an option, joined by dots.
        bounds: Least and greatest value by path; of other numbers the least is 0.
        also: Further names of options, by path.
        defaults: What a command takes for a field that is not given, by path.
        title: Heading of the options in the help.
    """

    message: type[Message]
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    skip: tuple[str, ...] = ()
    bounds: Mapping[str, tuple[float | None, float | None]] = field(
        default_factory=dict[str, tuple[float | None, float | None]]
    )
    also: Mapping[str, str] = field(default_factory=dict[str, str])
    defaults: Mapping[str, str] = field(default_factory=dict[str, str])
    title: str

    def options(self) -> Iterator[FieldOption]:
        """Every option, in the order of the fields."""
        yield from self._below(self.message.DESCRIPTOR, (), "")

    def parameters(self) -> Iterable[inspect.Parameter]:
        """Parameters as Typer reads them; None is an option that was not given."""
        for option in self.options():
            where = ".".join(option.path)
            low, high = self.bounds.get(where, (0, None))
            is_number = option.field.type in _NUMBERS
            names = [option.name, *([self.also[where]] if where in self.also else [])]
            if _has_no(option):
                names[0] += f"/--no-{option.name.removeprefix('--')}"
            described = typer.Option(
                *names,
                help=_help(option.field),
                min=low if is_number else None,
                max=high if is_number else None,
                show_default=where in self.defaults,
                rich_help_panel=self.title,
            )
            default = self.defaults.get(where)
            if default is None and is_required(option.field) and len(option.path) == 1:
                default = inspect.Parameter.empty
            kind = _type(option) if default is not None else _type(option) | None
            yield inspect.Parameter(
                option.parameter,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, described],
            )

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that were given, by the names of fields, messages as dicts."""
        values: dict[str, Any] = {}
        for option in self.options():
            value: Any = arguments.get(option.parameter)
            if value is None or not (value or _has_no(option) or option.field.type in _NUMBERS):
                continue
            parent = values
            for name in option.path[:-1]:
                parent = parent.setdefault(name, {})
            if option.field.is_repeated:
                value = str(value).split(",")
            parent[option.path[-1]] = {} if option.is_switch else value
        return values

    def value(self, kind: type[T], values: Mapping[str, Any]) -> T:
        """Values by the names of fields as the `kind` that the message is.

        Raises InvalidArgumentError, by the name of an option, for what is missing.
        """
        try:
            return from_proto(to_proto(self.message, values), kind, is_request=True)
        except FieldError as err:
            names = {".".join(option.path): option.name for option in self.options()}
            raise InvalidArgumentError(
                names.get(err.field, err.field), err.got, err.expected
            ) from err

    def _below(self, message: Any, path: tuple[str, ...], prefix: str) -> Iterator[FieldOption]:
        for each in fields_of(message):
            own = (*path, each.name)
            where = ".".join(own)
            if where in self.skip or is_map(each):
                continue
            words = prefix if each.name == "kind" else f"{prefix}-{each.name}"
            words = self.names.get(where, words).strip("-")
            if each.message_type is not None and list(fields_of(each.message_type)):
                yield from self._below(each.message_type, own, words)
            else:
                yield FieldOption(path=own, name="--" + words.replace("_", "-"), field=each)


def takes(*messages: MessageOptions) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these messages, which it gets as its keyword arguments."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        kept = [
            parameter
            for parameter in own.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        added = [parameter for message in messages for parameter in message.parameters()]
        named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in kept]
        cast("Any", command).__signature__ = own.replace(parameters=[*named, *added])
        # Typer reads the annotations beside the signature.
        command.__annotations__ = {each.name: each.annotation for each in [*kept, *added]}
        return command

    return decorate


def _has_no(option: FieldOption) -> bool:
    """Whether it may be switched off as well as on: where absence is not false."""
    return option.field.type == FieldDescriptor.TYPE_BOOL and option.field.has_presence


def _type(option: FieldOption) -> Any:
    field = option.field
    if field.enum_type is not None:
        return Literal[tuple(enum_names(field.enum_type))]
    if option.is_switch or field.type == FieldDescriptor.TYPE_BOOL:
        return bool
    return _NUMBERS.get(field.type, str)


def _help(field: FieldDescriptor) -> str:
    text = comment(field.full_name)
    if field.message_type is not None:
        text = text or comment(field.message_type.full_name)
    if field.enum_type is not None:
        text = text or comment(field.enum_type.full_name)
    default = default_text(field)
    if default and "efault" not in text:
        text = f"{text} Default: {default}.".strip()
    return escape(text.replace("`", ""))
