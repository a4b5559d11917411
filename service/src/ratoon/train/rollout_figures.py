"""What a forward-backward found of each rollout and of each of its tokens, whatever the cut.

A pass keeps four numbers of every trained token on the device and copies them to the host once, at
its end. All figures are made of them there, in float64 and in request order, so that neither
micro-batches nor waves nor ranks decide any bit of them beyond those of the log-probs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.rollout.batch import RolloutBatch, sent_places
from ratoon.train.loss.compute import LossOutput
from ratoon.train.loss.ratios import MAX_GAP
from ratoon.train.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """What a pass found at n trained tokens, in any order; ranks may have a token in common.

    Floats are in the dtype of log-probs.
    """

    # int64 [n]: indexes among the batch's response tokens.
    token_N: NDArray[np.int64]
    # [4, n]: log-prob; gradient of the loss sum with respect to it; log-ratio before its clamp, NaN
    # where the loss has none; 1 where the clip holds the term. But for the log-prob they are of
    # counted tokens.
    values_4N: NDArray[np.floating]
    # int64 [a]: tokens whose log-probs are answered; [2, a]: log-prob and entropy.
    answered_A: NDArray[np.int64]
    answers_2A: NDArray[np.floating]

    @classmethod
    def over(cls, ranks: Sequence[TokenFigures]) -> TokenFigures:
        """Join the figures that ranks found of their tokens."""
        return cls(
            token_N=np.concatenate([found.token_N for found in ranks]),
            values_4N=np.concatenate([found.values_4N for found in ranks], axis=1),
            answered_A=np.concatenate([found.answered_A for found in ranks]),
            answers_2A=np.concatenate([found.answers_2A for found in ranks], axis=1),
        )

    def answers(self, num_tokens: int) -> NDArray[np.floating]:
        """Log-probs and entropies by response token, [2, J]; NaN where there are none."""
        answers_2J = np.full((2, num_tokens), np.nan, self.answers_2A.dtype)
        answers_2J[:, self.answered_A] = self.answers_2A
        return answers_2J

    def columns(self, num_tokens: int) -> NDArray[np.float64]:
        """The values by response token, float64 [4, J]; NaN where a token was not run."""
        columns_4J = np.full((4, num_tokens), np.nan)
        columns_4J[:, self.token_N] = self.values_4N
        return columns_4J


class TokenParts:
    """Collects what a pass finds, on the device; `on_host` ends it."""

    def __init__(self) -> None:
        self._tokens: list[NDArray[np.int64]] = []
        self._values: list[Tensor] = []
        self._answered: list[NDArray[np.int64]] = []
        self._answers: list[Tensor] = []

    def add(self, tokens: NDArray[np.int64], logprob_L: Tensor, output: LossOutput) -> None:
        """Add the terms of response tokens, int64 [L], from their loss; nothing waits for it."""
        self._tokens.append(tokens)
        self._values.append(_term_values(logprob_L, output))

    def answer(self, tokens: NDArray[np.int64], logprob_L: Tensor, entropy_L: Tensor) -> None:
        """Add the answers at response tokens, int64 [L]; nothing waits for them."""
        self._answered.append(tokens)
        self._answers.append(torch.stack([logprob_L.detach(), entropy_L.detach()]))

    def on_host(self) -> TokenFigures:
        """Copy all that was added; waits for the device."""
        token_N, values_4N = _joined(self._tokens, self._values, 4)
        answered_A, answers_2A = _joined(self._answered, self._answers, 2)
        return TokenFigures(
            token_N=token_N, values_4N=values_4N, answered_A=answered_A, answers_2A=answers_2A
        )


def _joined(
    tokens: list[NDArray[np.int64]], values: list[Tensor], num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
    """Tokens [n] and values [num_rows, n] on the host."""
    if not tokens:
        return np.empty(0, np.int64), np.empty((num_rows, 0), np.float32)
    return np.concatenate(tokens), torch.cat(values, dim=1).cpu().numpy()


@torch.no_grad()
def _term_values(logprob_L: Tensor, output: LossOutput) -> Tensor:
    """[4, L], as `TokenFigures` has them."""
    counted = output.counted
    values_4L = logprob_L.new_full((4, len(logprob_L)), float("nan"))
    values_4L[0], values_4L[1] = logprob_L, output.grad_logprob_L
    if counted.log_ratio_C is not None:
        values_4L[2, counted.index_C] = counted.log_ratio_C
    policy = counted.policy
    values_4L[3, counted.index_C] = (policy.clipped_low_L | policy.clipped_high_L).to(
        values_4L.dtype
    )
    return values_4L


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFigures:
    """Figures of all S rollouts as they were sent, dropped ones too, in request order.

    NaN, or -1 for an index, where there is none: what the model says is known of rollouts that were
    run, a gap where sampler log-probs are at the sampling temperature. Indexes of tokens are among
    the rollout's response tokens. Gaps and ratios are over counted tokens.
    """

    # int64 [S]: index of the group in the request, and of the rollout in the group.
    group_S: NDArray[np.int64]
    rollout_S: NDArray[np.int64]
    # float64 [S]: the reward as sent; mean advantage of the counted tokens, as the loss takes it.
    reward_S: NDArray[np.float64]
    advantage_S: NDArray[np.float64]
    # int64 [S]: response tokens.
    length_S: NDArray[np.int64]
    # float64 [S]: |log p - log p_sampler| in nats, mean and largest; int64 [S].
    gap_abs_mean_S: NDArray[np.float64]
    gap_max_S: NDArray[np.float64]
    gap_max_token_S: NDArray[np.int64]
    # float64 [S]: largest ratio of the loss, after its clamp; int64 [S].
    ratio_max_S: NDArray[np.float64]
    ratio_max_token_S: NDArray[np.int64]
    # float64 [S]: share of the tokens that the clip holds; share of the batch's sum of |gradient of
    # the loss with respect to a token's log-prob|.
    clipped_S: NDArray[np.float64]
    weight_share_S: NDArray[np.float64]


def rollout_figures(prepared: Prepared, columns_4J: NDArray[np.float64]) -> RolloutFigures:
    """Figures of every rollout of a forward-backward; `columns_4J` as of `TokenFigures`."""
    batch, columns, offsets = prepared.batch, prepared.columns, prepared.batch.response_offsets
    group_S, rollout_S = sent_places(batch)
    logprob_J, gradient_J, log_ratio_J, clipped_J = columns_4J
    gap_J = np.abs(sampler_gaps(batch, logprob_J))
    advantages = Segments(np.flatnonzero(columns.counted_J), offsets)
    run = Segments(np.flatnonzero(columns.counted_J & ~np.isnan(clipped_J)), offsets)
    gap_max_S, gap_max_token_S = run.largest(gap_J)
    ratio_max_S, ratio_max_token_S = run.largest(_ratios(log_ratio_J))
    weight_S = np.where(run.is_held_S, run.sum(np.abs(gradient_J)), 0.0)
    with np.errstate(invalid="ignore"):  # of an infinite weight
        weight_S /= weight_S.sum() or np.nan
    nothing_S = np.full(batch.num_sequences, np.nan)
    return RolloutFigures(
        group_S=group_S,
        rollout_S=rollout_S,
        reward_S=nothing_S if batch.rewards is None else batch.rewards,
        advantage_S=(
            nothing_S if prepared.loss.advantage is None else advantages.mean(columns.advantage_J)
        ),
        length_S=np.diff(offsets),
        gap_abs_mean_S=run.mean(gap_J),
        gap_max_S=gap_max_S,
        gap_max_token_S=gap_max_token_S,
        ratio_max_S=ratio_max_S,
        ratio_max_token_S=ratio_max_token_S,
        clipped_S=run.mean(clipped_J),
        weight_share_S=weight_S,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRollouts:
    """A forward-backward that has run, and what it found of its rollouts."""

    prepared: Prepared
    # float64 [4, J], as `TokenFigures.columns`.
    columns_4J: NDArray[np.float64]
    # [2, J], as `TokenFigures.answers`; None: nothing was asked for.
    answers_2J: NDArray[np.floating] | None
    figures: RolloutFigures

    @classmethod
    def of(cls, prepared: Prepared, found: TokenFigures) -> FoundRollouts:
        """`found`: by all ranks."""
        num_tokens = len(prepared.batch.loss_mask)
        columns_4J = found.columns(num_tokens)
        return cls(
            prepared=prepared,
            columns_4J=columns_4J,
            answers_2J=None if prepared.asked_J is None else found.answers(num_tokens),
            figures=rollout_figures(prepared, columns_4J),
        )

    def gaps(self) -> NDArray[np.float64]:
        """log p - log p_sampler of each response token; NaN where they do not compare."""
        return sampler_gaps(self.prepared.batch, self.columns_4J[0])

    def ratios(self) -> NDArray[np.float64]:
        """The loss's ratio at each response token; NaN where there is none."""
        return _ratios(self.columns_4J[2])

    def clipped(self) -> NDArray[np.bool_]:
        """Tokens that the clip holds."""
        return self.columns_4J[3] > 0


def sampler_gaps(batch: RolloutBatch, logprob_J: NDArray[np.float64]) -> NDArray[np.float64]:
    """log p - log p_sampler of each response token, float64 [J]; NaN where they do not compare."""
    if batch.sampler_logprobs is None:
        return np.full(len(logprob_J), np.nan)
    gap_J = logprob_J - batch.sampler_logprobs
    if batch.sampler_is_raw.any():
        gap_J[np.repeat(batch.sampler_is_raw, np.diff(batch.response_offsets))] = np.nan
    return gap_J


def _ratios(log_ratio_J: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ratios of the loss, after its clamp."""
    return np.exp(np.clip(log_ratio_J, -MAX_GAP, MAX_GAP))


class Segments:
    """Reduces values of some response tokens over each rollout that has one of them.

    A result is float64 [S], NaN for the other rollouts.
    """

    def __init__(self, tokens: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        """`tokens`: int64 [n], ascending indexes of response tokens; `offsets`: int64 [S + 1]."""
        bounds = np.searchsorted(tokens, offsets)
        self._offsets, self._tokens = offsets, tokens
        self._count_S = np.diff(bounds)
        # bool [S]: rollouts that have one.
        self.is_held_S = self._count_S > 0
        self._starts = bounds[:-1][self.is_held_S]

    def sum(self, value_J: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums over the tokens."""
        return self._reduced(np.add, value_J[self._tokens])

    def mean(self, value_J: NDArray[np.float64]) -> NDArray[np.float64]:
        """Means over the tokens."""
        return self.sum(value_J) / np.maximum(self._count_S, 1)

    def largest(
        self, value_J: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Largest values and the first token of each, int64 [S] among the rollout's; -1: none."""
        value_N = value_J[self._tokens]
        largest_S = self._reduced(np.maximum, value_N)
        token_S = np.full(len(self._count_S), -1)
        is_it_N = value_N == np.repeat(largest_S, self._count_S)
        # Backwards, so that the first of several stays.
        place = np.flatnonzero(is_it_N)[::-1]
        sequence = np.searchsorted(self._offsets, self._tokens[place], side="right") - 1
        token_S[sequence] = self._tokens[place] - self._offsets[sequence]
        return largest_S, token_S

    def _reduced(self, how: np.ufunc, value_N: NDArray[np.float64]) -> NDArray[np.float64]:
        reduced_S = np.full(len(self._count_S), np.nan)
        if len(self._starts):
            reduced_S[self.is_held_S] = how.reduceat(value_N, self._starts)
        return reduced_S
