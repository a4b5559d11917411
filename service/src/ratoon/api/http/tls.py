"""TLS of HTTP and of the gateway.

Enters a store of certificates, leaves a context for a server to listen with. Invariant: every
handshake is made with the certificates as they are then; connections that are open go on.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence

from ratoon.auth.certificates import CertificateStore

_PROBE_S = 10.0


def server_context(store: CertificateStore, *, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Clients must have a certificate where the store has authorities for them.

    `protocols`: what is spoken inside, for clients that ask (ALPN).
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

    # OpenSSL asks it in every handshake, with a server name and without.
    context.sni_callback = take_current
    return context


def lets_strangers_in(host: str, port: int) -> bool:
    """Whether a client without a certificate gets an answer. Raises OSError for a closed port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Who answers is not the question.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((host, port), _PROBE_S) as raw:
        try:
            with context.wrap_socket(raw) as connection:
                connection.sendall(b"GET /v1/health HTTP/1.0\r\n\r\n")
                return bool(connection.recv(1))
        except OSError:
            return False
