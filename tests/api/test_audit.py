"""The audit log of the gate, and that secrets are nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratoon.api.gate import AuthorizedCall, Gate
from ratoon.auth.access import OpenAccess, Presented, anybody
from ratoon.auth.audit import AuditLog
from ratoon.auth.keys import Scope
from ratoon.auth.rates import InFlight, Rates
from ratoon.log import configure_logging
from ratoon_proto.v1 import operation_pb2, service_pb2
from tests.api import requests
from tests.api.guarded import Guarded, refusal

MINE, OTHER = requests.POLICY, "tiny-2"
UNKNOWN_KEY = f"ratoon_{'0' * 12}_{'0' * 64}"


async def test_changing_and_refused_calls_are_audited(guarded: Guarded, wire_name: str) -> None:
    key = guarded.key(Scope.ADMIN, (MINE,))
    wire = guarded.wire(wire_name, key)
    await wire.call("CreatePolicy", service_pb2.CreatePolicyRequest(spec=requests.spec(MINE)))
    await wire.call("Update", requests.update(seq=1))
    await wire.call("GetPolicy", service_pb2.GetPolicyRequest(policy_id=MINE))
    await refusal(wire, "Update", requests.update(seq=2, batch=[]))
    await refusal(wire, "Update", requests.update(seq=3, policy_id=OTHER))
    await refusal(guarded.wire(wire_name), "Update", requests.update(seq=4))
    reader = guarded.key(Scope.READ)
    await refusal(guarded.wire(wire_name, reader), "Update", requests.update(seq=5))
    huge = requests.update(seq=5, batch=requests.groups(1000))
    assert (await refusal(wire, "Update", huge))[0] == "BODY_TOO_LARGE"
    entries = guarded.audit()
    key_id = key.split("_")[1]
    assert [
        (entry["key_id"], entry["call"], entry["policy_id"], entry["seq"], entry["outcome"])
        for entry in entries
    ] == [
        (key_id, "create_policy", MINE, 0, "OK"),
        (key_id, "update", MINE, 1, "OK"),
        # JSON that is no batch is refused before its seq is known.
        (key_id, "update", MINE, 2 if wire_name == "grpc" else 0, "INVALID_ARGUMENT"),
        # HTTP has the policy in its path, and reads no body then.
        (key_id, "update", OTHER, 3 if wire_name == "grpc" else 0, "PERMISSION_DENIED"),
        ("", "update", "", 0, "UNAUTHENTICATED"),
        (reader.split("_")[1], "update", "", 0, "PERMISSION_DENIED"),
        (key_id, "update", "" if wire_name == "grpc" else MINE, 0, "BODY_TOO_LARGE"),
    ]
    assert all(entry["peer"] == "127.0.0.1" and entry["at"] for entry in entries)


async def test_an_audited_name_cannot_forge_a_line(guarded: Guarded) -> None:
    wire = guarded.wire("grpc", guarded.key(Scope.ADMIN, (MINE,)))
    name = f'x"\n{{"key_id": "forged"}}{"y" * 10_000}'
    await refusal(wire, "GetPolicy", service_pb2.GetPolicyRequest(policy_id=name))
    (entry,) = guarded.audit()
    assert entry["policy_id"] == "?"


async def test_secrets_are_in_no_file_log_or_error(
    guarded: Guarded, wire_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logging("DEBUG")
    try:
        texts: list[str] = []
        keys = [guarded.key(Scope.ADMIN), guarded.key(Scope.READ, (OTHER,)), UNKNOWN_KEY]
        keys.append(f"{keys[0][:-64]}{'a' * 64}")
        for key in keys:
            wire = guarded.wire(wire_name, key)
            for rpc, request in (
                ("Update", requests.update()),
                ("GetPolicy", service_pb2.GetPolicyRequest(policy_id=key)),
            ):
                texts.append(str(await refusal(wire, rpc, request)))
        (guarded.root / "access" / "keys.json").write_text("{")
        info = service_pb2.GetServerInfoRequest()
        texts.append(str(await refusal(guarded.wire(wire_name, keys[0]), "GetServerInfo", info)))
    finally:
        configure_logging("ERROR")
    out, err = capfd.readouterr()
    assert "keys cannot be read" in err
    audit = (guarded.root / "access" / "audit.jsonl").read_text()
    for key in keys:
        assert key[20:40] not in out + err + audit
        # A caller that names its key as a policy is shown the beginning of what it sent.
        for text in (out, err, audit, *texts):
            assert key[-60:] not in text


async def test_an_operation_keeps_the_seq_that_the_service_gave(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path, max_file_bytes=0, max_files=1)
    in_flight = InFlight(most=1, most_of_caller=1)
    rates = Rates(tmp_path)
    gate = Gate(OpenAccess(), audit, in_flight, rates, lambda _reason, _key_id: None)

    async def update(_: service_pb2.UpdateRequest) -> operation_pb2.Operation:
        return operation_pb2.Operation(seq=7)

    request = service_pb2.UpdateRequest(policy_id=MINE)
    presented = Presented(authorization="", peer="p")
    await gate.run(AuthorizedCall(anybody(presented), "update", presented), update, request)
    (line,) = (tmp_path / "access" / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["seq"] == 7
