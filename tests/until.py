"""Waiting for what must come: without a bound of its own, which a busy machine would miss.

What never comes is ended by pytest's timeout of the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LOOK_S = 0.01


async def until(is_so: Callable[[], object]) -> None:
    """Returns once it is so."""
    while not is_so():  # noqa: ASYNC110 - whatever it is, it has no event
        await asyncio.sleep(_LOOK_S)
