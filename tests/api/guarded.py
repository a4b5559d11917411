"""A service that asks for API keys, on both wires, and calls of it that carry one."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from fastapi import FastAPI

from ratoon.api.gate import Gate, build_gate
from ratoon.api.grpc.server import start_grpc
from ratoon.api.http.app import create_app
from ratoon.api.service import PolicyService
from ratoon.auth.keys import KeyFile, Scope, new_key
from ratoon.config import AuthConfig, LimitsConfig, RatoonConfig
from tests.api.wires import GrpcWire, HttpWire, Wire, refused_by

MESSAGE_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """A service behind a gate that asks for keys."""

    root: Path
    address: str
    channel: grpc.aio.Channel
    client: httpx.AsyncClient
    app: FastAPI
    gate: Gate

    def key(self, scope: Scope, policies: tuple[str, ...] | None = None, **changes: Any) -> str:
        return make_key(self.root, scope, policies, **changes)

    def wire(self, name: str, key: str = "") -> Wire:
        """A wire that sends `key` with every call."""
        if name == "http":
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            transport = httpx.ASGITransport(self.app)
            return HttpWire(
                client=httpx.AsyncClient(
                    transport=transport, base_url="http://test", headers=headers
                )
            )
        return GrpcWire(channel=_Keyed(self.channel, key))  # pyright: ignore[reportArgumentType]

    def audit(self) -> list[dict[str, Any]]:
        lines = (self.root / "access" / "audit.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def make_key(
    root: Path, scope: Scope, policies: tuple[str, ...] | None = None, **changes: Any
) -> str:
    values = {"note": "", "created_at": time.time(), "expires_at": None} | changes
    key, text = new_key(scope=scope, policies=policies, **values)
    KeyFile(root).add(key)
    return text


class _Keyed:
    """A channel whose unary calls carry a key."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"bearer {key}"),) if key else ()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        call = self._channel.unary_unary(*arguments, **options)
        return lambda request, timeout=None: call(request, timeout=timeout, metadata=self._metadata)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        call = self._channel.unary_stream(*arguments, **options)
        return lambda request, timeout=None: call(request, timeout=timeout, metadata=self._metadata)


@asynccontextmanager
async def guarded_service(
    service: PolicyService, limits: LimitsConfig, root: Path
) -> AsyncIterator[Guarded]:
    """`service` with the keys below `root`."""
    gate = build_gate(RatoonConfig(data_root=root, auth=AuthConfig(required=True)))
    running = await start_grpc(
        service, limits, gate=gate, host="127.0.0.1", port=0, max_message_bytes=MESSAGE_BYTES
    )
    app = create_app(service, limits, gate=gate)
    address = f"127.0.0.1:{running.port}"
    async with (
        grpc.aio.insecure_channel(address) as channel,
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client,
    ):
        yield Guarded(
            root=root, address=address, channel=channel, client=client, app=app, gate=gate
        )
    await running.stop(None)


async def refusal(wire: Wire, rpc: str, request: Any) -> tuple[str, int | grpc.StatusCode, str]:
    """(code, status, message) of a call that must fail."""
    error = await refused_by(wire, rpc, request)
    return error.detail.code, error.status, error.detail.message
