"""The synchronous receiver: its adapter and its observer run on the client's thread."""

from __future__ import annotations

from ratoon_client.blocking.loop import LoopThread
from ratoon_client.weights.receiver import AsyncWeightReceiver, Received


class WeightReceiver:
    """See `AsyncWeightReceiver`."""

    def __init__(self, loop: LoopThread, receiver: AsyncWeightReceiver) -> None:
        self._loop = loop
        self._receiver = receiver

    def sync_once(self, wait_s: float = 0.0) -> Received | None:
        """See `AsyncWeightReceiver.sync_once`."""
        return self._loop.run(self._receiver.sync_once(wait_s))

    def follow(self) -> None:
        """See `AsyncWeightReceiver.follow`."""
        self._loop.run(self._receiver.follow())
