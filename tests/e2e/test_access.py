"""A service of its own with API keys: who gets in at its three ports, and what it prints."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator

import grpc
import grpc.aio
import httpx
import pytest

from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub
from tests.api.wires import grpc_error
from tests.e2e.own_service import OwnService

pytestmark = [pytest.mark.e2e, pytest.mark.more]
# What a start and a stop print together, on standard output and standard error.
MOST_LINES, MOST_COLUMNS = 16, 200


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnService]:
    service = OwnService(tmp_path_factory.mktemp("keys"), AUTH__REQUIRED="true")
    with service.running():
        yield service


def _statuses(own: OwnService, key: str = "") -> tuple[int, str, int]:
    """The answers to ListPolicies of the gateway, over HTTP and gRPC, then of Serve."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def by_http(port: int) -> int:
        url = f"http://127.0.0.1:{port}/v1/policies"
        return httpx.get(url, headers=headers, trust_env=False, timeout=30).status_code

    by_grpc = asyncio.run(_status(own.ports["grpc"], key))
    return by_http(own.ports["http"]), by_grpc, by_http(own.ports["serve"])


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


def test_keys_are_asked_for_on_every_port_and_revoked_within_a_second(own: OwnService) -> None:
    # Health is free: it is asked without a key.
    health = f"http://127.0.0.1:{own.ports['http']}/v1/health"
    assert httpx.get(health, trust_env=False, timeout=30).status_code == 200
    refused = (401, "UNAUTHENTICATED", 401)
    assert _statuses(own) == refused
    key = own.command("keys", "create", "--scope", "read")
    assert _statuses(own, key) == (200, "OK", 200)
    assert _statuses(own, f"{key[:-8]}00000000") == refused
    own.command("keys", "revoke", key.split("_")[1])
    time.sleep(1.0)
    assert _statuses(own, key) == refused
    logs = (own.log, own.folder / "data" / "access" / "audit.jsonl")
    written = "".join(log.read_text() for log in logs)
    assert key[-60:] not in written
    assert written.count('"outcome": "UNAUTHENTICATED"') == 9


def test_ray_keeps_no_record_of_each_call(own: OwnService) -> None:
    """Without a dashboard nobody would see it."""
    commands = [process.cmdline() for process in own.processes()]
    (head,) = (command for command in commands if command and "gcs_server" in command[0])
    (config,) = (word for word in head if word.startswith("--config_list="))
    settings = json.loads(base64.b64decode(config.partition("=")[2]))
    assert settings["task_events_report_interval_ms"] == 0


def test_a_start_and_a_stop_print_few_lines_that_fit_a_screen(own: OwnService) -> None:
    """Ray and Serve told each of their steps, one of them in a line of 2,900 characters."""
    before = len(own.log.read_text().splitlines())
    own.stop()
    lines = [*own.started, *own.log.read_text().splitlines()[before:]]
    assert len(lines) <= MOST_LINES, lines
    assert max(map(len, lines)) <= MOST_COLUMNS, lines
    ports = own.ports
    named = dict(line.split("  ", 1) for line in lines if line[:1].isalpha() and "  " in line)
    named = {name: value.strip() for name, value in named.items()}
    assert named["http"] == f"http://127.0.0.1:{ports['http']}"
    assert named["grpc"] == f"127.0.0.1:{ports['grpc']}"
    assert named["page"] == f"http://127.0.0.1:{ports['http']}/"
    assert named["data root"].endswith("/data")
    assert "Ctrl-C" in named["ready"]
    assert lines[-1].startswith("stopping  ")
    said = "\n".join(lines)
    assert "service runs" in said
    assert "existing" not in said
