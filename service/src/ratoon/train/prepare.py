"""Decides everything about a batch and a loss before the model runs, once. numpy only.

The order: advantages over each group as received, then drops, then counters over what remains; then
the plan, on which none of them depends.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ratoon.errors import invalid
from ratoon.planner.activation_plan import HeadLoad
from ratoon.planner.plan import share_as_planned
from ratoon.planner.planning import Planner, head_load
from ratoon.rollout import advantages as group_advantages
from ratoon.rollout.bad import bad_offenders, bad_rollouts, without
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.offenders import offenders
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import SortedPrefixes, route_conflicts, sort_sequences
from ratoon.rollout.raw import Fault
from ratoon.rollout.selection import (
    Counters,
    Selection,
    counters,
    first_owner_mask,
    fresh_sequences,
    group_keys,
    predicted_mask,
    select_sequences,
    trained_lengths,
    trained_mask,
)
from ratoon.train.loss.spec import Loss
from ratoon.train.loss.warnings import GROUP_BASELINES, batch_warnings
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto.types import (
    AdvantageKind,
    BadRolloutReason,
    LogprobsOf,
    LossKind,
    OldLogprobsKind,
    OverlongFilter,
    OverlongPenalty,
    SharedTokens,
    StalenessAction,
    StepWarning,
    TokenWeight,
)

_ADVANTAGES = {
    AdvantageKind.GROUP_MEAN_STD: group_advantages.group_mean_std,
    AdvantageKind.GROUP_MEAN: group_advantages.group_mean,
    AdvantageKind.GROUP_MEAN_BATCH_STD: group_advantages.group_mean_batch_std,
    AdvantageKind.LEAVE_ONE_OUT: group_advantages.leave_one_out,
    AdvantageKind.NONE: group_advantages.identity,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Per response token of the batch, [J] each."""

    # bool: trained tokens of sequences that stay; those of them whose term counts.
    trained_J: NDArray[np.bool_]
    counted_J: NDArray[np.bool_]
    # float64: 1, or 1 / (counted tokens of the sequence).
    weight_J: NDArray[np.float64]
    # float64: advantage, or the signed token weight of cross_entropy.
    advantage_J: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedForward:
    """A Forward, sorted and planned.

    Attributes:
        prefixes: The prefixes that `plan` shares.
        seconds: Time that sorting and planning took.
        num_best: How many of the likeliest tokens are answered at each trained token.
        with_teacher: Whether the log-probs of the rollouts' teacher tokens are.
    """

    batch: RolloutBatch
    prefixes: SortedPrefixes
    plan: UpdatePlan
    seconds: float
    num_best: int = 0
    with_teacher: bool = False

    @property
    def num_candidates(self) -> int:
        """How many candidates a token has, given or to be found; 0: none are asked for."""
        given_JK = self.candidates_JK
        return self.num_best if given_JK is None else given_JK.shape[1]

    @property
    def candidates_JK(self) -> NDArray[np.int32] | None:  # noqa: N802
        """Tokens beside its own whose log-probs each token's row gives, int32 [J, K]."""
        return self.batch.teacher_tokens if self.with_teacher else None

    def of_rank(self, rank: int) -> PreparedForward:
        """What one rank runs of it."""
        return replace(self, plan=self.plan.of_rank(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A forward-backward with every decision made; the journal keeps `plan` of it.

    Attributes:
        version: The policy's version that it was prepared for.
        old_logprobs_J: Old log-probs [J] of a `from_forward` loss; None for any other.
        prefixes: The prefixes that `plan` shares.
        group_keys: Keys of the groups, if they may come in parts in several calls; else empty.
        asked_J: bool [J], tokens whose log-probs are answered, trained or not; None: of none.
        not_run_S: bool [S], sequences that count but are in no micro-batch, having no gradient.
        route_conflicts: Tokens that sequences of the plan do not share only because their recorded
            routes differ.
        load: What the loss and sampling masks take of the LM head beside.
        seconds: Time that sorting, selecting, counting and planning took.
    """

    batch: RolloutBatch
    loss: Loss
    version: int
    old_logprobs_J: NDArray[np.floating] | None
    prefixes: SortedPrefixes
    selection: Selection
    columns: Columns
    counters: Counters
    group_keys: frozenset[bytes]
    asked_J: NDArray[np.bool_] | None
    not_run_S: NDArray[np.bool_]
    plan: UpdatePlan
    warnings: tuple[StepWarning, ...]
    route_conflicts: int
    seconds: float
    load: HeadLoad

    @property
    def term_mask_J(self) -> NDArray[np.bool_]:  # noqa: N802
        """Tokens that the pass has log-probs of, bool [J]: those asked for beside the trained."""
        trained_J = self.columns.trained_J
        return trained_J if self.asked_J is None else trained_J | self.asked_J

    @property
    def candidates_JK(self) -> NDArray[np.int32] | None:  # noqa: N802
        """The teacher's tokens, int32 [J, K], of a loss that distils."""
        return None if self.loss.distillation is None else self.batch.teacher_tokens

    def of_rank(self, rank: int) -> Prepared:
        """What one rank runs of it."""
        return replace(self, plan=self.plan.of_rank(rank))


def prepare(
    batch: RolloutBatch,
    loss: Loss,
    *,
    version: int,
    plan: UpdatePlan | Planner,
    old_logprobs_J: NDArray[np.floating] | None = None,
    entropy_J: NDArray[np.floating] | None = None,
    logprobs_of: LogprobsOf | None = None,
) -> Prepared:
    """Make every decision of a forward-backward before the model runs.

    Args:
        batch: S sequences of J response tokens.
        loss: The loss, resolved against `batch`.
        version: The policy's version.
        plan: The plan to run, made earlier from the same batch, loss and version, or what makes it.
        old_logprobs_J: Log-probs [J] of the Forward that a `from_forward` loss names.
        entropy_J: Entropies [J] of that Forward, for a loss with `top_entropy_share`.
        logprobs_of: Tokens whose log-probs are answered; with `all`, every sequence is run.

    Raises:
        RatoonError: STALE_ROLLOUTS if the loss refuses stale rollouts.
    """
    started = time.perf_counter()
    if loss.kind is LossKind.VALUE:
        # A critic's log-probs are no sampler's policy's: their difference means nothing.
        batch = replace(batch, sampler_logprobs=None)
    shared = sort_sequences(batch)
    selection = select(batch, loss, version)
    columns = _columns(batch, loss, shared, selection)
    asked_J, has_gradient_S = None, _has_gradient(batch, loss, columns)
    is_run_S = has_gradient_S
    if logprobs_of is LogprobsOf.TRAINED:
        asked_J = columns.trained_J
    elif logprobs_of is LogprobsOf.ALL:
        asked_J = predicted_mask(batch)
        is_run_S = has_gradient_S | (trained_lengths(batch, asked_J) > 0)
    teacher_JK = None if loss.distillation is None else batch.teacher_tokens
    load = head_load(batch, shared, num_targets=0 if teacher_JK is None else teacher_JK.shape[1])
    if isinstance(plan, Planner):
        plan = plan.carrying(load).plan(batch, shared, is_run_S)
    counted = counters(columns.counted_J, batch, selection.kept_S)
    if loss.count_untrained:
        sampled_S = select(batch, replace(loss, overlong=None), version).kept_S
        counted = replace(counted, sequences=int(np.count_nonzero(sampled_S)))
    comes_whole = loss.advantage not in (None, AdvantageKind.GIVEN)
    warnings = _bad_warnings(batch)
    if batch.num_sequences:
        warnings += batch_warnings(batch, loss, kept_S=selection.kept_S, version=version)
    run = run_sequences(plan)
    return Prepared(
        batch=batch,
        loss=loss,
        version=version,
        old_logprobs_J=old_logprobs_J,
        prefixes=share_as_planned(shared, plan.unshared),
        selection=selection,
        columns=_keep_top_entropy(columns, loss, entropy_J),
        counters=counted,
        group_keys=frozenset() if comes_whole else group_keys(batch, columns.counted_J),
        asked_J=asked_J,
        not_run_S=_not_run(batch, columns, run),
        plan=plan,
        warnings=(*warnings, *_warnings(batch, counted, has_gradient_S, warnings)),
        route_conflicts=route_conflicts(shared, run),
        seconds=time.perf_counter() - started,
        load=load,
    )


def prepare_forward(
    batch: RolloutBatch,
    plan: UpdatePlan | Planner,
    *,
    num_best: int = 0,
    with_teacher: bool = False,
) -> PreparedForward:
    """Sort and plan the sequences of a Forward: those of an update that drops nothing.

    Args:
        batch: The rollouts to run.
        plan: The plan to run, made earlier from the same batch, or what makes it.
        num_best: How many of the likeliest tokens to answer at each trained token.
        with_teacher: Whether to answer the log-probs of the rollouts' teacher tokens.
    """
    started = time.perf_counter()
    shared = sort_sequences(batch)
    if isinstance(plan, Planner):
        plan = plan.plan(batch, shared, has_trained_tokens(batch))
    return PreparedForward(
        batch=batch,
        prefixes=share_as_planned(shared, plan.unshared),
        plan=plan,
        seconds=time.perf_counter() - started,
        num_best=num_best,
        with_teacher=with_teacher,
    )


def _keep_top_entropy(
    columns: Columns, loss: Loss, entropy_J: NDArray[np.floating] | None
) -> Columns:
    """`columns` without the advantages of tokens below the loss's share of most entropy.

    The threshold is the entropy of the last token of that share, rounded up, among all counted
    tokens of the operation; tokens that tie with it stay. Tokens below it keep their place in
    counters, KL and entropy bonus, as in "Beyond the 80/20 rule" (arXiv 2506.01939, its objective
    for forking tokens: an indicator within the mean over all tokens).
    """
    share = loss.top_entropy_share
    if share is None or entropy_J is None or not columns.counted_J.any():
        return columns
    counted = entropy_J[columns.counted_J]
    # The share in decimal, as it was written: 0.1 of 30 are 3.
    num_kept = math.ceil(Fraction(repr(share)) * len(counted))
    least = np.partition(counted, len(counted) - num_kept)[len(counted) - num_kept]
    is_kept_J = columns.trained_J & (entropy_J >= least)
    return replace(columns, advantage_J=np.where(is_kept_J, columns.advantage_J, 0.0))


def without_bad(batch: RolloutBatch, loss: Loss, version: int) -> RolloutBatch:
    """`batch` without rollouts that the loss refuses as stale, and then without those that are left
    alone of their group by what was dropped, where advantages are made over groups.

    Raises `RatoonError` INVALID_ARGUMENT as `select_sequences`.
    """
    faults: dict[int, Fault] = {}
    staleness = loss.staleness
    if staleness is not None and staleness.action is StalenessAction.REFUSE:
        fresh_S = fresh_sequences(batch, version, staleness.max_versions, refuse_stale=False)
        faults = dict.fromkeys(np.flatnonzero(~fresh_S).tolist(), (BadRolloutReason.STALE, -1))
    batch = without(batch, faults)
    if batch.bad_rollouts is None or loss.advantage not in GROUP_BASELINES:
        return batch
    assert batch.sent_group is not None
    is_short_G = np.isin(batch.sent_group, batch.bad_rollouts[:, 0])
    alone_G = is_short_G & (np.diff(batch.group_offsets) == 1)
    alone = batch.group_offsets[:-1][alone_G].tolist()
    return without(batch, dict.fromkeys(alone, (BadRolloutReason.ALONE, -1)))


def select(batch: RolloutBatch, loss: Loss, version: int) -> Selection:
    """Drops for staleness, truncation and zero variance, as the loss says."""
    staleness = loss.staleness
    return select_sequences(
        batch,
        version=version,
        max_versions=None if staleness is None else staleness.max_versions,
        refuse_stale=staleness is not None and staleness.action is StalenessAction.REFUSE,
        drop_truncated=isinstance(loss.overlong, OverlongFilter),
        drop_zero_variance=loss.drop_zero_variance_groups,
    )


def has_trained_tokens(batch: RolloutBatch) -> NDArray[np.bool_]:
    """Sequences that a Forward runs, bool [S]."""
    return trained_lengths(batch, batch.loss_mask) > 0


def _has_gradient(batch: RolloutBatch, loss: Loss, columns: Columns) -> NDArray[np.bool_]:
    """Sequences that an update runs, bool [S]: the others' terms are zero whatever the model says.

    A term of the policy gradient is a multiple of its advantage; KL, distillation, value, entropy
    and balance are not, and a KL is measured also where its coefficient is 0.
    """
    has_gradient_J = columns.counted_J
    coefficients = (loss.entropy_coefficient, loss.router_aux_loss_coefficient)
    terms = loss.kl, loss.distillation, loss.value
    if terms == (None, None, None) and not any(coefficients):
        has_gradient_J = has_gradient_J & (columns.advantage_J != 0)
    return trained_lengths(batch, has_gradient_J) > 0


def run_sequences(plan: UpdatePlan) -> NDArray[np.int64]:
    """The sequences that a plan runs, in its order."""
    return np.array([s for part in plan.micro_batches for s in part.sequences], np.int64)


def _not_run(batch: RolloutBatch, columns: Columns, run: NDArray[np.int64]) -> NDArray[np.bool_]:
    not_run_S = trained_lengths(batch, columns.counted_J) > 0
    not_run_S[run] = False
    return not_run_S


def _columns(
    batch: RolloutBatch, loss: Loss, prefixes: SortedPrefixes, selection: Selection
) -> Columns:
    advantage_J = _advantages(batch, loss)
    trained_J = trained_mask(batch, selection.kept_S)
    counted_J = trained_J
    # Who owns a token that several sequences train is no question of what pays, nor of routes.
    if loss.shared_tokens is SharedTokens.ONCE:
        counted_J = first_owner_mask(batch, prefixes.by_tokens or prefixes, selection.kept_S)
    weight_J = np.ones(len(trained_J), np.float64)
    if loss.token_weight is TokenWeight.PER_SEQUENCE:
        lengths_S = trained_lengths(batch, counted_J)
        weight_S = 1.0 / np.maximum(lengths_S, 1)
        weight_J = np.repeat(weight_S, np.diff(batch.response_offsets))
    return Columns(
        trained_J=trained_J, counted_J=counted_J, weight_J=weight_J, advantage_J=advantage_J
    )


def _advantages(batch: RolloutBatch, loss: Loss) -> NDArray[np.float64]:
    """Advantage of every response token, over each group as received; float64 [J]."""
    if loss.advantage is None:
        if batch.token_weights is None:
            return np.ones(len(batch.loss_mask), np.float64)
        return batch.token_weights.astype(np.float64)
    if loss.advantage is AdvantageKind.GIVEN:
        assert batch.advantages is not None
        return batch.advantages.astype(np.float64)
    assert batch.rewards is not None
    rewards_S = batch.rewards
    lengths_S = np.diff(batch.response_offsets)
    if isinstance(loss.overlong, OverlongPenalty):
        rule = loss.overlong
        penalty_S = group_advantages.overlong_penalty(
            lengths_S, rule.max_tokens, rule.buffer_tokens
        )
        rewards_S = group_advantages.with_penalty(
            rewards_S, batch.group_offsets, rule.scale * penalty_S
        )
    advantage_S = _ADVANTAGES[loss.advantage](rewards_S, batch.group_offsets)
    return np.repeat(advantage_S, lengths_S)


def _bad_warnings(batch: RolloutBatch) -> tuple[StepWarning, ...]:
    """How many rollouts were dropped for what is wrong with them, and the first of them."""
    counts = Counter(bad.reason for bad in bad_rollouts(batch))
    if not counts:
        return ()
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
    total = counts.total() + batch.num_sequences
    text = f"{counts.total()} of {total} rollouts cannot be trained and were dropped: {reasons}"
    return (warn(WarningKind.BAD_ROLLOUTS, text, bad_offenders(batch)),)


def _warnings(
    batch: RolloutBatch,
    counted: Counters,
    has_gradient_S: NDArray[np.bool_],
    told: tuple[StepWarning, ...],
) -> tuple[StepWarning, ...]:
    """What drops and advantages leave to train on, where it is nothing and `told` has no cause."""
    every = offenders(batch, np.arange(batch.num_sequences), value_S=batch.rewards)
    if counted.tokens == 0:
        text = "every rollout was dropped: there is nothing to train on"
        return (warn(WarningKind.ALL_DROPPED, text, every),)
    is_told = any(each.kind == WarningKind.EQUAL_REWARDS for each in told)
    if not has_gradient_S.any() and not is_told:
        text = "every advantage is zero: nothing is trained, and the gradient is zero"
        return (warn(WarningKind.ZERO_ADVANTAGES, text, every),)
    return ()


def check_forward_logprobs(
    batch: RolloutBatch,
    loss: Loss,
    old_logprobs_J: NDArray[np.floating] | None,
    entropy_J: NDArray[np.floating] | None,
) -> None:
    """Check that the Forward that the loss names was of as many tokens as the batch has.

    Raises `RatoonError` INVALID_ARGUMENT naming the field.
    """
    old = loss.old_logprobs
    is_asked = old is not None and old.kind is OldLogprobsKind.FROM_FORWARD
    assert is_asked == (old_logprobs_J is not None), "from_forward log-probs come with their loss"
    needs_entropy = loss.top_entropy_share is not None
    assert needs_entropy == (entropy_J is not None), "entropies come with their loss"
    if old_logprobs_J is not None and old_logprobs_J.shape != batch.loss_mask.shape:
        raise invalid(
            "loss.old_logprobs.forward_operation_id",
            f"a Forward of {old_logprobs_J.size} response tokens",
            f"one of this batch's {len(batch.loss_mask)}",
        )
