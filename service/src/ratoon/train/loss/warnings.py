"""What a caller should know of its batch, though it is no error; `train.verdicts` has what a pass
shows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.advantages import zero_variance_groups
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.columns import newest_versions
from ratoon.rollout.offenders import offenders, worst_first
from ratoon.rollout.sampling_masks import is_unmasked, outside_masks
from ratoon.train.loss.spec import Loss
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto.types import (
    AdvantageKind,
    KlKind,
    OldLogprobsKind,
    ReferenceKind,
    StepWarning,
)

# A reward so many times as far from the median as three quarters of all, or as the median or 1.
_FAR_REWARD = 1000.0
# Share of truncated rollouts above which the rewards of most are of nothing whole.
_MAX_TRUNCATED = 0.5
_LEAST_ROLLOUTS = 8
# Response tokens: a shorter longest response is no limit that cuts others.
_LEAST_LIMIT = 32
# Versions in the mean; asynchronous runs have 1 to 4.
_MAX_STALENESS = 8.0
GROUP_BASELINES = (
    AdvantageKind.GROUP_MEAN_STD,
    AdvantageKind.GROUP_MEAN,
    AdvantageKind.GROUP_MEAN_BATCH_STD,
    AdvantageKind.LEAVE_ONE_OUT,
)


def batch_warnings(
    batch: RolloutBatch, loss: Loss, *, kept_S: NDArray[np.bool_], version: int
) -> tuple[StepWarning, ...]:
    """Warnings about a batch that a policy at `version` is to be trained on.

    `kept_S`: bool [S], the rollouts that were not dropped.
    """
    return (
        *_sampling_warnings(batch),
        *_unused_warnings(batch, loss),
        *_group_warnings(batch, loss),
        *_reward_warnings(batch, loss),
        *_length_warnings(batch),
        *_version_warnings(batch, loss, kept_S, version),
    )


def _sampling_warnings(batch: RolloutBatch) -> list[StepWarning]:
    found: list[StepWarning] = []
    cut_S = is_unmasked(batch)
    if cut_S.any():
        text = (
            f"{np.count_nonzero(cut_S)} rollouts were sampled with top_p or top_k: the trained "
            "distribution is not cut so"
        )
        named = offenders(batch, np.flatnonzero(cut_S))
        found.append(warn(WarningKind.TRUNCATED_SAMPLING, text, named))
    outside_S, token_S = outside_masks(batch)
    if outside_S.any():
        text = (
            f"{outside_S.sum()} tokens are outside of their own sampling mask, and are not trained"
        )
        worst = worst_first(outside_S, outside_S > 0)
        named = offenders(batch, worst, value_S=outside_S, token_S=token_S)
        found.append(warn(WarningKind.OUTSIDE_SAMPLING_MASK, text, named))
    if batch.sampler_logprobs is not None and batch.sampler_is_raw.any():
        text = "raw sampler_logprobs are left out of the sampler mismatch"
        named = offenders(batch, np.flatnonzero(batch.sampler_is_raw))
        found.append(warn(WarningKind.RAW_LOGPROBS, text, named))
    return found


def _unused_warnings(batch: RolloutBatch, loss: Loss) -> list[StepWarning]:
    """Columns that the loss does not use, and a KL term that pulls nowhere."""
    found: list[StepWarning] = []
    old, kl = loss.old_logprobs, loss.kl
    if batch.old_logprobs is not None and (old is None or old.kind is not OldLogprobsKind.GIVEN):
        text = "old_logprobs were sent but loss.old_logprobs does not use them"
        found.append(warn(WarningKind.UNUSED_LOGPROBS, text))
    if batch.reference_logprobs is not None and (
        kl is None or kl.reference is not ReferenceKind.GIVEN
    ):
        text = "reference_logprobs were sent but loss.kl does not use them"
        found.append(warn(WarningKind.UNUSED_LOGPROBS, text))
    if batch.teacher_logprobs is not None and loss.distillation is None:
        text = "teacher_logprobs were sent but the loss does not distil"
        found.append(warn(WarningKind.UNUSED_LOGPROBS, text))
    if batch.returns is not None and loss.value is None:
        text = "returns were sent but the loss trains no value head"
        found.append(warn(WarningKind.UNUSED_LOGPROBS, text))
    if kl is not None and kl.kind is KlKind.K1 and not kl.importance_weighted and kl.coefficient:
        text = (
            "the expected gradient of kl k1 is zero on policy: a loss of it is noise; take "
            "k1_plus, k3_plus, k2 or k3, or importance_weighted"
        )
        found.append(warn(WarningKind.KL_WITHOUT_GRADIENT, text))
    return found


def _group_warnings(batch: RolloutBatch, loss: Loss) -> list[StepWarning]:
    """Groups without another rollout to compare with."""
    single = np.flatnonzero(np.diff(batch.group_offsets) == 1)
    if loss.advantage not in GROUP_BASELINES or not len(single):
        return []
    text = (
        f"{len(single)} of {batch.num_groups} groups have a single rollout: {loss.advantage} has "
        "no baseline there, and the advantage is the reward itself"
    )
    named = offenders(batch, batch.group_offsets[single], value_S=batch.rewards)
    return [warn(WarningKind.SINGLE_ROLLOUT_GROUP, text, named)]


def _reward_warnings(batch: RolloutBatch, loss: Loss) -> list[StepWarning]:
    """Rewards that cannot be compared: equal in each group, or one far beyond the others."""
    rewards_S = batch.rewards
    if rewards_S is None:
        return []
    found: list[StepWarning] = []
    has_several_G = np.diff(batch.group_offsets) > 1
    is_flat_G = zero_variance_groups(rewards_S, batch.group_offsets)
    if loss.advantage in GROUP_BASELINES and has_several_G.any() and is_flat_G[has_several_G].all():
        text = (
            f"the rewards within each of {np.count_nonzero(has_several_G)} groups are all equal: "
            "there is nothing to compare, and nothing to learn"
        )
        named = offenders(batch, batch.group_offsets[:-1][has_several_G], value_S=rewards_S)
        found.append(warn(WarningKind.EQUAL_REWARDS, text, named))
    middle = float(np.median(rewards_S))
    away_S = np.abs(rewards_S - middle)
    usual = max(1.0, abs(middle), float(np.quantile(away_S, 0.75)))
    is_far_S = away_S > _FAR_REWARD * usual
    if is_far_S.any():
        worst = worst_first(away_S, is_far_S)
        text = (
            f"{len(worst)} of {len(rewards_S)} rewards are more than {_FAR_REWARD:g} times as far "
            f"from the median ({middle:.3g}) as three quarters of all, the farthest "
            f"{rewards_S[worst[0]]:.3g}: the advantages of their groups are of them alone"
        )
        named = offenders(batch, worst, value_S=rewards_S)
        found.append(warn(WarningKind.REWARD_OUTLIER, text, named))
    return found


def _length_warnings(batch: RolloutBatch) -> list[StepWarning]:
    """Responses that were cut, whether marked as such or not."""
    lengths_S, num = np.diff(batch.response_offsets), batch.num_sequences
    cut = worst_first(lengths_S, batch.truncated)
    if num >= _LEAST_ROLLOUTS and len(cut) > _MAX_TRUNCATED * num:
        low, high = lengths_S[cut].min(), lengths_S[cut].max()
        at = f"{high}" if low == high else f"{low} to {high}"
        text = (
            f"{len(cut)} of {num} rollouts are truncated, at {at} response tokens: their rewards"
            " are of answers without an end"
        )
        return [warn(WarningKind.TRUNCATED_MOST, text, offenders(batch, cut, value_S=lengths_S))]
    longest = int(lengths_S.max())
    is_longest_S = lengths_S == longest
    if len(cut) or longest < _LEAST_LIMIT or np.count_nonzero(lengths_S > 0) < _LEAST_ROLLOUTS:
        return []
    # What shorter responses end with is the end of a turn.
    last_S = batch.response_tokens[batch.response_offsets[1:] - 1]
    ends = last_S[~is_longest_S & (lengths_S > 0)]
    if not len(ends):
        return []
    values, counts = np.unique(ends, return_counts=True)
    is_cut_S = is_longest_S & (last_S != values[counts.argmax()])
    if counts.max() < 0.9 * len(ends) or np.count_nonzero(is_cut_S) < max(2, 0.1 * num):
        return []
    text = (
        f"{np.count_nonzero(is_cut_S)} of {num} rollouts have exactly {longest} response tokens "
        f"and do not end as the others do (token {values[counts.argmax()]}): they look truncated, "
        "and none is marked so"
    )
    named = offenders(batch, np.flatnonzero(is_cut_S), value_S=lengths_S)
    return [warn(WarningKind.UNMARKED_TRUNCATION, text, named)]


def _version_warnings(
    batch: RolloutBatch, loss: Loss, kept_S: NDArray[np.bool_], version: int
) -> list[StepWarning]:
    """Rollouts that other versions of the policy sampled than the loss takes them to be of."""
    found: list[StepWarning] = []
    num_kept = int(np.count_nonzero(kept_S))
    oldest_S, newest_S = batch.policy_version, newest_versions(batch)
    is_corrected = loss.correction is not None or loss.correction_mask is not None
    old = loss.old_logprobs
    is_stale_S = kept_S & (oldest_S >= 0) & (oldest_S < version)
    stale = oldest_S[is_stale_S]
    if len(stale) and not is_corrected and old and old.kind is OldLogprobsKind.ON_POLICY:
        text = (
            f"{len(stale)} of {num_kept} rollouts were sampled by versions {stale.min()} to "
            f"{stale.max()}, before version {version}, and loss.old_logprobs on_policy takes them "
            "for its own: their ratio is 1; a correction weighs the difference"
        )
        named = offenders(batch, worst_first(-oldest_S, is_stale_S), value_S=oldest_S)
        found.append(warn(WarningKind.STALE_ON_POLICY, text, named))
    is_dated_S = kept_S & (oldest_S >= 0) & (oldest_S <= version)
    age_S = version - oldest_S
    if is_dated_S.any() and age_S[is_dated_S].mean() > _MAX_STALENESS:
        text = (
            f"rollouts are {age_S[is_dated_S].mean():.1f} versions old in the mean, and "
            f"{age_S[is_dated_S].max()} at most: the sampler falls behind, or its weights are not "
            "replaced"
        )
        named = offenders(batch, worst_first(age_S, is_stale_S), value_S=age_S)
        found.append(warn(WarningKind.STALE_ROLLOUTS, text, named))
    is_future_S = kept_S & (newest_S > version)
    future = newest_S[is_future_S]
    if len(future):
        text = (
            f"{len(future)} of {num_kept} rollouts name versions {future.min()} to {future.max()}, "
            f"and the policy is at {version}: it has not had them, or has gone back to a "
            "checkpoint; no figure of staleness counts them"
        )
        named = offenders(batch, worst_first(newest_S, is_future_S), value_S=newest_S)
        found.append(warn(WarningKind.FUTURE_VERSION, text, named))
    return found
