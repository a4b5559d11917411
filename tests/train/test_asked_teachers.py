"""What a loss asks of teachers, against a Hugging Face run of each rollout alone, in float64.

Teachers are other models, one with an adapter. Groups of two teachers share prefixes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ratoon.engine.files.results import read_answer, write_forward_output
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.questions import Answer, Question, answered_batch, asked_batch, questions
from ratoon_proto.types import (
    DistillationConfig,
    Divergence,
    FullTuning,
    KlConfig,
    KlKind,
    LoraTuning,
    LossConfig,
    LossKind,
    OldLogprobs,
    OldLogprobsKind,
    ReferenceKind,
    Teacher,
)
from tests.equivalence import paths_of
from tests.oracle import hf
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import Pair, check_gradients, make_pair, random_batch_near

NUM_TOKENS = 5


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Models of other weights than the student's."""
    root = tmp_path_factory.mktemp("teachers")
    found: dict[str, Pair] = {}
    for seed, (name, tuning) in enumerate(
        {"full": FullTuning(), "tenant": LoraTuning(rank=3, alpha=6.0)}.items(), 50
    ):
        torch.manual_seed(seed)
        folder = write_folder(root / name, "qwen3", seed=seed)
        found[name] = make_pair(folder, scratch=root / f"{name}-adapter", tuning=tuning)
    return found


def _loss(batch: RolloutBatch) -> LossConfig:
    """A group has the tenant, and all others the full model, which is the KL term's reference."""
    rest = Teacher("full")
    distillation = DistillationConfig(
        Divergence.FORWARD_KL,
        coefficient=0.7,
        teachers=[rest, Teacher("tenant", group_ids=batch.group_ids[1:2])],
        num_teacher_tokens=NUM_TOKENS,
    )
    return LossConfig(
        kind=LossKind.GRPO,
        old_logprobs=OldLogprobs(kind=OldLogprobsKind.GIVEN),
        distillation=distillation,
        kl=KlConfig(KlKind.K3, 0.3, ReferenceKind.TEACHER, teachers=[rest]),
    )


def _answer(teacher: Pair, question: Question, batch: RolloutBatch, folder: Path) -> Answer:
    """As the service has it: a Forward, and the file that it leaves."""
    asked = asked_batch(batch, question.asked_G)
    prepared = teacher.trainer.prepare_forward(asked, None, num_best=question.num_tokens)
    found = teacher.trainer.forward(prepared, with_entropy=False, use_reference=False)
    digest, _ = write_forward_output(
        folder, "p.1", asked, found.logprobs, None, is_reference=False, teacher_JK=found.teacher
    )
    return read_answer((folder / digest).read_bytes())


@pytest.mark.parametrize("micro_batch_tokens", [1, 30])
def test_gradients_are_those_of_each_rollout_alone_with_its_teacher(
    pair: Pair, teachers: dict[str, Pair], tmp_path: Path, micro_batch_tokens: int
) -> None:
    batch = random_batch_near(pair, 50, outcome="advantages", max_response=12)
    loss = _loss(batch)
    asked = questions(loss, batch)
    assert [each.field for each in asked] == [
        "loss.distillation.teachers[0]",
        "loss.distillation.teachers[1]",
        "loss.kl.teachers[0]",
    ]
    answers = [_answer(teachers[each.teacher.policy_id], each, batch, tmp_path) for each in asked]
    answered = answered_batch(batch, asked, answers)
    assert answered.teacher_tokens is not None
    assert answered.teacher_logprobs is not None
    assert answered.reference_logprobs is not None
    group_S = np.repeat(np.arange(batch.num_groups), np.diff(batch.group_offsets))
    for path, group, start in zip(
        paths_of(batch), group_S, batch.response_offsets[:-1], strict=True
    ):
        rows = start + path.trained
        if not len(rows):
            continue
        with torch.no_grad():
            model = teachers["tenant" if group == 1 else "full"].oracle.model
            best = hf.distributions(model, path).topk(NUM_TOKENS, dim=1)
            own = hf.logprobs(teachers["full"].oracle.model, path)[0]
        found = answered.teacher_tokens[rows], answered.teacher_logprobs[rows]
        np.testing.assert_array_equal(found[0], best.indices.numpy()[path.trained])
        # Batches hold float32.
        expected = best.values.numpy()[path.trained].astype(np.float32)
        np.testing.assert_allclose(found[1], expected, rtol=2e-7, atol=0)
        expected = own.numpy()[path.trained].astype(np.float32)
        np.testing.assert_allclose(answered.reference_logprobs[rows], expected, rtol=2e-7, atol=0)
    check_gradients(pair, answered, loss, micro_batch_tokens=micro_batch_tokens)


def test_an_answer_is_what_rollouts_would_carry(
    pair: Pair, teachers: dict[str, Pair], tmp_path: Path
) -> None:
    """Bit by bit, in whatever groups it is asked for."""
    batch = random_batch_near(pair, 51, outcome="advantages", max_response=12)
    teacher, everything = teachers["full"], np.ones(batch.num_groups, np.bool_)
    (whole,) = questions(
        LossConfig(
            kind=LossKind.DISTILLATION,
            distillation=DistillationConfig(
                Divergence.REVERSE_KL, teachers=[Teacher("full")], num_teacher_tokens=NUM_TOKENS
            ),
        ),
        batch,
    )
    np.testing.assert_array_equal(whole.asked_G, everything)
    answer = _answer(teacher, whole, batch, tmp_path)
    carried = answered_batch(batch, [whole], [answer])
    assert answer.tokens is not None
    assert answer.token_logprobs is not None
    np.testing.assert_array_equal(carried.teacher_tokens, answer.tokens)
    np.testing.assert_array_equal(
        carried.teacher_logprobs, answer.token_logprobs.astype(np.float32)
    )
    halves = [replace(whole, asked_G=everything & (np.arange(4) % 2 == odd)) for odd in (0, 1)]
    by_half = answered_batch(
        batch, halves, [_answer(teacher, half, batch, tmp_path) for half in halves]
    )
    np.testing.assert_array_equal(by_half.teacher_tokens, carried.teacher_tokens)
    assert by_half.teacher_logprobs is not None
    assert carried.teacher_logprobs is not None
    # Other groups are packed otherwise.
    np.testing.assert_allclose(
        by_half.teacher_logprobs, carried.teacher_logprobs, rtol=2e-7, atol=0
    )
