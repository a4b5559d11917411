"""A service in a process of its own with TLS, client certificates and keys: who gets in where."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from cryptography import x509

from ratoon.config import is_loopback
from ratoon.edge.tls import CertificateFiles
from ratoon_client import (
    Loss,
    OperationHandle,
    Optim,
    RatoonApiError,
    RatoonClient,
    StepResult,
    TransportError,
    group,
    rollout,
)
from tests.addresses import other_address
from tests.certificates import Authority, make_authority
from tests.e2e.own_prometheus import running_prometheus, wait_for
from tests.e2e.own_service import OwnService

pytestmark = [pytest.mark.e2e, pytest.mark.more]
WIRE_PORTS, WIRES = ("http", "grpc"), ("https", "grpcs")
# Bytes that the preset has as tokens, in an order that nothing else has.
MARKER = [201, 17, 203, 99, 205, 33, 207]


@dataclass(frozen=True, kw_only=True)
class Running:
    """`targets` by scheme."""

    own: OwnService
    folder: Path
    targets: dict[str, str]
    servers: Authority
    files: CertificateFiles
    key: str

    def client(self, scheme: str, **changes: Path | None) -> RatoonClient:
        files: dict[str, Path | None] = {
            "cert_file": self.folder / "client.pem",
            "key_file": self.folder / "client-key.pem",
        }
        files |= changes
        return RatoonClient(
            self.targets[scheme],
            api_key=self.key,
            ca_file=self.folder / "servers.pem",
            cert_file=files["cert_file"],
            key_file=files["key_file"],
            timeout_s=60,
        )

    def serial(self, scheme: str) -> int:
        """Serial number of the certificate that a new connection is shown."""
        context = ssl.create_default_context(cafile=self.folder / "servers.pem")
        context.set_alpn_protocols(["h2", "http/1.1"])
        context.load_cert_chain(self.folder / "client.pem", self.folder / "client-key.pem")
        port = int(self.targets[scheme].rpartition(":")[2])
        with (
            socket.create_connection(("127.0.0.1", port), 5) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number

    def listening(self) -> dict[tuple[str, int], str]:
        """The process name at every address and port that this service listens on.

        An actor's name ends with the method that it runs, while it runs one.
        """
        names = {one.pid: one.name().partition(".")[0] for one in self.own.processes()}
        return {at: names[pid] for at, pid in _listeners() if pid in names}

    def others_ports(self) -> set[int]:
        """Ports that processes of other programs listen on."""
        pids = {one.pid for one in self.own.processes()}
        return {port for (_, port), pid in _listeners() if pid not in pids}


def _listeners() -> list[tuple[tuple[str, int], int | None]]:
    """Address, port and process of all that is listened on at this machine."""
    return [
        ((one.laddr.ip, one.laddr.port), one.pid)
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr
    ]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("t")
    own = OwnService(
        folder,
        AUTH__REQUIRED="true",
        TLS__CERT_FILE=folder / "cert.pem",
        TLS__KEY_FILE=folder / "key.pem",
        TLS__CLIENT_CA_FILE=folder / "clients.pem",
        RAY__TEMP_FOLDER=folder / "r",
        LOG_LEVEL="DEBUG",
    )
    servers, clients = make_authority("servers"), make_authority("clients")
    (folder / "servers.pem").write_bytes(servers.pem)
    (folder / "clients.pem").write_bytes(clients.pem)
    files = CertificateFiles(
        cert=folder / "cert.pem", key=folder / "key.pem", client_ca=folder / "clients.pem"
    )
    servers.issue(files.cert, files.key)
    clients.issue(folder / "client.pem", folder / "client-key.pem", "trainer")
    key = own.command("keys", "create", "--scope", "admin")
    with own.running():
        yield Running(
            own=own,
            folder=folder,
            targets={f"{name}s": f"{name}s://127.0.0.1:{own.ports[name]}" for name in WIRE_PORTS},
            servers=servers,
            files=files,
            key=key,
        )


def test_both_wires_verify_both_ends(running: Running) -> None:
    for scheme in WIRES:
        with running.client(scheme) as client:
            assert client.list_policies() == []
        with (
            running.client(scheme, cert_file=None, key_file=None) as client,
            pytest.raises(TransportError),
        ):
            client.health()


def test_prometheus_scrapes_with_a_key_and_certificates(running: Running, tmp_path: Path) -> None:
    """By deploy/prometheus-tls.yml as it is, but for the address."""
    key = running.own.command("keys", "create", "--scope", "read")
    (tmp_path / "ratoon-key").write_text(key)
    for theirs, ours in (
        ("ratoon-ca.pem", "servers.pem"),
        ("prometheus.pem", "client.pem"),
        ("prometheus-key.pem", "client-key.pem"),
    ):
        shutil.copy(running.folder / ours, tmp_path / theirs)
    target = running.targets["https"].removeprefix("https://")
    with running_prometheus("prometheus-tls.yml", target, tmp_path) as url:
        wait_for(url, "up", 1)
        wait_for(url, "ratoon_build_info", 1)


@pytest.fixture(scope="module")
def updated(running: Running) -> str:
    """A policy that has had one update, of the marker, and refused another."""
    with running.client("https") as client:
        client.create_policy("marked", preset="tiny").result()
        _update(client, 1).result()
        with pytest.raises(RatoonApiError):
            _update(client, 2, sampler_logprob=float("nan"))
    return "marked"


def _update(
    client: RatoonClient, seq: int, sampler_logprob: float = -5.5
) -> OperationHandle[StepResult]:
    logprobs = [sampler_logprob] * len(MARKER)
    rollouts = [
        rollout(response=MARKER, sampler_logprobs=logprobs, reward=reward, policy_version=0)
        for reward in (0.0, 1.0)
    ]
    groups = [group("g", MARKER, rollouts)]
    return client.policy("marked").update(
        groups, loss=Loss("grpo"), optim=Optim(learning_rate=1e-4), seq=seq
    )


def test_a_certificate_changes_under_waiting_callers(running: Running, updated: str) -> None:
    """Callers of both wires wait through it for one operation; new connections see the new one."""
    with (
        running.client("https") as http,
        running.client("grpcs") as grpc,
        ThreadPoolExecutor() as threads,
    ):
        handles = [_update(client, 3) for client in (http, grpc)]
        waiting = [threads.submit(handle.result) for handle in handles]
        before = [running.serial(scheme) for scheme in WIRES]
        fresh = running.folder / "fresh.pem", running.folder / "fresh-key.pem"
        serial = running.servers.issue(*fresh)
        fresh[0].replace(running.files.cert)
        fresh[1].replace(running.files.key)
        after = [running.serial(scheme) for scheme in WIRES]
        assert after == [serial, serial] != before
        assert not any(one.done() for one in waiting)
        grpc.policy(updated).discard_gradients(seq=2).result()
        assert [one.result().version for one in waiting] == [2, 2]


REPLICA = "ray::ServeReplica:ratoon:Ingress"


def test_every_port_is_of_this_machine_alone(running: Running) -> None:
    """Ray's are remote code execution: its own, Serve's, and those between their processes.

    Serve opens one in each replica on all interfaces; it lets nobody in, as the next test shows.
    """
    listening = running.listening()
    assert {"gcs_server", "raylet"} < set(listening.values())
    assert len(listening) > 12
    public = {at: name for at, name in listening.items() if not is_loopback(at[0])}
    assert list(public.values()) == [REPLICA], public
    other = other_address()
    if other is None:
        pytest.skip("this machine has no address but loopback")
    closed = {port for at, port in listening if is_loopback(at)} - {port for _, port in public}
    for port in closed - running.others_ports():
        # A caller that the system gave the very port that it calls would reach itself.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), 5, ("0.0.0.0", 0))


@pytest.mark.parametrize("presented", ["plain text", "no certificate", "a client's", "its own"])
def test_nobody_gets_into_a_replicas_own_port(
    running: Running, tmp_path: Path, presented: str
) -> None:
    """It unpickles what it is sent."""
    ((_, port),) = [at for at in running.listening() if not is_loopback(at[0])]
    shown = tmp_path / "shown.pem"
    shown.write_text(ssl.get_server_certificate(("127.0.0.1", port)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if presented == "a client's":
        context.load_cert_chain(running.folder / "client.pem", running.folder / "client-key.pem")
    if presented == "its own":
        # One of the same names, for its key is in no file.
        authority = make_authority("ratoon replica")
        authority.issue(tmp_path / "cert.pem", tmp_path / "key.pem", "ratoon replica")
        context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    heard = b""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as raw:
        end = raw if presented == "plain text" else context.wrap_socket(raw)
        end.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        # The end of it, for a server that speaks HTTP/2 begins with its settings.
        heard = end.recv(1024)
    assert heard == b""


def test_serves_own_port_has_tls_and_asks_for_keys(running: Running) -> None:
    context = ssl.create_default_context(cafile=running.folder / "servers.pem")
    port = running.own.ports["serve"]
    with httpx.Client(verify=context, trust_env=False, timeout=30) as client:
        url = f"https://127.0.0.1:{port}/v1/policies"
        assert client.get(url).status_code == 401
        headers = {"Authorization": f"Bearer {running.key}"}
        assert client.get(url, headers=headers).status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/v1/health", trust_env=False, timeout=30)


# What runs code, or gives away what code is run with, at each kind of Ray's processes.
RAY_CALLS = (
    "ray.rpc.InternalKVGcsService/InternalKVPut",
    "ray.rpc.ActorInfoGcsService/RegisterActor",
    "ray.rpc.NodeManagerService/RequestWorkerLease",
    "ray.rpc.ObjectManagerService/Pull",
    "ray.rpc.CoreWorkerService/PushTask",
    "ray.rpc.ReporterService/GetTraceback",
    "ray.serve.ASGIService/HandleRequest",
)


@pytest.mark.parametrize("token", ["", "0" * 64])
def test_rays_ports_ask_for_its_token(running: Running, token: str) -> None:
    """Whoever has it may run code; it is in a file that this user alone can read."""
    file = running.folder / "data/access/ray-token"
    assert (file.stat().st_mode & 0o777, file.stat().st_uid) == (0o600, os.getuid())
    assert not (running.folder / ".ray").exists()
    answers: dict[str, set[str]] = {}
    for (_, port), name in running.listening().items():
        answers.setdefault(name, set()).update(_grpc_answers(port, token), _job(port, token))
    for process in ("gcs_server", "raylet", "ratoon", REPLICA, "ray::EngineActor"):
        assert "UNAUTHENTICATED" in answers[process], answers
    assert {"401", "403"} & answers["ray::RuntimeEnvAgent"]
    # INTERNAL, UNKNOWN: a handler had the call.
    assert not {"OK", "200", "500", "INTERNAL", "UNKNOWN"} & set().union(*answers.values()), answers


def _grpc_answers(port: int, token: str) -> set[str]:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    options = (("grpc.enable_http_proxy", 0),)
    statuses = set[str]()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        for call in RAY_CALLS:
            try:
                channel.unary_unary(f"/{call}")(b"", timeout=5, metadata=metadata)
                statuses.add("OK")
            except grpc.RpcError as error:
                code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
                if code is grpc.StatusCode.UNAVAILABLE:
                    # Not gRPC.
                    break
                statuses.add(code.name)
    return statuses


def _job(port: int, token: str) -> set[str]:
    """What is answered to a job, which is a command line, over HTTP; nothing where it is not."""
    url = f"http://127.0.0.1:{port}/api/job_agent/jobs/"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.post(
            url, json={"entrypoint": "true"}, headers=headers, trust_env=False, timeout=5
        )
    except httpx.HTTPError:
        return set()
    return {str(answer.status_code)}


def test_logs_have_neither_prompts_nor_secrets(running: Running, updated: str) -> None:
    """After an update: ours, Ray's, Serve's, the audit log."""
    folder = running.folder
    token = (folder / "data/access/ray-token").read_text()
    secret = running.key.rpartition("_")[2]
    private = running.files.key.read_text().splitlines()[1]
    tokens = r"\D{1,3}".join(str(token) for token in MARKER)
    logs = [folder / "log", folder / "data/access/audit.jsonl"]
    logs += [path for path in (folder / "r").rglob("*") if path.is_file() and "/logs/" in str(path)]
    assert len(logs) > 10
    for path in logs:
        text = path.read_text(errors="replace")
        found = [
            name
            for name, pattern in {
                "key": secret,
                "token": token,
                "private key": re.escape(private),
                "prompt": tokens,
                "bytes of the prompt": re.escape(repr(bytes(MARKER))[2:-1]),
            }.items()
            if re.search(pattern, text)
        ]
        assert found == [], path
    audit = (folder / "data/access/audit.jsonl").read_text()
    assert f'"call": "update", "policy_id": "{updated}"' in audit
