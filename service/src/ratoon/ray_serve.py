"""Ray Serve: the same HTTP application in replicas, for callers inside a cluster.

Everything is set by Serve's own options and variables; what they cannot do is left to the gateway
(docs/decisions/0016-edges.md).

Serve opens a port in each replica, on all interfaces, for pickles. Proxies reach replicas as Ray
actors, so the port has no callers, but Serve has no option to turn it off. It reads Ray's TLS
variables when it opens the port, after the replica's constructor. They are set to demand a client
certificate of an authority whose key nobody has.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import ControllerOptions, HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from ratoon.api.edges import build_service
from ratoon.api.gate import ROOM_TO_REFUSE, build_gate
from ratoon.api.gateway import DRAIN_S
from ratoon.api.http.app import create_app
from ratoon.api.tinker.routes import tinker_routes
from ratoon.auth.access import checked_hosts
from ratoon.config import RatoonConfig, is_ray_tls, ray_tls_files
from ratoon.edge.tls import files_of
from ratoon.log import ShownLogs, configure_logging, ray_level

APP_NAME = "ratoon"
# Serve fails the start where a proxy takes three times this long to import its modules. Its default
# of 5 s is too short on a busy machine, as when many policies are recovering.
_PROXY_START_S = 30.0
_LIFE = timedelta(days=3650)


class Ingress:
    """One Serve replica, which answers HTTP behind Serve's proxy."""

    async def __init__(self, config: RatoonConfig) -> None:  # pyright: ignore[reportGeneralTypeIssues]
        configure_logging(config.log_level)
        self._config = config
        self._service = await build_service(config)
        self._gate = build_gate(config, self._service.record_refusal)
        # Serve opens the replica's port next, and then asks for health.
        self._opening = ExitStack()
        self._opening.enter_context(closed_replica_port())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(
            self._service,
            self._config.limits,
            gate=self._gate,
            allowed_hosts=checked_hosts(self._config),
            tinker=tinker_routes(self._service, self._gate, self._config),
        )

    def check_health(self) -> None:
        """First called by Serve once the replica's own port is open."""
        self._opening.close()


def build_app(config: RatoonConfig) -> serve.Application:
    """The Serve application. The engine must run before deployment."""
    wrapped = cast("type[Ingress]", serve.ingress()(Ingress))
    deployment = serve.deployment(
        name="Ingress",
        num_replicas=config.serve.num_replicas,
        max_ongoing_requests=config.limits.max_requests_in_flight + ROOM_TO_REFUSE,
        max_queued_requests=ROOM_TO_REFUSE,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=DRAIN_S,
        logging_config=_logging(config),
    )
    return deployment(wrapped).bind(config)


def start_serve(config: RatoonConfig, *, shown: ShownLogs) -> None:
    """Returns once the replicas answer. Variables of Serve's processes set what no option does."""
    level = ray_level(config.log_level) if shown is ShownLogs.ALL else "ERROR"
    logging.getLogger("ray.serve").setLevel(level)
    variables = {
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(_PROXY_START_S),
        # uvicorn by default trusts the forwarded addresses that local callers send.
        "FORWARDED_ALLOW_IPS": "",
    }
    serve.start(
        http_options=_http_options(config),
        controller_options=ControllerOptions(runtime_env={"env_vars": variables}),
        logging_config=_logging(config),
    )
    serve.run(build_app(config), name=APP_NAME, route_prefix="/")


def stop_serve(*, ends_with_ray: bool) -> None:
    """Drain the replicas and end Serve. Where Ray ends next, only delete the application.

    Serve's shutdown kills its controller while that answers the call, which Ray reports as a
    failure.
    """
    if not ends_with_ray:
        serve.shutdown()
        return
    # There may be no application; whatever is left of Serve ends with Ray.
    with suppress(RayServeException, RayActorError, TimeoutError):
        serve.delete(APP_NAME)


def _http_options(config: RatoonConfig) -> HTTPOptions:
    options: dict[str, Any] = {}
    files = files_of(config)
    if files is not None:
        options = {"ssl_keyfile": str(files.key), "ssl_certfile": str(files.cert)}
    return HTTPOptions(host=config.serve.http_host, port=config.serve.http_port, **options)


def _logging(config: RatoonConfig) -> LoggingConfig:
    return LoggingConfig(log_level=ray_level(config.log_level), enable_access_log=False)


@contextmanager
def closed_replica_port() -> Generator[None, None, None]:
    """A port that Serve opens within the block completes no handshake.

    Where Ray itself has TLS, the port demands a certificate of Ray's authority instead.
    """
    if is_ray_tls():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="ratoon-") as name:
        folder = Path(name)
        cert, key, authority = folder / "cert.pem", folder / "key.pem", folder / "authority.pem"
        own, own_key = _self_signed()
        cert.write_bytes(own)
        key.write_bytes(own_key)
        # The authority's key is discarded here, so it can never sign a client certificate.
        authority.write_bytes(_self_signed()[0])
        with ray_tls_files(cert=cert, key=key, authority=authority):
            yield


def _self_signed() -> tuple[bytes, bytes]:
    """A certificate and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ratoon replica")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
