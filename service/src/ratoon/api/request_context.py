"""The authenticated principal of the call being served.

It is a context variable, so it follows a call into its tasks and threads but never into another
call. Calls of the service need no second argument for it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from ratoon.engine.commands import NOBODY, Holder

_HOLDER: ContextVar[Holder] = ContextVar("ratoon_holder", default=NOBODY)


@contextmanager
def acting_for(holder: Holder) -> Generator[None, None, None]:
    """Operations submitted in the block belong to `holder`."""
    token = _HOLDER.set(holder)
    try:
        yield
    finally:
        _HOLDER.reset(token)


def current_holder() -> Holder:
    return _HOLDER.get()
