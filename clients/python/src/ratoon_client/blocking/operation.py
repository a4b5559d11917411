"""The synchronous handle: each method waits for the asynchronous one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from ratoon_client.blocking.loop import LoopThread
from ratoon_client.operation import AsyncOperationHandle
from ratoon_client.results import Operation

ResultT = TypeVar("ResultT")


class OperationHandle(Generic[ResultT]):
    """See `AsyncOperationHandle`."""

    def __init__(self, loop: LoopThread, handle: AsyncOperationHandle[ResultT]) -> None:
        self._loop = loop
        self._handle = handle

    @property
    def operation_id(self) -> str:
        return self._handle.operation_id

    @property
    def seq(self) -> int:
        """0 where the operation is not sequenced."""
        return self._handle.seq

    def status(self) -> Operation:
        return self._loop.run(self._handle.status())

    def wait(self, timeout_s: float | None = None) -> Operation:
        return self._loop.run(self._handle.wait(timeout_s))

    def result(self, timeout_s: float | None = None, *, progress: bool = False) -> ResultT:
        return self._loop.run(self._handle.result(timeout_s, progress=progress))

    def watch(self) -> Iterator[Operation]:
        return self._loop.iterate(self._handle.watch())

    def cancel(self) -> Operation:
        return self._loop.run(self._handle.cancel())
