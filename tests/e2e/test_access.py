"""A service of its own with API keys: who gets in at its three ports, and what it prints."""

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
from tests.api.wires import grpc_error

pytestmark = [pytest.mark.e2e, pytest.mark.more]
RATOON = Path(sys.executable).with_name("ratoon")
START_S = 600.0
# Of standard output and standard error together, by a start and a stop.
MOST_LINES, MOST_COLUMNS = 12, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of a service in its own process. `started`: the lines that its start printed."""

    process: subprocess.Popen[bytes]
    folder: Path
    started: list[str]
    http: int
    gateway: int
    serve_http: int
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

    def statuses(self, key: str = "") -> tuple[int, str, int]:
        """The answers to ListPolicies of the gateway, over HTTP and gRPC, then of Serve."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}

        def by_http(port: int) -> int:
            url = f"http://127.0.0.1:{port}/v1/policies"
            return httpx.get(url, headers=headers, trust_env=False, timeout=30).status_code

        by_grpc = asyncio.run(_status(self.gateway, key))
        return by_http(self.http), by_grpc, by_http(self.serve_http)


async def _status(port: int, key: str) -> str:
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    options = (("grpc.enable_http_proxy", 0),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
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


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    folder = tmp_path_factory.mktemp("keys")
    http, gateway, serve_http = (free_port() for _ in range(3))
    environment = os.environ | {
        "RATOON_DATA_ROOT": str(folder / "data"),
        "RATOON_MODELS_ROOT": str(folder / "models"),
        "RATOON_HTTP__PORT": str(http),
        "RATOON_GRPC__PORT": str(gateway),
        "RATOON_SERVE__HTTP_PORT": str(serve_http),
        "RATOON_AUTH__REQUIRED": "true",
        "RATOON_WORKER__DEVICE": "cpu",
        "RATOON_RAY__OBJECT_STORE_BYTES": str(100 * 2**20),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [RATOON, "serve"], env=environment, stdout=file, stderr=file, cwd=folder
        )
        try:
            _wait_until_well(process, http, log)
            _check_reports(process.pid)
            yield Ports(
                process=process,
                folder=folder,
                started=log.read_text().splitlines(),
                http=http,
                gateway=gateway,
                serve_http=serve_http,
                environment=environment,
            )
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) == 0, log.read_text()[-4000:]


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


def test_keys_are_asked_for_on_every_port_and_revoked_within_a_second(
    ports: Ports,
) -> None:
    refused = (401, "UNAUTHENTICATED", 401)
    assert ports.statuses() == refused
    key = ports.keys("create", "--scope", "read")
    assert ports.statuses(key) == (200, "OK", 200)
    assert ports.statuses(f"{key[:-8]}00000000") == refused
    ports.keys("revoke", key.split("_")[1])
    time.sleep(1.0)
    assert ports.statuses(key) == refused
    logs = (ports.folder / "log", ports.folder / "data" / "access" / "audit.jsonl")
    written = "".join(log.read_text() for log in logs)
    assert key[-60:] not in written
    assert written.count('"outcome": "UNAUTHENTICATED"') == 9


def test_a_start_and_a_stop_print_few_lines_that_fit_a_screen(ports: Ports) -> None:
    """Ray and Serve told each of their steps, one of them in a line of 2,900 characters."""
    log = ports.folder / "log"
    before = len(log.read_text().splitlines())
    ports.process.send_signal(signal.SIGTERM)
    assert ports.process.wait(START_S) == 0
    lines = [*ports.started, *log.read_text().splitlines()[before:]]
    assert len(lines) <= MOST_LINES, lines
    assert max(map(len, lines)) <= MOST_COLUMNS, lines
    assert {f"http  http://127.0.0.1:{ports.http}", f"grpc  127.0.0.1:{ports.gateway}"} <= {*lines}
    assert lines[-1] == "stopping"
    said = "\n".join(lines)
    assert "service runs" in said
    assert "existing" not in said
