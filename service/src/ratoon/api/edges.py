"""Builds a process's service from its config, and starts both wires of the gateway.

gRPC and HTTP stand behind one gate. This module must not import torch, whatever process imports it.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from ratoon.api.convert.policy import SpecDefaults
from ratoon.api.gate import build_gate
from ratoon.api.grpc.server import RunningGrpc, start_grpc
from ratoon.api.http.app import RunningHttp, create_app, start_http
from ratoon.api.service import PolicyService
from ratoon.api.tinker.routes import tinker_routes
from ratoon.auth.access import checked_hosts
from ratoon.cluster.bootstrap import connect
from ratoon.cluster.placement import worker_device
from ratoon.cluster.sampler_process import RaySampler, SamplerSettings
from ratoon.config import RatoonConfig
from ratoon.edge.budget import EdgeBounds
from ratoon.edge.tls import CertificateStore, files_of, server_context
from ratoon.engine.settings import EngineSettings


async def build_service(config: RatoonConfig) -> PolicyService:
    """Build a service that reaches the engine through Ray, which must be connected.

    Raises UNAVAILABLE where no engine runs (`engine.bootstrap`).
    """
    return PolicyService(
        engine=await connect(config.ray.namespace),
        sampler=RaySampler(SamplerSettings.from_config(config)),
        limits=config.limits,
        defaults=SpecDefaults(
            models_root=config.models_folder,
            micro_batch_tokens=config.worker.micro_batch_tokens,
        ),
        device=worker_device(EngineSettings.from_config(config)),
    )


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
            create_app(
                service,
                config.limits,
                gate=gate,
                allowed_hosts=checked_hosts(config),
                tinker=tinker_routes(service, gate, config),
            ),
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
