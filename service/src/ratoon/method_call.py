"""A method call that travels to another process, as one value.

The sender names the method by the function itself (`MethodCall.of(Rank.step, ...)`), so a type
checker compares name and arguments with the method. Only the name goes over the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MethodCall(Generic[T]):
    """`T`: what the method returns; a coroutine function returns its awaitable."""

    name: str
    args: tuple[object, ...]
    options: dict[str, object]

    @classmethod
    def of(
        cls, method: Callable[Concatenate[Any, P], R], *args: P.args, **options: P.kwargs
    ) -> MethodCall[R]:
        """A call of a public method, which is given without the object that it belongs to."""
        assert not method.__name__.startswith("_"), method.__name__
        return MethodCall(method.__name__, args, options)

    def on(self, target: object) -> T:
        """Call the method of `target`. Raises what the method raises."""
        return cast("T", getattr(target, self.name)(*self.args, **self.options))


class MethodNames:
    """Stands for a class whose module a process does not import: it knows the names alone.

    A caller imports the class itself under `TYPE_CHECKING`, so that calls are checked all the same.
    """

    def __getattr__(self, name: str) -> SimpleNamespace:
        if name.startswith("_"):
            raise AttributeError(name)
        return SimpleNamespace(__name__=name)
