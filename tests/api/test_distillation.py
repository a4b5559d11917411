"""Teachers over both wires: the same bodies, and refusals by field that take no seq."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ratoon.engine.commands import ForwardCommand, UpdateCommand
from ratoon_proto.codec import encode_array
from ratoon_proto.types import DistillationConfig, Divergence, Teacher
from ratoon_proto.v1 import rollout_pb2, service_pb2, training_pb2
from tests.api import requests
from tests.api.conftest import Api
from tests.api.wires import refused_by

LAST = "groups[1].rollouts[1]"
LOGPROBS = np.log(np.array([[0.6, 0.3]], np.float32))
LOSS = training_pb2.LossConfig(
    kind=training_pb2.LOSS_KIND_DISTILLATION,
    distillation=training_pb2.DistillationConfig(divergence=training_pb2.DIVERGENCE_REVERSE_KL),
)


def _taught(
    tokens: Any = ((9, 3),), logprobs: Any = LOGPROBS, dtype: Any = np.uint32
) -> list[rollout_pb2.RolloutGroup]:
    """Groups whose rollouts have a teacher; the last one has this one."""
    groups = requests.groups()
    for group in groups:
        for rollout in group.rollouts:
            length = rollout.response.shape[0]
            ids = np.tile(np.array([[9, 3]], np.uint32), (length, 1))
            rollout.teacher_tokens.CopyFrom(encode_array(ids))
            rollout.teacher_logprobs.CopyFrom(encode_array(np.tile(LOGPROBS, (length, 1))))
    last = groups[-1].rollouts[-1]
    last.teacher_tokens.CopyFrom(encode_array(np.array(tokens, dtype)))
    last.teacher_logprobs.CopyFrom(encode_array(np.array(logprobs)))
    return groups


def _update(groups: list[rollout_pb2.RolloutGroup] | None = None, **changes: Any) -> Any:
    request = requests.update(batch=_taught() if groups is None else groups)
    request.loss.CopyFrom(LOSS)
    for name, value in changes.items():
        setattr(request.loss.distillation, name, value)
    return request


async def test_both_wires_give_the_engine_the_same(api: Api) -> None:
    await api.create_policy()
    first = await api.wire("grpc").call("Update", _update())
    again = await api.wire("http").call("Update", _update())
    assert again.operation_id == first.operation_id
    (submission,) = api.engine.log
    command = submission.command
    assert isinstance(command, UpdateCommand)
    assert command.loss.distillation == DistillationConfig(Divergence.REVERSE_KL)
    refused = await refused_by(api.wire("http"), "Update", _update(_taught(((9, 4),))))
    assert refused.detail.code == "KEY_REUSED"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        (f"{LAST}.teacher_tokens[0][1]", {"tokens": ((9, 256),)}),
        (f"{LAST}.teacher_tokens[0]", {"tokens": ((9, 9),)}),
        (f"{LAST}.teacher_tokens.shape", {"tokens": ((9,),)}),
        (f"{LAST}.teacher_tokens.dtype", {"dtype": np.float32}),
        (f"{LAST}.teacher_logprobs.shape", {"logprobs": LOGPROBS[:, :1]}),
        (f"{LAST}.teacher_logprobs[0][1]", {"logprobs": LOGPROBS[:, ::-1]}),
        (f"{LAST}.teacher_logprobs[0]", {"logprobs": np.zeros_like(LOGPROBS)}),
        (f"{LAST}.teacher_logprobs[0][0]", {"logprobs": np.full_like(LOGPROBS, np.nan)}),
    ],
)
async def test_a_bad_teacher_is_refused_by_position(
    api: Api, wire_name: str, field: str, change: dict[str, Any]
) -> None:
    await api.create_policy()
    refused = await refused_by(api.wire(wire_name), "Update", _update(_taught(**change)))
    assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)
    assert api.engine.log == []
    await api.wire(wire_name).call("Update", _update())


async def test_sizes_that_lie_are_refused(api: Api, wire_name: str) -> None:
    await api.create_policy()
    groups = _taught()
    groups[1].rollouts[1].teacher_tokens.shape[:] = [1, 1 << 40]
    refused = await refused_by(api.wire(wire_name), "Update", _update(groups))
    assert refused.detail.field == f"{LAST}.teacher_tokens.shape"
    assert api.engine.log == []


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("loss.distillation.coefficient", {"coefficient": float("inf")}),
        ("loss.distillation.beta", {"beta": 0.5}),
        (
            "loss.distillation.beta",
            {"divergence": training_pb2.DIVERGENCE_JENSEN_SHANNON, "beta": 1.0},
        ),
        ("loss.distillation.divergence", {"divergence": training_pb2.DIVERGENCE_UNSPECIFIED}),
    ],
)
async def test_a_bad_divergence_is_refused(
    api: Api, wire_name: str, field: str, change: dict[str, Any]
) -> None:
    await api.create_policy()
    refused = await refused_by(api.wire(wire_name), "Update", _update(**change))
    assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)


async def test_a_loss_that_distils_needs_a_teacher_and_nothing_else(
    api: Api, wire_name: str
) -> None:
    await api.create_policy()
    wire = api.wire(wire_name)
    refused = await refused_by(wire, "Update", _update(requests.groups()))
    assert refused.detail.field == "loss.distillation"
    without = _update()
    without.loss.ClearField("distillation")
    refused = await refused_by(wire, "Update", without)
    assert (refused.detail.field, refused.detail.got) == ("loss.distillation", "none")
    weighted = _update()
    for group in weighted.batch.groups:
        for rollout in group.rollouts:
            rollout.token_weights.CopyFrom(requests.floats([1.0] * rollout.response.shape[0]))
    refused = await refused_by(wire, "Update", weighted)
    assert refused.detail.field == "groups[0].rollouts[0].token_weights"
    assert "distillation takes no weights" in refused.detail.expected
    assert api.engine.log == []


def _forward(groups: list[rollout_pb2.RolloutGroup], **asked: Any) -> service_pb2.ForwardRequest:
    return service_pb2.ForwardRequest(
        policy_id=requests.POLICY,
        key=service_pb2.OperationKey(seq=1),
        batch=rollout_pb2.RolloutBatch(groups=groups),
        **asked,
    )


async def test_a_forward_is_asked_for_tokens_within_bounds(api: Api, wire_name: str) -> None:
    await api.create_policy()
    wire = api.wire(wire_name)
    for field, asked in (
        ("num_teacher_tokens", {"num_teacher_tokens": 129}),
        ("num_teacher_tokens", {"num_teacher_tokens": -1}),
        ("with_teacher_logprobs", {"with_teacher_logprobs": True, "num_teacher_tokens": 3}),
    ):
        refused = await refused_by(wire, "Forward", _forward(_taught(), **asked))
        assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)
    plain = _forward(requests.groups(), with_teacher_logprobs=True)
    refused = await refused_by(wire, "Forward", plain)
    assert refused.detail.field == "with_teacher_logprobs"
    assert api.engine.log == []
    await wire.call("Forward", _forward(_taught(), num_teacher_tokens=128))
    (submission,) = api.engine.log
    command = submission.command
    assert isinstance(command, ForwardCommand)
    assert command.num_teacher_tokens == 128


def _asking(*teachers: training_pb2.Teacher, number: int = 4) -> Any:
    request = _update(requests.groups())
    request.loss.distillation.teachers.extend(teachers)
    request.loss.distillation.num_teacher_tokens = number
    return request


async def test_both_wires_ask_the_same_of_the_same_teachers(api: Api) -> None:
    await api.create_policy()
    request = _asking(
        training_pb2.Teacher(policy_id="t"),
        training_pb2.Teacher(policy_id="u", version=0, group_ids=["group-1"]),
    )
    first = await api.wire("grpc").call("Update", request)
    again = await api.wire("http").call("Update", request)
    assert again.operation_id == first.operation_id
    (submission,) = api.engine.log
    command = submission.command
    assert isinstance(command, UpdateCommand)
    assert command.teachers == (Teacher("t"), Teacher("u", version=0, group_ids=["group-1"]))
    # Every rollout is run twice, once by its teacher.
    plain = await api.wire("grpc").call("Update", requests.update(seq=2))
    assert plain.seq == 2
    assert submission.num_tokens == 2 * api.engine.log[1].num_tokens


@pytest.mark.parametrize(
    ("field", "teachers", "number"),
    [
        ("loss.distillation.teachers[0].policy_id", [training_pb2.Teacher()], 4),
        (
            "loss.distillation.teachers[1].policy_id",
            [training_pb2.Teacher(policy_id="t"), training_pb2.Teacher(policy_id="No Id")],
            4,
        ),
        (
            "loss.distillation.teachers[0].version",
            [training_pb2.Teacher(policy_id="t", version=-1)],
            4,
        ),
        (
            "loss.distillation.teachers[0].group_ids[0]",
            [training_pb2.Teacher(policy_id="t", group_ids=["group-9"])],
            4,
        ),
        ("groups[0]", [training_pb2.Teacher(policy_id="t", group_ids=["group-1"])], 4),
        ("loss.distillation.num_teacher_tokens", [training_pb2.Teacher(policy_id="t")], 129),
        ("loss.distillation", [], 4),
    ],
)
async def test_teachers_that_cannot_be_asked_are_refused_by_field(
    api: Api, wire_name: str, field: str, teachers: list[training_pb2.Teacher], number: int
) -> None:
    await api.create_policy()
    refused = await refused_by(api.wire(wire_name), "Update", _asking(*teachers, number=number))
    assert (refused.detail.code, refused.detail.field) == ("INVALID_ARGUMENT", field)
    assert api.engine.log == []


async def test_what_rollouts_carry_is_not_asked(api: Api, wire_name: str) -> None:
    await api.create_policy()
    request = _asking(training_pb2.Teacher(policy_id="t"))
    request.batch.CopyFrom(_update().batch)
    refused = await refused_by(api.wire(wire_name), "Update", request)
    assert refused.detail.field == "loss.distillation.teachers"
    assert api.engine.log == []
