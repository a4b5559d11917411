"""Starts both wires of the gateway: gRPC and HTTP behind one gate."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from ratoon.api.build import build_service
from ratoon.api.gate import build_gate
from ratoon.api.grpc.server import RunningGrpc, start_grpc
from ratoon.api.http.app import create_app
from ratoon.api.http.listener import RunningHttp, start_http
from ratoon.auth.access import checked_hosts
from ratoon.config import RatoonConfig
from ratoon.edge.budget import EdgeBounds
from ratoon.edge.tls import CertificateStore, files_of, server_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """The running servers of both wires."""

    grpc: RunningGrpc
    http: RunningHttp

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and answer those under way within `grace_s` seconds."""
        await asyncio.gather(self.grpc.stop(grace_s), self.http.stop(grace_s))


async def start_edges(config: RatoonConfig) -> Edges:
    """Serve both wires behind one gate. Raises OSError where a port is taken."""
    service = await build_service(config)
    gate = build_gate(config, service.record_refusal)
    grpc = await start_grpc(
        service,
        config.limits,
        gate=gate,
        host=config.grpc.host,
        port=config.grpc.port,
        max_message_bytes=config.grpc.max_message_bytes,
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
    """Build the TLS context of one wire; None without TLS.

    Each wire has its own store, as its ALPN protocols are a property of the context.
    """
    files = files_of(config)
    if files is None:
        return None
    return server_context(CertificateStore(files), protocols=protocols)
