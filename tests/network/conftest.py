"""Clients of the real service through a network that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Unpack

import pytest

from ratoon_client import (
    AsyncRatoonClient,
    ClientConfig,
    PolicyOptions,
    RatoonClient,
)
from tests.network.proxy import Proxy, proxied
from tests.running_service import Service

TRANSPORTS = ("http", "grpc")
TINY: PolicyOptions = {"preset": "tiny", "seed": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One transport: the proxy, the address behind it and in front of it."""

    transport: str
    proxy: Proxy
    direct: str

    @property
    def target(self) -> str:
        return f"{self.transport}://{self.proxy.address}"

    def client(self, config: ClientConfig | None = None) -> AsyncRatoonClient:
        return AsyncRatoonClient(self.target, config=config)

    def direct_client(self) -> AsyncRatoonClient:
        return AsyncRatoonClient(self.direct)


@asynccontextmanager
async def opened(service: Service, transport: str) -> AsyncIterator[Bench]:
    addresses = service.addresses
    direct = addresses.http if transport == "http" else f"grpc://{addresses.grpc}"
    async with proxied(direct) as proxy:
        yield Bench(transport=transport, proxy=proxy, direct=direct)


@pytest.fixture(params=TRANSPORTS)
async def bench(service: Service, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with opened(service, str(request.param)) as bench:
        yield bench


@pytest.fixture(scope="session")
def policy(service: Service) -> Iterator[str]:
    """One policy for all tests but those that compare; a test looks at its version first."""
    # The first answer of each replica takes as long as importing torch.
    with RatoonClient(service.addresses.http) as client:
        for _ in range(6):
            client.server_info()
    with RatoonClient(service.addresses.grpc) as client:
        client.server_info()
        client.create_policy("network", **TINY).result()
        yield "network"
        client.delete_policy("network").result()


@asynccontextmanager
async def tiny_policy(
    client: AsyncRatoonClient, policy_id: str, **options: Unpack[PolicyOptions]
) -> AsyncIterator[str]:
    """A policy of its own, removed at the end."""
    spec: PolicyOptions = {**TINY, **options}
    await (await client.create_policy(policy_id, **spec)).result()
    try:
        yield policy_id
    finally:
        await (await client.delete_policy(policy_id)).result()
