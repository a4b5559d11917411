"""Calls of methods as values that other processes get."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ratoon.method_call import MethodCall, MethodNames


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int, *, times: int = 1) -> int:
        self.total += number * times
        return self.total

    def _clear(self) -> None:
        self.total = 0


def test_a_call_runs_its_method_on_the_other_side() -> None:
    """With keywords: proxies by name took positional arguments alone."""
    sent = pickle.loads(pickle.dumps(MethodCall.of(Counter.add, 2, times=3)))
    assert sent.name == "add"
    counter = Counter()
    assert (sent.on(counter), sent.on(counter)) == (6, 12)


def test_a_call_names_public_methods_alone() -> None:
    with pytest.raises(AssertionError, match="_clear"):
        MethodCall.of(Counter._clear)


def test_names_stand_for_a_class_that_is_not_imported() -> None:
    names: Any = MethodNames()
    assert MethodCall.of(names.add, 2) == MethodCall.of(Counter.add, 2)
    with pytest.raises(AttributeError):
        _ = names._clear


def test_a_method_that_the_other_side_has_not_is_an_error_there() -> None:
    names: Any = MethodNames()
    call = MethodCall.of(names.subtract, 2)
    with pytest.raises(AttributeError, match="subtract"):
        call.on(Counter())
