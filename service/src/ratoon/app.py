"""Starts and stops the service: Ray, the engine, the gateway and Ray Serve.

`stop` stops whatever was started here, in reverse order.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError

from ratoon.api.gateway import Gateway
from ratoon.auth.access import check_start
from ratoon.cluster.bootstrap import (
    drain_engine,
    start_engine,
    stop_engine,
    wait_for_workers,
)
from ratoon.cluster.local_ray import connect_ray, is_own_ray, leave_ray
from ratoon.cluster.placement import ON_HEAD, worker_device
from ratoon.config import RatoonConfig, is_loopback, public_hosts
from ratoon.edge.tls import files_of, load_certificates
from ratoon.engine.settings import EngineSettings
from ratoon.errors import invalid
from ratoon.log import ShownLogs, configure_logging, get_logger
from ratoon.sole_service import free_port, sole_service
from ratoon_proto.build import describe_build

if TYPE_CHECKING:
    from ray.serve import Application

GATEWAY_NAME = "ratoon-gateway"

_log = get_logger("app")


class StartStoppedError(Exception):
    """A start that was ended from outside; what it had begun is stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddresses:
    """URLs of HTTP, and host:port of gRPC. `serve_http` is None where Serve is off."""

    http: str
    grpc: str
    serve_http: str | None


def app_builder(args: dict[str, Any]) -> Application:
    """Build the Serve application for a Serve config file.

    `args` are the fields of `RatoonConfig`. The engine and the gateway are started unless they run.
    Raises INVALID_ARGUMENT for settings that `auth` refuses.
    """
    from ratoon.ray_serve import build_app

    config = RatoonConfig(**args)
    check_start(config)
    ray.get([start_engine(config), _start_gateway(config)])
    return build_app(config)


def start(
    config: RatoonConfig, *, shown: ShownLogs = ShownLogs.NONE, stopped: Event | None = None
) -> ServiceAddresses:
    """Start the service on this machine, or on the cluster of `config.ray.address`.

    Port 0 picks a free port. `shown` of the logs of all processes is copied to this process's
    standard error. Raises what the parts raise, and StartStoppedError between two of them once
    `stopped` is set; leaves nothing running then.
    """
    configure_logging(config.log_level)
    _check_serve(config)
    check_start(config)
    check_tls(config)
    config = _with_ports(config)
    _go_on(stopped)
    has_ray = ray.is_initialized()
    if not has_ray:
        connect_ray(config, shown=shown)
    try:
        # These start one after the other: the gateway asks the engine first, and the spare worker,
        # which the first policy waits for, has a core of two for itself.
        _go_on(stopped)
        ray.get(start_engine(config))
        _go_on(stopped)
        ray.get(_start_gateway(config))
        addresses = _addresses(config)
        # Callers are answered from here on, while Serve is still being imported and started.
        _log.info("gateway answers", http=addresses.http, grpc=addresses.grpc)
        if config.serve.is_on:
            from ratoon.ray_serve import start_serve

            # Serve's processes would take the cores that policies' workers need to start.
            _go_on(stopped)
            wait_for_workers(config)
            _go_on(stopped)
            start_serve(config, shown=shown)
        _go_on(stopped)
    except BaseException:
        stop(config, ends_ray=not has_ray and is_own_ray())
        raise
    _log.info("service runs", http=addresses.http, grpc=addresses.grpc)
    return addresses


def _go_on(stopped: Event | None) -> None:
    if stopped is not None and stopped.is_set():
        raise StartStoppedError


def stop(config: RatoonConfig, *, ends_ray: bool = False) -> None:
    """Drain and stop the service. Ray keeps running: whoever connected to it stops it.

    Every wire refuses new work at once and running operations may finish; then the wires stop.
    `ends_ray`: the caller stops Ray next, so whatever ends with Ray is not stopped here.
    """
    drain_engine(config)
    _stop_gateway(config)
    if config.serve.is_on:
        from ratoon.ray_serve import stop_serve

        stop_serve(ends_with_ray=ends_ray)
    stop_engine(config)


@contextmanager
def running(
    config: RatoonConfig, *, shown: ShownLogs = ShownLogs.NONE, stopped: Event | None = None
) -> Generator[ServiceAddresses, None, None]:
    """Run the service for the duration of the block. A Ray started for it stops with it.

    On an existing cluster, starting twice gives one service. Raises what `start` raises, and
    INVALID_ARGUMENT, before anything is started, where another service has its folder or a port.
    """
    configure_logging(config.log_level)
    has_ray = ray.is_initialized()
    is_sole = not has_ray and not config.ray.address
    with sole_service(config) if is_sole else nullcontext():
        try:
            addresses = start(config, shown=shown, stopped=stopped)
            try:
                yield addresses
            finally:
                stop(config, ends_ray=not has_ray and is_own_ray())
        finally:
            if not has_ray:
                leave_ray()


def describe(config: RatoonConfig, addresses: ServiceAddresses) -> dict[str, str]:
    """What someone who has started the service wants to know of it, by name."""
    said = {
        "ratoon": describe_build("ratoon"),
        "data root": str(config.data_root.absolute()),
        "models root": str(config.models_folder),
        "device": worker_device(EngineSettings.from_config(config)),
        "http": addresses.http,
        "grpc": addresses.grpc,
    }
    if addresses.serve_http is not None:
        said["serve http"] = addresses.serve_http
    if config.tinker.enabled:
        said["tinker"] = f"TINKER_BASE_URL={addresses.http}"
    return said | {"page": f"{addresses.http}/"}


def _addresses(config: RatoonConfig) -> ServiceAddresses:
    scheme = "http" if files_of(config) is None else "https"
    http, grpc, serve = config.http, config.grpc, config.serve
    return ServiceAddresses(
        http=f"{scheme}://{http.host}:{http.port}",
        grpc=f"{grpc.host}:{grpc.port}",
        serve_http=f"{scheme}://{serve.http_host}:{serve.http_port}" if serve.is_on else None,
    )


def _check_serve(config: RatoonConfig) -> None:
    """Refuse a public Serve port beside `tls.client_ca_file`: it asks for no client certificate.

    Raises INVALID_ARGUMENT naming `serve.http_host`.
    """
    host = config.serve.http_host
    if config.serve.is_on and not is_loopback(host) and config.tls.client_ca_file is not None:
        raise invalid("serve.http_host", host, "a loopback address beside tls.client_ca_file")


def check_tls(config: RatoonConfig) -> None:
    """Check the files of `tls`; public addresses without TLS log a warning.

    Raises INVALID_ARGUMENT naming the bad file.
    """
    files, public = files_of(config), public_hosts(config)
    if files is not None:
        load_certificates(files)
    elif public:
        _log.warning("served without TLS", hosts=public)


def _start_gateway(config: RatoonConfig) -> ObjectRef[None]:
    """Start the gateway unless it runs.

    Once the reference resolves, both of its ports are open.
    """
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
            update={"http_port": serve.http_port or free_port(serve.http_host)}
        ),
    }
    return config.model_copy(update=sections)
