"""Builders of grouped rollouts: arrays in the dtypes of the wire; the service judges values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ratoon_client.arguments import (
    FlagArray,
    FlagsLike,
    FloatsLike,
    IntsLike,
    RouteArray,
    RoutesLike,
    TokenArray,
    TokenRowsLike,
    ValueArray,
    ValueRowsLike,
    all_of,
    check_type,
    flag,
    flag_array,
    integer,
    matrix_of,
    number,
    route_array,
    token_array,
    value_array,
)
from ratoon_client.errors import InvalidArgumentError
from ratoon_proto.types import SamplerLogprobsKind, SamplerLogprobsKindName, VersionSpan

GivenT = TypeVar("GivenT")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of a multi-turn rollout; one that is not trained is context only."""

    tokens: IntsLike
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentSegment:
    """A `Segment` as it is sent: int32 [length]."""

    tokens: TokenArray
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMask:
    """The token ids that top-k and top-p left the sampler at each of R response tokens.

    Attributes:
        token_ids: Ids, those of one response token after those of the one before.
        lengths: How many ids are of each response token [R]; 0 of context tokens.
        untrain_outside: A token that is not among its own ids is not trained, and counted by the
            report; otherwise the service refuses its rollout.
    """

    token_ids: IntsLike
    lengths: IntsLike
    untrain_outside: bool = False

    @classmethod
    def of(cls, rows: Sequence[IntsLike], *, untrain_outside: bool = False) -> SamplingMask:
        """Make one of a list of ids for each response token, as vLLM and SGLang return it."""
        arrays = [token_array(f"sampling_mask[{t}]", row) for t, row in enumerate(rows)]
        return cls(
            token_ids=np.concatenate([np.empty(0, np.int32), *arrays]),
            lengths=np.array([len(row) for row in arrays], np.int32),
            untrain_outside=untrain_outside,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled continuation, as `rollout` makes it.

    R is the number of its response tokens, over all segments. `content` is int32 [R] or segments,
    the mask is bool [R], and the other per-token arrays are float32 [R].
    """

    content: TokenArray | tuple[ContentSegment, ...]
    outcome: float | ValueArray | None
    loss_mask: FlagArray | None
    sampler_logprobs: ValueArray | None
    old_logprobs: ValueArray | None
    reference_logprobs: ValueArray | None
    token_weights: ValueArray | None
    temperature: float | None
    sampler_logprobs_kind: SamplerLogprobsKind | SamplerLogprobsKindName | None
    top_p: float | None
    top_k: int | None
    policy_version: int | None
    truncated: bool
    version_spans: tuple[VersionSpan, ...] = ()
    # [tokens, layers with experts, experts per token], and the token of the first row.
    routed_experts: RouteArray | None = None
    routed_experts_start: int = 0
    sampling_mask: SamplingMask | None = None
    # [R, K].
    teacher_tokens: TokenArray | None = None
    teacher_logprobs: ValueArray | None = None
    returns: ValueArray | None = None
    old_values: ValueArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts of one prompt, int32 [P]; P may be 0."""

    group_id: str
    prompt: TokenArray
    rollouts: tuple[Rollout, ...]


def rollout(
    *,
    response: IntsLike | None = None,
    segments: Sequence[Segment] | None = None,
    reward: float | None = None,
    advantages: FloatsLike | None = None,
    loss_mask: FlagsLike | None = None,
    sampler_logprobs: FloatsLike | None = None,
    old_logprobs: FloatsLike | None = None,
    reference_logprobs: FloatsLike | None = None,
    token_weights: FloatsLike | None = None,
    temperature: float | None = None,
    sampler_logprobs_kind: SamplerLogprobsKind | SamplerLogprobsKindName | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    policy_version: int | None = None,
    truncated: bool = False,
    version_spans: Sequence[VersionSpan] = (),
    routed_experts: RoutesLike | None = None,
    routed_experts_start: int = 0,
    sampling_mask: SamplingMask | Sequence[IntsLike] | NDArray[np.integer[Any]] | None = None,
    teacher_tokens: TokenRowsLike | None = None,
    teacher_logprobs: ValueRowsLike | None = None,
    returns: FloatsLike | None = None,
    old_values: FloatsLike | None = None,
) -> Rollout:
    """Make a rollout of `response` or of `segments`, with a `reward` or ready `advantages`.

    Per-token arrays have one value for each of the R response tokens, context segments included.

    Args:
        response: Token ids [R].
        segments: Runs of tokens of a multi-turn rollout, in order, in place of `response`.
        reward: The rollout's reward.
        advantages: Ready-made advantages [R], in place of a reward.
        loss_mask: Which tokens are trained [R]. Default: all that are no context.
        sampler_logprobs: Log-probs by the sampler [R], in nats.
        old_logprobs: Log-probs for the ratio of `old_logprobs="given"` [R].
        reference_logprobs: Log-probs by the reference of a KL term [R].
        token_weights: Signed weights of `cross_entropy` [R]. Default: 1.
        temperature: The sampling temperature. Default: 1.
        sampler_logprobs_kind: Whether `sampler_logprobs` are `processed`, computed after the
            division by the temperature, or `raw`. Required at a temperature other than 1.
        top_p: The sampler's top-p, where it had one.
        top_k: The sampler's top-k, where it had one.
        policy_version: The version that sampled the rollout.
        truncated: Whether the response hit the length limit.
        version_spans: Which version sampled which tokens, where weights changed in flight; the
            first span begins at token 0.
        routed_experts: Which experts the sampler sent tokens of prompt and response to, integers
            [tokens, layers with experts, experts per token], from `routed_experts_start` on
            (vLLM's `CompletionOutput.routed_experts`).
        routed_experts_start: The token of the first row of `routed_experts`.
        sampling_mask: The token ids that top-k and top-p left the sampler, a list for each response
            token (vLLM's and SGLang's sampling mask): log-probs, entropy and gradients are over
            them.
        teacher_tokens: A teacher's likeliest tokens at each response token [R, K], K at most 128.
        teacher_logprobs: Their log-probs by the teacher [R, K], the largest first.
        returns: What the value head is to say at each token, as `gae` makes them [R].
        old_values: Its values when the returns were made [R], for a `ValueLoss` with a clip.

    Raises:
        InvalidArgumentError: An argument, which the error names, has no form on the wire.
    """

    def optional(field: str, given: GivenT | None, read: Callable[[str, GivenT], T]) -> T | None:
        return None if given is None else read(field, given)

    if reward is not None and advantages is not None:
        raise InvalidArgumentError("advantages", "reward and advantages", "one of them")
    outcome = optional("reward", reward, number)
    if outcome is None:
        outcome = optional("advantages", advantages, value_array)
    return Rollout(
        content=_content(response, segments),
        outcome=outcome,
        loss_mask=optional("loss_mask", loss_mask, flag_array),
        sampler_logprobs=optional("sampler_logprobs", sampler_logprobs, value_array),
        old_logprobs=optional("old_logprobs", old_logprobs, value_array),
        reference_logprobs=optional("reference_logprobs", reference_logprobs, value_array),
        token_weights=optional("token_weights", token_weights, value_array),
        temperature=optional("temperature", temperature, number),
        sampler_logprobs_kind=sampler_logprobs_kind,
        top_p=optional("top_p", top_p, number),
        top_k=optional("top_k", top_k, integer),
        policy_version=optional("policy_version", policy_version, integer),
        truncated=flag("truncated", truncated),
        version_spans=_spans(version_spans),
        routed_experts=optional("routed_experts", routed_experts, route_array),
        routed_experts_start=integer("routed_experts_start", routed_experts_start),
        sampling_mask=optional("sampling_mask", sampling_mask, _mask),
        teacher_tokens=optional(
            "teacher_tokens", teacher_tokens, lambda name, rows: matrix_of(name, rows, token_array)
        ),
        teacher_logprobs=optional(
            "teacher_logprobs",
            teacher_logprobs,
            lambda name, rows: matrix_of(name, rows, value_array),
        ),
        returns=optional("returns", returns, value_array),
        old_values=optional("old_values", old_values, value_array),
    )


def group(group_id: str, prompt: IntsLike, rollouts: Sequence[Rollout]) -> Group:
    """Make a group of rollouts that continue one prompt.

    Args:
        group_id: A name of the caller's choice.
        prompt: Token ids [P]; P may be 0.
        rollouts: The rollouts, as `rollout` makes them.

    Raises:
        InvalidArgumentError: An argument has no form on the wire.
    """
    check_type("group_id", group_id, str)
    return Group(
        group_id=group_id,
        prompt=token_array("prompt", prompt),
        rollouts=all_of("rollouts", rollouts, Rollout),
    )


def _content(
    response: IntsLike | None, segments: Sequence[Segment] | None
) -> TokenArray | tuple[ContentSegment, ...]:
    if response is not None and segments is None:
        return token_array("response", response)
    if segments is not None and response is None:
        return tuple(
            ContentSegment(
                tokens=token_array(f"segments[{index}].tokens", segment.tokens),
                trained=flag(f"segments[{index}].trained", segment.trained),
            )
            for index, segment in enumerate(all_of("segments", segments, Segment))
        )
    got = "neither" if response is None else "both"
    raise InvalidArgumentError("response", got, "one of response and segments")


def _mask(
    field: str, given: SamplingMask | Sequence[IntsLike] | NDArray[np.integer[Any]]
) -> SamplingMask:
    """A mask as it is sent: int32 ids and lengths."""
    if isinstance(given, Sequence | np.ndarray):
        return SamplingMask.of([*given])
    check_type(field, given, SamplingMask)
    return SamplingMask(
        token_ids=token_array(f"{field}.token_ids", given.token_ids),
        lengths=token_array(f"{field}.lengths", given.lengths),
        untrain_outside=flag(f"{field}.untrain_outside", given.untrain_outside),
    )


def _spans(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(
            first_token=integer(f"version_spans[{index}].first_token", span.first_token),
            version=integer(f"version_spans[{index}].version", span.version),
        )
        for index, span in enumerate(all_of("version_spans", spans, VersionSpan))
    )


# A rollout with the tokens of its prompt.
Row = tuple[tuple[int, ...], Rollout]


def groups_of(rows: Iterable[Row], *, name: str) -> list[Group]:
    """Groups of the rollouts of each prompt, whatever micro-batch and process they were in."""
    found: dict[tuple[int, ...], list[Rollout]] = {}
    for prompt, made in rows:
        found.setdefault(prompt, []).append(made)
    return [
        group(f"{name}-{index}", prompt, rollouts)
        for index, (prompt, rollouts) in enumerate(found.items())
    ]
