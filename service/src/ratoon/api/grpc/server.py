"""A plain grpc.aio server around a servicer.

Enters a servicer and where to listen, leaves a running server and its port. Invariant: both
directions take messages of `max_message_bytes`, and a port that is taken is an error, never shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from ratoon.api.grpc.servicer import PolicyServicer
from ratoon.api.grpc.wiring import add_policy_service


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
    credentials: grpc.ServerCredentials | None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> RunningServer:
    """Listen on `host`; port 0: a free one. `credentials` None: without TLS.

    Raises RuntimeError where the port is taken.
    """
    server = grpc.aio.server(
        interceptors=interceptors,
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.so_reuseport", 0),
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
