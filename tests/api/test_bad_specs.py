"""Specs of policies that are refused over both wires, by field."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon_proto.v1 import policy_pb2, service_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import WireError

BAD_SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "upper case id": ({"policy_id": "Tiny"}, "spec.policy_id"),
    "id with a slash": ({"policy_id": "a/b"}, "spec.policy_id"),
    "no id": ({"policy_id": ""}, "spec.policy_id"),
    "unknown preset": ({"preset": "huge"}, "spec.preset"),
    "folder outside": ({"model_folder": "../outside"}, "spec.model_folder"),
    "absolute folder": ({"model_folder": "/etc"}, "spec.model_folder"),
    "the root itself": ({"model_folder": "."}, "spec.model_folder"),
    "a link that leads out": ({"model_folder": "escape"}, "spec.model_folder"),
    "no such folder": ({"model_folder": "absent"}, "spec.model_folder"),
    "a folder with a zero byte": ({"model_folder": "real\0x"}, "spec.model_folder"),
    "too long a folder": ({"model_folder": "x" * 5000}, "spec.model_folder"),
    "no versions kept": ({"keep_versions": 0}, "spec.keep_versions"),
    "no tokens": ({"micro_batch_tokens": 0}, "spec.micro_batch_tokens"),
    "replay without determinism": ({"deterministic": False}, "spec.recovery"),
}


@pytest.mark.parametrize("case", BAD_SPECS)
async def test_bad_spec_is_refused(api: Api, wire_name: str, case: str) -> None:
    changes, field = BAD_SPECS[case]
    request = service_pb2.CreatePolicyRequest(spec=requests.spec(**changes))
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("CreatePolicy", request)
    assert (caught.value.detail.code, caught.value.detail.field) == ("INVALID_ARGUMENT", field)
    assert str(api.models_root) not in caught.value.detail.message
    assert api.engine.known_policies == {}


NESTED_SPECS = {
    "spec.optimizer.beta1": policy_pb2.PolicySpec(optimizer=policy_pb2.AdamWConfig(beta1=1.0)),
    "spec.optimizer.eps": policy_pb2.PolicySpec(optimizer=policy_pb2.AdamWConfig(eps=0.0)),
    "spec.optimizer.weight_decay": policy_pb2.PolicySpec(
        optimizer=policy_pb2.AdamWConfig(weight_decay=-1.0)
    ),
    "spec.lora.rank": policy_pb2.PolicySpec(lora=policy_pb2.LoraTuning(rank=-1, alpha=1.0)),
    "spec.lora.alpha": policy_pb2.PolicySpec(lora=policy_pb2.LoraTuning(rank=4, alpha=-1.0)),
    "spec.publish.every_n": policy_pb2.PolicySpec(publish=policy_pb2.PublishConfig(every_n=4)),
    "spec.parallel.num_workers": policy_pb2.PolicySpec(
        parallel=policy_pb2.ParallelLayout(num_workers=-1)
    ),
    "spec.parallel.sequence_ranks": policy_pb2.PolicySpec(
        parallel=policy_pb2.ParallelLayout(num_workers=4, sequence_ranks=3)
    ),
    "spec.numerics_guard.max_grad_norm_to_step": policy_pb2.PolicySpec(
        numerics_guard=policy_pb2.NumericsGuard(max_grad_norm_to_step=0.0)
    ),
    "spec.numerics_guard.max_reference_kl_to_step": policy_pb2.PolicySpec(
        numerics_guard=policy_pb2.NumericsGuard(max_reference_kl_to_step=-1.0)
    ),
    "spec.numerics_guard.max_skipped_in_row": policy_pb2.PolicySpec(
        numerics_guard=policy_pb2.NumericsGuard(max_skipped_in_row=-1)
    ),
}


@pytest.mark.parametrize("field", NESTED_SPECS)
async def test_bad_nested_spec_is_refused(api: Api, wire_name: str, field: str) -> None:
    spec = requests.spec()
    spec.MergeFrom(NESTED_SPECS[field])
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("CreatePolicy", service_pb2.CreatePolicyRequest(spec=spec))
    assert (caught.value.detail.code, caught.value.detail.field) == ("INVALID_ARGUMENT", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("beta1", value) for value in (-0.1, 1.0, 2.0)),
        *(("beta2", value) for value in (-0.1, 1.0)),
        *(("eps", value) for value in (0.0, 1e-31, 1e31, 1e300)),
        *(("weight_decay", value) for value in (-0.1, 1e31, 1e300)),
    ],
)
async def test_optimizer_of_a_policy_has_the_bounds_of_a_step(
    api: Api, wire_name: str, field: str, value: float
) -> None:
    spec = requests.spec()
    spec.optimizer.CopyFrom(policy_pb2.AdamWConfig(**{field: value}))
    with pytest.raises(WireError) as caught:
        await api.wire(wire_name).call("CreatePolicy", service_pb2.CreatePolicyRequest(spec=spec))
    detail = caught.value.detail
    assert (detail.code, detail.field) == ("INVALID_ARGUMENT", f"spec.optimizer.{field}")
