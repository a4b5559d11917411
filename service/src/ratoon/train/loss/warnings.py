"""What a caller should know of its batch and of the sums of its loss, though it is no error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.columns import newest_versions
from ratoon.rollout.offenders import offenders, worst_first
from ratoon.train.loss.ratios import MAX_GAP, MAX_K3
from ratoon.train.loss.spec import Loss
from ratoon.train.loss.sums import LossSums
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto.types import (
    AdvantageKind,
    KlKind,
    OldLogprobsKind,
    ReferenceKind,
    StepWarning,
)

# Share of the terms of one sign; beyond it the clip decides more than the advantages.
_MAX_CLIPPED = 0.5
_GROUP_BASELINES = (
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
        *_version_warnings(batch, loss, kept_S, version),
    )


def _sampling_warnings(batch: RolloutBatch) -> list[StepWarning]:
    found: list[StepWarning] = []
    cut_S = (batch.top_p < 1) | (batch.top_k > 0)
    if cut_S.any():
        text = (
            f"{np.count_nonzero(cut_S)} rollouts were sampled with top_p or top_k: the trained "
            "distribution is not cut so"
        )
        named = offenders(batch, np.flatnonzero(cut_S))
        found.append(warn(WarningKind.TRUNCATED_SAMPLING, text, named))
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
    if loss.advantage not in _GROUP_BASELINES or not len(single):
        return []
    text = (
        f"{len(single)} of {batch.num_groups} groups have a single rollout: {loss.advantage} has "
        "no baseline there, and the advantage is the reward itself"
    )
    named = offenders(batch, batch.group_offsets[single], value_S=batch.rewards)
    return [warn(WarningKind.SINGLE_ROLLOUT_GROUP, text, named)]


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


def sum_warnings(loss: Loss, sums: LossSums) -> tuple[StepWarning, ...]:
    """Warnings about the sums of one forward-backward."""
    return (*_clamp_warnings(sums), *_clip_warnings(loss, sums), *_silence_warnings(sums))


def _clamp_warnings(sums: LossSums) -> list[StepWarning]:
    found: list[StepWarning] = []
    if sums.clamped_ratios:
        text = (
            f"{sums.clamped_ratios:.0f} log-ratios beyond {MAX_GAP:g} were clamped and have no "
            "gradient: their old log-probs are not of these tokens, or of another policy"
        )
        found.append(warn(WarningKind.CLAMPED_RATIOS, text))
    if sums.clamped_kls:
        text = (
            f"{sums.clamped_kls:.0f} KL terms were clamped (a gap beyond {MAX_GAP:g}, a k3 above "
            f"{MAX_K3:g}): the reference is far from the policy there"
        )
        found.append(warn(WarningKind.CLAMPED_KLS, text))
    if sums.clamped_sampler_gaps:
        text = (
            f"{sums.clamped_sampler_gaps:.0f} tokens have sampler log-probs so far from the "
            f"policy's (up to {sums.sampler_gap_max:.3g}) that sampler_kl is clamped"
        )
        found.append(warn(WarningKind.CLAMPED_SAMPLER_GAPS, text))
    return found


def _clip_warnings(loss: Loss, sums: LossSums) -> list[StepWarning]:
    """Clips that hold, and so silence, most terms of a sign."""
    if not loss.objective.clip_is_by_sign:
        return []
    found: list[StepWarning] = []
    for sign, clipped, terms in (
        ("positive", sums.positive_clipped, sums.positive_terms),
        ("negative", sums.negative_clipped, sums.negative_terms),
    ):
        if terms and clipped / terms > _MAX_CLIPPED:
            text = (
                f"the clip of {loss.kind} leaves {100 * clipped / terms:.0f}% of the terms with a "
                f"{sign} advantage without a gradient{_advice(loss)}"
            )
            found.append(warn(WarningKind.CLIPPED_MOST, text))
    return found


def _silence_warnings(sums: LossSums) -> list[StepWarning]:
    if not sums.terms or sums.silenced < sums.terms:
        return []
    text = f"masks and clips leave none of {sums.terms:.0f} tokens: the policy gradient is zero"
    return [warn(WarningKind.SILENCED_ALL, text)]


def _advice(loss: Loss) -> str:
    old = loss.old_logprobs
    if old is None or old.kind is not OldLogprobsKind.SAMPLER:
        return ""
    return (
        ": the numerics of sampler and trainer differ by more than the clip allows, perhaps; take "
        "old_logprobs on_policy, or from_forward where a batch is several updates, and a "
        "correction for the difference"
    )
