"""Disk work off the event loop.

It has ended when the caller goes on, cancelled or not, so nothing writes to a file that has been
closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    # A future, not a task: closing the client cancels all tasks.
    work = asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs))
    is_cancelled = False
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            is_cancelled = True
        except BaseException:  # noqa: BLE001 - `work.result()` raises it
            break
    if is_cancelled:
        raise asyncio.CancelledError
    return work.result()
