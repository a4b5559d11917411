"""Finite numbers that float32 does not hold, or cannot be computed with, over both wires."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from ratoon_proto.codec import encode_array
from ratoon_proto.v1 import service_pb2, training_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import WireError

Loss = training_pb2.LossConfig
BEYOND = (3.5e38, 1e39, -1e300, 1.7e308)
COLUMNS = ("sampler_logprobs", "old_logprobs", "reference_logprobs", "advantages", "token_weights")


async def _refused(api: Api, wire: str, request: Message, field: str, got: float) -> None:
    is_spec = isinstance(request, service_pb2.CreatePolicyRequest)
    with pytest.raises(WireError) as caught:
        await api.wire(wire).call("CreatePolicy" if is_spec else "Update", request)
    detail = caught.value.detail
    assert (detail.code, detail.field) == ("INVALID_ARGUMENT", field), detail
    assert detail.got == str(got)
    assert api.engine.log == []


async def test_a_column_beyond_float32_is_refused_by_index(api: Api, wire_name: str) -> None:
    """It became infinite, and five steps that were skipped for it failed the policy."""
    await api.create_policy()
    for name in COLUMNS:
        request = requests.update()
        rollouts = [rollout for group in request.batch.groups for rollout in group.rollouts]
        for rollout in rollouts:
            column = [-1.0] * rollout.response.shape[0]
            getattr(rollout, name).CopyFrom(requests.floats(column))
        for value in BEYOND:
            getattr(rollouts[-1], name).CopyFrom(encode_array(np.array([value])))
            await _refused(api, wire_name, request, f"groups[1].rollouts[1].{name}[0]", value)


OF_ROLLOUTS = {
    "reward": BEYOND,
    "temperature": (1e39, 1e-40, 1e-320),
    "top_p": (1e-50, 1e39),
}


@pytest.mark.parametrize("name", OF_ROLLOUTS)
async def test_a_number_of_a_rollout_that_float32_does_not_hold_is_refused(
    api: Api, wire_name: str, name: str
) -> None:
    await api.create_policy()
    for value in OF_ROLLOUTS[name]:
        request = requests.update()
        setattr(request.batch.groups[1].rollouts[1], name, value)
        await _refused(api, wire_name, request, f"groups[1].rollouts[1].{name}", value)


async def test_rewards_that_float32_holds_are_taken(api: Api, wire_name: str) -> None:
    await api.create_policy()
    pairs = [(3e38, -3e38), (1e30, 2e30), (0.0, 1e-40), (-1e-45, 0.0)]
    for seq, pair in enumerate(pairs, start=1):
        request = requests.update(seq)
        for rollout, value in zip(request.batch.groups[0].rollouts, pair, strict=True):
            rollout.reward = value
        assert (await api.wire(wire_name).call("Update", request)).step.version == seq


_ON_POLICY = training_pb2.OldLogprobs(kind=training_pb2.OLD_LOGPROBS_KIND_ON_POLICY)
_SAPO = training_pb2.LOSS_KIND_SAPO
_TOKEN = training_pb2.CORRECTION_LEVEL_TOKEN
LOSSES: dict[str, Any] = {
    "loss.clip_low": lambda value: Loss(clip_low=value),
    "loss.clip_high": lambda value: Loss(clip_high=value),
    "loss.dual_clip": lambda value: Loss(dual_clip=value),
    "loss.tau_positive": lambda value: Loss(kind=_SAPO, tau_positive=value),
    "loss.tau_negative": lambda value: Loss(kind=_SAPO, tau_negative=value),
    "loss.entropy_coefficient": lambda value: Loss(entropy_coefficient=value),
    "loss.router_aux_loss_coefficient": lambda value: Loss(router_aux_loss_coefficient=value),
    "loss.kl.coefficient": lambda value: Loss(
        kl=training_pb2.KlConfig(
            kind=training_pb2.KL_KIND_K3,
            coefficient=value,
            reference=training_pb2.REFERENCE_KIND_GIVEN,
        )
    ),
    "loss.correction.high": lambda value: Loss(
        old_logprobs=_ON_POLICY,
        correction=training_pb2.RolloutCorrection(
            mode=training_pb2.CORRECTION_MODE_TRUNCATE, level=_TOKEN, high=value
        ),
    ),
    "loss.correction_mask.high": lambda value: Loss(
        old_logprobs=_ON_POLICY,
        correction_mask=training_pb2.CorrectionMask(level=_TOKEN, low=0.5, high=value),
    ),
    "loss.overlong_penalty.scale": lambda value: Loss(
        overlong_penalty=training_pb2.OverlongPenalty(max_tokens=4, buffer_tokens=2, scale=value)
    ),
}


async def test_an_option_of_a_loss_beyond_float32_is_refused(api: Api, wire_name: str) -> None:
    """A clip of 1e308 ended in INTERNAL: no float32 tensor could be filled with it."""
    await api.create_policy()
    for field, loss in LOSSES.items():
        for value in (3.5e38, 1e308):
            request = requests.update()
            request.loss.MergeFrom(loss(value))
            await _refused(api, wire_name, request, field, value)


async def test_a_gate_is_bounded_both_ways(api: Api, wire_name: str) -> None:
    """Its inverse is used too."""
    await api.create_policy()
    for field in ("loss.tau_positive", "loss.tau_negative"):
        for value in (1e-320, 1e-40, 1e-7, 1e7, 1e39):
            request = requests.update()
            request.loss.MergeFrom(LOSSES[field](value))
            await _refused(api, wire_name, request, field, value)


async def test_a_limit_of_the_guard_beyond_float32_is_refused(api: Api, wire_name: str) -> None:
    for name in ("max_grad_norm_to_step", "max_reference_kl_to_step", "max_sampler_kl_to_step"):
        spec = requests.spec()
        setattr(spec.numerics_guard, name, 1e39)
        request = service_pb2.CreatePolicyRequest(spec=spec)
        await _refused(api, wire_name, request, f"spec.numerics_guard.{name}", 1e39)
