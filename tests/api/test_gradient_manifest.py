"""Gradient sums of an open window over both wires: who may read them, and as what."""

from __future__ import annotations

from pathlib import Path

from ratoon.auth.keys import Scope
from ratoon.config import LimitsConfig
from ratoon_proto.v1 import service_pb2, weights_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.guarded import Guarded, guarded_service, refusal
from tests.api.wires import refused_by

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
    refused = await refused_by(api.wire(wire_name), "GetGradientManifest", asked())
    assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", "names")


async def test_many_tensors_are_named_in_one_call(api: Api, tmp_path: Path) -> None:
    """A model of 48 layers with 128 experts each has 18,432 matrices of experts."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"
        for layer in range(48)
        for expert in range(128)
        for kind in ("gate", "down", "up")
    ]
    await api.create_policy()
    async with guarded_service(api.service, LimitsConfig(), tmp_path / "own") as guarded:
        key = guarded.key(Scope.TRAIN)
        for wire in ("http", "grpc"):
            manifest = await guarded.wire(wire, key).call("GetGradientManifest", asked(*names))
            assert manifest.file.size_bytes == len("\n".join(names))
            refused = await refused_by(
                guarded.wire(wire, key), "GetGradientManifest", asked(*names * 2)
            )
            assert refused.detail.code == "BODY_TOO_LARGE"
            assert refused.detail.message.endswith("ask for fewer names at a time")


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
