"""The service over a fake engine, on both wires, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import grpc.aio
import httpx
import pytest
from fastapi import FastAPI

from ratoon.api.grpc.server import start_grpc
from ratoon.api.http.app import create_app
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.log import configure_logging
from ratoon_proto.v1 import service_pb2
from tests.api import requests
from tests.api.fake_engine import FakeEngine, service_of
from tests.api.guarded import Guarded, guarded_service
from tests.api.open_gate import OPEN_GATE
from tests.api.wires import GrpcWire, HttpWire, Wire

MAX_BODY_BYTES = 16 * 1024
MAX_MESSAGE_BYTES = 64 * 1024


class _Current:
    """Stands for the service of the test that runs: routes take longer to build than most tests."""

    service: PolicyService

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            return getattr(self.service, name)(*arguments, **options)

        return call


_CURRENT = _Current()
LIMITS = LimitsConfig(
    max_body_bytes=MAX_BODY_BYTES, max_fetch_bytes=1024, max_groups=8, max_wait_s=1.0
)


@cache
def _app() -> FastAPI:
    return create_app(cast("PolicyService", _CURRENT), LIMITS, gate=OPEN_GATE)


@dataclass(frozen=True, kw_only=True)
class Api:
    """Everything of one service; `models_root` has a folder `real` and a link that leads out."""

    engine: FakeEngine
    service: PolicyService
    limits: LimitsConfig
    grpc: GrpcWire
    models_root: Path
    weights: Path

    @property
    def app(self) -> FastAPI:
        """The application of all tests, which serves this service now."""
        _CURRENT.service = self.service
        app = _app()
        # It belongs to a test's loop.
        app.state.parsing = asyncio.Semaphore(2)
        return app

    @cached_property
    def http(self) -> HttpWire:
        transport = httpx.ASGITransport(self.app)
        return HttpWire(client=httpx.AsyncClient(transport=transport, base_url="http://test"))

    def wire(self, name: str) -> Wire:
        return self.http if name == "http" else self.grpc

    async def create_policy(self, **changes: Any) -> None:
        request = service_pb2.CreatePolicyRequest(spec=requests.spec(**changes))
        await self.service.create_policy(request)


@pytest.fixture(params=["http", "grpc"])
def wire_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    models_root, weights = tmp_path / "models", tmp_path / "weights"
    for folder in (models_root / "real", weights, tmp_path / "outside"):
        folder.mkdir(parents=True)
    (models_root / "escape").symlink_to(tmp_path / "outside")
    (weights / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    engine = FakeEngine(folder=weights, gap_wait_s=0.1)
    service = service_of(engine, LIMITS, models_root)
    running = await start_grpc(
        service,
        LIMITS,
        gate=OPEN_GATE,
        host="127.0.0.1",
        port=0,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        yield Api(
            engine=engine,
            service=service,
            limits=LIMITS,
            grpc=GrpcWire(channel=channel),
            models_root=models_root,
            weights=weights,
        )
    await running.stop(None)


@pytest.fixture
async def guarded(api: Api, tmp_path: Path) -> AsyncIterator[Guarded]:
    """The service of `api`, which asks for keys here."""
    async with guarded_service(api.service, api.limits, tmp_path / "data") as service:
        yield service


@pytest.fixture(autouse=True, scope="session")
def _plain_logs() -> None:
    """structlog's own default draws tracebacks with all locals, for seconds."""
    configure_logging("ERROR")
