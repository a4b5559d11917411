"""The demo's verifiable task: copy the marked word.

A prompt is a shared few-shot preamble followed by a query like `wyuzca=`; the right answer is the
word of the letters a to d before the equals sign. Evaluation queries are never drawn for training.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

ALPHABET = "abcd"
FILLERS = "uvwxyz"
FILLER_LENGTH = 4
WORD_LENGTH = 2
NUM_SHOTS = 4
NUM_EVALUATION = 256
# A wrong letter of the alphabet earns a little, so that a random policy has a gradient to follow.
# Answers are balanced, so one constant word earns 0.25 + 0.75 * 0.1 = 0.325.
WRONG_LETTER_REWARD = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Text is appended to the preamble; the answer has WORD_LENGTH letters of ALPHABET."""

    text: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTask:
    """The few-shot preamble, the queries kept for evaluation, and the training queries to come."""

    preamble: str
    evaluation: tuple[Query, ...]
    held_out: frozenset[str]
    training: Iterator[Query]

    @classmethod
    def create(cls, seed: int) -> CopyTask:
        # The generator must be repeatable, not secret.
        queries = _queries(random.Random(seed))  # nosec B311
        shots = list(itertools.islice(queries, NUM_SHOTS))
        evaluation: dict[str, Query] = {}
        while len(evaluation) < NUM_EVALUATION:
            query = next(queries)
            evaluation[query.text] = query
        return cls(
            preamble="".join(f"{shot.text}{shot.answer}\n" for shot in shots),
            evaluation=tuple(evaluation.values()),
            held_out=frozenset(evaluation),
            training=queries,
        )

    def training_queries(self, count: int) -> tuple[Query, ...]:
        """`count` queries, none of them held out."""
        allowed = (query for query in self.training if query.text not in self.held_out)
        return tuple(itertools.islice(allowed, count))


def _queries(rng: random.Random) -> Iterator[Query]:
    """Queries without end; every run of len(ALPHABET) ** WORD_LENGTH holds each answer once."""
    answers = ["".join(letters) for letters in itertools.product(ALPHABET, repeat=WORD_LENGTH)]
    while True:
        rng.shuffle(answers)
        for answer in answers:
            filler = "".join(rng.choice(FILLERS) for _ in range(FILLER_LENGTH))
            yield Query(text=f"{filler}{answer}=", answer=answer)


def reward(query: Query, response: bytes) -> float:
    """Mean over the answer's letters: 1 for the letter, WRONG_LETTER_REWARD for another, else 0."""
    letters = response.ljust(WORD_LENGTH, b"\0")[:WORD_LENGTH].decode("latin-1")
    return sum(map(_letter_reward, letters, query.answer)) / WORD_LENGTH


def _letter_reward(given: str, wanted: str) -> float:
    if given == wanted:
        return 1.0
    return WRONG_LETTER_REWARD if given in ALPHABET else 0.0


def tokens(text: str) -> list[int]:
    """Byte tokens of ASCII text."""
    return list(text.encode("ascii"))
