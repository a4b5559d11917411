"""What the demo calls learned, and which faults of a service its second leg finds."""

from __future__ import annotations

import dataclasses
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ratoon.demo.loop import Loop
from ratoon.demo.task import ALPHABET, CopyTask, reward
from ratoon.demo.verdict import Round, Verdict, loss_faults
from tests.demo.trained_here import Fault, TrainedHere

NUM_ROUNDS = 1


def rounds_of(folder: Path, fault: Fault) -> list[Round]:
    client = TrainedHere(folder, fault=fault)
    loop = Loop(client=client, folder=folder, seed=0, shuffle_rewards=False)  # pyright: ignore[reportArgumentType]
    return list(islice(loop.asynchronous(), NUM_ROUNDS))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Round]:
    return rounds_of(tmp_path_factory.mktemp("sound"), Fault.NONE)


def verdict(rounds: list[Round], **changes: float) -> Verdict:
    learned = Verdict(
        first_reward=0.01,
        middle_reward=0.6,
        last_reward=0.9,
        num_updates=100,
        token_reduction=30.0,
        version=100,
        seconds=60.0,
        rounds=rounds,
    )
    return dataclasses.replace(learned, **changes)  # pyright: ignore[reportArgumentType]


def test_a_sound_service_has_no_faults(sound: list[Round]) -> None:
    assert verdict(sound).faults == ()
    assert verdict(sound).lines()[-1].startswith("demo: reward 0.010 -> 0.600 -> 0.900 in 100 ")


@pytest.mark.parametrize("letter", [0, 1])
def test_copying_one_letter_of_two_is_not_enough(sound: list[Round], letter: int) -> None:
    """A bound of 0.6 passed a policy that copied one letter and guessed the other."""
    rng = random.Random(0)

    def answer(wanted: str) -> bytes:
        letters = [rng.choice(ALPHABET), rng.choice(ALPHABET)]
        letters[letter] = wanted[letter]
        return "".join(letters).encode()

    evaluation = CopyTask.create(0).evaluation
    score = float(np.mean([reward(query, answer(query.answer)) for query in evaluation]))
    assert 0.63 < score < 0.70
    (fault,) = verdict(sound, last_reward=score).faults
    assert "below 0.75" in fault


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"first_reward": 0.5}, "nothing to learn"),
        ({"token_reduction": 1.0}, "rho"),
    ],
)
def test_what_was_not_learned_is_told(
    sound: list[Round], changes: dict[str, float], fault: str
) -> None:
    (found,) = verdict(sound, **changes).faults
    assert fault in found


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (Fault.NO_CLIP, ["nothing was clipped"]),
        (Fault.NO_CORRECTION, ["no correction was applied"]),
        (Fault.NO_STALENESS, ["0 and 0 versions stale"]),
        (Fault.ON_POLICY, ["second half's ratio is 1", "nothing was clipped"]),
        (Fault.OTHER_ROLLOUTS, ["first half's ratio is not 1", "weight is not"]),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Fault) else "",
)
def test_a_part_of_the_loss_that_does_not_act_is_found(
    tmp_path: Path, fault: Fault, found: list[str]
) -> None:
    """One Update a batch on fresh samples passed without any of these."""
    faults = loss_faults(rounds_of(tmp_path, fault))
    for text in found:
        assert any(text in each for each in faults), faults
