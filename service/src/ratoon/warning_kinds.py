"""Every kind of warning that a step's report may carry; docs/runbook.md has a heading for each."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from ratoon_proto.types import Offender, StepWarning


class WarningKind(StrEnum):
    """What a warning is about."""

    # The batch.
    BAD_ROLLOUTS = "bad_rollouts"
    TRUNCATED_SAMPLING = "truncated_sampling"
    OUTSIDE_SAMPLING_MASK = "outside_sampling_mask"
    RAW_LOGPROBS = "raw_logprobs"
    UNUSED_LOGPROBS = "unused_logprobs"
    KL_WITHOUT_GRADIENT = "kl_without_gradient"
    SINGLE_ROLLOUT_GROUP = "single_rollout_group"
    STALE_ON_POLICY = "stale_on_policy"
    FUTURE_VERSION = "future_version"
    NEEDLESS_FORWARD = "needless_forward"
    EQUAL_REWARDS = "equal_rewards"
    REWARD_OUTLIER = "reward_outlier"
    TRUNCATED_MOST = "truncated_most"
    UNMARKED_TRUNCATION = "unmarked_truncation"
    STALE_ROLLOUTS = "stale_rollouts"
    ALL_DROPPED = "all_dropped"
    ZERO_ADVANTAGES = "zero_advantages"
    # What the loss made of it.
    WRONG_LOGPROBS = "wrong_logprobs"
    DOMINANT_ROLLOUT = "dominant_rollout"
    ENTROPY_COLLAPSED = "entropy_collapsed"
    CLAMPED_RATIOS = "clamped_ratios"
    CLAMPED_KLS = "clamped_kls"
    CLAMPED_SAMPLER_GAPS = "clamped_sampler_gaps"
    CLIPPED_MOST = "clipped_most"
    SILENCED_ALL = "silenced_all"
    # The step.
    LARGE_STEP = "large_step"
    STEP_SKIPPED = "step_skipped"
    ROUNDED_UPDATES = "rounded_updates"
    SELF_CHECK_EXCEEDED = "self_check_exceeded"
    SELF_CHECK_NOT_RUN = "self_check_not_run"
    NOT_PUBLISHED = "not_published"
    # Receivers of its versions, and a start that went back.
    RECEIVER_LAG = "receiver_lag"
    ROLLED_BACK = "rolled_back"


def warn(kind: WarningKind, message: str, offenders: Iterable[Offender] = ()) -> StepWarning:
    """One warning of a report; `offenders` worst first, at most 8."""
    return StepWarning(kind=kind.value, message=message, offenders=tuple(offenders))
