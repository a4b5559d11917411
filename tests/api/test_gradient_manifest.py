"""Gradient sums of an open window over both wires: who may read them, and as what."""

from __future__ import annotations

import pytest

from ratoon.auth.scopes import Scope
from ratoon_proto.v1 import service_pb2, weights_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.guarded import Guarded, refusal
from tests.api.wires import WireError

NAMES = ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")


def asked(*names: str) -> service_pb2.GetGradientManifestRequest:
    return service_pb2.GetGradientManifestRequest(policy_id=requests.POLICY, names=names)


async def test_a_manifest_names_a_file_for_fetch_weights(api: Api, wire_name: str) -> None:
    await api.create_policy()
    manifest = await api.wire(wire_name).call("GetGradientManifest", asked(*NAMES, NAMES[0]))
    data = "\n".join(NAMES).encode()
    assert manifest == weights_pb2.GradientManifest(
        policy_id=requests.POLICY,
        version=0,
        file=weights_pb2.WeightFile(name="g", size_bytes=len(data), digest=manifest.file.digest),
        seqs=[1, 3],
        trained_tokens=7,
        num_sequences=5,
        num_groups=2,
    )
    chunk = await api.grpc.call(
        "FetchWeights",
        service_pb2.FetchWeightsRequest(
            policy_id=requests.POLICY, digest=manifest.file.digest, length=len(data)
        ),
    )
    assert chunk.data == data


async def test_tensors_are_named(api: Api, wire_name: str) -> None:
    await api.create_policy()
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("GetGradientManifest", asked())
    assert (caught.value.detail.code, caught.value.detail.field) == ("INVALID_ARGUMENT", "names")
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(3000)]
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("GetGradientManifest", asked(*names))
    assert caught.value.detail.code == "BODY_TOO_LARGE"


async def test_gradients_are_for_those_who_train(
    api: Api, guarded: Guarded, wire_name: str
) -> None:
    await api.create_policy()
    reader = guarded.wire(wire_name, guarded.key(Scope.READ))
    assert (await refusal(reader, "GetGradientManifest", asked(*NAMES)))[0] == "PERMISSION_DENIED"
    key = guarded.key(Scope.TRAIN, (requests.POLICY,))
    await guarded.wire(wire_name, key).call("GetGradientManifest", asked(*NAMES))
    other = guarded.wire(wire_name, guarded.key(Scope.TRAIN, ("other",)))
    assert (await refusal(other, "GetGradientManifest", asked(*NAMES)))[0] == "PERMISSION_DENIED"
    lines = [(line["call"], line["policy_id"], line["outcome"]) for line in guarded.audit()]
    assert lines == [
        ("get_gradient_manifest", "", "PERMISSION_DENIED"),
        ("get_gradient_manifest", requests.POLICY, "OK"),
        ("get_gradient_manifest", requests.POLICY, "PERMISSION_DENIED"),
    ]
