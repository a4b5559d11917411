"""What teachers are asked: whole groups, one teacher each, and nothing of the rollouts' outcome."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.questions import (
    Answer,
    answered_batch,
    asked_batch,
    asked_tokens,
    check_teachers,
    questions,
)
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes
from ratoon.rollout.validate import validate_groups
from ratoon_proto.types import (
    DistillationConfig,
    Divergence,
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    ReferenceKind,
    Teacher,
)
from tests.builders import group, limits, rollout

LIMITS = limits(vocab_size=50)
DISTILLATION = "loss.distillation.teachers"


def _batch(**options: Any) -> RolloutBatch:
    groups = [
        group([7], [rollout([2, 3], reward=1.0), rollout([4], reward=0.0)], "a"),
        group([7, 8], [rollout([99], reward=1.0), rollout([5, 6, 7], reward=0.5)], "b"),
        group([9], [rollout([2], reward=0.5)], "c"),
    ]
    return validate_groups(groups, LIMITS, drops_bad=True, **options)


def _loss(
    *teachers: Teacher, number: int = 2, reference: tuple[Teacher, ...] = (), **options: Any
) -> LossConfig:
    distillation = DistillationConfig(
        Divergence.FORWARD_KL, teachers=teachers, num_teacher_tokens=number
    )
    kl = KlConfig(KlKind.K3, 0.1, ReferenceKind.TEACHER, teachers=reference)
    return LossConfig(
        kind=LossKind.GRPO, distillation=distillation, kl=kl if reference else None, **options
    )


def test_each_group_has_its_own_teacher() -> None:
    rest, own = Teacher("rest"), Teacher("own", version=3, group_ids=["b"])
    batch = _batch()
    asked = questions(_loss(rest, own, reference=(rest,)), batch)
    found = [(each.teacher, each.num_tokens, each.asked_G.tolist()) for each in asked]
    assert found == [
        (rest, 2, [True, False, True]),
        (own, 2, [False, True, False]),
        (rest, 0, [True, True, True]),
    ]
    # Prompts of one and two tokens, before each of their rollouts.
    assert asked_tokens(_loss(rest, own), batch) == (3 + 2 + 2) + 5
    assert asked_tokens(_loss(rest, own, reference=(rest,)), batch) == 2 * 12


def test_a_teacher_of_both_terms_is_asked_once() -> None:
    (asked,) = questions(_loss(Teacher("t"), reference=(Teacher("t"),)), _batch())
    assert (asked.num_tokens, asked.is_reference) == (2, True)


def test_a_teacher_of_dropped_groups_alone_is_not_asked() -> None:
    whole = validate_groups(
        [group([7], [rollout([2], reward=1.0)], "a"), group([7], [rollout([99], reward=1.0)], "b")],
        LIMITS,
        drops_bad=True,
    )
    asked = questions(_loss(Teacher("s", group_ids=["a"]), Teacher("t", group_ids=["b"])), whole)
    assert [each.teacher.policy_id for each in asked] == ["s"]


@pytest.mark.parametrize(
    ("teachers", "field"),
    [
        ((Teacher("s"), Teacher("t")), f"{DISTILLATION}[1].group_ids"),
        ((Teacher("s"), Teacher("t", group_ids=["d"])), f"{DISTILLATION}[1].group_ids[0]"),
        ((Teacher("s", group_ids=["a", "a"]),), f"{DISTILLATION}[0].group_ids[1]"),
        (
            (Teacher("s", group_ids=["a", "b", "c"]), Teacher("t", group_ids=["c"])),
            f"{DISTILLATION}[1].group_ids[0]",
        ),
        ((Teacher("s", group_ids=["a", "c"]),), "groups[1]"),
    ],
)
def test_a_group_without_one_teacher_is_refused(teachers: tuple[Teacher, ...], field: str) -> None:
    with pytest.raises(RatoonError) as caught:
        questions(_loss(*teachers), _batch())
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (_loss(Teacher("t"), number=0), "loss.distillation.num_teacher_tokens"),
        (_loss(Teacher("t"), number=51), "loss.distillation.num_teacher_tokens"),
        (_loss(number=3), "loss.distillation.num_teacher_tokens"),
        (
            replace(_loss(number=0), kl=KlConfig(KlKind.K3, 0.1, ReferenceKind.TEACHER)),
            "loss.kl.teachers",
        ),
        (
            replace(
                _loss(number=0),
                kl=KlConfig(KlKind.K3, 0.1, ReferenceKind.GIVEN, teachers=[Teacher("t")]),
            ),
            "loss.kl.teachers",
        ),
    ],
)
def test_what_the_terms_say_of_teachers_fits(loss: LossConfig, field: str) -> None:
    with pytest.raises(RatoonError) as caught:
        check_teachers(loss, _batch(), 50)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, field)


def test_what_rollouts_carry_is_not_asked() -> None:
    batch = _batch()
    columns_JK = np.zeros((len(batch.loss_mask), 2))
    carried = replace(
        batch,
        teacher_tokens=columns_JK.astype(np.int32),
        teacher_logprobs=columns_JK.astype(np.float32),
        reference_logprobs=columns_JK[:, 0].astype(np.float32),
    )
    for loss, field in (
        (_loss(Teacher("t")), DISTILLATION),
        (_loss(number=0, reference=(Teacher("t"),)), "loss.kl.teachers"),
    ):
        with pytest.raises(RatoonError) as caught:
            check_teachers(loss, carried, 50)
        assert caught.value.field == field


def test_a_teacher_sees_tokens_and_nothing_else() -> None:
    """Its batch is one of its own, though something was dropped of the student's."""
    batch = _batch()
    of_critic = np.ones(len(batch.loss_mask), np.float32)
    batch = replace(batch, returns=of_critic, old_values=of_critic)
    asked = asked_batch(batch, np.array([False, True, True]))
    again = batch_from_bytes(batch_to_bytes(asked))
    assert again.group_ids == ("b", "c")
    np.testing.assert_array_equal(again.prompt_tokens, [7, 8, 9])
    np.testing.assert_array_equal(again.response_tokens, [5, 6, 7, 2])
    said = {field.name for field in fields(again) if getattr(again, field.name) is not None}
    assert said == {
        "group_ids", "group_offsets", "prompt_tokens", "prompt_offsets", "response_tokens",
        "response_offsets", "loss_mask", "temperature", "sampler_is_raw", "truncated",
        "policy_version", "top_p", "top_k",
    }  # fmt: skip


def test_answers_go_to_their_groups() -> None:
    batch = _batch()
    mask = batch.loss_mask.copy()
    mask[1] = False
    batch = replace(batch, loss_mask=mask)
    asked = questions(_loss(Teacher("s"), Teacher("t", group_ids=["b"])), batch)
    answers = [
        Answer(
            logprobs=np.zeros(size),
            tokens=np.arange(10 * first, 10 * first + 2 * size, dtype=np.int32).reshape(size, 2),
            token_logprobs=np.full((size, 2), -float(first)),
        )
        for first, size in ((1, 4), (2, 3))
    ]
    found = answered_batch(batch, asked, answers)
    assert found.teacher_tokens is not None
    assert found.teacher_logprobs is not None
    assert found.reference_logprobs is None
    assert found.teacher_tokens[:, 0].tolist() == [10, 0, 14, 20, 22, 24, 16]
    assert found.teacher_logprobs[:, 1].tolist() == [-1, 0, -1, -2, -2, -2, -1]


def test_an_answer_that_is_not_finite_is_refused_by_position() -> None:
    batch = _batch()
    (asked,) = questions(_loss(Teacher("t"), reference=(Teacher("t"),)), batch)
    logprobs_JK = np.zeros((7, 2))
    logprobs_JK[4, 1] = np.nan
    answer = Answer(
        logprobs=np.zeros(7), tokens=np.zeros((7, 2), np.int32), token_logprobs=logprobs_JK
    )
    with pytest.raises(
        RatoonError, match=r"groups\[1\]\.rollouts\[1\], response token 1"
    ) as caught:
        answered_batch(batch, [asked], [answer])
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
