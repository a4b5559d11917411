"""What Serve has no options for, done inside its own processes.

Enters by import path: Serve's proxy calls `in_proxy` before it opens its ports; a replica calls
`in_replica` itself. Leaves Serve's ports with our TLS, and on loopback where Ray is. Invariant: the
names that are replaced belong to the one minor release of Ray that we allow.

Neither uvicorn nor Serve bounds how long a caller may take to send or read.
Serve asks no client for the certificate that `ssl_ca_certs` is for, and reads its own once; its
gRPC port and the port between replicas, which takes pickles, listen on all interfaces.
"""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
import uvicorn.config
from ray.serve._private import constants, default_impl, replica
from starlette.middleware import Middleware

from ratoon.api.http.connections import BoundedConnection
from ratoon.api.http.edge_budget import EdgeBounds, EdgeBudget
from ratoon.api.http.tls import server_context
from ratoon.auth.certificates import CertificateFiles, CertificateStore
from ratoon.config import is_loopback, max_body_bytes_of_environment

IN_PROXY = "ratoon.serve_hooks:in_proxy"
# The variable by which Serve's proxy is told what to call.
IN_PROXY_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_ALL_INTERFACES = "[::]:"


def in_proxy() -> list[Middleware]:
    """No middleware: it is called for what it does to the process."""
    uvicorn.config.create_ssl_context = _context
    bounds = EdgeBounds(max_body_bytes=max_body_bytes_of_environment())
    protocols = cast("dict[str, Any]", uvicorn.config.HTTP_PROTOCOLS)
    protocols["auto"] = partial(BoundedConnection, budget=EdgeBudget(bounds))
    # gRPC inflates a message whole before it looks at its size.
    constants.DEFAULT_GRPC_SERVER_OPTIONS.append(("grpc.compression_enabled_algorithms_bitset", 1))
    if _is_ray_local():
        add_address = default_impl.add_grpc_address
        default_impl.add_grpc_address = lambda server, address: add_address(server, _local(address))
    return []


def in_replica() -> None:
    """Before the replica opens its port, which it does after its first constructor."""
    if _is_ray_local():
        module: Any = replica
        add_port = module.add_port_to_grpc_server
        module.add_port_to_grpc_server = lambda server, address: add_port(server, _local(address))


def _context(certfile: str, keyfile: str, ca_certs: str | None, **_: Any) -> ssl.SSLContext:
    """In the place of uvicorn's own, with the names of its arguments."""
    client_ca = None if ca_certs is None else Path(ca_certs)
    files = CertificateFiles(cert=Path(certfile), key=Path(keyfile), client_ca=client_ca)
    return server_context(CertificateStore(files))


def _is_ray_local() -> bool:
    return is_loopback(ray.util.get_node_ip_address())


def _local(address: str) -> str:
    return address.replace(_ALL_INTERFACES, "127.0.0.1:", 1)
