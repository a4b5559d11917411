"""A service with a version to receive, a client of it over HTTP and engines to load it into."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratoon_client import AsyncRatoonClient, AsyncWeightReceiver, SglangAdapter, VllmAdapter
from tests.client.fake_engine import FILE, FakeEngine, serving_engine
from tests.client.fake_service import CHUNK_BYTES, FakeService

NUM_CHUNKS = 4
SIZE_BYTES = (NUM_CHUNKS - 1) * CHUNK_BYTES + 7
WAIT_S = 20.0


def model(version: int) -> bytes:
    return random.Random(version).randbytes(SIZE_BYTES)


def publish(service: FakeService, version: int) -> None:
    service.publish(version, {FILE: model(version), "config.json": b"{}"})


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A service with version 1, a client of it, a folder for versions, and an engine."""

    service: FakeService
    client: AsyncRatoonClient
    root: Path
    engine: FakeEngine
    request: pytest.FixtureRequest

    @property
    def vllm(self) -> VllmAdapter:
        """The engine's adapter, which holds it from here on."""
        return self.request.getfixturevalue("vllm")

    def publish(self, version: int) -> None:
        publish(self.service, version)

    def receiver(self) -> AsyncWeightReceiver:
        return self.client.weight_receiver("p", self.root, self.vllm)

    def mirror(self) -> AsyncWeightReceiver:
        """A receiver without an engine."""
        return self.client.weight_receiver("p", self.root)


def honest(data: bytes, _: int) -> bytes:
    return data


def follow(url: str, *options: str) -> subprocess.Popen[str]:
    # A shell's background job would ignore SIGINT.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heeds}; from ratoon_client.cli import main; main()"
    command = [sys.executable, "-c", code, "--url", url, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def wire() -> str:
    return "http"


@pytest.fixture(autouse=True)
def _published(service: FakeService) -> None:
    publish(service, 1)


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncRatoonClient]:
    async with AsyncRatoonClient(url, timeout_s=WAIT_S) as client:
        yield client


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engine_url(engine: FakeEngine) -> Iterator[str]:
    with serving_engine(engine) as url:
        yield url


@pytest.fixture
def vllm(engine_url: str) -> Iterator[VllmAdapter]:
    with VllmAdapter(engine_url, drain_s=WAIT_S, load_s=WAIT_S, call_s=WAIT_S) as adapter:
        yield adapter


@pytest.fixture
def sglang(engine_url: str) -> Iterator[SglangAdapter]:
    with SglangAdapter(engine_url, load_s=WAIT_S, call_s=WAIT_S) as adapter:
        yield adapter


@pytest.fixture
def rig(
    service: FakeService,
    client: AsyncRatoonClient,
    root: Path,
    engine: FakeEngine,
    request: pytest.FixtureRequest,
) -> Rig:
    return Rig(service=service, client=client, root=root, engine=engine, request=request)
