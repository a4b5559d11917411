"""A fake service on a wire, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratoon_client import ClientConfig, PulledWeights, RatoonClient
from tests.client.fake_grpc import serving_grpc
from tests.client.fake_http import serving_http
from tests.client.fake_service import FakeService

CONFIG = ClientConfig(timeout_s=20.0)
HASTY = ClientConfig(timeout_s=1.0)


@contextmanager
def serving(service: FakeService, wire: str, port: int = 0) -> Iterator[str]:
    with (serving_grpc if wire == "grpc" else serving_http)(service, port) as url:
        yield url


def versions(root: Path) -> set[str]:
    return {path.name for path in root.glob("version-*")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture(params=["grpc", "http"])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(service: FakeService, wire: str) -> Iterator[str]:
    with serving(service, wire) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[RatoonClient]:
    with RatoonClient(url, config=CONFIG) as client:
        yield client


@dataclass(frozen=True, kw_only=True)
class Rig:
    """A service, a client of it and a folder for versions."""

    service: FakeService
    client: RatoonClient
    root: Path

    def pull(self, version: int | None = None, **options: Any) -> PulledWeights:
        return self.client.pull_weights("p", self.root, version, **options)


@pytest.fixture
def rig(service: FakeService, client: RatoonClient, root: Path) -> Rig:
    return Rig(service=service, client=client, root=root)


@pytest.fixture
def hasty_client(url: str) -> Iterator[RatoonClient]:
    """Gives up after a second."""
    with RatoonClient(url, config=HASTY) as client:
        yield client
