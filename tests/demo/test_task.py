"""The demo's task: what it rewards, and that evaluation is held out."""

from __future__ import annotations

import itertools

import pytest

from ratoon.demo.task import ALPHABET, WORD_LENGTH, CopyTask, Query, reward


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_evaluation_queries_are_never_trained_on(seed: int) -> None:
    task = CopyTask.create(seed)
    trained = {query.text for _ in range(200) for query in task.training_queries(16)}
    assert len({query.text for query in task.evaluation}) == len(task.evaluation) == 256
    assert trained.isdisjoint(task.held_out)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_best_constant_answer_scores_at_most_035(seed: int) -> None:
    evaluation = CopyTask.create(seed).evaluation
    scores = [
        sum(reward(query, "".join(word).encode()) for query in evaluation) / len(evaluation)
        for word in itertools.product(ALPHABET, repeat=WORD_LENGTH)
    ]
    assert max(scores) <= 0.35


def test_reward_is_the_mean_over_letters() -> None:
    query = Query(text="uuuuab=", answer="ab")
    assert reward(query, b"ab") == 1.0
    assert reward(query, b"aa") == pytest.approx(0.55)
    assert reward(query, b"ba") == pytest.approx(0.1)
    assert reward(query, b"a") == pytest.approx(0.5)
    assert reward(query, b"\xffb") == pytest.approx(0.5)
    assert reward(query, b"") == 0.0
