"""What the figures of a pass and of a step say about a run: pure rules, each in plain words.

Enter the sums of a forward-backward with what it found of each rollout, or the report of a step;
leave warnings that name whom they are about. A rule has a limit that good runs stay well below
(docs/runbook.md says for each what it means), and none tells a cause that another rule has told.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ratoon.rollout.columns import newest_versions
from ratoon.rollout.offenders import offenders, worst_first
from ratoon.train.loss.ratios import MAX_GAP, MAX_K3, clamp_k3
from ratoon.train.loss.spec import Loss
from ratoon.train.loss.sums import LossSums
from ratoon.train.rollout_figures import FoundRollouts, Segments, sampler_gaps
from ratoon.train.step_probe import update_share
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto.types import (
    Offender,
    OldLogprobsKind,
    ReferenceKind,
    SkipReason,
    StepReport,
    StepWarning,
)

# Share of the terms of one sign; beyond it the clip decides more than the advantages.
_MAX_CLIPPED = 0.5
# Mean k3 in nats per token between sampler and trainer of the same version. Their numerics make
# 0.003 at most (bfloat16, fp8 in the sampler, experts); a temperature of 0.6 for 1 makes 0.01
# where tokens are all but equally likely, and more elsewhere.
MAX_SAMPLER_KL = 0.005
# From here on the log-probs are of something else, whatever the version: no staleness does it.
_FOREIGN_KL = 0.5
# Fewer tokens are too few for a mean, and fewer rollouts for a share.
_LEAST_TOKENS = 32
_LEAST_ROLLOUTS = 8
# Share that a single rollout has of a sum over all; and how its own mean gap stands out.
_MAX_SHARE = 0.5
_FAR_GAP = 8.0
# Nats per token; below it a policy has one answer.
_MIN_ENTROPY = 0.01
# Nats per token of weights before and after a step. A trust region is a hundredth; the first steps
# of AdamW on random weights make 0.15, a hundred times their learning rate 0.6 and more.
MAX_STEP_KL = 0.3
# update_norm / weight_norm where no KL could be measured.
_MAX_SHARE_OF_WEIGHTS = 0.5


def pass_warnings(found: FoundRollouts, sums: LossSums) -> tuple[StepWarning, ...]:
    """Warnings about what one forward-backward showed, beyond those of its batch."""
    if not found.prepared.batch.num_sequences:
        return ()
    logprobs = _logprob_warnings(found, sums)
    return (
        *logprobs,
        *_share_warnings(found),
        *_entropy_warnings(found.prepared.loss, sums),
        *_clamp_warnings(found, sums),
        *_clip_warnings(found, sums, has_advice=not logprobs),
        *_silence_warnings(found, sums),
    )


def step_warnings(report: StepReport) -> tuple[StepWarning, ...]:
    """Warnings about a step that was taken, by how far it moved the policy."""
    share, kl = update_share(report), report.step_kl
    if kl is not None and kl > MAX_STEP_KL:
        text = (
            f"the step is too large: it moved the policy by a KL of {kl:.3g} nats per token on "
            f"{report.step_kl_tokens} of the batch's own tokens, and the weights by "
            f"{100 * share:.2g}% of their norm; lower the learning rate, and go back to a "
            "checkpoint if rewards fall"
        )
        return (warn(WarningKind.LARGE_STEP, text),)
    if kl is None and share > _MAX_SHARE_OF_WEIGHTS:
        text = (
            f"the step is too large: it changed the weights by {100 * share:.2g}% of their norm; "
            "lower the learning rate, and go back to a checkpoint if rewards fall"
        )
        return (warn(WarningKind.LARGE_STEP, text),)
    return ()


def skip_offenders(found: FoundRollouts, reason: SkipReason) -> tuple[Offender, ...]:
    """Whom a skipped step is about: rollouts of its window's last forward-backward."""
    gradient_J = np.abs(found.columns_4J[1])
    if reason is SkipReason.SAMPLER_KL:
        return _worst_tokens(found, np.abs(_gaps(found)))
    if reason is SkipReason.REFERENCE_KL:
        return _worst_tokens(found, _reference_gaps(found))
    if reason in (SkipReason.NON_FINITE_LOSS, SkipReason.NON_FINITE_GRADIENT):
        # What is no number is the worst, and was no number before it was one here.
        is_run_J = ~np.isnan(found.columns_4J[0])
        gradient_J = np.where(is_run_J & np.isnan(gradient_J), np.inf, gradient_J)
    if reason in (
        SkipReason.NON_FINITE_LOSS,
        SkipReason.NON_FINITE_GRADIENT,
        SkipReason.NON_FINITE_STEP,
        SkipReason.GRADIENT_NORM,
    ):
        return _worst_tokens(found, gradient_J)
    return ()


def _gaps(found: FoundRollouts) -> NDArray[np.float64]:
    """log p - log p_sampler of counted tokens, float64 [J]; NaN where there is none."""
    prepared = found.prepared
    gap_J = sampler_gaps(prepared.batch, found.columns_4J[0])
    return np.where(prepared.columns.counted_J, gap_J, np.nan)


def _reference_gaps(found: FoundRollouts) -> NDArray[np.float64]:
    """|log p - log p_reference| where the reference was sent, float64 [J]; else NaN."""
    prepared = found.prepared
    kl, reference_J = prepared.loss.kl, prepared.batch.reference_logprobs
    if kl is None or kl.reference is not ReferenceKind.GIVEN or reference_J is None:
        return np.full(len(prepared.batch.loss_mask), np.nan)
    gap_J = np.abs(found.columns_4J[0] - reference_J)
    return np.where(prepared.columns.counted_J, gap_J, np.nan)


def _worst_tokens(
    found: FoundRollouts, value_J: NDArray[np.float64], above: float = -np.inf
) -> tuple[Offender, ...]:
    """The rollouts with the largest values above a bound, each by its worst token."""
    batch = found.prepared.batch
    tokens = np.flatnonzero(value_J > above)
    segments = Segments(tokens, batch.response_offsets)
    value_S, token_S = segments.largest(value_J)
    order = worst_first(value_S, segments.is_held_S)
    return offenders(batch, order, value_S=value_S, token_S=token_S)


def _k3(gap_J: NDArray[np.float64]) -> NDArray[np.float64]:
    """`ratios.clamp_k3` of gaps, float64 [J]."""
    return clamp_k3(torch.from_numpy(gap_J))[0].numpy()


def _logprob_warnings(found: FoundRollouts, sums: LossSums) -> list[StepWarning]:
    """Sampler log-probs that no numerics explain: of rollouts of this very version, or of any."""
    prepared, gap_J = found.prepared, _gaps(found)
    batch, version = prepared.batch, prepared.version
    oldest_S, newest_S = batch.policy_version, newest_versions(batch)
    lengths_S = np.diff(batch.response_offsets)
    is_own_S = (oldest_S == version) & (newest_S == version)
    for is_meant_S, limit in ((is_own_S, MAX_SAMPLER_KL), (oldest_S < 0, _FOREIGN_KL)):
        is_meant_J = np.repeat(is_meant_S, lengths_S) & ~np.isnan(gap_J)
        segments = Segments(np.flatnonzero(is_meant_J), batch.response_offsets)
        total_S, count_S = segments.sum(_k3(gap_J)), segments.sum(np.ones_like(gap_J))
        total, count = np.nansum(total_S), np.nansum(count_S)
        if count < _LEAST_TOKENS or total / count <= limit:
            continue
        worst = worst_first(total_S / count_S, segments.is_held_S)
        first, num = worst[0], len(worst)
        others = (total - total_S[first]) / max(1.0, count - count_S[first])
        if num >= _LEAST_ROLLOUTS and others <= limit:
            # The rollout alone is wrong: `_share_warnings` names it.
            continue
        kl = total / count
        whose = f"by version {version} itself" if is_meant_S is is_own_S else "by no named version"
        text = (
            f"the log-probs are wrong: sampler_logprobs of {num} rollouts sampled {whose} are "
            f"{kl:.3g} nats per token (k3) from the policy's own, and numerics make less than "
            f"{MAX_SAMPLER_KL:g}; {_cause(found, sums, is_meant_J, kl)}"
        )
        gap_S, token_S = segments.largest(np.abs(gap_J))
        named = offenders(batch, worst, value_S=gap_S, token_S=token_S)
        return [warn(WarningKind.WRONG_LOGPROBS, text, named)]
    return []


def _cause(found: FoundRollouts, sums: LossSums, is_meant_J: NDArray[np.bool_], kl: float) -> str:
    """What to look at first."""
    if kl >= _FOREIGN_KL:
        return (
            "they are of other tokens, another prompt (chat template, end of turn) or other "
            "weights than were named"
        )
    sampler_J = found.prepared.batch.sampler_logprobs
    assert sampler_J is not None, "there is a gap"
    # A sampler's own tokens estimate its entropy; the policy's is that of its distributions.
    sampler, own = -float(sampler_J[is_meant_J].mean(dtype=np.float64)), sums.entropy / sums.weight
    return (
        f"the sampler was {'more' if sampler < own else 'less'} certain than the policy (entropy "
        f"{sampler:.3g} against {own:.3g} nats): check its temperature against the one declared, "
        "top-p and top-k, and whether its log-probs are processed or raw"
    )


def _share_warnings(found: FoundRollouts) -> list[StepWarning]:
    """Single rollouts that make more than half of the sampler's gap, or of the gradient."""
    warnings: list[StepWarning] = []
    batch, figures = found.prepared.batch, found.figures
    gap_S = figures.gap_abs_mean_S
    has_gap_S = ~np.isnan(gap_S)
    if np.count_nonzero(has_gap_S) >= _LEAST_ROLLOUTS:
        tokens = Segments(np.flatnonzero(~np.isnan(_gaps(found))), batch.response_offsets)
        sum_S = np.where(has_gap_S, tokens.sum(np.abs(_gaps(found))), 0.0)
        worst = int(worst_first(sum_S, has_gap_S)[0])
        others = float(np.median(np.delete(gap_S, worst)[np.delete(has_gap_S, worst)]))
        share = float(sum_S[worst] / (sum_S.sum() or np.nan))
        if share > _MAX_SHARE and gap_S[worst] > max(_FAR_GAP * others, MAX_SAMPLER_KL):
            text = (
                f"one rollout makes {100 * share:.0f}% of the sampler's gap: its log-probs are "
                f"{gap_S[worst]:.3g} nats a token from the policy's, those of the others "
                f"{others:.2g}; they are of other tokens or another prompt"
            )
            named = offenders(
                batch, np.array([worst]), value_S=gap_S, token_S=figures.gap_max_token_S
            )
            warnings.append(warn(WarningKind.DOMINANT_ROLLOUT, text, named))
    weight_S = np.nan_to_num(figures.weight_share_S)
    weighs_S = weight_S > 0
    worst = int(np.argmax(weight_S))
    num_groups = len(np.unique(figures.group_S[weighs_S]))
    is_most = weight_S[worst] > _MAX_SHARE and num_groups > 1
    if is_most and np.count_nonzero(weighs_S) >= _LEAST_ROLLOUTS:
        advantage, length = figures.advantage_S[worst], figures.length_S[worst]
        text = (
            f"one rollout makes {100 * weight_S[worst]:.0f}% of the gradient: its mean advantage "
            f"is {advantage:.3g}, and it has {length} response tokens, where the median is "
            f"{np.median(figures.length_S):.0f}"
        )
        named = offenders(batch, np.array([worst]), value_S=weight_S)
        warnings.append(warn(WarningKind.DOMINANT_ROLLOUT, text, named))
    return warnings


def _entropy_warnings(loss: Loss, sums: LossSums) -> list[StepWarning]:
    """A policy that has one answer left; a loss without advantages may well aim at that."""
    if loss.advantage is None or sums.terms < _LEAST_TOKENS or not sums.weight:
        return []
    entropy = sums.entropy / sums.weight
    if not entropy < _MIN_ENTROPY:
        return []
    text = (
        f"the entropy is {entropy:.2g} nats per token: all rollouts of a group become the same, "
        "and nothing is left to compare; an entropy bonus, a wider clip_high or fewer passes over "
        "a batch keep it up"
    )
    return [warn(WarningKind.ENTROPY_COLLAPSED, text)]


def _clamp_warnings(found: FoundRollouts, sums: LossSums) -> list[StepWarning]:
    warnings: list[StepWarning] = []
    if sums.clamped_ratios:
        text = (
            f"{sums.clamped_ratios:.0f} log-ratios beyond {MAX_GAP:g} were clamped and have no "
            "gradient: their old log-probs are not of these tokens, or of another policy"
        )
        named = _worst_tokens(found, np.abs(found.columns_4J[2]), MAX_GAP)
        warnings.append(warn(WarningKind.CLAMPED_RATIOS, text, named))
    if sums.clamped_kls:
        text = (
            f"{sums.clamped_kls:.0f} KL terms were clamped (a gap beyond {MAX_GAP:g}, a k3 above "
            f"{MAX_K3:g}): the reference is far from the policy there"
        )
        named = _worst_tokens(found, _reference_gaps(found))
        warnings.append(warn(WarningKind.CLAMPED_KLS, text, named))
    if sums.clamped_sampler_gaps:
        text = (
            f"{sums.clamped_sampler_gaps:.0f} tokens have sampler log-probs so far from the "
            f"policy's (up to {sums.sampler_gap_max:.3g}) that sampler_kl is clamped"
        )
        named = _worst_tokens(found, np.abs(_gaps(found)))
        warnings.append(warn(WarningKind.CLAMPED_SAMPLER_GAPS, text, named))
    return warnings


def _clip_warnings(found: FoundRollouts, sums: LossSums, *, has_advice: bool) -> list[StepWarning]:
    """Clips that hold, and so silence, most terms of a sign.

    `has_advice`: the log-probs are not known to be wrong, which no other old log-probs mend.
    """
    loss = found.prepared.loss
    if not loss.objective.clip_is_by_sign:
        return []
    warnings: list[StepWarning] = []
    is_clipped_J = np.nan_to_num(found.columns_4J[3]) > 0
    advantage_J = found.prepared.columns.advantage_J
    for sign, clipped, terms, is_of_sign_J in (
        ("positive", sums.positive_clipped, sums.positive_terms, advantage_J > 0),
        ("negative", sums.negative_clipped, sums.negative_terms, advantage_J < 0),
    ):
        if not terms or clipped / terms <= _MAX_CLIPPED:
            continue
        text = clip_text(loss, sign, clipped / terms, has_advice=has_advice)
        is_held_J = is_clipped_J & is_of_sign_J
        named = _worst_tokens(found, np.where(is_held_J, np.abs(found.columns_4J[2]), np.nan))
        warnings.append(warn(WarningKind.CLIPPED_MOST, text, named))
    return warnings


def clip_text(loss: Loss, sign: str, share: float, *, has_advice: bool) -> str:
    """Message for a clip that holds this share of the terms whose advantage has a `sign`."""
    text = (
        f"the clip of {loss.kind} leaves {100 * share:.0f}% of the terms with a {sign} advantage "
        "without a gradient"
    )
    old = loss.old_logprobs
    if not has_advice or old is None or old.kind is not OldLogprobsKind.SAMPLER:
        return text
    return (
        f"{text}: the numerics of sampler and trainer differ by more than the clip allows, "
        "perhaps; take old_logprobs on_policy, or from_forward where a batch is several updates, "
        "and a correction for the difference"
    )


def _silence_warnings(found: FoundRollouts, sums: LossSums) -> list[StepWarning]:
    if not sums.terms or sums.silenced < sums.terms:
        return []
    text = f"masks and clips leave none of {sums.terms:.0f} tokens: the policy gradient is zero"
    named = _worst_tokens(found, np.abs(found.columns_4J[2]))
    return [warn(WarningKind.SILENCED_ALL, text, named)]
