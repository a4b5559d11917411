"""Checks of arguments of callers who do not check types."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import TypeVar, cast

from ratoon_client.errors import InvalidArgumentError

T = TypeVar("T")
# gRPC waits for ever where a deadline is more than some hundred years away.
_MOST_S = 1e9


def check_seconds(field: str, value: object, *, most: float = _MOST_S) -> None:
    """Of a timeout: a number from 0 to `most`, and so not NaN."""
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    if not is_number or not 0 <= cast("float", value) <= most:
        raise InvalidArgumentError(field, shown(value), "seconds, 0 or more")


def check_type(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidArgumentError(field, shown(value), f"a value of type {kind.__name__}")


def all_of(field: str, values: Iterable[T], kind: type[T]) -> tuple[T, ...]:
    """`values`, each of them checked."""
    try:
        found = tuple(values)
    except TypeError as err:
        raise InvalidArgumentError(field, shown(values), f"a list of {kind.__name__}") from err
    for index, value in enumerate(found):
        check_type(f"{field}[{index}]", value, kind)
    return found


def shown(value: object) -> str:
    """A value of whatever size and type in an error."""
    return repr(value)[:80]
