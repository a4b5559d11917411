"""The gateway process: gRPC and HTTP for callers anywhere. It outlives Serve's replicas.

After SIGTERM or `drain` it refuses new calls and answers those under way, within `DRAIN_S` seconds.

The gateway is a plain (not asyncio) Ray actor, so its constructor runs on the process's main
thread, the only one that may install signal handlers. That thread waits in Ray's C++ loop, where no
Python handler would run, so a thread of our own reads the signal from the wakeup pipe. Processes
that look the actor up import this module, so the constructor imports the servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from concurrent.futures import Future
from types import FrameType
from typing import Any

from ratoon.config import RatoonConfig
from ratoon.garbage import frozen_imports
from ratoon.log import configure_logging, get_logger

DRAIN_S = 25.0

_log = get_logger("gateway")


class Gateway:
    """Serves from construction to `drain`; after a restart by Ray it listens on the same ports."""

    def __init__(self, config: RatoonConfig) -> None:
        configure_logging(config.log_level)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="edges", daemon=True).start()
        with frozen_imports():
            from ratoon.api.edges import start_edges

            self._edges = self._call(start_edges(config)).result()
        self._drain_on_sigterm()
        _log.debug("gateway listens", grpc=self._edges.grpc.port, http=self._edges.http.port)

    def wait_until_ready(self) -> None:
        """Return once the constructor has ended, so both ports are open."""

    def drain(self) -> None:
        """Refuse new calls, and return once those under way are answered."""
        self._call(self._edges.stop(DRAIN_S)).result()

    def _call(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _drain_on_sigterm(self) -> None:
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.signal(signal.SIGTERM, _leave_to_thread)
        signal.set_wakeup_fd(self._wakeup.fileno())
        threading.Thread(target=self._wait_for_sigterm, name="sigterm", daemon=True).start()

    def _wait_for_sigterm(self) -> None:
        while signal.SIGTERM not in self._signals.recv(64):
            pass
        _log.info("gateway drains", reason="SIGTERM")
        self.drain()
        os._exit(0)


def _leave_to_thread(signal_number: int, frame: FrameType | None) -> None:
    """Do nothing; without a Python handler, nothing would be written to the wakeup pipe."""
