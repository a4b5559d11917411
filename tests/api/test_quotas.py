"""A key's rate and quotas at the gate, and what becomes of a wait whose key is revoked."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from ratoon.api import gate as gate_module
from ratoon.api.contract import acting_for
from ratoon.api.gate import Gate
from ratoon.auth.access import OpenAccess, Presented
from ratoon.auth.keys import KeyFile, Scope
from ratoon.auth.rates import InFlight, Rates
from ratoon.config import KeyLimits
from ratoon.engine.commands import NOBODY, Holder
from ratoon.errors import RatoonError
from ratoon.metrics import MetricsTotals
from ratoon_proto.v1 import operation_pb2, service_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.guarded import Guarded, refusal
from tests.api.open_gate import NoAudit, open_gate
from tests.api.wires import refused_by


async def test_a_keys_rate_is_kept_on_every_wire(guarded: Guarded, wire_name: str) -> None:
    limits = KeyLimits(requests_per_second=0.01, burst=3)
    wire = guarded.wire(wire_name, guarded.key(Scope.READ, limits=limits))
    info = service_pb2.GetServerInfoRequest()
    for _ in range(3):
        await wire.call("GetServerInfo", info)
    refused = await refused_by(wire, "GetServerInfo", info)
    detail = refused.detail
    assert (detail.code, detail.details["resource"]) == (
        "RESOURCE_EXHAUSTED",
        "requests_per_second",
    )
    assert 90 <= int(detail.details["retry_after_s"]) <= 100
    await guarded.wire(wire_name, guarded.key(Scope.READ)).call("GetServerInfo", info)
    assert [entry["outcome"] for entry in guarded.audit()] == ["RESOURCE_EXHAUSTED"]


async def test_a_submission_carries_its_key_and_its_tokens(
    api: Api, guarded: Guarded, wire_name: str
) -> None:
    limits = KeyLimits(tokens_per_day=1000)
    key = guarded.key(Scope.ADMIN, limits=limits)
    wire = guarded.wire(wire_name, key)
    await wire.call("CreatePolicy", service_pb2.CreatePolicyRequest(spec=requests.spec()))
    await wire.call("Update", requests.update(seq=1, batch=requests.groups(2)))
    (submission,) = api.engine.submissions.values()
    assert submission.holder.key_id == key.split("_")[1]
    assert submission.holder.limits == limits
    # Two groups of a prompt of 3 with responses of 2 and 1.
    assert submission.num_tokens == 2 * (3 + 2 + 3 + 1)
    await api.http.call("Update", requests.update(seq=2))
    assert list(api.engine.submissions.values())[-1].holder == NOBODY


async def test_a_revoked_key_sees_no_end_of_its_wait(
    api: Api, guarded: Guarded, wire_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "RECHECK_S", 0.05)
    key = guarded.key(Scope.ADMIN)
    wire = guarded.wire(wire_name, key)
    await wire.call("CreatePolicy", service_pb2.CreatePolicyRequest(spec=requests.spec()))
    api.engine.hold = True
    operation = await wire.call("Update", requests.update(seq=1))
    wait = service_pb2.GetOperationRequest(operation_id=operation.operation_id, wait_s=1.0)
    waiting = asyncio.create_task(refusal(wire, "GetOperation", wait))
    await asyncio.sleep(0.1)
    KeyFile(guarded.root).revoke(key.split("_")[1], time.time())
    # At its end the wait would be answered.
    assert (await waiting)[0] == "UNAUTHENTICATED"
    assert guarded.audit()[-1]["call"] == "get_operation"


async def test_a_revoked_key_sees_no_more_of_a_watch(
    api: Api, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "RECHECK_S", 0.05)
    key = guarded.key(Scope.ADMIN)
    await guarded.wire("grpc", key).call(
        "CreatePolicy", service_pb2.CreatePolicyRequest(spec=requests.spec())
    )
    api.engine.hold = True
    operation = await guarded.wire("grpc", key).call("Update", requests.update(seq=1))
    url = f"/v1/operations/{operation.operation_id}/events"
    lines: list[str] = []

    async def revoke() -> None:
        await asyncio.sleep(0.2)
        KeyFile(guarded.root).revoke(key.split("_")[1], time.time())

    revoking = asyncio.create_task(revoke())
    headers = {"Authorization": f"Bearer {key}"}
    async with guarded.client.stream("GET", url, headers=headers, timeout=5.0) as response:
        lines += [line async for line in response.aiter_lines()]
    await revoking
    assert lines[0] == "event: operation"
    assert "event: error" in lines
    assert "UNAUTHENTICATED" in lines[-2]


async def test_one_more_than_may_be_in_flight_is_refused() -> None:
    gate = open_gate(most=1)
    presented = Presented(authorization="", peer="p")

    async def answer(_: service_pb2.GetPolicyRequest) -> operation_pb2.Operation:
        with pytest.raises(RatoonError) as caught:
            gate.enter("get_policy", presented)
        assert caught.value.details["resource"] == "requests_in_flight"
        return operation_pb2.Operation()

    for _ in range(2):
        authorized = gate.enter("get_policy", presented)
        await gate.run(authorized, answer, service_pb2.GetPolicyRequest())
        gate.leave(authorized, "", "OK")


async def test_a_wire_lets_its_requests_go(guarded: Guarded, wire_name: str) -> None:
    """A refused, a failed and an answered request each give their place back."""
    wire = guarded.wire(wire_name, guarded.key(Scope.ADMIN))
    for _ in range(3):
        await refusal(wire, "GetPolicy", service_pb2.GetPolicyRequest(policy_id="absent"))
        await wire.call("ListPolicies", service_pb2.ListPoliciesRequest())
        await refusal(wire, "Update", requests.update(batch=[]))
    assert guarded.gate._in_flight._of_caller == {}


async def test_refusals_are_counted_by_reason_and_key(api: Api, tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    in_flight = InFlight(most=0, most_of_caller=1)
    rates = Rates(tmp_path)
    gate = Gate(OpenAccess(), NoAudit(), in_flight, rates, lambda *refused: seen.append(refused))
    with pytest.raises(RatoonError):
        gate.enter("get_policy", Presented(authorization="", peer="p"))
    assert seen == [("requests_in_flight", "")]
    api.service.record_refusal("disk", "k1")
    totals = MetricsTotals()
    totals.send(api.engine.metrics)
    assert b'ratoon_refusals_total{key_id="k1",reason="disk"} 1.0' in totals.render()


async def test_a_part_of_an_upload_is_its_senders(api: Api) -> None:
    """It was nobody's, and so within no key's limits."""
    await api.create_policy()
    part = service_pb2.UploadPartRequest(
        policy_id=requests.POLICY, upload_id="u", part_index=0, groups=requests.groups()
    )
    with acting_for(Holder(key_id="k1", limits=KeyLimits())):
        await api.service.upload_part(part)
    assert api.engine.uploaders == ["k1"]
