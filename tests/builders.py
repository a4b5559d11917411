"""Random and recorded grouped rollouts for the tests of every room. No torch.

Enter a random generator or recorded groups, leave `RawGroup`s or a `RolloutBatch`. Invariant:
the same generator state gives the same groups, and what is built is valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.raw import RawGroup, RawRollout, RawSegment, SamplerLogprobsKind
from ratoon.rollout.validate import BatchLimits, validate_groups
from tests.recorded import RecordedGroup, RecordedRollout

Tokens = Sequence[int] | NDArray[np.integer]

# flat: one prompt, equal, prefix, empty and one-token responses; tree: conversations that branch at
# three depths; single: N = 1; bare: P = 0, first token context.
Kind = Literal["flat", "tree", "single", "bare"]
KINDS: tuple[Kind, ...] = ("flat", "tree", "single", "bare")
# reward: one random per rollout; advantages: one random per response token; none: neither.
Outcome = Literal["reward", "advantages", "none"]


def limits(**changes: Any) -> BatchLimits:
    """Generous limits; byte tokens by default."""
    values: dict[str, Any] = {
        "vocab_size": 256,
        "max_sequence_tokens": 1 << 20,
        "max_groups": 1 << 12,
        "max_sequences": 1 << 16,
        "max_tokens": 1 << 24,
    }
    return BatchLimits(**{**values, **changes})


def rollout(
    response: Tokens | Sequence[tuple[Tokens, bool]],
    **changes: Any,
) -> RawRollout:
    """A rollout of response tokens, or of (tokens, trained) segments; `changes` are its fields."""
    is_segmented = len(response) > 0 and isinstance(response[0], tuple)
    segments: Any = response if is_segmented else [(response, True)]
    plain = RawRollout(
        segments=tuple(
            RawSegment(tokens=np.asarray(tokens, np.int32), trained=trained)
            for tokens, trained in segments
        ),
        loss_mask=None,
        sampler_logprobs=None,
        old_logprobs=None,
        reference_logprobs=None,
        reward=None,
        advantages=None,
        token_weights=None,
        temperature=1.0,
        sampler_logprobs_kind=SamplerLogprobsKind.PROCESSED,
        top_p=None,
        top_k=None,
        policy_version=None,
        truncated=False,
    )
    return replace(plain, **changes)


def group(
    prompt: Tokens,
    rollouts: Sequence[RawRollout],
    group_id: str = "group-0",
) -> RawGroup:
    return RawGroup(
        group_id=group_id, prompt=np.asarray(prompt, np.int32), rollouts=tuple(rollouts)
    )


def num_response_tokens(raw: RawRollout) -> int:
    return sum(len(segment.tokens) for segment in raw.segments)


def dressed(
    raw: RawRollout, rng: np.random.Generator, *, outcome: Outcome, with_logprobs: bool
) -> RawRollout:
    """`raw` with random log-probs in [-3, 0) and a random non-zero outcome."""
    length = num_response_tokens(raw)
    if with_logprobs:
        raw = replace(
            raw,
            sampler_logprobs=-rng.uniform(0.01, 3.0, length).astype(np.float32),
            old_logprobs=-rng.uniform(0.01, 3.0, length).astype(np.float32),
            reference_logprobs=-rng.uniform(0.01, 3.0, length).astype(np.float32),
        )
    if outcome == "reward":
        return replace(raw, reward=float(rng.normal()))
    if outcome == "advantages":
        return replace(raw, reward=None, advantages=rng.normal(size=length).astype(np.float32))
    return replace(raw, reward=None)


def taught(
    raw: RawRollout, rng: np.random.Generator, num_tokens: int, vocab_size: int
) -> RawRollout:
    """`raw` with so many random tokens at each response token, and log-probs by a teacher."""
    length = num_response_tokens(raw)
    ids = rng.permuted(np.tile(np.arange(vocab_size), (length, 1)), axis=1)[:, :num_tokens]
    # The last is the mass of the rest.
    mass = rng.dirichlet(np.full(num_tokens + 1, 2.0), length)[:, :num_tokens]
    logprobs = -np.sort(-np.log(mass), axis=1).astype(np.float32)
    return replace(raw, teacher_tokens=ids.astype(np.int32), teacher_logprobs=logprobs)


def judged(raw: RawRollout, rng: np.random.Generator) -> RawRollout:
    """`raw` with random returns, and old values on both sides of a clip."""
    length = num_response_tokens(raw)
    returns, old = rng.normal(size=(2, length)).astype(np.float32)
    return replace(raw, returns=returns, old_values=old / 2)


def random_groups(
    rng: np.random.Generator,
    *,
    num_groups: int = 4,
    kinds: Sequence[Kind] = KINDS,
    vocab_size: int = 64,
    max_prompt: int = 8,
    max_response: int = 10,
    max_rollouts: int = 6,
    outcome: Outcome = "reward",
    with_logprobs: bool = True,
    temperatures: Sequence[float] = (1.0,),
    policy_version: int | None = None,
    num_teacher_tokens: int = 0,
    with_returns: bool = False,
) -> list[RawGroup]:
    """Groups of `kinds` in turn; all but the bare ones begin with one system prompt.

    A group has one of `temperatures`, in turn. Some token of each kind is trained. With
    `num_teacher_tokens` every rollout has a teacher of its own, with `with_returns` what a critic
    is trained on.
    """
    system = rng.integers(0, vocab_size, max(1, max_prompt // 2))
    groups: list[RawGroup] = []
    for g in range(num_groups):
        kind = kinds[g % len(kinds)]
        tail = rng.integers(0, vocab_size, int(rng.integers(1, max_prompt + 1)))
        prompt = np.empty(0, np.int32) if kind == "bare" else np.concatenate([system, tail])
        num_rollouts = 1 if kind == "single" else int(rng.integers(2, max_rollouts + 1))
        if kind == "tree":
            bare = _random_tree(rng, vocab_size, max_response)
        elif kind == "bare":
            bare = _bare_rollouts(rng, num_rollouts, vocab_size, max_response)
        else:
            bare = _flat_rollouts(rng, num_rollouts, vocab_size, max_response)
        rollouts = [
            replace(
                dressed(raw, rng, outcome=outcome, with_logprobs=with_logprobs),
                temperature=temperatures[g % len(temperatures)],
                policy_version=policy_version,
            )
            for raw in bare
        ]
        if num_teacher_tokens:
            rollouts = [taught(raw, rng, num_teacher_tokens, vocab_size) for raw in rollouts]
        if with_returns:
            rollouts = [judged(raw, rng) for raw in rollouts]
        groups.append(group(prompt, rollouts, f"{kind}-{g}"))
    return groups


def random_batch(rng: np.random.Generator, *, vocab_size: int = 64, **knobs: Any) -> RolloutBatch:
    """`random_groups`, validated."""
    groups = random_groups(rng, vocab_size=vocab_size, **knobs)
    return validate_groups(groups, limits(vocab_size=vocab_size))


def _flat_rollouts(
    rng: np.random.Generator, num_rollouts: int, vocab_size: int, max_response: int
) -> list[RawRollout]:
    """The first is whole; then an equal one, a strict prefix, an empty and a one-token one."""
    first = rng.integers(0, vocab_size, int(rng.integers(2, max_response + 1)))
    responses = [first, first, first[: len(first) // 2], first[:0], first[-1:]][:num_rollouts]
    while len(responses) < num_rollouts:
        responses.append(rng.integers(0, vocab_size, int(rng.integers(1, max_response + 1))))
    return [rollout(responses[n]) for n in [0, *(1 + rng.permutation(num_rollouts - 1))]]


def _bare_rollouts(
    rng: np.random.Generator, num_rollouts: int, vocab_size: int, max_response: int
) -> list[RawRollout]:
    """Without a prompt: the first token is masked, or in a context segment."""
    rollouts: list[RawRollout] = []
    for n in range(num_rollouts):
        tokens = rng.integers(0, vocab_size, int(rng.integers(2, max_response + 1)))
        if n % 2:
            rollouts.append(rollout([(tokens[:1], False), (tokens[1:], True)]))
        else:
            rollouts.append(rollout(tokens, loss_mask=np.arange(len(tokens)) > 0))
    return rollouts


def _random_tree(rng: np.random.Generator, vocab_size: int, max_response: int) -> list[RawRollout]:
    """Conversations of 3 trained turns with tool outputs between, forking once or more at each."""
    longest = max(2, max_response // 5)

    def run() -> NDArray[np.int64]:
        return rng.integers(0, vocab_size, int(rng.integers(1, longest + 1)))

    paths: list[list[tuple[Any, bool]]] = [[]]
    for depth in range(3):
        grown: list[list[tuple[Any, bool]]] = []
        for place, path in enumerate(paths):
            # One path forks at every depth, the others by chance.
            for _ in range(2 if place == 0 else int(rng.integers(1, 3))):
                turn = [*path, (run(), True)]
                grown.append([*turn, (run(), False)] if depth < 2 else turn)
        paths = grown
    return [rollout(path) for path in paths]


def groups_from_jsonl(
    groups: Sequence[RecordedGroup], *, limit_tokens: int | None = None
) -> list[RawGroup]:
    """Recorded groups as byte tokens with their recorded rewards.

    The leading context segments that all rollouts of a group have in common are its prompt. A
    conversation of more than `limit_tokens` is cut there and marked truncated.
    """
    raw_groups: list[RawGroup] = []
    for recorded in groups:
        num_common = _num_common_context(recorded)
        parts = [segment.tokens for segment in recorded.rollouts[0].segments[:num_common]]
        prompt = np.concatenate([np.empty(0, np.int32), *parts])[:limit_tokens]
        room = None if limit_tokens is None else limit_tokens - len(prompt)
        raw_groups.append(
            group(
                prompt,
                [
                    _cut_rollout(conversation, num_common, room)
                    for conversation in recorded.rollouts
                ],
                recorded.group_id,
            )
        )
    return raw_groups


def _num_common_context(recorded: RecordedGroup) -> int:
    conversations = [conversation.segments for conversation in recorded.rollouts]
    num_common = 0
    for heads in zip(*conversations, strict=False):
        if heads[0].is_trained or any(head != heads[0] for head in heads):
            break
        num_common += 1
    return num_common


def _cut_rollout(recorded: RecordedRollout, num_common: int, room: int | None) -> RawRollout:
    """Segments after the common ones, at most `room` tokens of them."""
    parts: list[tuple[NDArray[np.int32], bool]] = []
    is_cut = False
    for segment in recorded.segments[num_common:]:
        tokens = segment.tokens
        if room is not None:
            is_cut |= len(tokens) > room
            tokens = tokens[:room]
            room -= len(tokens)
        parts.append((tokens, segment.is_trained))
    return rollout(parts, reward=recorded.reward, truncated=is_cut)


def batch_from_jsonl(
    groups: Sequence[RecordedGroup],
    *,
    limit_tokens: int | None = None,
    vocab_size: int = 256,
    rng: np.random.Generator | None = None,
    outcome: Outcome = "reward",
    with_logprobs: bool = False,
) -> RolloutBatch:
    """`groups_from_jsonl`, validated; with `rng`, random outcomes in place of recorded rewards."""
    raw_groups = groups_from_jsonl(groups, limit_tokens=limit_tokens)
    if rng is not None:
        raw_groups = [
            replace(
                raw_group,
                rollouts=tuple(
                    dressed(raw, rng, outcome=outcome, with_logprobs=with_logprobs)
                    for raw in raw_group.rollouts
                ),
            )
            for raw_group in raw_groups
        ]
    return validate_groups(raw_groups, limits(vocab_size=vocab_size))
