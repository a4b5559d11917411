"""The gateway: gRPC and HTTP for callers anywhere, in one process that outlives Serve's replicas.

After SIGTERM or `drain` it refuses new calls and answers those under way, within `DRAIN_S` seconds.

It is a plain (not asyncio) Ray actor, so its constructor runs on the process's main thread, the
only one that may install signal handlers. That thread waits in Ray's C++ loop, where no Python
handler would run, so a thread of our own reads the signal from the wakeup pipe.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ratoon.api.build import build_service
from ratoon.api.gate import build_gate
from ratoon.api.grpc.server import RunningServer, start_server
from ratoon.api.grpc.servicer import PolicyServicer
from ratoon.api.http.app import create_app
from ratoon.api.http.edge_budget import EdgeBounds
from ratoon.api.http.listener import RunningHttp, start_http
from ratoon.api.http.tls import server_context
from ratoon.auth.access import checked_hosts
from ratoon.auth.certificates import CertificateStore, files_of
from ratoon.config import RatoonConfig
from ratoon.garbage import freeze_garbage
from ratoon.log import configure_logging, get_logger

DRAIN_S = 25.0

_log = get_logger("gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """The servers of both wires."""

    grpc: RunningServer
    http: RunningHttp

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and answer those under way within `grace_s` seconds."""
        await asyncio.gather(self.grpc.stop(grace_s), self.http.stop(grace_s))


class Gateway:
    """Serves from construction to `drain`; after a restart by Ray it listens on the same ports."""

    def __init__(self, config: RatoonConfig) -> None:
        configure_logging(config.log_level)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="edges", daemon=True).start()
        self._edges = self._call(start_edges(config)).result()
        freeze_garbage()
        self._drain_on_sigterm()
        _log.info("gateway listens", grpc=self._edges.grpc.port, http=self._edges.http.port)

    def wait_until_ready(self) -> None:
        """Returns once the constructor has ended, so both ports are open."""

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
    """Without a Python handler nothing would be written to the wakeup pipe."""


async def start_edges(config: RatoonConfig) -> Edges:
    """Serve both wires behind one gate. Raises OSError where a port is taken."""
    service = await build_service(config)
    gate = build_gate(config, service.record_refusal)
    servicer = PolicyServicer(
        service,
        max_body_bytes=config.limits.max_body_bytes,
        status_needs_message=False,
        gate=gate,
    )
    grpc = await start_server(
        servicer,
        host=config.grpc.host,
        port=config.grpc.port,
        max_message_bytes=config.grpc.max_message_bytes,
        limits=config.limits,
        context=_context(config, "h2"),
    )
    try:
        http = await start_http(
            create_app(service, config.limits, gate=gate, allowed_hosts=checked_hosts(config)),
            host=config.http.host,
            port=config.http.port,
            bounds=EdgeBounds(max_body_bytes=config.limits.max_body_bytes),
            context=_context(config),
        )
    except OSError:
        await grpc.stop(None)
        raise
    return Edges(grpc=grpc, http=http)


def _context(config: RatoonConfig, *protocols: str) -> ssl.SSLContext | None:
    """Each wire has its own store, as its ALPN protocols are a property of the context."""
    files = files_of(config)
    if files is None:
        return None
    return server_context(CertificateStore(files), protocols=protocols)
