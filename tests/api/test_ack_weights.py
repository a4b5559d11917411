"""What receivers say of themselves, on both wires."""

from __future__ import annotations

from ratoon.auth.keys import Scope
from ratoon.engine.types import Acknowledgement
from ratoon_proto.v1 import service_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.guarded import Guarded
from tests.api.wires import refused_by


def asked(receiver_id: str = "vllm-0", **fields: float) -> service_pb2.AckWeightsRequest:
    return service_pb2.AckWeightsRequest(
        policy_id=requests.POLICY,
        receiver_id=receiver_id,
        **fields,  # pyright: ignore[reportArgumentType]
    )


async def test_an_acknowledgement_reaches_the_engine_whole(api: Api, wire_name: str) -> None:
    await api.create_policy()
    wire = api.wire(wire_name)
    answer = await wire.call("AckWeights", asked(version=0, holds_version=3, hold_s=60.0))
    assert answer == service_pb2.AckWeightsResponse(published_version=0)
    assert answer.HasField("published_version")
    await wire.call("AckWeights", asked("x" * 64))
    assert api.engine.acks == [
        Acknowledgement(receiver_id="vllm-0", version=0, holds_version=3, hold_s=60.0),
        Acknowledgement(receiver_id="x" * 64, version=None, holds_version=None, hold_s=0.0),
    ]


async def test_what_makes_no_sense_is_refused(api: Api, wire_name: str) -> None:
    await api.create_policy()
    for field, request in (
        ("receiver_id", asked("")),
        ("receiver_id", asked("a/b")),
        ("receiver_id", asked("x" * 65)),
        ("version", asked(version=-1)),
        ("holds_version", asked(holds_version=-1, hold_s=1.0)),
        ("hold_s", asked(holds_version=1)),
        ("hold_s", asked(holds_version=1, hold_s=3600.5)),
        ("hold_s", asked(holds_version=1, hold_s=-1.0)),
        ("hold_s", asked(holds_version=1, hold_s=float("nan"))),
        ("hold_s", asked(version=1, hold_s=1.0)),
    ):
        refused = await refused_by(api.wire(wire_name), "AckWeights", request)
        detail = refused.detail
        assert (detail.code, detail.field) == ("INVALID_ARGUMENT", field), request
    assert api.engine.acks == []


async def test_a_reader_acknowledges_its_own_policies(
    api: Api, guarded: Guarded, wire_name: str
) -> None:
    await api.create_policy()
    reader = guarded.wire(wire_name, guarded.key(Scope.READ, (requests.POLICY,)))
    await reader.call("AckWeights", asked(version=0))
    other = guarded.wire(wire_name, guarded.key(Scope.ADMIN, ("other",)))
    refused = await refused_by(other, "AckWeights", asked(version=0))
    assert refused.detail.code == "PERMISSION_DENIED"
    assert len(api.engine.acks) == 1
