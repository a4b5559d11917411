"""A grpc.aio server of the policy service, behind its `GrpcProxy`.

A taken port is an error, never shared. Idle connections are closed, and no message is read before
the intake knows its size.
"""

from __future__ import annotations

import shutil
import ssl
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio

from ratoon.api.gate import ROOM_TO_REFUSE, Gate
from ratoon.api.grpc.intake import Intake
from ratoon.api.grpc.servicer import PolicyServicer
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.edge.budget import EdgeBounds, EdgeBudget
from ratoon.edge.grpc_proxy import GrpcProxy

# A connection carries any number of calls, so fewer are needed than over HTTP/1.
GRPC_BOUNDS = EdgeBounds(max_connections=2048, max_connections_of_host=1024)
# Half of each byte budget is the most that one caller holds.
_MOST_OF_ONE = 0.5
# A dead peer is noticed within 40 s. Every connection ends after ten minutes, plus two for calls
# under way; clients reconnect by themselves, and stalled readers are dropped.
_CONNECTION_OPTIONS = (
    # gRPC inflates a whole message before it checks the size: a few KiB could become many GiB.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Bytes that a call may send before its message is asked for. Bandwidth probing would raise it
    # to megabytes.
    ("grpc.http2.lookahead_bytes", 16 * 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_connection_age_ms", 600_000),
    ("grpc.max_connection_age_grace_ms", 120_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningGrpc:
    """A started gRPC server; `port` is the bound one."""

    server: grpc.aio.Server
    proxy: GrpcProxy
    port: int

    async def stop(self, grace_s: float | None) -> None:
        """Refuse new calls, and answer those under way within `grace_s` seconds."""
        self.proxy.close()
        await self.server.stop(grace_s)
        self.proxy.abort()
        shutil.rmtree(self.proxy.upstream.parent, ignore_errors=True)


async def start_grpc(
    service: PolicyService,
    limits: LimitsConfig,
    *,
    gate: Gate,
    host: str,
    port: int,
    max_message_bytes: int,
    bounds: EdgeBounds = GRPC_BOUNDS,
    context: ssl.SSLContext | None = None,
) -> RunningGrpc:
    """Serve `service` on `host`; port 0 picks a free one. `context` None: without TLS.

    A message with a batch has at most `max_message_bytes`, and at most `limits.max_body_bytes`.
    Raises OSError where the port is taken.
    """
    most = min(max_message_bytes, limits.max_body_bytes)
    budget = EdgeBudget(replace(bounds, max_body_bytes=most), most_of_one=_MOST_OF_ONE)
    # The folder is open to this user only, and its path short: a socket path has at most 107 bytes.
    socket = Path(tempfile.mkdtemp(prefix="ratoon-")) / "grpc"
    proxy = GrpcProxy(socket, context, budget)
    intake = Intake(limits, budget)
    server = grpc.aio.server(
        maximum_concurrent_rpcs=limits.max_requests_in_flight + ROOM_TO_REFUSE,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.server_handshake_timeout_ms", int(bounds.headers_s * 1000)),
            *_CONNECTION_OPTIONS,
        ],
    )
    server.add_generic_rpc_handlers((PolicyServicer(service, gate, intake, proxy),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    running = RunningGrpc(server=server, proxy=proxy, port=port)
    try:
        return replace(running, port=await proxy.listen(host, port))
    except OSError:
        await running.stop(None)
        raise
