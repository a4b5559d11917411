"""What a loss asks teachers about a batch, and the batch with their answers.

A teacher is asked about whole groups, each of which has one teacher in each list of the loss. It
sees tokens, masks and temperatures, nothing of how rollouts were sampled or rewarded. With its
answers a batch is what it would be if its rollouts had carried them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid, shown
from ratoon.rollout.bad import selected
from ratoon.rollout.batch import RolloutBatch, group_of_sequence, sent_field, sequence_lengths
from ratoon.rollout.raw import first_true
from ratoon.rollout.teacher import MAX_TEACHER_TOKENS
from ratoon_proto.types import LossConfig, ReferenceKind, Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one teacher is asked: its log-probs of the tokens of some groups, and its likeliest.

    Attributes:
        field: The teacher's path in the request.
        num_tokens: How many of its likeliest tokens it answers at each position; 0: none.
        is_reference: Whether its log-probs of the rollouts' own tokens are the KL term's.
        asked_G: The groups, bool [G].
    """

    teacher: Teacher
    field: str
    num_tokens: int
    is_reference: bool
    asked_G: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a teacher says of its groups' J response tokens, in their order.

    `logprobs`: [J], of the rollouts' own tokens. `tokens`: int32 [J, K], `token_logprobs`: [J, K];
    None, both: it was asked for none.
    """

    logprobs: NDArray[np.floating]
    tokens: NDArray[np.int32] | None
    token_logprobs: NDArray[np.floating] | None


def teachers_of(loss: LossConfig) -> tuple[Teacher, ...]:
    """All teachers that a loss names; a policy named twice is there twice."""
    distilled = () if loss.distillation is None else loss.distillation.teachers
    return distilled + (() if loss.kl is None else loss.kl.teachers)


def questions(loss: LossConfig, batch: RolloutBatch) -> tuple[Question, ...]:
    """What a loss asks about a batch; a policy that both terms ask about the same groups, once.

    Raises INVALID_ARGUMENT where a group has no teacher, or two, or is not of the batch.
    """
    found: dict[tuple[str, int | None, bytes], Question] = {}
    lists = (
        ("distillation", loss.distillation and loss.distillation.teachers),
        ("kl", loss.kl and loss.kl.teachers),
    )
    for name, teachers in lists:
        field, is_reference = f"loss.{name}.teachers", name == "kl"
        for index, (teacher, asked_G) in enumerate(_by_group(teachers or (), field, batch)):
            key = (teacher.policy_id, teacher.version, asked_G.tobytes())
            if key in found:
                found[key] = replace(found[key], is_reference=True)
            elif asked_G.any():
                distilled = None if is_reference else loss.distillation
                found[key] = Question(
                    teacher=teacher,
                    field=f"{field}[{index}]",
                    num_tokens=0 if distilled is None else distilled.num_teacher_tokens,
                    is_reference=is_reference,
                    asked_G=asked_G,
                )
    return tuple(found.values())


def check_teachers(loss: LossConfig, batch: RolloutBatch, vocab_size: int) -> None:
    """Check what a request says of teachers but for the policies. Raises INVALID_ARGUMENT."""
    distillation, kl = loss.distillation, loss.kl
    if distillation is not None:
        field, most = "loss.distillation.num_teacher_tokens", min(MAX_TEACHER_TOKENS, vocab_size)
        number = distillation.num_teacher_tokens
        if not distillation.teachers and number:
            raise invalid(field, number, "0 without loss.distillation.teachers")
        if distillation.teachers and not 1 <= number <= most:
            raise invalid(field, number, f"1 to {most}")
        if distillation.teachers and batch.teacher_tokens is not None:
            expected = "rollouts without teacher_tokens: the teachers are asked for them"
            raise invalid("loss.distillation.teachers", "rollouts that carry them", expected)
    if kl is not None:
        is_asked = kl.reference is ReferenceKind.TEACHER
        if bool(kl.teachers) is not is_asked:
            expected = "at least one" if is_asked else f"none: the reference is {kl.reference}"
            raise invalid("loss.kl.teachers", len(kl.teachers), expected)
        if is_asked and batch.reference_logprobs is not None:
            expected = "rollouts without reference_logprobs: the teachers are asked for them"
            raise invalid("loss.kl.teachers", "rollouts that carry them", expected)
    questions(loss, batch)


def asked_tokens(loss: LossConfig, batch: RolloutBatch) -> int:
    """Tokens that teachers run: prompt and response of each sequence, as often as one is asked."""
    length_S, group_S = sequence_lengths(batch), group_of_sequence(batch)
    asked = questions(loss, batch)
    return sum(int(length_S[question.asked_G[group_S]].sum()) for question in asked)


def asked_batch(batch: RolloutBatch, asked_G: NDArray[np.bool_]) -> RolloutBatch:
    """The batch of these groups that a teacher runs.

    Recorded experts are the student's, and are left out.
    """
    return replace(
        selected(batch, asked_G[group_of_sequence(batch)]),
        sampler_logprobs=None,
        old_logprobs=None,
        reference_logprobs=None,
        rewards=None,
        advantages=None,
        token_weights=None,
        returns=None,
        old_values=None,
        token_version=None,
        routed_experts=None,
        route_first=None,
        route_offsets=None,
        outside_mask=None,
        teacher_tokens=None,
        teacher_logprobs=None,
    )


def answered_batch(
    batch: RolloutBatch, asked: Sequence[Question], answers: Sequence[Answer]
) -> RolloutBatch:
    """`batch` with what each question was answered, in their order.

    Raises INVALID_ARGUMENT naming the rollout and the response token where an answer is not finite.
    """
    length_S, group_S = np.diff(batch.response_offsets), group_of_sequence(batch)
    reference_J = tokens_JK = logprobs_JK = None
    for question, answer in zip(asked, answers, strict=True):
        rows_J = np.flatnonzero(np.repeat(question.asked_G[group_S], length_S))
        trained_J = batch.loss_mask[rows_J]
        if question.is_reference:
            _check_finite(question, answer.logprobs[:, None], rows_J, batch)
            if reference_J is None:
                reference_J = np.zeros(len(batch.loss_mask), np.float32)
            reference_J[rows_J] = np.where(trained_J, answer.logprobs, 0.0)
        if answer.tokens is not None and answer.token_logprobs is not None:
            _check_finite(question, answer.token_logprobs, rows_J, batch)
            if tokens_JK is None or logprobs_JK is None:
                shape = len(batch.loss_mask), question.num_tokens
                tokens_JK, logprobs_JK = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
            tokens_JK[rows_J] = np.where(trained_J[:, None], answer.tokens, 0)
            logprobs_JK[rows_J] = np.where(trained_J[:, None], answer.token_logprobs, 0.0)
    if reference_J is not None:
        batch = replace(batch, reference_logprobs=reference_J)
    if tokens_JK is not None:
        batch = replace(batch, teacher_tokens=tokens_JK, teacher_logprobs=logprobs_JK)
    return batch


def _by_group(
    teachers: Sequence[Teacher], field: str, batch: RolloutBatch
) -> list[tuple[Teacher, NDArray[np.bool_]]]:
    """Each teacher of a list with its groups, bool [G]."""
    if not teachers:
        return []
    ids = frozenset(batch.group_ids if batch.sent_ids is None else batch.sent_ids)
    named: dict[str, int] = {}
    rest = -1
    for index, teacher in enumerate(teachers):
        if not teacher.group_ids:
            if rest >= 0:
                expected = f"ids of groups: {field}[{rest}] is asked about all that are not named"
                raise invalid(f"{field}[{index}].group_ids", "none", expected)
            rest = index
        for place, group_id in enumerate(teacher.group_ids):
            path = f"{field}[{index}].group_ids[{place}]"
            if group_id not in ids:
                raise invalid(path, shown(group_id), "the id of a group of this call")
            if group_id in named:
                raise invalid(path, shown(group_id), "a group that is not named before")
            named[group_id] = index
    chosen_G = np.array([named.get(group_id, rest) for group_id in batch.group_ids], np.int64)
    bare = first_true(chosen_G < 0)
    if bare is not None:
        sent = bare if batch.sent_group is None else int(batch.sent_group[bare])
        raise invalid(f"groups[{sent}]", "no teacher", f"a teacher of {field} for every group")
    return [(teacher, chosen_G == index) for index, teacher in enumerate(teachers)]


def _check_finite(
    question: Question,
    values_JK: NDArray[np.floating],
    rows_J: NDArray[np.int64],
    batch: RolloutBatch,
) -> None:
    is_bad_J = ~np.isfinite(values_JK).all(axis=1) & batch.loss_mask[rows_J]
    bad = first_true(is_bad_J)
    if bad is None:
        return
    row = int(rows_J[bad])
    sequence = int(np.searchsorted(batch.response_offsets, row, side="right")) - 1
    token = row - int(batch.response_offsets[sequence])
    got = f"a log-prob that is not finite at {sent_field(batch, sequence)}, response token {token}"
    raise invalid(question.field, f"{question.teacher.policy_id}, {got}", "finite log-probs")
