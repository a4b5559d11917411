"""The composition root: Ray, the engine, the gateway and Ray Serve.

Whatever was started here is stopped by `stop`, in reverse order.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError

from ratoon.api.gateway import Gateway
from ratoon.auth.access import check_start
from ratoon.auth.certificates import files_of, load_certificates
from ratoon.cluster.bootstrap import (
    drain_engine,
    start_engine,
    stop_engine,
    wait_for_workers,
)
from ratoon.cluster.local_ray import connect_ray, is_own_ray, leave_ray
from ratoon.cluster.placement import ON_HEAD
from ratoon.config import RatoonConfig, is_loopback, public_hosts
from ratoon.errors import invalid
from ratoon.log import configure_logging, get_logger
from ratoon.sole_service import free_port, sole_service

if TYPE_CHECKING:
    from ray.serve import Application

GATEWAY_NAME = "ratoon-gateway"

_log = get_logger("app")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddresses:
    """URLs of HTTP, host:port of gRPC. Those of Serve are None where it is off."""

    http: str
    grpc: str
    serve_http: str | None
    serve_grpc: str | None


def app_builder(args: dict[str, Any]) -> Application:
    """For a Serve config file, whose `args` are the fields of `RatoonConfig`.

    Starts the engine and the gateway unless they run.
    """
    from ratoon.ray_serve import build_app

    config = RatoonConfig(**args)
    check_start(config)
    ray.get([start_engine(config), _start_gateway(config)])
    return build_app(config)


def start(config: RatoonConfig, *, show_logs: bool = False) -> ServiceAddresses:
    """Start the service on this machine, or on the cluster of `config.ray.address`.

    Port 0 picks a free port. `show_logs` copies the logs of all processes to this process's
    standard error. Raises what the parts raise, and leaves nothing running then.
    """
    configure_logging(config.log_level)
    _check_serve(config)
    check_start(config)
    check_tls(config)
    config = _with_ports(config)
    if not ray.is_initialized():
        connect_ray(config, show_logs=show_logs)
    try:
        # One after the other: the gateway asks the engine first, and the spare worker, which the
        # first policy waits for, has a core of two for itself.
        ray.get(start_engine(config))
        ray.get(_start_gateway(config))
        addresses = _addresses(config)
        # Callers are answered from here on, while Serve is still being imported and started.
        _log.info("gateway answers", http=addresses.http, grpc=addresses.grpc)
        if config.serve.has_http:
            from ratoon.ray_serve import start_serve

            # Serve's processes would take the cores that policies' workers need to start.
            wait_for_workers(config)
            start_serve(config, show_logs=show_logs)
    except BaseException:
        stop(config)
        raise
    _log.info("service runs", http=addresses.http, grpc=addresses.grpc)
    return addresses


def stop(config: RatoonConfig, *, ends_ray: bool = False) -> None:
    """Drain and stop the service. Ray keeps running: whoever connected to it stops it.

    Every wire refuses new work at once and running operations may finish; then the wires stop.
    `ends_ray`: the caller stops Ray next, so whatever ends with Ray is not stopped here.
    """
    drain_engine(config)
    _stop_gateway(config)
    if config.serve.has_http:
        from ratoon.ray_serve import stop_serve

        stop_serve(ends_with_ray=ends_ray)
    stop_engine(config)


@contextmanager
def running(
    config: RatoonConfig, *, show_logs: bool = False
) -> Generator[ServiceAddresses, None, None]:
    """Run the service for the duration of the block. A Ray started for it stops with it.

    Raises as `start`. Raises INVALID_ARGUMENT, before anything is started, where another service
    has its folder or a port. On an existing cluster, starting twice gives one service.
    """
    has_ray = ray.is_initialized()
    is_sole = not has_ray and not config.ray.address
    with sole_service(config) if is_sole else nullcontext():
        try:
            addresses = start(config, show_logs=show_logs)
            try:
                yield addresses
            finally:
                stop(config, ends_ray=not has_ray and is_own_ray())
        finally:
            if not has_ray:
                leave_ray()


def _addresses(config: RatoonConfig) -> ServiceAddresses:
    scheme = "http" if files_of(config) is None else "https"
    http, grpc, serve = config.http, config.grpc, config.serve
    return ServiceAddresses(
        http=f"{scheme}://{http.host}:{http.port}",
        grpc=f"{grpc.host}:{grpc.port}",
        serve_http=f"{scheme}://{serve.http_host}:{serve.http_port}" if serve.has_http else None,
        serve_grpc=f"127.0.0.1:{serve.grpc_port}" if serve.has_grpc else None,
    )


def _check_serve(config: RatoonConfig) -> None:
    """Refuse Serve ports that would be weaker ways in than the gateway's.

    Serve's gRPC is plain text without a bind address; its HTTP asks for no client certificate.
    """
    public = public_hosts(config)
    if public and config.serve.has_grpc:
        raise invalid("serve.grpc", "true", f"false, beside a bind to {public[0]}")
    host = config.serve.http_host
    if config.serve.has_http and not is_loopback(host) and config.tls.client_ca_file is not None:
        raise invalid("serve.http_host", host, "a loopback address beside tls.client_ca_file")


def check_tls(config: RatoonConfig) -> None:
    """Raises INVALID_ARGUMENT naming the bad file. Public addresses without TLS log a warning."""
    files, public = files_of(config), public_hosts(config)
    if files is not None:
        load_certificates(files)
    elif public:
        _log.warning("served without TLS", hosts=public)


def _start_gateway(config: RatoonConfig) -> ObjectRef[None]:
    """Start it unless it runs. Once the reference resolves, both of its ports are open."""
    gateway: Any = (
        ray.remote(Gateway)
        .options(
            name=GATEWAY_NAME,
            namespace=config.ray.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources=ON_HEAD,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote(config)
    )
    return gateway.wait_until_ready.remote()


def _stop_gateway(config: RatoonConfig) -> None:
    try:
        gateway = ray.get_actor(GATEWAY_NAME, config.ray.namespace)
    except ValueError:
        return
    # A gateway that failed to start, as on a taken port, has nothing to drain.
    with suppress(RayActorError):
        ray.get(gateway.drain.remote())
    ray.kill(gateway, no_restart=True)


def _with_ports(config: RatoonConfig) -> RatoonConfig:
    """Replace every port 0 by a free one, which a restarted process must find again."""
    http, grpc, serve = config.http, config.grpc, config.serve
    sections = {
        "http": http.model_copy(update={"port": http.port or free_port(http.host)}),
        "grpc": grpc.model_copy(update={"port": grpc.port or free_port(grpc.host)}),
        "serve": serve.model_copy(
            update={
                "http_port": serve.http_port or free_port(serve.http_host),
                "grpc_port": serve.grpc_port or free_port(),
            }
        ),
    }
    return config.model_copy(update=sections)
