"""Whose call this is, for the code that the call runs.

Enters a holder at the gate, leaves it where an operation is submitted. Invariant: it is the
context's own, so it follows a call into its tasks and threads and never into another call. The
calls of the service have one argument, the request, whatever wire they came by.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from ratoon.engine.types import NOBODY, Holder

_HOLDER: ContextVar[Holder] = ContextVar("ratoon_holder", default=NOBODY)


@contextmanager
def acting_for(holder: Holder) -> Generator[None, None, None]:
    """What is submitted in the block is `holder`'s."""
    token = _HOLDER.set(holder)
    try:
        yield
    finally:
        _HOLDER.reset(token)


def current_holder() -> Holder:
    return _HOLDER.get()
