"""Throttles a watched operation for its reader.

A slow reader has at most one value waiting, the newest, however many changes there were.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from ratoon.engine.types import Operation


async def throttled(
    changes: AsyncIterator[Operation], *, interval_s: float
) -> AsyncGenerator[Operation, None]:
    """Yield the newest operation at once, then at most one in `interval_s` seconds.

    It ends with the final one. Raises the error of `changes`, after the last value that came before
    it.
    """
    newest: Operation | None = None
    changed = asyncio.Event()

    async def pump() -> None:
        nonlocal newest
        async for operation in changes:
            newest = operation
            changed.set()

    task = asyncio.create_task(pump())
    task.add_done_callback(lambda _: changed.set())
    sent: Operation | None = None
    try:
        while True:
            await changed.wait()
            changed.clear()
            if newest is sent or newest is None:
                if task.done():
                    await task
                    return
                continue
            sent = newest
            yield sent
            if sent.state.is_final:
                return
            await asyncio.sleep(interval_s)
            if task.done():
                changed.set()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
