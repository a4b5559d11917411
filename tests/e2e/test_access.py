"""API keys on the real service: all four ports, and a key revoked while it runs."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import httpx
import psutil
import pytest

from ratoon.sole_service import free_port
from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.addresses import other_address
from tests.api.wires import grpc_error
from tests.running_service import Service

RATOON = Path(sys.executable).with_name("ratoon")
START_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Of a service in a process of its own."""

    http: int
    gateway: int
    serve_http: int
    serve_grpc: int
    environment: dict[str, str]

    def keys(self, *arguments: str) -> str:
        done = subprocess.run(
            [RATOON, "keys", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.strip()

    def statuses(self, key: str = "") -> tuple[int, str, int, str]:
        """What ListPolicies is answered over HTTP and gRPC by the gateway, then by Serve."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}

        def by_http(port: int) -> int:
            url = f"http://127.0.0.1:{port}/v1/policies"
            return httpx.get(url, headers=headers, trust_env=False, timeout=30).status_code

        def by_grpc(port: int) -> str:
            return asyncio.run(_status(port, key))

        return (
            by_http(self.http), by_grpc(self.gateway),
            by_http(self.serve_http), by_grpc(self.serve_grpc),
        )  # fmt: skip


async def _status(port: int, key: str, host: str = "127.0.0.1") -> str:
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    options = (("grpc.enable_http_proxy", 0),)
    async with grpc.aio.insecure_channel(f"{host}:{port}", options=options) as channel:
        stub = PolicyServiceStub(channel)
        try:
            await stub.ListPolicies(
                service_pb2.ListPoliciesRequest(), metadata=metadata, timeout=30
            )
        except grpc.aio.AioRpcError as error:
            detail = grpc_error(error).detail
            assert detail.code == error.code().name
            return detail.code
    return "OK"


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[Ports]:
    http, gateway, serve_http, serve_grpc = (free_port() for _ in range(4))
    environment = os.environ | {
        "RATOON_DATA_ROOT": str(tmp_path / "data"),
        "RATOON_MODELS_ROOT": str(tmp_path / "models"),
        "RATOON_HTTP__PORT": str(http),
        "RATOON_GRPC__PORT": str(gateway),
        "RATOON_SERVE__HTTP_PORT": str(serve_http),
        "RATOON_SERVE__GRPC": "true",
        "RATOON_SERVE__GRPC_PORT": str(serve_grpc),
        "RATOON_AUTH__REQUIRED": "true",
        "RATOON_RAY__OBJECT_STORE_BYTES": str(100 * 2**20),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [RATOON, "serve"], env=environment, stdout=log, stderr=log, cwd=tmp_path
        )
        try:
            _wait_until_well(process, http, tmp_path / "log")
            _check_reports(process.pid)
            yield Ports(
                http=http,
                gateway=gateway,
                serve_http=serve_http,
                serve_grpc=serve_grpc,
                environment=environment,
            )
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, (tmp_path / "log").read_text()[-4000:]


def _check_reports(pid: int) -> None:
    """Ray keeps no record of each call: without a dashboard nobody would see it."""
    commands = [child.cmdline() for child in psutil.Process(pid).children(recursive=True)]
    (head,) = (command for command in commands if "gcs_server" in command[0])
    (config,) = (word for word in head if word.startswith("--config_list="))
    settings = json.loads(base64.b64decode(config.partition("=")[2]))
    assert settings["task_events_report_interval_ms"] == 0


def _wait_until_well(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Health is free: it is asked without a key."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        # The last line of the start: every port is open then.
        if "grpc  127" in log.read_text():
            url = f"http://127.0.0.1:{port}/v1/health"
            assert httpx.get(url, trust_env=False, timeout=30).status_code == 200
            return
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-4000:])


@pytest.mark.e2e
@pytest.mark.more
def test_keys_are_asked_for_on_every_port_and_revoked_within_a_second(
    ports: Ports, tmp_path: Path
) -> None:
    refused = (401, "UNAUTHENTICATED") * 2
    assert ports.statuses() == refused
    key = ports.keys("create", "--scope", "read")
    assert ports.statuses(key) == (200, "OK") * 2
    assert ports.statuses(f"{key[:-8]}00000000") == refused
    ports.keys("revoke", key.split("_")[1])
    time.sleep(1.0)
    assert ports.statuses(key) == refused
    written = (tmp_path / "log").read_text() + (tmp_path / "data/access/audit.jsonl").read_text()
    assert key[-60:] not in written
    assert written.count('"outcome": "UNAUTHENTICATED"') == 12


@pytest.mark.e2e
async def test_without_keys_another_address_is_refused(service: Service) -> None:
    """Serve's gRPC port listens on all interfaces though nothing but loopback was asked for."""
    address = other_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    assert service.addresses.serve_grpc is not None
    port = int(service.addresses.serve_grpc.rpartition(":")[2])
    assert await _status(port, "") == "OK"
    assert await _status(port, "", address) == "UNAUTHENTICATED"


@pytest.mark.e2e
def test_without_keys_a_rebound_name_is_refused(service: Service) -> None:
    headers = {"Host": "evil.example"}
    for address in (service.addresses.http, service.addresses.serve_http):
        url = f"{address}/v1/policies"
        assert httpx.get(url, headers=headers, trust_env=False, timeout=30).status_code == 403
        assert httpx.get(url, trust_env=False, timeout=30).status_code == 200
