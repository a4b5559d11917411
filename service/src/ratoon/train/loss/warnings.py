"""What a caller should know of its batch and of the sums of its loss, though it is no error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.columns import newest_versions
from ratoon.train.loss.ratios import MAX_GAP, MAX_K3
from ratoon.train.loss.spec import Loss
from ratoon.train.loss.sums import LossSums
from ratoon_proto.types import AdvantageKind, KlKind, OldLogprobsKind, ReferenceKind

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
) -> tuple[str, ...]:
    """One text each, of a batch that a policy at `version` is to be trained on.

    `kept_S`: bool [S], the rollouts that were not dropped.
    """
    return (
        *_sampling_warnings(batch),
        *_unused_warnings(batch, loss),
        *_group_warnings(batch, loss),
        *_version_warnings(batch, loss, kept_S, version),
    )


def _sampling_warnings(batch: RolloutBatch) -> list[str]:
    found: list[str] = []
    cut_S = (batch.top_p < 1) | (batch.top_k > 0)
    if cut_S.any():
        found.append(
            f"{np.count_nonzero(cut_S)} rollouts were sampled with top_p or top_k: the trained "
            "distribution is not cut so"
        )
    if batch.sampler_logprobs is not None and batch.sampler_is_raw.any():
        found.append("raw sampler_logprobs are left out of the sampler mismatch")
    return found


def _unused_warnings(batch: RolloutBatch, loss: Loss) -> list[str]:
    """Columns that the loss does not use, and a KL term that pulls nowhere."""
    found: list[str] = []
    old, kl = loss.old_logprobs, loss.kl
    if batch.old_logprobs is not None and (old is None or old.kind is not OldLogprobsKind.GIVEN):
        found.append("old_logprobs were sent but loss.old_logprobs does not use them")
    if batch.reference_logprobs is not None and (
        kl is None or kl.reference is not ReferenceKind.GIVEN
    ):
        found.append("reference_logprobs were sent but loss.kl does not use them")
    if kl is not None and kl.kind is KlKind.K1 and not kl.importance_weighted and kl.coefficient:
        found.append(
            "the expected gradient of kl k1 is zero on policy: a loss of it is noise; take "
            "k1_plus, k3_plus, k2 or k3, or importance_weighted"
        )
    return found


def _group_warnings(batch: RolloutBatch, loss: Loss) -> list[str]:
    """Groups without another rollout to compare with."""
    num_single = int(np.count_nonzero(np.diff(batch.group_offsets) == 1))
    if loss.advantage not in _GROUP_BASELINES or not num_single:
        return []
    text = (
        f"{num_single} of {batch.num_groups} groups have a single rollout: {loss.advantage} has no "
        "baseline there, and the advantage is the reward itself"
    )
    return [text]


def _version_warnings(
    batch: RolloutBatch, loss: Loss, kept_S: NDArray[np.bool_], version: int
) -> list[str]:
    """Rollouts that other versions of the policy sampled than the loss takes them to be of."""
    found: list[str] = []
    num_kept = int(np.count_nonzero(kept_S))
    oldest_S, newest_S = batch.policy_version, newest_versions(batch)
    is_corrected = loss.correction is not None or loss.correction_mask is not None
    old = loss.old_logprobs
    stale = oldest_S[kept_S & (oldest_S >= 0) & (oldest_S < version)]
    if len(stale) and not is_corrected and old and old.kind is OldLogprobsKind.ON_POLICY:
        found.append(
            f"{len(stale)} of {num_kept} rollouts were sampled by versions {stale.min()} to "
            f"{stale.max()}, before version {version}, and loss.old_logprobs on_policy takes them "
            "for its own: their ratio is 1; a correction weighs the difference"
        )
    future = newest_S[kept_S & (newest_S > version)]
    if len(future):
        found.append(
            f"{len(future)} of {num_kept} rollouts name versions {future.min()} to {future.max()}, "
            f"and the policy is at {version}: it has not had them, or has gone back to a "
            "checkpoint; no figure of staleness counts them"
        )
    return found


def sum_warnings(loss: Loss, sums: LossSums) -> tuple[str, ...]:
    """One text each, of the sums of one forward-backward."""
    return (*_clamp_warnings(sums), *_clip_warnings(loss, sums), *_silence_warnings(sums))


def _clamp_warnings(sums: LossSums) -> list[str]:
    found: list[str] = []
    if sums.clamped_ratios:
        found.append(
            f"{sums.clamped_ratios:.0f} log-ratios beyond {MAX_GAP:g} were clamped and have no "
            "gradient: their old log-probs are not of these tokens, or of another policy"
        )
    if sums.clamped_kls:
        found.append(
            f"{sums.clamped_kls:.0f} KL terms were clamped (a gap beyond {MAX_GAP:g}, a k3 above "
            f"{MAX_K3:g}): the reference is far from the policy there"
        )
    if sums.clamped_sampler_gaps:
        found.append(
            f"{sums.clamped_sampler_gaps:.0f} tokens have sampler log-probs so far from the "
            f"policy's (up to {sums.sampler_gap_max:.3g}) that sampler_kl is clamped"
        )
    return found


def _clip_warnings(loss: Loss, sums: LossSums) -> list[str]:
    """Clips that hold, and so silence, most terms of a sign."""
    if not loss.objective.clip_is_by_sign:
        return []
    found: list[str] = []
    for sign, clipped, terms in (
        ("positive", sums.positive_clipped, sums.positive_terms),
        ("negative", sums.negative_clipped, sums.negative_terms),
    ):
        if terms and clipped / terms > _MAX_CLIPPED:
            found.append(
                f"the clip of {loss.kind} leaves {100 * clipped / terms:.0f}% of the terms with a "
                f"{sign} advantage without a gradient{_advice(loss)}"
            )
    return found


def _silence_warnings(sums: LossSums) -> list[str]:
    if not sums.terms or sums.silenced < sums.terms:
        return []
    return [f"masks and clips leave none of {sums.terms:.0f} tokens: the policy gradient is zero"]


def _advice(loss: Loss) -> str:
    old = loss.old_logprobs
    if old is None or old.kind is not OldLogprobsKind.SAMPLER:
        return ""
    return (
        ": the numerics of sampler and trainer differ by more than the clip allows, perhaps; take "
        "old_logprobs on_policy, or from_forward where a batch is several updates, and a "
        "correction for the difference"
    )
