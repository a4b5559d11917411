"""TLS of the gateway's ports: each handshake uses the certificates current at that time.

Open connections continue.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from ratoon.auth.certificates import CertificateStore


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
