"""The losses: what each one is by default, and how its own options become its objective. No torch.

A new loss is a row of `LOSSES`. If no objective here is its own, it brings one, whose terms are
computed in `objectives`. Losses and steps are computed in float32, so a number that float32 does
not hold is refused by name, as one that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ratoon.errors import invalid
from ratoon.rollout.raw import MAX_FLOAT32
from ratoon_proto.types import AdvantageKind, DivideBy, LossConfig, LossKind, TokenWeight


def require(field: str, value: float, holds: bool, expected: str) -> None:
    """Raise INVALID_ARGUMENT naming `field` unless float32 holds `value`, and `holds`."""
    if not (abs(value) <= MAX_FLOAT32 and holds):
        raise invalid(field, value, expected)


def require_finite(field: str, value: float) -> None:
    require(field, value, True, "a finite float32")


def require_not_negative(field: str, value: float) -> None:
    require(field, value, value >= 0, "a finite float32, at least 0")


# The gate's slope times a clamped ratio, and 4 over the slope, are far within float32.
_MOST_TAU = 1e6

Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a loss makes of a term's ratio and advantage, and within which bounds.

    Attributes:
        options: Names of `_OPTIONS` that a request may set.
        has_clip: Whether reports count the terms that a clip holds by the sign of their advantage.
        clip_keeps_gradient: Whether a term that the clip holds still has a gradient.
        clip_is_by_sign: Whether each bound of the clip holds terms of one sign only.
        ratio_is_of_sequence: Whether the ratio is the whole sequence's; else it is the token's.
    """

    options: ClassVar[tuple[str, ...]] = ()
    has_clip: ClassVar[bool] = True
    clip_keeps_gradient: ClassVar[bool] = False
    clip_is_by_sign: ClassVar[bool] = False
    ratio_is_of_sequence: ClassVar[bool] = False

    @classmethod
    def resolve(cls, request: LossConfig, clip: Bounds) -> Objective:
        """The objective that a request's options make, `clip` being the default of the clip."""
        return cls()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipObjective(Objective):
    """The ratio is held in [1 - clip_low, 1 + clip_high].

    `dual_clip` bounds the ratio of negative advantages; infinity: off.
    """

    clip_low: float
    clip_high: float
    dual_clip: float

    options: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "dual_clip")
    clip_is_by_sign: ClassVar[bool] = True

    @classmethod
    def resolve(cls, request: LossConfig, clip: Bounds) -> ClipObjective:
        low, high = _ratio_bounds(request, clip)
        dual = request.dual_clip
        if dual is not None:
            expected = f"a finite float32 above {1 + high:g}, the clip"
            require("loss.dual_clip", dual, dual > 1 + high, expected)
        return cls(clip_low=low, clip_high=high, dual_clip=math.inf if dual is None else dual)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceClipObjective(Objective):
    """The sequence's ratio is held in [1 - clip_low, 1 + clip_high]."""

    clip_low: float
    clip_high: float

    options: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    clip_is_by_sign: ClassVar[bool] = True
    ratio_is_of_sequence: ClassVar[bool] = True

    @classmethod
    def resolve(cls, request: LossConfig, clip: Bounds) -> SequenceClipObjective:
        low, high = _ratio_bounds(request, clip)
        return cls(clip_low=low, clip_high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricClipObjective(Objective):
    """Log-ratios of tokens are held in [-most_down, most_up]; the ratio is the sequence's, of what
    is held."""

    most_down: float
    most_up: float

    options: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    clip_is_by_sign: ClassVar[bool] = True
    ratio_is_of_sequence: ClassVar[bool] = True

    @classmethod
    def resolve(cls, request: LossConfig, clip: Bounds) -> GeometricClipObjective:
        low, high = _bounds(request, clip)
        return cls(most_down=low, most_up=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoObjective(Objective):
    """The detached ratio is held in [ratio_low, ratio_high]."""

    ratio_low: float
    ratio_high: float

    options: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")
    clip_keeps_gradient: ClassVar[bool] = True

    @classmethod
    def resolve(cls, request: LossConfig, clip: Bounds) -> CispoObjective:
        """The clip bounds the ratio itself: without 1 it would hold what is on policy."""
        low, high = _bounds(request, clip)
        require("loss.clip_low", low, low <= 1, "at most 1, the ratio on policy")
        require("loss.clip_high", high, high > 1, "above 1, the ratio on policy")
        return cls(ratio_low=low, ratio_high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class IpoObjective(Objective):
    """How far a token's probability may have fallen and risen."""

    most_down: float
    most_up: float

    options: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    @classmethod
    def resolve(cls, request: LossConfig, clip: Bounds) -> IpoObjective:
        low, high = _bounds(request, clip)
        require("loss.clip_low", low, low <= 1, "at most 1, of a probability")
        require("loss.clip_high", high, high <= 1, "at most 1, of a probability")
        return cls(most_down=low, most_up=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoObjective(Objective):
    """Temperatures of the gate on the ratio, for positive advantages and for the others."""

    tau_positive: float
    tau_negative: float

    options: ClassVar[tuple[str, ...]] = ("tau_positive", "tau_negative")
    has_clip: ClassVar[bool] = False

    @classmethod
    def resolve(cls, request: LossConfig, clip: Bounds) -> SapoObjective:
        """Defaults are those of the paper's experiments: negative advantages are gated harder."""
        positive = 1.0 if request.tau_positive is None else request.tau_positive
        negative = 1.05 if request.tau_negative is None else request.tau_negative
        for name, tau in (("tau_positive", positive), ("tau_negative", negative)):
            expected = f"a number from {1 / _MOST_TAU:g} to {_MOST_TAU:g}"
            require(f"loss.{name}", tau, 1 / _MOST_TAU <= tau <= _MOST_TAU, expected)
        return cls(tau_positive=positive, tau_negative=negative)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioObjective(Objective):
    """The ratio as it is."""

    has_clip: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobObjective(Objective):
    """The log-prob in place of a ratio."""

    has_clip: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NoObjective(Objective):
    """No policy gradient: the loss is what is added to it."""

    has_clip: ClassVar[bool] = False


# An option of one loss or several -> what a loss lacks that does not take it.
_OPTIONS = {
    "clip_low": "clip",
    "clip_high": "clip",
    "dual_clip": "dual clip",
    "tau_positive": "gate",
    "tau_negative": "gate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDefinition:
    """One loss.

    Attributes:
        objective: What the loss makes of ratios and advantages.
        clip: Default of `clip_low` and `clip_high`; None: the loss has no clip.
        advantage: Default for rollouts with rewards; None: the loss has none.
        takes_weights: Whether signed token weights stand in the advantage's place.
        has_ratio: Whether old log-probs enter the terms.
        needs_old_logprobs: Whether the caller must name their source.
    """

    objective: type[Objective]
    token_weight: TokenWeight
    divide_by: DivideBy
    advantage: AdvantageKind | None
    clip: Bounds | None = None
    has_ratio: bool = True
    needs_old_logprobs: bool = False
    takes_weights: bool = False
    drop_zero_variance_groups: bool = False


def resolve_objective(request: LossConfig) -> Objective:
    """The objective that the request's options make.

    Raises:
        RatoonError: INVALID_ARGUMENT naming an option that the loss does not have, or whose value
            is out of bounds.
    """
    loss = LOSSES[request.kind]
    for option, lacking in _OPTIONS.items():
        value = getattr(request, option)
        if value is not None and option not in loss.objective.options:
            raise invalid(f"loss.{option}", value, f"absent: {request.kind} has no {lacking}")
    return loss.objective.resolve(request, loss.clip or (0.0, 0.0))


def _bounds(request: LossConfig, clip: Bounds) -> Bounds:
    low = clip[0] if request.clip_low is None else request.clip_low
    high = clip[1] if request.clip_high is None else request.clip_high
    require_not_negative("loss.clip_low", low)
    require_not_negative("loss.clip_high", high)
    return low, high


def _ratio_bounds(request: LossConfig, clip: Bounds) -> Bounds:
    low, high = _bounds(request, clip)
    require("loss.clip_low", low, low <= 1, "at most 1: a ratio is never negative")
    return low, high


LOSSES: Mapping[LossKind, LossDefinition] = {
    LossKind.GRPO: LossDefinition(
        objective=ClipObjective,
        clip=(0.2, 0.2),
        token_weight=TokenWeight.PER_SEQUENCE,
        divide_by=DivideBy.SEQUENCES,
        advantage=AdvantageKind.GROUP_MEAN_STD,
    ),
    LossKind.PPO_CLIP: LossDefinition(
        objective=ClipObjective,
        clip=(0.2, 0.2),
        token_weight=TokenWeight.PER_TOKEN,
        divide_by=DivideBy.TOKENS,
        advantage=AdvantageKind.GROUP_MEAN_STD,
    ),
    LossKind.DAPO: LossDefinition(
        objective=ClipObjective,
        clip=(0.2, 0.28),
        token_weight=TokenWeight.PER_TOKEN,
        divide_by=DivideBy.TOKENS,
        advantage=AdvantageKind.GROUP_MEAN_STD,
        drop_zero_variance_groups=True,
    ),
    LossKind.DR_GRPO: LossDefinition(
        objective=ClipObjective,
        clip=(0.2, 0.2),
        token_weight=TokenWeight.PER_TOKEN,
        divide_by=DivideBy.CONSTANT,
        advantage=AdvantageKind.GROUP_MEAN,
    ),
    LossKind.GSPO: LossDefinition(
        objective=SequenceClipObjective,
        clip=(3e-4, 4e-4),
        token_weight=TokenWeight.PER_SEQUENCE,
        divide_by=DivideBy.SEQUENCES,
        advantage=AdvantageKind.GROUP_MEAN_STD,
        needs_old_logprobs=True,
    ),
    LossKind.GMPO: LossDefinition(
        objective=GeometricClipObjective,
        clip=(0.4, 0.4),
        token_weight=TokenWeight.PER_SEQUENCE,
        divide_by=DivideBy.SEQUENCES,
        advantage=AdvantageKind.GROUP_MEAN_STD,
    ),
    LossKind.CISPO: LossDefinition(
        objective=CispoObjective,
        clip=(0.0, 5.0),
        token_weight=TokenWeight.PER_TOKEN,
        divide_by=DivideBy.TOKENS,
        advantage=AdvantageKind.GROUP_MEAN_STD,
    ),
    LossKind.SAPO: LossDefinition(
        objective=SapoObjective,
        token_weight=TokenWeight.PER_SEQUENCE,
        divide_by=DivideBy.SEQUENCES,
        advantage=AdvantageKind.GROUP_MEAN_STD,
    ),
    LossKind.IPO: LossDefinition(
        objective=IpoObjective,
        clip=(0.3, 0.3),
        token_weight=TokenWeight.PER_TOKEN,
        divide_by=DivideBy.TOKENS,
        advantage=AdvantageKind.GROUP_MEAN,
    ),
    LossKind.IMPORTANCE_SAMPLING: LossDefinition(
        objective=RatioObjective,
        token_weight=TokenWeight.PER_TOKEN,
        divide_by=DivideBy.NONE,
        advantage=AdvantageKind.GROUP_MEAN_STD,
    ),
    LossKind.REINFORCE: LossDefinition(
        objective=LogprobObjective,
        token_weight=TokenWeight.PER_TOKEN,
        divide_by=DivideBy.NONE,
        advantage=AdvantageKind.GROUP_MEAN_STD,
        has_ratio=False,
    ),
    LossKind.CROSS_ENTROPY: LossDefinition(
        objective=LogprobObjective,
        token_weight=TokenWeight.PER_TOKEN,
        divide_by=DivideBy.TOKENS,
        advantage=None,
        has_ratio=False,
        takes_weights=True,
    ),
    LossKind.DISTILLATION: LossDefinition(
        objective=NoObjective,
        token_weight=TokenWeight.PER_TOKEN,
        divide_by=DivideBy.TOKENS,
        advantage=None,
        has_ratio=False,
    ),
    LossKind.VALUE: LossDefinition(
        objective=NoObjective,
        token_weight=TokenWeight.PER_TOKEN,
        divide_by=DivideBy.TOKENS,
        advantage=None,
        has_ratio=False,
    ),
}
