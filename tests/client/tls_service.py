"""The real wires with TLS over a fake engine, on a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ratoon.api.convert.policy import SpecDefaults
from ratoon.api.grpc.server import start_grpc
from ratoon.api.http.app import create_app, start_http
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.edge.budget import EdgeBounds
from ratoon.edge.tls import CertificateFiles, CertificateStore, server_context
from tests.api.fake_engine import FakeEngine
from tests.api.open_gate import OPEN_GATE

MESSAGE_BYTES = 4 * 2**20
LIMITS = LimitsConfig()


@dataclass(frozen=True, kw_only=True)
class TlsService:
    """`ports` by wire: http and grpc."""

    ports: dict[str, int]
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop

    def url(self, wire: str, host: str = "127.0.0.1") -> str:
        scheme = {"http": "https", "grpc": "grpcs"}[wire]
        return f"{scheme}://{host}:{self.ports[wire]}"

    def release(self) -> None:
        """Let held operations end."""
        asyncio.run_coroutine_threadsafe(self.engine.release(), self.loop).result(60)


@contextmanager
def serving_tls(folder: Path, files: CertificateFiles) -> Iterator[TlsService]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ready: Future[TlsService] = Future()
    over = asyncio.Event()
    served = asyncio.run_coroutine_threadsafe(_serve(folder, files, ready, over), loop)
    try:
        yield ready.result(60)
    finally:
        loop.call_soon_threadsafe(over.set)
        served.result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _serve(
    folder: Path, files: CertificateFiles, ready: Future[TlsService], over: asyncio.Event
) -> None:
    engine = FakeEngine(folder=folder, gap_wait_s=0.1)
    service = PolicyService(
        engine=engine,
        limits=LIMITS,
        defaults=SpecDefaults(models_root=folder, micro_batch_tokens=4096),
        device="cpu",
    )
    gateway = await start_grpc(
        service,
        LIMITS,
        gate=OPEN_GATE,
        host="127.0.0.1",
        port=0,
        max_message_bytes=MESSAGE_BYTES,
        context=server_context(CertificateStore(files), protocols=("h2",)),
    )

    http = await start_http(
        create_app(service, LIMITS, gate=OPEN_GATE),
        host="127.0.0.1",
        port=0,
        bounds=EdgeBounds(),
        context=server_context(CertificateStore(files)),
    )
    ports = {"http": http.port, "grpc": gateway.port}
    ready.set_result(TlsService(ports=ports, engine=engine, loop=asyncio.get_running_loop()))
    await over.wait()
    await http.stop(None)
    await gateway.stop(None)
