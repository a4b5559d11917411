"""The public gRPC endpoint: one detached process that outlives Serve's replicas and redeploys.

Enters the server's config, leaves an open port. Invariant: after SIGTERM or `drain` no new call is
taken and those under way are answered, up to `DRAIN_S` seconds.

It is a plain (not asyncio) Ray actor, for then its constructor runs on the process's main thread,
the only one that may install signal handlers. That thread waits in Ray's C++ loop, where no Python
handler would run: the signal is read from the wakeup pipe by a thread of our own.
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

from ratoon.api.build import build_service
from ratoon.api.gate import build_gate
from ratoon.api.grpc.server import RunningServer, start_server
from ratoon.api.grpc.servicer import PolicyServicer
from ratoon.api.http.tls import server_context
from ratoon.auth.certificates import CertificateStore, files_of
from ratoon.config import RatoonConfig
from ratoon.garbage import freeze_garbage
from ratoon.log import configure_logging, get_logger

DRAIN_S = 25.0

_log = get_logger("gateway")


class Gateway:
    """Serving from construction to `drain`; a restart by Ray listens on the same port again."""

    def __init__(self, config: RatoonConfig) -> None:
        configure_logging(config.log_level)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="grpc", daemon=True).start()
        self._running: RunningServer = self._call(_start(config)).result()
        self._address = f"{config.grpc.host}:{self._running.port}"
        freeze_garbage()
        self._drain_on_sigterm()
        _log.info("gateway listens", address=self._address)

    def address(self) -> str:
        """host:port."""
        return self._address

    def drain(self) -> None:
        """Take no new call, answer those under way; returns when it is done."""
        self._call(self._running.stop(DRAIN_S)).result()

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
    """Without a handler in Python, nothing would be written to the wakeup pipe."""


async def _start(config: RatoonConfig) -> RunningServer:
    service = await build_service(config)
    gate = build_gate(config, service.record_refusal)
    servicer = PolicyServicer(
        service,
        max_body_bytes=config.limits.max_body_bytes,
        status_needs_message=False,
        gate=gate,
    )
    files = files_of(config)
    context = None if files is None else server_context(CertificateStore(files), protocols=["h2"])
    return await start_server(
        servicer,
        host=config.grpc.host,
        port=config.grpc.gateway_port,
        max_message_bytes=config.grpc.max_message_bytes,
        limits=config.limits,
        context=context,
    )
