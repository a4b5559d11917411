"""What a batch says before the model runs, as sums that add up over the calls of a window."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ratoon.rollout.advantages import zero_variance_groups
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.columns import versions_of_tokens
from ratoon.train.additive import Merged, Moments, largest, mean, total
from ratoon.train.prepare import Prepared


@dataclass(frozen=True, slots=True)
class BatchSums(Merged):
    """Sums over all rollouts as they were sent, except `advantages` and `staleness`."""

    rollouts: float = total()
    truncated: float = total()
    response_tokens: float = total()
    response_tokens_max: float = largest()
    rewards: Moments = field(default_factory=Moments)
    # Groups with rewards, and those of them whose rewards are all equal.
    rewarded_groups: float = total()
    flat_groups: float = total()
    # Over counted tokens.
    advantages: Moments = field(default_factory=Moments)
    dropped_stale: float = total()
    dropped_truncated: float = total()
    dropped_zero_variance: float = total()
    # Rollouts that count, but have no gradient and were not run.
    not_run: float = total()
    # Versions between sampling and now, over kept rollouts that say one that the policy has had.
    dated_rollouts: float = total()
    staleness: float = total()
    staleness_max: float = largest()
    # Versions since sampling by response token, each by the version that sampled it.
    dated_tokens: float = total()
    token_staleness: float = total()
    route_conflicts: float = total()

    def figures(self) -> dict[str, float | int | None]:
        """Fields of a `StepReport`, by name. A mean over nothing is None."""
        rewards, advantages = self.rewards, self.advantages
        return {
            "reward_mean": rewards.mean if rewards.count else None,
            "reward_std": rewards.std if rewards.count else None,
            "advantage_mean": advantages.mean if advantages.count else None,
            "advantage_std": advantages.std if advantages.count else None,
            "zero_variance_fraction": mean(self.flat_groups, self.rewarded_groups),
            "truncated_fraction": mean(self.truncated, self.rollouts) or 0.0,
            "response_length_mean": mean(self.response_tokens, self.rollouts) or 0.0,
            "response_length_max": int(self.response_tokens_max),
            "staleness_mean": mean(self.staleness, self.dated_rollouts),
            "staleness_max": int(self.staleness_max) if self.dated_rollouts else None,
            "token_staleness_mean": mean(self.token_staleness, self.dated_tokens),
            "dropped_stale": int(self.dropped_stale),
            "dropped_truncated": int(self.dropped_truncated),
            "dropped_zero_variance": int(self.dropped_zero_variance),
            "zero_advantage_sequences": int(self.not_run),
            "route_conflicts": int(self.route_conflicts),
        }


def of_batch(batch: RolloutBatch) -> BatchSums:
    lengths_S = np.diff(batch.response_offsets)
    sums = BatchSums(
        rollouts=batch.num_sequences,
        truncated=int(np.count_nonzero(batch.truncated)),
        response_tokens=int(lengths_S.sum()),
        response_tokens_max=int(lengths_S.max()),
    )
    if batch.rewards is None:
        return sums
    is_flat_G = zero_variance_groups(batch.rewards, batch.group_offsets)
    return replace(
        sums,
        rewards=Moments.of(batch.rewards),
        rewarded_groups=batch.num_groups,
        flat_groups=int(np.count_nonzero(is_flat_G)),
    )


def of_prepared(prepared: Prepared) -> BatchSums:
    """Sums of the batch, and of what its loss makes of it at the policy's version."""
    version = prepared.version
    batch, columns, selection = prepared.batch, prepared.columns, prepared.selection
    advantages = Moments()
    if prepared.loss.advantage is not None:
        advantages = Moments.of(columns.advantage_J[columns.counted_J])
    is_dated_S = selection.kept_S & (batch.policy_version >= 0) & (batch.policy_version <= version)
    age = version - batch.policy_version[is_dated_S]
    token_age = version - versions_of_tokens(batch, is_dated_S)
    token_age = token_age[token_age >= 0]
    return replace(
        of_batch(batch),
        advantages=advantages,
        dropped_stale=selection.dropped_stale,
        dropped_truncated=selection.dropped_truncated,
        dropped_zero_variance=selection.dropped_zero_variance,
        not_run=int(np.count_nonzero(prepared.not_run_S)),
        dated_rollouts=len(age),
        staleness=int(age.sum()),
        staleness_max=int(age.max(initial=0)),
        dated_tokens=len(token_age),
        token_staleness=int(token_age.sum()),
        route_conflicts=prepared.route_conflicts,
    )
