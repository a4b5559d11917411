"""Arguments of callers who do not check types, in the dtypes of the wire.

No value is changed but by rounding to float32; what does not fit is refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ratoon_client.errors import InvalidArgumentError

T = TypeVar("T")
ScalarT = TypeVar("ScalarT", bound=np.generic)
# gRPC waits for ever where a deadline is more than some hundred years away.
_MOST_S = 1e9
TokenArray = NDArray[np.int32]
ValueArray = NDArray[np.float32]
FlagArray = NDArray[np.bool_]
IntsLike = Sequence[int] | NDArray[np.integer[Any]]
FloatsLike = Sequence[float] | NDArray[np.floating[Any]]
RouteArray = NDArray[np.uint8 | np.uint16]
TokenRowsLike = Sequence[Sequence[int]] | NDArray[np.integer[Any]]
ValueRowsLike = Sequence[Sequence[float]] | NDArray[np.floating[Any]]
RoutesLike = Sequence[Sequence[Sequence[int]]] | NDArray[np.integer[Any]]
FlagsLike = Sequence[bool] | Sequence[int] | NDArray[np.bool_] | NDArray[np.integer[Any]]
_INT32 = np.iinfo(np.int32)


def check_seconds(field: str, value: object, *, most: float = _MOST_S) -> None:
    """Check a timeout: it is a number from 0 to `most`, and so not NaN."""
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


def token_array(field: str, tokens: IntsLike) -> TokenArray:
    """int32 [length]. Raises InvalidArgumentError for other than integers of 32 bits."""
    array = _vector(field, tokens, "an integer token id")
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(field, f"dtype {array.dtype}", "integer token ids")
    if len(array) and (array.min() < _INT32.min or array.max() > _INT32.max):
        bad = int(np.argmax((array < _INT32.min) | (array > _INT32.max)))
        raise InvalidArgumentError(f"{field}[{bad}]", array[bad], "an integer of 32 bits")
    return array.astype(np.int32)


def value_array(field: str, values: FloatsLike) -> ValueArray:
    """float32 [length]; values that are not finite pass, the service names them.

    Raises InvalidArgumentError for a finite value that float32 does not hold, and for floats of 16
    bits: what they have rounded away is missing in every ratio.
    """
    array = _vector(field, values, "a number")
    if array.dtype.kind not in "fiu":
        raise InvalidArgumentError(field, f"dtype {array.dtype}", "numbers")
    if array.dtype.kind == "f" and array.dtype.itemsize < np.dtype(np.float32).itemsize:
        raise InvalidArgumentError(field, f"dtype {array.dtype}", "floats of at least 32 bits")
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    lost = np.isinf(narrow) & np.isfinite(array)
    if lost.any():
        bad = int(np.argmax(lost))
        raise InvalidArgumentError(f"{field}[{bad}]", array[bad], "a finite float32")
    return narrow


def flag_array(field: str, flags: FlagsLike) -> FlagArray:
    """bool [length], from booleans or from the integers 0 and 1."""
    array = _vector(field, flags, "true, false, 0 or 1")
    if array.dtype.kind in "iu" and not ((array == 0) | (array == 1)).all():
        bad = int(np.argmax((array != 0) & (array != 1)))
        raise InvalidArgumentError(f"{field}[{bad}]", array[bad], "true, false, 0 or 1")
    if array.dtype.kind not in "biu":
        raise InvalidArgumentError(field, f"dtype {array.dtype}", "booleans")
    return array.astype(np.bool_)


def route_array(field: str, routes: RoutesLike) -> RouteArray:
    """uint8 [tokens, layers, experts per token], uint16 where an expert is above 255."""
    try:
        array = np.asarray(routes)
    except (ValueError, OverflowError, TypeError, RuntimeError) as err:
        raise InvalidArgumentError(field, type(routes).__name__, "an array of experts") from err
    if array.ndim != 3:
        expected = "[tokens, layers, experts per token]"
        raise InvalidArgumentError(field, f"{array.ndim} dimensions", expected)
    if array.dtype.kind not in "iu":
        raise InvalidArgumentError(field, f"dtype {array.dtype}", "integers")
    least, most = (int(array.min()), int(array.max())) if array.size else (0, 0)
    if least < 0 or most > np.iinfo(np.uint16).max:
        raise InvalidArgumentError(field, least if least < 0 else most, "experts of 16 bits")
    return array.astype(np.uint8 if most <= np.iinfo(np.uint8).max else np.uint16)


def matrix_of(
    field: str, values: object, read: Callable[[str, Any], NDArray[ScalarT]]
) -> NDArray[ScalarT]:
    """[rows, columns], its values as `read` makes a vector of them, by whose index errors name
    them."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError, TypeError, RuntimeError) as err:
        raise InvalidArgumentError(field, type(values).__name__, "rows of one length") from err
    if array.ndim != 2:
        raise InvalidArgumentError(field, f"{array.ndim} dimensions", "two dimensions")
    return read(field, array.reshape(-1)).reshape(array.shape)


def number(field: str, value: float) -> float:
    """`value` as a float; text is refused, even where it could be read as a number."""
    try:
        if not isinstance(value, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            return float(value)
    except (ValueError, OverflowError, TypeError, RuntimeError) as err:
        raise InvalidArgumentError(field, shown(value), "a number") from err
    raise InvalidArgumentError(field, shown(value), "a number")


def integer(field: str, value: int) -> int:
    """`value` as an int, from Python, numpy or a tensor without dimensions."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except (ValueError, TypeError, RuntimeError) as err:
        raise InvalidArgumentError(field, shown(value), "an integer") from err
    raise InvalidArgumentError(field, shown(value), "an integer")


def flag(field: str, value: object) -> bool:
    """`value` as a bool, from Python or numpy."""
    if isinstance(value, bool):
        return value
    if isinstance(value, np.bool_):
        return value == np.True_
    raise InvalidArgumentError(field, shown(value), "true or false")


def _vector(field: str, values: object, expected: str) -> NDArray[Any]:
    """One dimension of numbers or booleans; `expected` says what an item should be."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError, TypeError, RuntimeError) as err:
        # The last two: tensors of other libraries that numpy has no dtype for, or may not read.
        raise _misfit(field, values, expected) from err
    if array.dtype.kind not in "biuf" and array.size:
        raise _misfit(field, values, expected)
    if array.ndim != 1:
        raise InvalidArgumentError(field, f"{array.ndim} dimensions", "one dimension")
    # An empty list has numpy's default dtype, float64.
    return (
        array if len(array) or array.dtype.kind in "biu" else array.astype(np.bool_).view(np.int8)
    )


def _misfit(field: str, values: object, expected: str) -> InvalidArgumentError:
    """An error that names the first item that no array of numbers holds, or else the whole."""
    items = cast("Sequence[object]", values) if isinstance(values, list | tuple) else ()
    for place, item in enumerate(items):
        if not _fits_array(item):
            return InvalidArgumentError(f"{field}[{place}]", shown(item), expected)
    kind = type(cast("object", values)).__name__
    got = shown(values) if isinstance(values, str | bytes) else kind
    return InvalidArgumentError(field, got, f"a list, each item {expected}")


def _fits_array(item: object) -> bool:
    try:
        value = float(cast("float", item))
    except (ValueError, OverflowError, TypeError, RuntimeError):
        return False
    return not isinstance(item, str | bytes) and (not isinstance(item, int) or abs(value) < 2**63)
