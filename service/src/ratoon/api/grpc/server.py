"""A grpc.aio server around a servicer.

Enters a servicer and where to listen, leaves a running server and its port. Invariant: both
directions take messages of `max_message_bytes`, a port that is taken is an error, never shared, and
no connection is held for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from ratoon.api.gate import ROOM_TO_REFUSE
from ratoon.api.grpc.deadlines import CallDeadlines
from ratoon.api.grpc.servicer import PolicyServicer
from ratoon.api.grpc.wiring import add_policy_service
from ratoon.config import LimitsConfig

# Chunks of files that may wait for their readers; gRPC has them twice.
_MAX_UNSENT_BYTES = 128 * 2**20
# A peer that is gone is noticed within 40 s; every connection ends after ten minutes, and two more
# for what is under way. Clients open another by themselves; a reader that stalls is rid of so.
_CONNECTION_OPTIONS = (
    # gRPC inflates a message whole before it looks at its size: a few KiB could be many GiB.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.server_handshake_timeout_ms", 20_000),
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
    port: int


async def start_server(
    servicer: PolicyServicer,
    *,
    host: str,
    port: int,
    max_message_bytes: int,
    limits: LimitsConfig,
    credentials: grpc.ServerCredentials | None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> RunningServer:
    """Listen on `host`; port 0: a free one. `credentials` None: without TLS.

    Raises RuntimeError where the port is taken.
    """
    deadlines = CallDeadlines(
        receive_s=limits.max_body_s,
        max_unsent_fetches=max(_MAX_UNSENT_BYTES // limits.max_fetch_bytes, 1),
    )
    server = grpc.aio.server(
        interceptors=[*interceptors, deadlines],
        maximum_concurrent_rpcs=limits.max_requests_in_flight + ROOM_TO_REFUSE,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),
            *_CONNECTION_OPTIONS,
        ],
    )
    add_policy_service(servicer, server)
    address = f"{host}:{port}"
    if credentials is None:
        bound = server.add_insecure_port(address)
    else:
        bound = server.add_secure_port(address, credentials)
    await server.start()
    return RunningServer(server=server, port=bound)
