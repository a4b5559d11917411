"""The loss and the optimizer step of a call, as small typed values.

`None` means the service's default, which depends on the loss (docs/api.md); nothing is judged here.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

LossKind = Literal[
    "grpo",
    "ppo_clip",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "sapo",
    "ipo",
    "importance_sampling",
    "reinforce",
    "cross_entropy",
]
GivenLogprobs = Literal["sampler", "given", "on_policy"]
AdvantageKind = Literal[
    "group_mean_std", "group_mean", "group_mean_batch_std", "leave_one_out", "none", "given"
]
KlKind = Literal["k1", "k2", "k3", "k1_plus", "k3_plus"]
ReferenceKind = Literal["given", "frozen"]
CorrectionMode = Literal["truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
TokenWeight = Literal["per_token", "per_sequence"]
DivideBy = Literal["tokens", "sequences", "groups", "constant", "none"]
SharedTokens = Literal["sum", "once"]
StalenessAction = Literal["refuse", "drop"]


@dataclass(frozen=True, slots=True)
class FromForward:
    """Old log-probs are those of a Forward of the same rollouts, kept on the server."""

    operation_id: str


@dataclass(frozen=True, slots=True)
class Kl:
    """A KL term against log-probs sent along (`given`) or the policy's frozen reference.

    `importance_weighted` (k1 and k3): times the token's ratio, right off policy too.
    """

    kind: KlKind
    coefficient: float
    reference: ReferenceKind
    importance_weighted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Weight exp(old - sampler) on the policy-gradient term, truncated at or masked by bounds."""

    mode: CorrectionMode
    level: CorrectionLevel
    high: float
    low: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionMask:
    """No policy gradient where exp(old - sampler), at its level, is outside of the bounds."""

    level: CorrectionLevel
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class OverlongFilter:
    """Drop truncated rollouts, after advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """DAPO's soft punishment of length (its eq. 13), added to the reward."""

    max_tokens: int
    buffer_tokens: int
    scale: float


@dataclass(frozen=True, slots=True)
class Staleness:
    """What becomes of rollouts sampled more than `max_versions` versions ago."""

    max_versions: int
    action: StalenessAction


@dataclass(frozen=True, slots=True)
class Loss:
    """`Loss("grpo")` is the loss with its own defaults."""

    kind: LossKind
    _: KW_ONLY
    advantage: AdvantageKind | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    tau_positive: float | None = None
    tau_negative: float | None = None
    old_logprobs: GivenLogprobs | FromForward | None = None
    kl: Kl | None = None
    entropy_coefficient: float = 0.0
    correction: Correction | None = None
    correction_mask: CorrectionMask | None = None
    top_entropy_share: float | None = None
    token_weight: TokenWeight | None = None
    shared_tokens: SharedTokens | None = None
    overlong: OverlongFilter | OverlongPenalty | None = None
    drop_zero_variance_groups: bool | None = None
    staleness: Staleness | None = None
    # Of the loss that balances experts; a policy without experts refuses all but 0.
    router_aux_loss_coefficient: float = 0.0
    # Sampler log-probs renormalised by top-p or top-k may enter a ratio.
    allow_truncated_sampling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    """One optimizer step; schedules are the caller's. `max_grad_norm` 0: no clipping.

    `beta1`, `beta2`, `eps`: AdamW's for this step; None: the policy's. `tensor_grad_norms`: the
    report has norm and largest value of each tensor's gradient too; `changed_share`: and the share
    of bfloat16 weights that the step changed. `step_on_zero_gradient`: a gradient of zeros is
    stepped on, by moments and weight decay alone; without it the step is skipped.
    """

    learning_rate: float
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    divide_by: DivideBy | None = None
    divide_constant: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    tensor_grad_norms: bool = False
    changed_share: bool = False
    step_on_zero_gradient: bool = False
