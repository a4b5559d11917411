"""Updates that are refused over both wires, by field: nothing is applied, and no seq is taken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from ratoon.engine.commands import UpdateCommand
from ratoon_proto.codec import encode_array
from ratoon_proto.v1 import rollout_pb2, service_pb2, training_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.requests import floats, group, tokens
from tests.api.wires import refused_by

Kl, Loss, Optim = training_pb2.KlConfig, training_pb2.LossConfig, training_pb2.OptimStepConfig
Rollout = rollout_pb2.Rollout
Update = service_pb2.UpdateRequest
FIRST, LAST = "groups[0].rollouts[0]", "groups[1].rollouts[1]"
K3, GIVEN = training_pb2.KL_KIND_K3, training_pb2.REFERENCE_KIND_GIVEN
COLUMNS = ("sampler_logprobs", "old_logprobs", "reference_logprobs", "advantages", "token_weights")
# Finite numbers that float32 does not hold.
BEYOND = (3.5e38, 1e39, -1e300, 1.7e308)


def _changed(path: str, value: Any) -> Update:
    """A right update with one field set, or without it for None; path "": merged with `value`."""
    request = requests.update()
    if not path:
        request.MergeFrom(value)
        return request
    *places, name = re.findall(r"\w+", path)
    message: Any = request.batch if path.startswith("groups") else request
    for place in places:
        message = message[int(place)] if place.isdecimal() else getattr(message, place)
    if value is None:
        message.ClearField(name)
    elif isinstance(value, Message):
        getattr(message, name).CopyFrom(value)
    elif isinstance(value, list):
        message.ClearField(name)
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)
    return request


# The field that is named, the one that is set, and its value.
CASES: list[tuple[str, str, Any]] = [
    ("groups", "groups", []),
    ("groups", "groups", [group("no token", Rollout(response=tokens([]), reward=1.0))]),
    ("groups[0].rollouts", "groups[0].rollouts", []),
    ("groups[0].rollouts[0]", "groups", [group("longer", requests.rollout([7] * 62))]),
    ("groups[1].group_id", "groups[1].group_id", "group-0"),
    (f"{FIRST}.response", "groups", [group("no content", Rollout(reward=1.0))]),
    (f"{FIRST}.reward", f"{FIRST}.reward", None),
    (f"{FIRST}.response.shape", f"{FIRST}.response.shape", [1, 2]),
    # Sizes that lie.
    (f"{FIRST}.response.data", f"{FIRST}.response.dtype", "int64"),
    (f"{FIRST}.response.data", f"{FIRST}.response.shape", [3]),
    (f"{LAST}.response.dtype", f"{LAST}.response", floats([1.0])),
    (f"{LAST}.response[0]", f"{LAST}.response", tokens([256])),
    (f"{LAST}.response[0]", f"{LAST}.response", tokens([-1])),
    (f"{LAST}.sampler_logprobs", f"{LAST}.sampler_logprobs", floats([])),
    (f"{LAST}.sampler_logprobs[0]", f"{LAST}.sampler_logprobs", floats([float("nan")])),
    (f"{LAST}.loss_mask", f"{LAST}.loss_mask", encode_array(np.array([True, True]))),
    (f"{LAST}.reward", f"{LAST}.reward", float("inf")),
    # Raw log-probs at another temperature, unsaid.
    (f"{LAST}.sampler_logprobs_kind", f"{LAST}.temperature", 0.5),
    ("key.seq", "key", None),
    ("key.seq", "key.seq", 0),
    ("key.request_id", "key.request_id", "x"),
    ("source", "batch", None),
    ("upload.upload_id", "upload", rollout_pb2.UploadedBatch(upload_id="../x", num_parts=1)),
    ("expected_version", "expected_version", -1),
    ("loss.clip_low", "loss", Loss(kind=training_pb2.LOSS_KIND_REINFORCE, clip_low=0.1)),
    ("loss.kl.coefficient", "loss.kl", Kl(kind=K3, reference=GIVEN)),
    (
        "loss.kl.reference",
        "loss.kl",
        Kl(kind=K3, coefficient=0.1, reference=training_pb2.REFERENCE_KIND_FROZEN),
    ),
    (
        "loss.correction_mask.low",
        "loss.correction_mask",
        training_pb2.CorrectionMask(level=training_pb2.CORRECTION_LEVEL_GEOMETRIC, high=1.1),
    ),
    (
        "loss.overlong_penalty.scale",
        "loss.overlong_penalty",
        training_pb2.OverlongPenalty(max_tokens=4, buffer_tokens=2),
    ),
    ("optim.divide_by", "optim.divide_by", training_pb2.DIVIDE_BY_TOKENS),
    ("optim.learning_rate", "optim.learning_rate", None),
    ("optim.learning_rate", "optim.learning_rate", -1.0),
]
# Steps that were accepted, and made weights that are not finite or ended the policy's workers: the
# field that is named, and the step. The policy's weight decay is 0.01.
BAD_STEPS = [
    ("learning_rate", Optim(learning_rate=1e308)),
    ("learning_rate", Optim(learning_rate=10001.0, weight_decay=0.0)),
    # The decay turns weights over: the policy's own, and that of the step.
    ("learning_rate", Optim(learning_rate=101.0)),
    ("weight_decay", Optim(learning_rate=1e-3, weight_decay=1001.0)),
    ("weight_decay", Optim(learning_rate=0.0, weight_decay=1e300)),
    ("beta1", Optim(learning_rate=1e-3, beta1=1.0)),
    ("beta2", Optim(learning_rate=1e-3, beta2=2.0)),
    ("eps", Optim(learning_rate=1e-3, eps=1e-31)),
    ("eps", Optim(learning_rate=1e-3, eps=1e300)),
    ("max_grad_norm", Optim(learning_rate=1e-3, max_grad_norm=1e-40)),
    ("max_grad_norm", Optim(learning_rate=1e-3, max_grad_norm=1e31)),
]


async def _refused(api: Api, wire: str, request: Message, field: str) -> Any:
    """The error's detail, which names the field."""
    rpc = request.DESCRIPTOR.name.removesuffix("Request")
    refused = await refused_by(api.wire(wire), rpc, request)
    detail = refused.detail
    # In JSON `key` is two plain fields.
    named = field.removeprefix("key.") if wire == "http" else field
    assert (detail.code, detail.field) == ("INVALID_ARGUMENT", named), (field, detail)
    assert named in detail.message
    assert wire == "grpc" or "key." not in detail.message
    assert not detail.retryable
    assert refused.status in (422, grpc.StatusCode.INVALID_ARGUMENT)
    assert api.engine.log == []
    return detail


async def test_a_bad_update_is_refused_whole(api: Api, wire_name: str) -> None:
    await api.create_policy()
    for field, path, value in CASES:
        await _refused(api, wire_name, _changed(path, value), field)
    for constant in (1e-31, 1e31, 1e308):
        request = requests.update()
        request.loss.kind = training_pb2.LOSS_KIND_DR_GRPO
        request.optim.divide_constant = constant
        await _refused(api, wire_name, request, "optim.divide_constant")
    assert (await api.wire(wire_name).call("Update", requests.update())).step.version == 1


async def test_a_bad_step_is_refused(api: Api, wire_name: str) -> None:
    await api.create_policy()
    key = service_pb2.OperationKey(seq=1)
    for field, optim in BAD_STEPS:
        step = service_pb2.OptimStepRequest(policy_id=requests.POLICY, key=key, optim=optim)
        for request in (_changed("optim", optim), step):
            await _refused(api, wire_name, request, f"optim.{field}")


def _of_policy(**options: Any) -> Update:
    return Update(loss=Loss(**options))


def _numbers() -> Iterator[tuple[str, str, Any, float]]:
    """A field, what to set to give it a number, and the number."""
    of_rollouts = (("reward", BEYOND), ("temperature", (1e39, 1e-40, 1e-320)))
    for name, values in (*of_rollouts, ("top_p", (1e-50, 1e39))):
        for value in values:
            yield f"{LAST}.{name}", f"{LAST}.{name}", value, value
    on_policy = training_pb2.OldLogprobs(kind=training_pb2.OLD_LOGPROBS_KIND_ON_POLICY)
    sapo, token = training_pb2.LOSS_KIND_SAPO, training_pb2.CORRECTION_LEVEL_TOKEN
    truncate = training_pb2.CORRECTION_MODE_TRUNCATE
    # A clip of 1e308 ended in INTERNAL: no float32 tensor could be filled with it.
    for value in (3.5e38, 1e308):
        correction = training_pb2.RolloutCorrection(mode=truncate, level=token, high=value)
        mask = training_pb2.CorrectionMask(level=token, low=0.5, high=value)
        penalty = training_pb2.OverlongPenalty(max_tokens=4, buffer_tokens=2, scale=value)
        kl = Kl(kind=K3, coefficient=value, reference=GIVEN)
        for field, options in (
            ("clip_low", {"clip_low": value}),
            ("clip_high", {"clip_high": value}),
            ("dual_clip", {"dual_clip": value}),
            ("entropy_coefficient", {"entropy_coefficient": value}),
            ("router_aux_loss_coefficient", {"router_aux_loss_coefficient": value}),
            ("kl.coefficient", {"kl": kl}),
            ("correction.high", {"old_logprobs": on_policy, "correction": correction}),
            ("correction_mask.high", {"old_logprobs": on_policy, "correction_mask": mask}),
            ("overlong_penalty.scale", {"overlong_penalty": penalty}),
        ):
            yield f"loss.{field}", "", _of_policy(**options), value
    # A gate's inverse is used too.
    for field in ("tau_positive", "tau_negative"):
        for value in (1e-320, 1e-40, 1e-7, 1e7, 1e39, 1e308):
            yield f"loss.{field}", "", _of_policy(kind=sapo, **{field: value}), value


async def test_a_number_that_float32_does_not_hold_is_refused(api: Api, wire_name: str) -> None:
    await api.create_policy()
    for field, path, value, number in _numbers():
        detail = await _refused(api, wire_name, _changed(path, value), field)
        assert detail.got == str(number), field


async def test_a_column_beyond_float32_is_refused_by_index(api: Api, wire_name: str) -> None:
    """It became infinite, and five steps that were skipped for it failed the policy."""
    await api.create_policy()
    for name in COLUMNS:
        request = requests.update()
        rollouts = [rollout for group in request.batch.groups for rollout in group.rollouts]
        for rollout in rollouts:
            getattr(rollout, name).CopyFrom(floats([-1.0] * rollout.response.shape[0]))
        for value in BEYOND:
            getattr(rollouts[-1], name).CopyFrom(encode_array(np.array([value])))
            detail = await _refused(api, wire_name, request, f"{LAST}.{name}[0]")
            assert detail.got == str(value)


async def test_rewards_that_float32_holds_are_taken(api: Api, wire_name: str) -> None:
    await api.create_policy()
    pairs = [(3e38, -3e38), (1e30, 2e30), (0.0, 1e-40), (-1e-45, 0.0)]
    for seq, pair in enumerate(pairs, start=1):
        request = requests.update(seq)
        for rollout, value in zip(request.batch.groups[0].rollouts, pair, strict=True):
            rollout.reward = value
        assert (await api.wire(wire_name).call("Update", request)).step.version == seq


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
        request.optim.CopyFrom(Optim(**recipe))
        await api.wire(wire_name).call("Update", request)
    for submission, recipe in zip(api.engine.log, recipes, strict=True):
        assert isinstance(submission.command, UpdateCommand)
        for name, value in recipe.items():
            assert getattr(submission.command.optim, name) == value
