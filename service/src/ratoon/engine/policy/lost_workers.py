"""Counts the workers in a row that are lost to one thing, which is given up after too many.

Each loss costs a load and a replay, and what takes every worker would cost them for ever.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.errors import ErrorCode, RatoonError

T = TypeVar("T")

MAX_LOSSES = 4


class LostWorkers:
    """Remembers the last thing that has lost a worker, by its name."""

    def __init__(self) -> None:
        self._name = ""
        # Why each worker was lost.
        self._reasons: tuple[str, ...] = ()

    async def counted(self, name: str, call: Awaitable[T]) -> T:
        """Await the worker's answer, and count a loss of the worker."""
        try:
            return await call
        except WorkerLostError as err:
            reasons = self._reasons if self._name == name else ()
            self._name, self._reasons = name, (*reasons, str(err))
            raise

    def check(self, name: str) -> None:
        """Raises WORKER_LOST where too many workers were lost to it."""
        if self._name == name and len(self._reasons) >= MAX_LOSSES:
            message = f"{len(self._reasons)} workers in a row were lost to it, the last: "
            raise RatoonError(ErrorCode.WORKER_LOST, message + self._reasons[-1])
