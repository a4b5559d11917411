"""The real wires over a fake engine, on a thread with its own event loop."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ratoon.api.convert.policy import SpecDefaults
from ratoon.api.gate import Gate
from ratoon.api.grpc.server import RunningGrpc, start_grpc
from ratoon.api.http.app import RunningHttp, create_app, start_http
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.edge.budget import EdgeBounds
from ratoon.edge.tls import CertificateFiles, CertificateStore, server_context
from ratoon_client.blocking import LoopThread
from tests.api.fake_engine import FakeEngine, FakeSampler
from tests.api.open_gate import OPEN_GATE

MESSAGE_BYTES = 4 * 2**20
LIMITS = LimitsConfig()
DATA = b"0123456789"


@dataclass(frozen=True, kw_only=True)
class RealWires:
    """Wires are named `http` and `grpc`."""

    http: RunningHttp
    grpc: RunningGrpc
    is_tls: bool
    engine: FakeEngine
    loop: LoopThread

    def port(self, wire: str) -> int:
        return self.http.port if wire == "http" else self.grpc.port

    def url(self, wire: str, host: str = "127.0.0.1") -> str:
        return f"{wire}{'s' if self.is_tls else ''}://{host}:{self.port(wire)}"

    def release(self) -> None:
        """Let held operations end."""
        self.loop.run(self.engine.release())


@contextmanager
def serving_wires(
    folder: Path, *, files: CertificateFiles | None = None, gate: Gate = OPEN_GATE
) -> Iterator[RealWires]:
    """`files` None: without TLS."""
    loop = LoopThread()
    try:
        wires = loop.run(_started(loop, folder, files, gate))
        yield wires
        loop.run(wires.http.stop(None))
        loop.run(wires.grpc.stop(None))
    finally:
        loop.stop()


async def _started(
    loop: LoopThread, folder: Path, files: CertificateFiles | None, gate: Gate
) -> RealWires:
    weights = folder / "served"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(DATA)
    engine = FakeEngine(folder=weights, gap_wait_s=0.1)
    engine.add_file(DATA)
    service = PolicyService(
        engine=engine,
        sampler=FakeSampler(),
        limits=LIMITS,
        defaults=SpecDefaults(models_root=folder, micro_batch_tokens=4096),
        device="cpu",
    )

    def context(*protocols: str) -> ssl.SSLContext | None:
        return files and server_context(CertificateStore(files), protocols=protocols)

    grpc = await start_grpc(
        service,
        LIMITS,
        gate=gate,
        host="127.0.0.1",
        port=0,
        max_message_bytes=MESSAGE_BYTES,
        context=context("h2"),
    )
    http = await start_http(
        create_app(service, LIMITS, gate=gate),
        host="127.0.0.1",
        port=0,
        bounds=EdgeBounds(),
        context=context(),
    )
    return RealWires(http=http, grpc=grpc, is_tls=files is not None, engine=engine, loop=loop)
