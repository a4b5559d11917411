"""TLS between client and service, over real sockets."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from ratoon.edge.tls import CertificateFiles
from ratoon_client import (
    ClientConfig,
    InvalidArgumentError,
    RatoonClient,
    TlsError,
    TransportError,
    WrongPortError,
)
from ratoon_client.cli.app import main
from ratoon_client.config import with_tls_files
from tests.certificates import Authority, make_authority
from tests.client.conftest import serving
from tests.client.fake_service import FakeService
from tests.client.real_wires import RealWires, serving_wires
from tests.client.samples import LOSS, OPTIM, one_group

WIRES = ["http", "grpc"]
SHORT_S = 0.6
LONG_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A service that asks for certificates of `clients`, and a client's."""

    service: RealWires
    files: CertificateFiles
    servers: Authority
    clients: Authority
    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "servers.pem"

    def client(self, wire: str, host: str = "127.0.0.1", **changes: Any) -> RatoonClient:
        files: dict[str, Any] = {
            "ca_file": self.ca,
            "cert_file": self.folder / "client.pem",
            "key_file": self.folder / "client-key.pem",
        }
        values: dict[str, Any] = {"timeout_s": LONG_S, **files, **changes}
        return RatoonClient(self.service.url(wire, host), **values)

    def refused(self, wire: str, **changes: Any) -> RatoonClient:
        """Gives up soon."""
        return self.client(wire, timeout_s=SHORT_S, **changes)

    def replace(self) -> int:
        """A new certificate of the service; gives its serial."""
        fresh = self.folder / "fresh.pem", self.folder / "fresh-key.pem"
        serial = self.servers.issue(*fresh)
        fresh[0].replace(self.files.cert)
        fresh[1].replace(self.files.key)
        return serial

    def serial(self, wire: str, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> int:
        """Serial number of the certificate that the service shows to a new connection."""
        context = ssl.create_default_context(cafile=self.ca)
        # Without this setting the client would refuse versions older than 1.2.
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2", "http/1.1"])
        context.load_cert_chain(self.folder / "client.pem", self.folder / "client-key.pem")
        with (
            socket.create_connection(("127.0.0.1", self.service.port(wire)), 60) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    for name in ("RATOON_CA_FILE", "RATOON_CERT_FILE", "RATOON_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    servers, clients = make_authority("servers"), make_authority("clients")
    (tmp_path / "servers.pem").write_bytes(servers.pem)
    (tmp_path / "clients.pem").write_bytes(clients.pem)
    servers.issue(tmp_path / "cert.pem", tmp_path / "key.pem")
    clients.issue(tmp_path / "client.pem", tmp_path / "client-key.pem", "trainer")
    files = CertificateFiles(
        cert=tmp_path / "cert.pem", key=tmp_path / "key.pem", client_ca=tmp_path / "clients.pem"
    )
    with serving_wires(tmp_path, files=files) as service:
        yield Setup(service=service, files=files, servers=servers, clients=clients, folder=tmp_path)


@pytest.mark.parametrize("wire", WIRES)
def test_both_ends_are_verified(setup: Setup, wire: str) -> None:
    with setup.client(wire) as client:
        assert client.list_policies() == []
    with setup.client(wire, host="localhost") as client:
        assert client.list_policies() == []


@pytest.mark.parametrize("wire", WIRES)
def test_whoever_cannot_be_verified_is_refused(setup: Setup, wire: str) -> None:
    """A service of another authority or name, a client without a certificate or with another's."""
    other = setup.folder / "other.pem"
    stranger = make_authority("strangers")
    other.write_bytes(stranger.pem)
    stranger.issue(setup.folder / "their.pem", setup.folder / "their-key.pem")
    theirs: dict[str, Any] = {
        "cert_file": setup.folder / "their.pem",
        "key_file": setup.folder / "their-key.pem",
    }
    refused = [
        setup.refused(wire, ca_file=other),
        setup.refused(wire, ca_file=None),
        setup.refused(wire, cert_file=None, key_file=None),
        setup.refused(wire, **theirs),
    ]
    for client in refused:
        with client, pytest.raises(TransportError):
            client.list_policies()
    setup.servers.issue(setup.files.cert, setup.files.key, "elsewhere", addresses=("10.1.2.3",))
    with setup.refused(wire) as client, pytest.raises(TransportError):
        client.list_policies()


@pytest.mark.parametrize("wire", WIRES)
def test_a_certificate_that_does_not_verify_is_told_at_once(
    setup: Setup, wire: str, tmp_path: Path
) -> None:
    """It was tried again until no time was left."""
    other = setup.folder / "other.pem"
    other.write_bytes(make_authority("strangers").pem)
    begin = time.monotonic()
    for ca_file in (other, None):
        with setup.client(wire, ca_file=ca_file) as client:
            with pytest.raises(TlsError, match="certificate does not verify"):
                client.list_policies()
            with pytest.raises(TlsError, match="certificate does not verify"):
                client.pull_weights("p", tmp_path / "weights")
    setup.servers.issue(setup.files.cert, setup.files.key, "elsewhere", addresses=("10.1.2.3",))
    with setup.client(wire) as client, pytest.raises(TlsError, match="does not verify"):
        client.list_policies()
    assert time.monotonic() - begin < LONG_S / 2


@pytest.mark.parametrize("wire", WIRES)
def test_a_service_without_tls_is_told_at_once(wire: str) -> None:
    with serving(FakeService(), wire) as url:
        target = url.replace("://", "s://")
        begin = time.monotonic()
        with (
            RatoonClient(target, timeout_s=LONG_S) as client,
            pytest.raises(TlsError, match="no certificate"),
        ):
            client.list_policies()
        assert time.monotonic() - begin < LONG_S / 2


def test_the_other_wires_port_is_told_at_once(tmp_path: Path) -> None:
    """Red before: "illegal request line", after all the time that there was."""
    begin = time.monotonic()
    with serving_wires(tmp_path) as wires:
        for scheme, port in (("http", wires.grpc.port), ("grpc", wires.http.port)):
            with (
                RatoonClient(f"{scheme}://127.0.0.1:{port}", timeout_s=LONG_S) as client,
                pytest.raises(WrongPortError, match=f"{scheme}:// is for"),
            ):
                client.list_policies()
    assert time.monotonic() - begin < LONG_S / 2


@pytest.mark.parametrize("wire", WIRES)
def test_a_service_with_tls_that_is_down_is_tried_again(setup: Setup, wire: str) -> None:
    target = setup.service.url(wire).rpartition(":")[0] + ":9"
    with RatoonClient(target, ca_file=setup.ca, timeout_s=SHORT_S) as client:
        with pytest.raises(TransportError) as caught:
            client.list_policies()
        assert not isinstance(caught.value, TlsError)


@pytest.mark.parametrize("wire", WIRES)
def test_plain_text_is_refused(setup: Setup, wire: str) -> None:
    scheme = {"http": "http", "grpc": "grpc"}[wire]
    target = f"{scheme}://127.0.0.1:{setup.service.port(wire)}"
    with RatoonClient(target, timeout_s=SHORT_S) as client, pytest.raises(TransportError):
        client.list_policies()
    with socket.create_connection(("127.0.0.1", setup.service.port(wire)), 60) as raw:
        raw.sendall(b"GET /v1/policies HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw.settimeout(60)
        assert b"policies" not in raw.recv(4096)
    with setup.client(wire) as client:
        assert client.list_policies() == []


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1:DeprecationWarning")
@pytest.mark.parametrize("wire", WIRES)
def test_old_versions_of_tls_are_refused(setup: Setup, wire: str) -> None:
    assert setup.serial(wire, ssl.TLSVersion.TLSv1_2) == setup.serial(wire)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        setup.serial(wire, ssl.TLSVersion.TLSv1_1)


@pytest.mark.parametrize("wire", WIRES)
def test_a_new_certificate_is_shown_while_a_caller_waits(setup: Setup, wire: str) -> None:
    before = setup.serial(wire)
    engine = setup.service.engine
    with setup.client(wire) as client, ThreadPoolExecutor() as threads:
        client.create_policy("p", preset="tiny").result()
        engine.hold = True
        update = client.policy("p").update(one_group(), loss=LOSS, optim=OPTIM, seq=1)
        waiting = threads.submit(update.result)
        after = setup.replace()
        assert setup.serial(wire) == after != before
        assert not waiting.done()
        setup.service.release()
        assert waiting.result(LONG_S).version == 1
    with setup.client(wire) as client:
        assert len(client.list_policies()) == 1
    # A renewal that went wrong changes nothing.
    setup.files.key.write_text("")
    assert setup.serial(wire) == after


@pytest.mark.parametrize("wire", WIRES)
def test_an_authority_that_is_taken_away_lets_nobody_in(setup: Setup, wire: str) -> None:
    with setup.client(wire) as client:
        client.list_policies()
    fresh = make_authority("clients")
    assert setup.files.client_ca is not None
    setup.files.client_ca.write_bytes(fresh.pem)
    with setup.refused(wire) as client, pytest.raises(TransportError):
        client.list_policies()
    fresh.issue(setup.folder / "client.pem", setup.folder / "client-key.pem", "trainer")
    with setup.client(wire) as client:
        client.list_policies()


def test_the_command_line_and_the_environment_name_the_files(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = setup.folder
    listing = ("--url", setup.service.url("grpc"), "policies", "list")
    assert _status("--timeout-s", str(SHORT_S), *listing) == 3
    options = ("--ca-file", str(setup.ca), "--cert-file", str(folder / "client.pem"))
    assert _status(*options, *listing) == 2
    assert "key_file" in capsys.readouterr().err
    assert _status(*options, "--key-file", str(folder / "client-key.pem"), *listing) == 0
    monkeypatch.setenv("RATOON_CA_FILE", str(setup.ca))
    monkeypatch.setenv("RATOON_CERT_FILE", str(folder / "client.pem"))
    monkeypatch.setenv("RATOON_KEY_FILE", str(folder / "client-key.pem"))
    assert _status(*listing) == 0


def _status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def test_files_that_nothing_would_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a caller who named them would think himself protected."""
    for target in ("127.0.0.1:1", "grpc://127.0.0.1:1", "http://127.0.0.1:1"):
        with pytest.raises(InvalidArgumentError, match="grpcs"):
            RatoonClient(target, ca_file="ca.pem")
    monkeypatch.setenv("RATOON_CA_FILE", "ca.pem")
    plain = with_tls_files(ClientConfig(), None, None, None, is_tls=False)
    assert plain.ca_file is None
    own = ClientConfig(ca_file=Path("own.pem"))
    assert with_tls_files(own, None, None, None, is_tls=True).ca_file == Path("own.pem")
    assert with_tls_files(own, "given.pem", None, None, is_tls=True).ca_file == Path("given.pem")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", ["ca_file", "cert_file", "key_file"])
def test_a_file_that_is_not_there_is_named(wire: str, name: str, tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "ca_file": None,
        "cert_file": tmp_path / "a",
        "key_file": tmp_path / "a",
    }
    (tmp_path / "a").write_text("")
    files[name] = tmp_path / "nothing"
    scheme = {"http": "https", "grpc": "grpcs"}[wire]
    with (
        RatoonClient(f"{scheme}://127.0.0.1:1", **files) as client,
        pytest.raises(InvalidArgumentError, match=name),
    ):
        client.list_policies()
