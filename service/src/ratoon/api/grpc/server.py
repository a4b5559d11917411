"""A grpc.aio server around a servicer, behind its `Front`.

Enters a servicer and where to listen, leaves a running server and its port. Invariant: a port that
is taken is an error, never shared, no connection is held for nothing, and no message is read of
which the intake does not know the size.
"""

from __future__ import annotations

import shutil
import ssl
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio

from ratoon.api.gate import ROOM_TO_REFUSE
from ratoon.api.grpc.front import HANDSHAKE_S, Front
from ratoon.api.grpc.intake import Intake
from ratoon.api.grpc.servicer import PolicyServicer
from ratoon.api.grpc.wiring import add_policy_service
from ratoon.config import LimitsConfig

# A peer that is gone is noticed within 40 s; every connection ends after ten minutes, and two more
# for what is under way. Clients open another by themselves; a reader that stalls is rid of so.
_CONNECTION_OPTIONS = (
    # gRPC inflates a message whole before it looks at its size: a few KiB could be many GiB.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # What a call may send before its message is asked for. Probing for bandwidth would raise it to
    # megabytes.
    ("grpc.http2.lookahead_bytes", 16 * 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_connection_age_ms", 600_000),
    ("grpc.max_connection_age_grace_ms", 120_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A started server; `port` is the one that was bound."""

    server: grpc.aio.Server
    front: Front
    port: int

    async def stop(self, grace_s: float | None) -> None:
        """Take no new call, and answer those under way within `grace_s` seconds."""
        self.front.close()
        await self.server.stop(grace_s)
        self.front.abort()
        shutil.rmtree(self.front.upstream.parent, ignore_errors=True)


async def start_server(
    servicer: PolicyServicer,
    *,
    host: str,
    port: int,
    max_message_bytes: int,
    limits: LimitsConfig,
    context: ssl.SSLContext | None,
) -> RunningServer:
    """Listen on `host`; port 0: a free one. `context` None: without TLS.

    Raises OSError where the port is taken.
    """
    # For this user alone; short, for the path of a socket has at most 107 bytes.
    socket = Path(tempfile.mkdtemp(prefix="ratoon-")) / "grpc"
    front = Front(socket, context)
    server = grpc.aio.server(
        interceptors=[Intake(front, limits, max_message_bytes=max_message_bytes)],
        maximum_concurrent_rpcs=limits.max_requests_in_flight + ROOM_TO_REFUSE,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            *_CONNECTION_OPTIONS,
        ],
    )
    add_policy_service(servicer, server, limits)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    running = RunningServer(server=server, front=front, port=port)
    try:
        return replace(running, port=await front.listen(host, port))
    except OSError:
        await running.stop(None)
        raise
