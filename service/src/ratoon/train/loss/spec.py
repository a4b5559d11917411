"""A loss and an optimizer step with every default filled in. Imports no torch.

An option that a loss does not have is not in its type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratoon.train.loss.kinds import Objective
from ratoon_proto.types import (
    AdamWConfig,
    AdvantageKind,
    CorrectionMask,
    Divergence,
    DivideBy,
    KlConfig,
    LossKind,
    OldLogprobs,
    OverlongFilter,
    OverlongPenalty,
    RolloutCorrection,
    SharedTokens,
    StalenessConfig,
    TokenWeight,
)

# Added to a norm that divides: the same guard as torch's clip_grad_norm_.
_CLIP_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
    """How a window's sums were weighted, and what its losses divide by unless told otherwise.

    `default_divide_by` None: the losses of the window disagree, so that the step must say it.
    """

    token_weight: TokenWeight
    default_divide_by: DivideBy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """A divergence from a teacher's K likeliest tokens, added to each term.

    `beta`: weight of the teacher in the mixture of the Jensen-Shannon divergence.
    """

    divergence: Divergence
    coefficient: float
    beta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """A critic's loss, added to each term. `clip`: how far from its old value a value is moved;
    None: however far."""

    coefficient: float
    clip: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss, complete. None stands for a term or source that this loss does not have."""

    kind: LossKind
    objective: Objective
    # None: cross_entropy, whose signed token weights stand in the advantage's place.
    advantage: AdvantageKind | None
    # None: no ratio and no correction.
    old_logprobs: OldLogprobs | None
    kl: KlConfig | None
    entropy_coefficient: float
    correction: RolloutCorrection | None
    correction_mask: CorrectionMask | None
    # Share of counted tokens, those of most entropy by the loss's Forward; None: all.
    top_entropy_share: float | None
    token_weight: TokenWeight
    default_divide_by: DivideBy
    shared_tokens: SharedTokens
    overlong: OverlongFilter | OverlongPenalty | None
    drop_zero_variance_groups: bool
    staleness: StalenessConfig | None
    # 0: no balance loss (`load_balance`).
    router_aux_loss_coefficient: float
    # Whether the report has every group.
    report_groups: bool
    # Whether sequences without a trained token are counted.
    count_untrained: bool = False
    distillation: Distillation | None = None
    value: ValueLoss | None = None

    @property
    def moves_logprobs(self) -> bool:
        """Whether log-probs or entropies have a gradient. A critic's alone moves only values."""
        terms = self.kl, self.distillation, self.entropy_coefficient or None
        return self.kind is not LossKind.VALUE or terms != (None, None, None)

    @property
    def normalisation(self) -> Normalisation:
        return Normalisation(
            token_weight=self.token_weight, default_divide_by=self.default_divide_by
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterDivisor:
    """Divide by the window's trained tokens, sequences or groups, times `times` > 0.

    `divide_by: constant` is the sequences times the constant (Dr. GRPO, arXiv 2503.20783).
    """

    counter: DivideBy
    times: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDivisor:
    """`divide_by: none`: the sums themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """One optimizer step. `max_grad_norm` infinity: no clipping.

    With `tensor_grad_norms` the gradient's norms are reported tensor by tensor, too, with
    `changed_share` how many bfloat16 weights it changes. With `step_on_zero_gradient` a gradient of
    zeros is stepped on, by moments and decay alone; with `allow_empty` also one of no token that
    counts, or of no forward-backward.
    """

    learning_rate: float
    weight_decay: float
    max_grad_norm: float
    divisor: CounterDivisor | NoDivisor
    tensor_grad_norms: bool = False
    changed_share: bool = False
    # AdamW of this step; None: the policy's.
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    step_on_zero_gradient: bool = False
    allow_empty: bool = False

    def clip_factor(self, norm: float) -> float:
        """What a gradient of this norm, after division, is multiplied by."""
        return min(1.0, self.max_grad_norm / (norm + _CLIP_EPSILON))

    def adamw(self, policy: AdamWConfig) -> AdamWConfig:
        """The policy's, but for what this step has its own of."""
        return replace(
            policy,
            beta1=policy.beta1 if self.beta1 is None else self.beta1,
            beta2=policy.beta2 if self.beta2 is None else self.beta2,
            eps=policy.eps if self.eps is None else self.eps,
            weight_decay=self.weight_decay,
        )
