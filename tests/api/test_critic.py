"""Critics over both wires: the same bodies, and refusals by field that take no seq."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ratoon.engine.commands import UpdateCommand
from ratoon_proto.codec import encode_array
from ratoon_proto.types import ValueLossConfig
from ratoon_proto.v1 import rollout_pb2, service_pb2, training_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import refused_by

FIRST = "groups[0].rollouts[0]"
LOSS = training_pb2.LossConfig(
    kind=training_pb2.LOSS_KIND_VALUE, value=training_pb2.ValueLossConfig(clip=0.2)
)


def _judged(**changes: Any) -> list[rollout_pb2.RolloutGroup]:
    """Groups whose rollouts have returns and old values, the first one these."""
    groups = requests.groups()
    for group in groups:
        for rollout in group.rollouts:
            length = rollout.response.shape[0]
            rollout.returns.CopyFrom(requests.floats([0.5] * length))
            rollout.old_values.CopyFrom(requests.floats([0.25] * length))
    first: Any = groups[0].rollouts[0]
    for name, values in changes.items():
        if values is None:
            first.ClearField(name)
        else:
            getattr(first, name).CopyFrom(encode_array(np.array(values)))
    return groups


def _update(groups: list[rollout_pb2.RolloutGroup] | None = None, **changes: Any) -> Any:
    request = requests.update(batch=_judged() if groups is None else groups)
    request.loss.CopyFrom(LOSS)
    for name, value in changes.items():
        setattr(request.loss.value, name, value)
    return request


async def test_both_wires_give_the_engine_the_same(api: Api) -> None:
    await api.create_policy(value_head=True)
    first = await api.wire("grpc").call("Update", _update())
    again = await api.wire("http").call("Update", _update())
    assert again.operation_id == first.operation_id
    (submission,) = api.engine.log
    command = submission.command
    assert isinstance(command, UpdateCommand)
    assert command.loss.value == ValueLossConfig(clip=0.2)
    other = _update(_judged(returns=np.array([0.5, 0.6], np.float32)))
    refused = await refused_by(api.wire("http"), "Update", other)
    assert refused.detail.code == "KEY_REUSED"
    get = service_pb2.GetPolicyRequest(policy_id=requests.POLICY)
    for wire_name in ("grpc", "http"):
        policy = await api.wire(wire_name).call("GetPolicy", get)
        assert policy.spec.value_head


@pytest.mark.parametrize(
    ("field", "change"),
    [
        (f"{FIRST}.returns", {"returns": np.zeros(3, np.float32)}),
        (f"{FIRST}.returns.shape", {"returns": np.zeros((2, 1), np.float32)}),
        (f"{FIRST}.returns.dtype", {"returns": np.zeros(2, np.int32)}),
        (f"{FIRST}.returns[1]", {"returns": np.array([0, np.nan], np.float32)}),
        (f"{FIRST}.returns[0]", {"returns": np.array([1e39, 0.0])}),
        (f"{FIRST}.returns", {"returns": None}),
        (f"{FIRST}.old_values[1]", {"old_values": np.array([0, np.inf], np.float32)}),
        (f"{FIRST}.old_values", {"old_values": np.zeros(1, np.float32)}),
        (f"{FIRST}.old_values", {"old_values": None}),
    ],
)
async def test_bad_returns_are_refused_by_position(
    api: Api, wire_name: str, field: str, change: dict[str, Any]
) -> None:
    await api.create_policy(value_head=True)
    refused = await refused_by(api.wire(wire_name), "Update", _update(_judged(**change)))
    assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)
    assert api.engine.log == []
    await api.wire(wire_name).call("Update", _update())


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("loss.value.coefficient", {"coefficient": float("inf")}),
        ("loss.value.clip", {"clip": 0.0}),
        ("loss.value.clip", {"clip": -1.0}),
        ("loss.value.clip", {"clip": float("nan")}),
    ],
)
async def test_a_bad_value_loss_is_refused(
    api: Api, wire_name: str, field: str, change: dict[str, Any]
) -> None:
    await api.create_policy(value_head=True)
    refused = await refused_by(api.wire(wire_name), "Update", _update(**change))
    assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)
    assert api.engine.log == []


async def test_a_critic_needs_a_head_and_returns_and_nothing_else(api: Api, wire_name: str) -> None:
    wire = api.wire(wire_name)
    await api.create_policy()
    refused = await refused_by(wire, "Update", _update())
    assert refused.detail.field == "loss.value"
    assert "value_head" in refused.detail.expected
    await api.create_policy(policy_id="critic", value_head=True)

    def of_critic(request: Any) -> Any:
        request.policy_id = "critic"
        return request

    refused = await refused_by(wire, "Update", of_critic(_update(requests.groups())))
    assert (refused.detail.field, refused.detail.got) == ("loss.value", "no returns")
    without = of_critic(_update())
    without.loss.ClearField("value")
    refused = await refused_by(wire, "Update", without)
    assert (refused.detail.field, refused.detail.got) == ("loss.value", "none")
    given = of_critic(_update())
    for group in given.batch.groups:
        for rollout in group.rollouts:
            rollout.advantages.CopyFrom(requests.floats([1.0] * rollout.response.shape[0]))
    refused = await refused_by(wire, "Update", given)
    assert refused.detail.field == "groups[0].rollouts[0].advantages"
    assert api.engine.log == []
