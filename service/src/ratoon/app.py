"""The composition root: Ray, the engine, Serve with its two wires, and the gRPC gateway.

Enters the config, leaves a running service and its addresses. Invariant: nothing else imports
`ray.serve`; whatever was started here is stopped by `stop`, in reverse order.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import ControllerOptions, HTTPOptions, gRPCOptions
from ray.serve.schema import LoggingConfig

from ratoon.api.build import build_service
from ratoon.api.gate import ROOM_TO_REFUSE, build_gate
from ratoon.api.grpc.gateway import DRAIN_S, Gateway
from ratoon.api.grpc.servicer import PolicyServicer
from ratoon.api.http.app import create_app
from ratoon.api.http.local_names import LocalNames
from ratoon.api.http.tls import lets_strangers_in
from ratoon.auth.access import check_start, checked_hosts
from ratoon.auth.certificates import files_of, load_certificates
from ratoon.config import MAX_BODY_VARIABLE, RatoonConfig, public_hosts
from ratoon.engine.bootstrap import drain_engine, start_engine, stop_engine
from ratoon.errors import invalid
from ratoon.log import configure_logging, get_logger
from ratoon.ports import free_port
from ratoon.ray_start import connect_ray, leave_ray
from ratoon.serve_hooks import IN_PROXY, IN_PROXY_VARIABLE, in_replica
from ratoon.sole_service import sole_service

APP_NAME = "ratoon"
GATEWAY_NAME = "ratoon-gateway"
SERVICER_FUNCTION = "ratoon.api.grpc.wiring.add_policy_service"

_log = get_logger("app")
# Serve gives a proxy three times that long to import what it needs, and ends the start otherwise;
# its own 5 s are too few where the machine is busy, as when many policies are coming back.
_PROXY_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAddresses:
    """Where the service is: a URL, and host:port of the gateway and of Serve's gRPC proxy.

    `serve_grpc` None: that port is off.
    """

    http: str
    grpc: str
    serve_grpc: str | None


class Ingress(PolicyServicer):
    """One Serve replica: HTTP, and gRPC behind Serve's proxy."""

    async def __init__(self, config: RatoonConfig) -> None:  # pyright: ignore[reportGeneralTypeIssues]
        configure_logging(config.log_level)
        in_replica()
        self._limits = config.limits
        self._allowed_hosts = checked_hosts(config)
        service = await build_service(config)
        super().__init__(
            service,
            max_body_bytes=config.limits.max_body_bytes,
            status_needs_message=True,
            gate=build_gate(config, service.record_refusal),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_app(self._service, self._limits, gate=self._gate)
        if self._allowed_hosts is not None:
            app.add_middleware(LocalNames, allowed=self._allowed_hosts)
        return app


def build_app(config: RatoonConfig) -> serve.Application:
    """The Serve application. The engine must run before it is deployed."""
    wrapped = cast("type[Ingress]", serve.ingress()(Ingress))
    deployment = serve.deployment(
        name="Ingress",
        num_replicas=config.http.num_replicas,
        max_ongoing_requests=config.limits.max_requests_in_flight + ROOM_TO_REFUSE,
        max_queued_requests=ROOM_TO_REFUSE,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=DRAIN_S,
        logging_config=_logging(config),
    )
    return deployment(wrapped).bind(config)


def app_builder(args: dict[str, Any]) -> serve.Application:
    """For a Serve config file, whose `args` are the fields of `RatoonConfig`.

    Starts the engine and the gateway where they are not running.
    """
    config = RatoonConfig(**args)
    check_start(config)
    start_engine(config)
    ray.get(_start_gateway(config).address.remote())
    return build_app(config)


def start(config: RatoonConfig, *, show_logs: bool = False) -> ServiceAddresses:
    """Start the service on this machine, or on the cluster of `config.ray.address`.

    A port of 0 takes a free one. `show_logs`: the logs of all processes on this one's standard
    error. Raises what the parts raise; nothing is left running then.
    """
    configure_logging(config.log_level)
    _check_bind(config)
    check_start(config)
    check_tls(config)
    config = _with_ports(config)
    if not ray.is_initialized():
        connect_ray(config, show_logs=show_logs)
    try:
        start_engine(config)
        # It comes up while Serve does.
        gateway = _start_gateway(config)
        _start_serve(config, show_logs=show_logs)
        _check_clients(config)
        address = str(ray.get(gateway.address.remote()))
    except BaseException:
        stop(config)
        raise
    scheme = "http" if files_of(config) is None else "https"
    addresses = ServiceAddresses(
        http=f"{scheme}://{config.http.host}:{config.http.port}",
        grpc=address,
        serve_grpc=f"127.0.0.1:{config.grpc.serve_port}" if config.grpc.serve_proxy else None,
    )
    _log.info("service runs", http=addresses.http, grpc=addresses.grpc)
    return addresses


def stop(config: RatoonConfig) -> None:
    """Drain and stop the service; Ray itself is left to who connected to it.

    New work is refused at once, by every wire, and what runs may end; then the wires go.
    """
    drain_engine(config)
    _stop_gateway(config)
    serve.shutdown()
    stop_engine(config)


@contextmanager
def running(
    config: RatoonConfig, *, show_logs: bool = False
) -> Generator[ServiceAddresses, None, None]:
    """The service for as long as the block lasts; a Ray that was started for it ends with it.

    Raises as `start`, and INVALID_ARGUMENT where another service has its folder or a port, before
    anything is started. On a cluster that was there, a service that is started twice is one.
    """
    has_ray = ray.is_initialized()
    is_sole = not has_ray and not config.ray.address
    with sole_service(config) if is_sole else nullcontext():
        try:
            addresses = start(config, show_logs=show_logs)
            try:
                yield addresses
            finally:
                stop(config)
        finally:
            if not has_ray:
                leave_ray()


def _start_serve(config: RatoonConfig, *, show_logs: bool) -> None:
    """Serve's own processes take from their environment what is no option."""
    if not show_logs:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
    variables = {
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(config.grpc.max_message_bytes),
        IN_PROXY_VARIABLE: IN_PROXY,
        MAX_BODY_VARIABLE: str(config.limits.max_body_bytes),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(_PROXY_START_S),
    }
    serve.start(
        http_options=_serve_http(config),
        grpc_options=_serve_grpc(config),
        controller_options=ControllerOptions(runtime_env={"env_vars": variables}),
        logging_config=_logging(config),
    )
    serve.run(build_app(config), name=APP_NAME, route_prefix="/")


def _serve_http(config: RatoonConfig) -> HTTPOptions:
    options = HTTPOptions(host=config.http.host, port=config.http.port)
    files = files_of(config)
    if files is not None:
        options.ssl_keyfile, options.ssl_certfile = str(files.key), str(files.cert)
        options.ssl_ca_certs = None if files.client_ca is None else str(files.client_ca)
    return options


def _serve_grpc(config: RatoonConfig) -> gRPCOptions | None:
    if not config.grpc.serve_proxy:
        return None
    return gRPCOptions(
        port=config.grpc.serve_port,
        grpc_servicer_functions=[SERVICER_FUNCTION],
        enable_reflection=False,
    )


def _check_bind(config: RatoonConfig) -> None:
    """Serve's gRPC port has plain text and no bind address, whatever the other two have."""
    public = public_hosts(config)
    if public and config.grpc.serve_proxy:
        raise invalid("grpc.serve_proxy", "true", f"false, beside a bind to {public[0]}")


def check_tls(config: RatoonConfig) -> None:
    """Raises INVALID_ARGUMENT naming the file that is not good; says so where there is none."""
    files, public = files_of(config), public_hosts(config)
    if files is not None:
        load_certificates(files)
    elif public:
        _log.warning("served without TLS", hosts=public)


def _check_clients(config: RatoonConfig) -> None:
    """A Serve that another program has started would let clients in without a certificate."""
    files = files_of(config)
    if files is None or files.client_ca is None:
        return
    if lets_strangers_in(config.http.host, config.http.port):
        got = f"{files.client_ca}, and a Serve that asks for no certificate"
        raise invalid("tls.client_ca_file", got, f"a Serve with {IN_PROXY_VARIABLE}={IN_PROXY}")


def _logging(config: RatoonConfig) -> LoggingConfig:
    return LoggingConfig(log_level=config.log_level, enable_access_log=False)


def _start_gateway(config: RatoonConfig) -> Any:
    """The gateway's actor, started where it is not running; it is not waited for."""
    return (
        ray.remote(Gateway)
        .options(
            name=GATEWAY_NAME,
            namespace=config.ray.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote(config)
    )


def _stop_gateway(config: RatoonConfig) -> None:
    try:
        gateway = ray.get_actor(GATEWAY_NAME, config.ray.namespace)
    except ValueError:
        return
    # One that could not start, its port being taken, has nothing to drain.
    with suppress(RayActorError):
        ray.get(gateway.drain.remote())
    ray.kill(gateway, no_restart=True)


def _with_ports(config: RatoonConfig) -> RatoonConfig:
    """Every port of 0 replaced by a free one: a process that restarts must find its own again."""
    http = config.http.model_copy(update={"port": config.http.port or free_port(config.http.host)})
    grpc = config.grpc.model_copy(
        update={
            "gateway_port": config.grpc.gateway_port or free_port(config.grpc.host),
            "serve_port": config.grpc.serve_port or free_port("127.0.0.1"),
        }
    )
    return config.model_copy(update={"http": http, "grpc": grpc})
