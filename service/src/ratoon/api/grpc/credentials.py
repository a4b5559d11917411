"""TLS of the gateway.

Enters a store of certificates, leaves gRPC's credentials. Invariant: every handshake is made with
the certificates as they are then; connections that are open go on.
"""

from __future__ import annotations

import grpc

from ratoon.auth.certificates import Certificates, CertificateStore


def server_credentials(store: CertificateStore) -> grpc.ServerCredentials:
    """Clients must have a certificate where the store has authorities for them."""
    current = store.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        now = store.current()
        if now is current:
            return None
        current = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(current),
        # None is "as before", which the types do not know.
        changed,  # pyright: ignore[reportArgumentType]
        require_client_authentication=current.client_ca is not None,
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)], root_certificates=certificates.client_ca
    )
