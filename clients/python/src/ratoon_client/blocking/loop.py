"""An event loop on a thread of its own; a caller that is interrupted cancels what it waits for."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from ratoon_client.caller import check_process, closed
from ratoon_client.errors import UnusableClientError

T = TypeVar("T")


class LoopThread:
    """Running from construction to `stop`; in a process that is forked meanwhile, not at all."""

    def __init__(self) -> None:
        self._process = os.getpid()
        # Reentrant: a watch that is collected while it is held is closed by a call of its own.
        self._stopping = threading.RLock()
        self._is_stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ratoon-client", daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._is_stopped and self._process == os.getpid()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, in the calling thread. Raises UnusableClientError."""
        try:
            self._check_thread()
        except UnusableClientError:
            coroutine.close()
            raise
        future = self._begin(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """The items one by one; leaving the loop early closes the generator."""
        try:
            while True:
                try:
                    yield self.run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            # Not waited for: a watch may be collected on the loop's own thread.
            with suppress(UnusableClientError):
                self._begin(items.aclose())

    def stop(self) -> None:
        """Threads that still wait for something get CancelledError."""
        with self._stopping:
            if self._is_stopped:
                return
            self._is_stopped = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            check_process(self._process)
            with self._stopping:
                if self._is_stopped:
                    raise closed()
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except UnusableClientError:
            coroutine.close()
            raise

    def _check_thread(self) -> None:
        """A wait on the loop's own thread would have no end."""
        if threading.current_thread() is self._thread:
            raise UnusableClientError(
                "a blocking call on the client's own thread, which runs adapters and on_event: make"
                " it on another thread, or with another client"
            )


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
