"""TLS of the gateway's ports: each handshake uses the certificates current at that time.

Open connections continue.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Sequence

from ratoon.auth.certificates import CertificateStore, files_of
from ratoon.config import RatoonConfig

_PROBE_S = 10.0
_HEALTH = "/v1/health"
# How a server bound to all addresses is reached from its own machine; nothing is bound here.
_OWN = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # nosec B104


def server_context(store: CertificateStore, *, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Return a context whose handshakes use the store's current certificates.

    Clients need a certificate if the store has authorities for them. `protocols` are the ALPN
    protocols to offer.
    """
    context = store.current().context
    if protocols:
        context.set_alpn_protocols(list(protocols))

    def take_current(
        connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, first: ssl.SSLContext
    ) -> None:
        now = store.current().context
        if now is not first:
            if protocols:
                now.set_alpn_protocols(list(protocols))
            connection.context = now

    # OpenSSL calls it in every handshake, with a server name or without.
    context.sni_callback = take_current
    return context


def own_health(config: RatoonConfig) -> str | None:
    """Return why the service of `config`, on this machine, is not healthy; None if it is.

    Its certificate is not verified, as the probe sends no secret. A service that refuses the probe
    because it requires another client certificate counts as healthy.
    """
    host = _OWN.get(config.http.host, config.http.host)
    files = files_of(config)
    if files is None:
        connection = http.client.HTTPConnection(host, config.http.port, timeout=_PROBE_S)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.load_cert_chain(files.cert, files.key)
        connection = http.client.HTTPSConnection(
            host, config.http.port, timeout=_PROBE_S, context=context
        )
    asks_clients = files is not None and files.client_ca is not None
    is_connected = False
    try:
        connection.connect()
        is_connected = True
        connection.request("GET", _HEALTH)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as err:
        # In TLS 1.3 a server refuses a client only after its own part of the handshake.
        is_refused = is_connected or (isinstance(err, ssl.SSLError) and "ALERT" in str(err))
        if asks_clients and is_refused and not isinstance(err, TimeoutError):
            return None
        return str(err) or type(err).__name__
    finally:
        connection.close()
    return None if status == http.client.OK else f"HTTP {status}"
