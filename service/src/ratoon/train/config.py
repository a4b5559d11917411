"""What a call says about the loss and the optimizer step, as sent. Imports no torch: the wires
import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LossKind(StrEnum):
    GRPO = "grpo"
    PPO_CLIP = "ppo_clip"
    DAPO = "dapo"
    DR_GRPO = "dr_grpo"
    GSPO = "gspo"
    CISPO = "cispo"
    SAPO = "sapo"
    IPO = "ipo"
    IMPORTANCE_SAMPLING = "importance_sampling"
    REINFORCE = "reinforce"
    CROSS_ENTROPY = "cross_entropy"


class AdvantageKind(StrEnum):
    GROUP_MEAN_STD = "group_mean_std"
    GROUP_MEAN = "group_mean"
    GROUP_MEAN_BATCH_STD = "group_mean_batch_std"
    LEAVE_ONE_OUT = "leave_one_out"
    NONE = "none"
    GIVEN = "given"


class OldLogprobsKind(StrEnum):
    SAMPLER = "sampler"
    GIVEN = "given"
    FROM_FORWARD = "from_forward"
    ON_POLICY = "on_policy"


class KlKind(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K1_PLUS = "k1_plus"
    K3_PLUS = "k3_plus"


class ReferenceKind(StrEnum):
    GIVEN = "given"
    FROZEN = "frozen"


class CorrectionMode(StrEnum):
    TRUNCATE = "truncate"
    MASK = "mask"


class CorrectionLevel(StrEnum):
    """Of one weight: a token's, the product over a rollout's trained tokens, its geometric mean."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GEOMETRIC = "geometric"


class TokenWeight(StrEnum):
    PER_TOKEN = "per_token"
    PER_SEQUENCE = "per_sequence"


class DivideBy(StrEnum):
    """Of a window; CONSTANT: its sequences times the step's `divide_constant`."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    GROUPS = "groups"
    CONSTANT = "constant"
    NONE = "none"


class SharedTokens(StrEnum):
    SUM = "sum"
    ONCE = "once"


class StalenessAction(StrEnum):
    REFUSE = "refuse"
    DROP = "drop"


class OptimizerStates(StrEnum):
    """What is kept of a bfloat16 policy beside its gradients (docs/decisions/0008).

    FP32: float32 master weights and moments. BF16_SPLIT: the same master as the bfloat16 weight and
    the 16 bits that it lacks; BF16_SPLIT_8BIT: the moments in 8 bits besides. BF16_STOCHASTIC and
    BF16_8BIT have no master and round weights stochastically: at RL's learning rates the rounding
    is larger than the update.
    """

    FP32 = "fp32"
    BF16_SPLIT = "bf16_split"
    BF16_SPLIT_8BIT = "bf16_split_8bit"
    BF16_STOCHASTIC = "bf16_stochastic"
    BF16_8BIT = "bf16_8bit"


class Shard(StrEnum):
    """What ranks share out beside their groups; each includes what is above it."""

    STATES = "states"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How a policy is spread over devices, a rank each.

    `shard` None: the first that fits. `sequence_ranks` of them run one group together, and divide
    `num_workers`; None: each plan chooses.
    """

    num_workers: int = 1
    shard: Shard | None = None
    sequence_ranks: int | None = None


ONE_DEVICE = ParallelLayout()


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLogprobs:
    """Source of the ratio's old log-probs; the operation id is for FROM_FORWARD, else empty."""

    kind: OldLogprobsKind
    forward_operation_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlConfig:
    """A KL term of the loss; `importance_weighted`: times the token's ratio to the old policy."""

    kind: KlKind
    coefficient: float
    reference: ReferenceKind
    importance_weighted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrection:
    """Weight exp(old - sampler) on the policy-gradient term; `low` is for MASK."""

    mode: CorrectionMode
    level: CorrectionLevel
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionMask:
    """Terms with exp(old - sampler) outside [low, high] have no policy gradient."""

    level: CorrectionLevel
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongFilter:
    """Truncated rollouts are dropped after advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """Soft overlong punishment added to the reward (DAPO, eq. 13), times `scale`; in tokens."""

    max_tokens: int
    buffer_tokens: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    max_versions: int
    action: StalenessAction


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRequest:
    """A loss as the caller sent it; `None` takes the loss's own default (see `resolve_loss`).

    `allow_truncated_sampling`: log-probs sampled under top-p or top-k may enter a ratio.
    """

    kind: LossKind
    advantage: AdvantageKind | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    tau_positive: float | None = None
    tau_negative: float | None = None
    old_logprobs: OldLogprobs | None = None
    kl: KlConfig | None = None
    entropy_coefficient: float = 0.0
    correction: RolloutCorrection | None = None
    correction_mask: CorrectionMask | None = None
    top_entropy_share: float | None = None
    token_weight: TokenWeight | None = None
    shared_tokens: SharedTokens = SharedTokens.SUM
    overlong: OverlongFilter | OverlongPenalty | None = None
    drop_zero_variance_groups: bool | None = None
    staleness: Staleness | None = None
    router_aux_loss_coefficient: float = 0.0
    allow_truncated_sampling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimRequest:
    """One optimizer step as the caller sent it; `None` takes the policy's or the loss's default.

    `max_grad_norm` None: 1, or no clipping where nothing divides the sums; 0: no clipping.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsGuard:
    """When a step is skipped though its numbers are finite, and when a policy is given up.

    A quantity above its limit skips the step; None: no limit. The gradient norm is that before
    clipping, the KLs are those of the report, in nats a token; one that a loss does not have is not
    looked at. `max_skipped_in_row` steps skipped for their numbers, one after the other, fail the
    policy; 0: never.
    """

    max_grad_norm_to_step: float | None = None
    max_reference_kl_to_step: float | None = None
    max_sampler_kl_to_step: float | None = None
    max_skipped_in_row: int = 5


DEFAULT_GUARD = NumericsGuard()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019) of one policy."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
