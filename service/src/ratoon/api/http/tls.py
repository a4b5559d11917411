"""TLS of HTTP.

Enters a store of certificates, leaves a context for a server to listen with. Invariant: every
handshake is made with the certificates as they are then; connections that are open go on.
"""

from __future__ import annotations

import ssl

from ratoon.auth.certificates import CertificateStore


def server_context(store: CertificateStore) -> ssl.SSLContext:
    """Clients must have a certificate where the store has authorities for them."""
    context = store.current().context

    def take_current(
        connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, first: ssl.SSLContext
    ) -> None:
        now = store.current().context
        if now is not first:
            connection.context = now

    # OpenSSL asks it in every handshake, with a server name and without.
    context.sni_callback = take_current
    return context
