"""What the sums of a loss say that its caller should know, though it is no error."""

from __future__ import annotations

from ratoon.train.config import OldLogprobsKind
from ratoon.train.loss.clamp import MAX_GAP, MAX_K3
from ratoon.train.loss.spec import ClipObjective, Loss, SequenceClipObjective
from ratoon.train.loss.sums import LossSums

# Of the terms of one sign: beyond it the clip decides more than the advantages.
_MAX_CLIPPED = 0.5


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
    """Clips that hold most terms of a sign. One of cispo keeps the gradient."""
    if not isinstance(loss.objective, ClipObjective | SequenceClipObjective):
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
