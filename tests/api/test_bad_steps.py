"""Optimizer steps that are refused over both wires, by field, before they take a seq."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.engine.commands import UpdateCommand
from ratoon_proto.v1 import service_pb2, training_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import WireError

# By the field that is named; the policy's weight decay is 0.01.
BAD_STEPS: dict[str, tuple[dict[str, Any], str]] = {
    "a rate that float64 holds alone": ({"learning_rate": 1e308}, "learning_rate"),
    "a rate above its bound": ({"learning_rate": 10001.0, "weight_decay": 0.0}, "learning_rate"),
    "a rate that the policy's decay turns over": ({"learning_rate": 101.0}, "learning_rate"),
    "a decay that turns weights over": (
        {"learning_rate": 1e-3, "weight_decay": 1001.0},
        "weight_decay",
    ),
    "a decay that float64 holds alone": (
        {"learning_rate": 0.0, "weight_decay": 1e300},
        "weight_decay",
    ),
    "beta1 of 1": ({"learning_rate": 1e-3, "beta1": 1.0}, "beta1"),
    "beta2 above 1": ({"learning_rate": 1e-3, "beta2": 2.0}, "beta2"),
    "no epsilon": ({"learning_rate": 1e-3, "eps": 1e-31}, "eps"),
    "an epsilon that float64 holds alone": ({"learning_rate": 1e-3, "eps": 1e300}, "eps"),
    "a norm that leaves nothing": (
        {"learning_rate": 1e-3, "max_grad_norm": 1e-40},
        "max_grad_norm",
    ),
    "a norm of no gradient": ({"learning_rate": 1e-3, "max_grad_norm": 1e31}, "max_grad_norm"),
}


@pytest.mark.parametrize("rpc", ["Update", "OptimStep"])
async def test_bad_step_takes_no_seq(api: Api, wire_name: str, rpc: str) -> None:
    """They were accepted, and made weights that are not finite or ended the policy's workers."""
    await api.create_policy()
    wire, request = api.wire(wire_name), requests.update()
    for case, (fields, field) in BAD_STEPS.items():
        request.optim.CopyFrom(training_pb2.OptimStepConfig(**fields))
        sent: Any = request
        if rpc == "OptimStep":
            sent = service_pb2.OptimStepRequest(
                policy_id=requests.POLICY, key=request.key, optim=request.optim
            )
        with pytest.raises(WireError) as caught:
            await wire.call(rpc, sent)
        detail = caught.value.detail
        assert (detail.code, detail.field) == ("INVALID_ARGUMENT", f"optim.{field}"), case
    assert api.engine.log == []
    assert (await wire.call("Update", requests.update())).step.version == 1


async def test_bad_constant_takes_no_seq(api: Api, wire_name: str) -> None:
    await api.create_policy()
    wire = api.wire(wire_name)
    for constant in (1e-31, 1e31, 1e308):
        request = requests.update()
        request.loss.kind = training_pb2.LOSS_KIND_DR_GRPO
        request.optim.divide_constant = constant
        with pytest.raises(WireError) as caught:
            await wire.call("Update", request)
        assert caught.value.detail.field == "optim.divide_constant"
    assert api.engine.log == []


async def test_extreme_recipes_are_accepted(api: Api, wire_name: str) -> None:
    """Rates of restarts and of sign-like steps, tiny epsilons, decay per step over the rate."""
    await api.create_policy()
    recipes: tuple[dict[str, Any], ...] = (
        {"learning_rate": 0.0},
        {"learning_rate": 100.0},
        {"learning_rate": 1e4, "weight_decay": 1e-4},
        {"learning_rate": 1e-8, "weight_decay": 1e7},
        {"learning_rate": 1e-6, "beta1": 0.0, "beta2": 0.99999, "eps": 1e-30},
        {"learning_rate": 1e-6, "eps": 1.0, "max_grad_norm": 1e6, "step_on_zero_gradient": True},
        {"learning_rate": 1e-6, "max_grad_norm": 0.0},
    )
    for seq, recipe in enumerate(recipes, 1):
        request = requests.update(seq=seq)
        request.optim.CopyFrom(training_pb2.OptimStepConfig(**recipe))
        await api.wire(wire_name).call("Update", request)
    for submission, recipe in zip(api.engine.log, recipes, strict=True):
        assert isinstance(submission.command, UpdateCommand)
        for name, value in recipe.items():
            assert getattr(submission.command.optim, name) == value
