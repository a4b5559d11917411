"""Values of `ratoon.v1`, made by scripts/proto_types.py from the .proto files: do not edit.

Times are in UTC. `ratoon_proto.records` reads values from messages, and `ratoon_proto.fill` writes
messages from values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from ratoon_proto import bases


class WeightKind(bases.WireEnum):
    """What a version's files are."""

    FULL = "full"
    """A model folder that transformers loads."""
    ADAPTER = "adapter"
    """An adapter folder that peft loads."""


class Sequencing(bases.WireEnum):
    """Who orders the calls to a policy."""

    CLIENT = "client"
    """The caller gives `seq`, contiguous from 1. The default."""
    SERVER = "server"
    """The caller gives `request_id`; the server assigns the next seq on arrival."""


SequencingName = Literal["client", "server"]


class Recovery(bases.WireEnum):
    """What the service does with operations past the last checkpoint after a failure."""

    REPLAY = "replay"
    """They are run again, to the same bits."""
    FAIL = "fail"
    """They fail, and their versions are never used again."""


RecoveryName = Literal["replay", "fail"]


class OnChangedNumerics(bases.WireEnum):
    """What a replay does on a device or with libraries whose numerics are others."""

    STOP = "stop"
    """The replay stops, and the policy is FAILED."""
    REBASE = "rebase"
    """The policy goes on from what the replay gives, and saves a checkpoint at once."""


OnChangedNumericsName = Literal["stop", "rebase"]


class PublishKind(bases.WireEnum):
    """When a version's weights are written for readers."""

    EVERY = "every"
    EVERY_N = "every_n"
    ON_REQUEST = "on_request"
    """Versions are published when their manifest is asked for."""


PublishKindName = Literal["every", "every_n", "on_request"]


class ModelDtype(bases.WireEnum):
    """The dtype of the weights on the device."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """Gradients are summed in float32; what else is kept is the server's worker.optimizer_states.
    """


ModelDtypeName = Literal["float32", "bfloat16"]


class ReferencePolicy(bases.WireEnum):
    """The frozen reference of a KL term, which the service computes."""

    NONE = "none"
    """There is none."""
    BASE = "base"
    """The weights of the preset or folder; for LoRA the adapter off."""


ReferencePolicyName = Literal["none", "base"]


class Shard(bases.WireEnum):
    """How the devices of one policy are sharded, beside their groups and the optimizer's states."""

    STATES = "states"
    """No more is sharded: each device has all weights and all gradients."""
    GRADIENTS = "gradients"
    """Gradients of the decoder's layers are sharded too; each device has all weights."""
    WEIGHTS = "weights"
    """Weights of the decoder's layers are sharded too: devices of one node read them from each
    other. With LoRA only the base's weights are sharded.
    """


ShardName = Literal["states", "gradients", "weights"]


class Decay(bases.WireEnum):
    """Which parameters weight decay applies to."""

    ALL = "all"
    MATRICES = "matrices"
    """All but norms and biases, which transformers' trainers tell by their names."""


DecayName = Literal["all", "matrices"]


class ScheduleKind(bases.WireEnum):
    """How a learning rate falls after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    """Half a cosine (Loshchilov and Hutter, 2017)."""


ScheduleKindName = Literal["constant", "linear", "cosine"]


class MuonAdjustLr(bases.WireEnum):
    """What Muon's update of a matrix of r rows and c columns is multiplied by, beside the learning
    rate; the names are torch.optim.Muon's.
    """

    ORIGINAL = "original"
    """sqrt(max(1, r / c))."""
    MATCH_RMS_ADAMW = "match_rms_adamw"
    """0.2 sqrt(max(r, c)), with which an update is as large as one of AdamW (arXiv 2502.16982)."""


MuonAdjustLrName = Literal["original", "match_rms_adamw"]


class KeepRollouts(bases.WireEnum):
    """Which rollouts of each ForwardBackward and Update are kept on disk, for ListRollouts and
    GetRollout.
    """

    NONE = "none"
    WORST = "worst"
    """Rollouts that warnings name, and the 16 worst each by sampler gap, by |advantage| times
    length, and by reward at either end.
    """
    ALL = "all"


KeepRolloutsName = Literal["none", "worst", "all"]


class PolicyState(bases.WireEnum):
    """Where a policy stands."""

    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"
    DELETING = "deleting"
    RELEASED = "released"
    """Put away: its state is on disk, and it has no worker. The next call that needs one brings it
    back.
    """
    ENDED = "ended"
    """Nobody has called it for `idle_ttl_s`. Its checkpoints and its history can still be read."""


class LossKind(bases.WireEnum):
    """A loss; docs/api.md has its formula and defaults."""

    GRPO = "grpo"
    PPO_CLIP = "ppo_clip"
    DAPO = "dapo"
    DR_GRPO = "dr_grpo"
    GSPO = "gspo"
    CISPO = "cispo"
    IMPORTANCE_SAMPLING = "importance_sampling"
    REINFORCE = "reinforce"
    CROSS_ENTROPY = "cross_entropy"
    SAPO = "sapo"
    IPO = "ipo"
    DISTILLATION = "distillation"
    """No policy gradient: `distillation` alone."""
    GMPO = "gmpo"
    VALUE = "value"
    """No policy gradient: `value` alone, which trains a critic."""


LossKindName = Literal[
    "grpo",
    "ppo_clip",
    "dapo",
    "dr_grpo",
    "gspo",
    "cispo",
    "importance_sampling",
    "reinforce",
    "cross_entropy",
    "sapo",
    "ipo",
    "distillation",
    "gmpo",
    "value",
]


class AdvantageKind(bases.WireEnum):
    """How advantages are made of rewards."""

    GROUP_MEAN_STD = "group_mean_std"
    """(reward - mean) / (std + 1e-6), std unbiased; a group of one: mean 0, std 1."""
    GROUP_MEAN = "group_mean"
    LEAVE_ONE_OUT = "leave_one_out"
    """reward - mean of the others' rewards."""
    NONE = "none"
    """The reward itself."""
    GIVEN = "given"
    """Per-token advantages sent with the rollouts."""
    GROUP_MEAN_BATCH_STD = "group_mean_batch_std"
    """(reward - mean) / (std + 1e-6), mean of the group, unbiased std of the differences over all
    rollouts of the operation.
    """


AdvantageKindName = Literal[
    "group_mean_std",
    "group_mean",
    "leave_one_out",
    "none",
    "given",
    "group_mean_batch_std",
]


class OldLogprobsKind(bases.WireEnum):
    """Where the old log-probs of the ratio come from."""

    SAMPLER = "sampler"
    """Rollout.sampler_logprobs."""
    GIVEN = "given"
    """Rollout.old_logprobs."""
    FROM_FORWARD = "from_forward"
    """The log-probs of a Forward, which the service has kept."""
    ON_POLICY = "on_policy"
    """The current log-probs, detached: the ratio is 1."""


OldLogprobsKindName = Literal["sampler", "given", "from_forward", "on_policy"]


class KlKind(bases.WireEnum):
    """An estimate of the KL divergence to the reference, from the log-probs of the token."""

    K1 = "k1"
    """logp - ref."""
    K2 = "k2"
    """(logp - ref)^2 / 2."""
    K3 = "k3"
    """exp(ref - logp) - (ref - logp) - 1."""
    K1_PLUS = "k1_plus"
    """The value of k1, of k3, with the gradient of k2."""
    K3_PLUS = "k3_plus"


KlKindName = Literal["k1", "k2", "k3", "k1_plus", "k3_plus"]


class ReferenceKind(bases.WireEnum):
    """The reference of a KL term."""

    GIVEN = "given"
    """reference_logprobs sent with the rollouts."""
    FROZEN = "frozen"
    """The policy's frozen reference (its base weights; for LoRA the adapter off), computed packed.
    """
    TEACHER = "teacher"
    """Another policy of the service, or one for each group: `teachers`."""


ReferenceKindName = Literal["given", "frozen", "teacher"]


class CorrectionMode(bases.WireEnum):
    """What becomes of correction weights beyond their bounds."""

    TRUNCATE = "truncate"
    """min(weight, high)."""
    MASK = "mask"
    """weight where low <= weight <= high, else 0."""


CorrectionModeName = Literal["truncate", "mask"]


class CorrectionLevel(bases.WireEnum):
    """What has one correction weight."""

    TOKEN = "token"
    """Each token has its own."""
    SEQUENCE = "sequence"
    """One weight a rollout: the product over its trained tokens."""
    GEOMETRIC = "geometric"
    """The geometric mean over its trained tokens, exp(mean(old - sampler)): it does not grow with
    length.
    """


CorrectionLevelName = Literal["token", "sequence", "geometric"]


class TokenWeight(bases.WireEnum):
    """The weight of a token's term in the sum."""

    PER_TOKEN = "per_token"
    PER_SEQUENCE = "per_sequence"
    """1 / trained tokens of the rollout."""


TokenWeightName = Literal["per_token", "per_sequence"]


class DivideBy(bases.WireEnum):
    """The counter of the window that its sums are divided by."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    GROUPS = "groups"
    CONSTANT = "constant"
    """The sequences times divide_constant."""
    NONE = "none"


DivideByName = Literal["tokens", "sequences", "groups", "constant", "none"]


class SharedTokens(bases.WireEnum):
    """How often a response token counts that several rollouts share."""

    SUM = "sum"
    """Every rollout's term, as if each were trained alone. The default."""
    ONCE = "once"
    """Only the first rollout's that trains it."""


SharedTokensName = Literal["sum", "once"]


class StalenessAction(bases.WireEnum):
    """What becomes of rollouts that are too old."""

    REFUSE = "refuse"
    DROP = "drop"


StalenessActionName = Literal["refuse", "drop"]


class BadRolloutAction(bases.WireEnum):
    """What becomes of a call's rollouts that cannot be trained."""

    REFUSE = "refuse"
    """The call is refused for the first of them. The default."""
    DROP = "drop"
    """The call is that of the other rollouts: baselines, counters and figures are theirs alone.
    Advantages that were given stay as they are.
    """


BadRolloutActionName = Literal["refuse", "drop"]


class BadRolloutReason(bases.WireEnum):
    """What is wrong with a rollout that was dropped: the first of these in the order of checks."""

    LENGTH = "length"
    """More tokens than the model takes."""
    TOKEN = "token"
    """A token of the prompt or of the response that is not of the vocabulary, or stands for an
    image.
    """
    REWARD = "reward"
    """A reward, advantage or token weight that is missing or no finite float32."""
    LOGPROB = "logprob"
    """A log-prob of a trained token that is missing, not finite or above 0."""
    STALE = "stale"
    """More than loss.staleness.max_versions old, where its action is REFUSE."""
    ALONE = "alone"
    """What was dropped has left it alone in its group, and advantages are made over groups."""
    SAMPLING_MASK = "sampling_mask"
    """A sampling mask with an id twice or not of the vocabulary, or of a trained token without that
    token.
    """


class Divergence(bases.WireEnum):
    """How far the policy is from its teacher at a position, by the teacher's K likeliest tokens
    and, as one more, all others. docs/distil.md has the formulas.
    """

    FORWARD_KL = "forward_kl"
    """KL(teacher || policy)."""
    REVERSE_KL = "reverse_kl"
    """KL(policy || teacher)."""
    JENSEN_SHANNON = "jensen_shannon"
    """beta KL(teacher || mixture) + (1 - beta) KL(policy || mixture), the mixture being beta
    teacher + (1 - beta) policy.
    """


DivergenceName = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


class SkipReason(bases.SkipReasonMethods, bases.WireEnum):
    """Why an optimizer step was skipped. All but NO_TOKENS and ZERO_GRADIENT count for
    max_skipped_in_row.
    """

    NO_TOKENS = "no_tokens"
    """Every rollout of the window was dropped."""
    NON_FINITE_LOSS = "non_finite_loss"
    NON_FINITE_GRADIENT = "non_finite_gradient"
    GRADIENT_NORM = "gradient_norm"
    """Above a limit of the policy's NumericsGuard."""
    REFERENCE_KL = "reference_kl"
    SAMPLER_KL = "sampler_kl"
    NON_FINITE_STEP = "non_finite_step"
    """The gradient is finite, but weights or moments after the step would not be."""
    ZERO_GRADIENT = "zero_gradient"
    """The gradient is zero in every element, and step_on_zero_gradient is off."""


class OperationKind(bases.OperationKindMethods, bases.WireEnum):
    """The call that an operation is."""

    CREATE_POLICY = "create_policy"
    DELETE_POLICY = "delete_policy"
    UPDATE = "update"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    DISCARD_GRADIENTS = "discard_gradients"
    FORWARD = "forward"
    SAVE_CHECKPOINT = "save_checkpoint"
    LOAD_CHECKPOINT = "load_checkpoint"
    IMPORT_WEIGHTS = "import_weights"
    PUBLISH_VERSION = "publish_version"


OperationKindName = Literal[
    "create_policy",
    "delete_policy",
    "update",
    "forward_backward",
    "optim_step",
    "discard_gradients",
    "forward",
    "save_checkpoint",
    "load_checkpoint",
    "import_weights",
    "publish_version",
]


class OperationState(bases.OperationStateMethods, bases.WireEnum):
    """Where an operation stands; the last three states are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


OperationStateName = Literal["queued", "running", "done", "failed", "cancelled"]


class SamplerLogprobsKind(bases.WireEnum):
    """How the sampler computed `sampler_logprobs`."""

    PROCESSED = "processed"
    """After the division of the logits by the temperature."""
    RAW = "raw"
    """Before it (the default of some samplers)."""


SamplerLogprobsKindName = Literal["processed", "raw"]


class StopReason(bases.WireEnum):
    """Why a sequence ended."""

    STOP = "stop"
    """With a stop token or text."""
    LENGTH = "length"
    """At its length limit."""


class LogprobsOf(bases.WireEnum):
    """The response tokens whose log-probs a ForwardBackward returns."""

    TRAINED = "trained"
    """Only those that are run in any case: trained ones of rollouts that stay and have a gradient.
    NaN at the others.
    """
    ALL = "all"
    """Every one: masked ones, and rollouts that are dropped or have no gradient, are run for it.
    NaN only at a first token without a prompt, which nothing predicts, and where on_bad_rollout has
    dropped.
    """


LogprobsOfName = Literal["trained", "all"]


class ImportMode(bases.WireEnum):
    """How imported values change the weights."""

    FULL = "full"
    """The folder's values replace the weights. The default."""
    DELTA = "delta"
    """The folder's values are added to the weights, in float32 before any rounding."""


ImportModeName = Literal["full", "delta"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """A file of a version's weights."""

    name: str = ""
    """Its name: model-00001-of-00002.safetensors, config.json, ..."""
    size_bytes: int = 0
    digest: str = ""
    """xxh3-128 of the whole file, 32 hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDelta:
    """A delta that makes a version's files out of those of `parent_version`."""

    parent_version: int
    file: WeightFile
    """The delta itself, fetched as a file of the version that it leads to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """The files of a version's weights."""

    policy_id: str
    version: int
    kind: WeightKind
    files: tuple[WeightFile, ...]
    created_at: datetime
    deltas: tuple[WeightDelta, ...]
    """Deltas that lead to the version; their files are not among `files`."""
    changed_share: float | None = None
    """Share of the values, 0 to 1, that have other bits than in the newest version before it.
    Absent: not compared.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientManifest:
    """Gradient sums of a window, and the counters that an OptimStep divides them by."""

    policy_id: str
    version: int
    """The version of the weights."""
    file: WeightFile
    """A file in safetensors' format, float32, not divided; kept for the server's result_ttl_s."""
    seqs: tuple[int, ...]
    """Seqs of the window's ForwardBackwards."""
    trained_tokens: int
    num_sequences: int
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FullTuning:
    """Full tuning: every parameter is trained."""


@dataclass(frozen=True, slots=True)
class LoraTuning:
    """Low-rank adapters (Hu et al., 2021)."""

    rank: int
    """Rank of the adapters, at most the smallest dimension of the matrices that are adapted."""
    alpha: float
    """Scale of the adapters, in [2^-20, 2^20]: what they add is multiplied by alpha / rank."""
    _: KW_ONLY
    target_modules: tuple[str, ...] = ()
    """The projections to adapt. Default, and what `all-linear` alone means: every linear projection
    of attention and MLP. An expert has factors of its own for each of gate_proj, up_proj and
    down_proj, which are named together or not at all. embed_tokens and lm_head are adapted only by
    name.
    """
    use_rslora: bool = False
    """Whether what the adapters add is multiplied by alpha / sqrt(rank) instead (rsLoRA, arXiv
    2312.03732).
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            rank: int,
            alpha: float,
            *,
            target_modules: Sequence[str] = (),
            use_rslora: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, target_modules=tuple)


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """Learning rates of a policy's steps, where a step does not say its own. With t steps taken so
    far, as the optimizer and its checkpoints count them, the next one's is learning_rate multiplied
    by (t + 1) / (warmup_steps + 1) while t < warmup_steps. Then it falls to final_share of itself,
    as x = (t - warmup_steps) / (total_steps - warmup_steps) goes from 0 to 1, and stays there.
    """

    kind: ScheduleKind
    learning_rate: float
    """The highest one. Required, also where it is 0."""
    _: KW_ONLY
    warmup_steps: int = 0
    """Steps over which the rate rises to learning_rate. Default: 0."""
    total_steps: int = 0
    """Warm-up included. More than warmup_steps; absent for CONSTANT."""
    final_share: float = 0.0
    """In [0, 1]; 0 for CONSTANT."""

    if TYPE_CHECKING:

        def __init__(
            self,
            kind: ScheduleKind | ScheduleKindName,
            learning_rate: float,
            *,
            warmup_steps: int = 0,
            total_steps: int = 0,
            final_share: float = 0.0,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, kind=ScheduleKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig:
    """Muon (Jordan et al., 2024) for the matrices of the decoder layers, those of each expert
    apart. AdamW steps all other parameters: embeddings, the LM head, norms, biases. Not for
    adapters.
    """

    momentum: float = 0.95
    """In [0, 1). Default 0.95."""
    nesterov: bool = True
    ns_steps: int = 5
    """Newton-Schulz iterations, 1 to 20. Default 5."""
    adjust_lr_fn: MuonAdjustLr = MuonAdjustLr.MATCH_RMS_ADAMW

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            momentum: float = 0.95,
            nesterov: bool = True,
            ns_steps: int = 5,
            adjust_lr_fn: MuonAdjustLr | MuonAdjustLrName = MuonAdjustLr.MATCH_RMS_ADAMW,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, adjust_lr_fn=MuonAdjustLr)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters with a learning rate or a weight decay of their own."""

    pattern: str
    """A shell pattern of parameters' names: `*` is any text, `?` any character, `[...]` one of
    several. It has to match one, which no other group of the policy matches.
    """
    _: KW_ONLY
    lr_factor: float = 1.0
    """What each step's learning rate is multiplied by, in [0, 1e4]. Default 1."""
    decays: bool | None = None
    """Whether weight decay applies. Default: as `decay` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019). Numbers have the bounds of OptimStepConfig."""

    beta1: float = 0.9
    """Defaults 0.9, 0.95 (beta1, beta2), 1e-8, 0.01."""
    beta2: float = 0.95
    eps: float = 1e-08
    weight_decay: float = 0.01
    decay: Decay = Decay.ALL
    """Also of a weight decay that a step brings."""
    schedule: LearningRateSchedule | None = None
    """Default: none, each step says its learning rate."""
    muon: MuonConfig | None = None
    """Default: none, AdamW steps all parameters."""
    groups: tuple[ParameterGroup, ...] = ()
    """At most 64."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            beta1: float = 0.9,
            beta2: float = 0.95,
            eps: float = 1e-08,
            weight_decay: float = 0.01,
            decay: Decay | DecayName = Decay.ALL,
            schedule: LearningRateSchedule | None = None,
            muon: MuonConfig | None = None,
            groups: Sequence[ParameterGroup] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, decay=Decay, groups=tuple)


@dataclass(frozen=True, slots=True)
class PublishConfig:
    """When a version's weights are written for readers; `every_n` counts versions."""

    kind: PublishKind = PublishKind.EVERY
    _: KW_ONLY
    every_n: int = 0
    """EVERY_N alone: 2 writes every second version."""
    deltas: bool = False
    """Whether to publish with each version the delta to it from the newest one before it, where
    that is less than half as large.
    """
    merged: bool = False
    """Whether the adapter is merged into each version, which is a whole model then. For LoRA alone.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            kind: PublishKind | PublishKindName = PublishKind.EVERY,
            *,
            every_n: int = 0,
            deltas: bool = False,
            merged: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, kind=PublishKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How the policy is spread over workers."""

    num_workers: int = 1
    """Number of devices that train it, each with groups of its own and a share of the optimizer's
    states. Default 1. At most the GPUs that are free; on CPUs the machine's cores.
    """
    shard: Shard | None = None
    """How they are sharded. Default: the first that fits."""
    sequence_ranks: int | None = None
    """Number of devices that run one group together, each a share of its tokens and heads; it
    divides `num_workers`. Default: what each plan chooses.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            num_workers: int = 1,
            shard: Shard | ShardName | None = None,
            sequence_ranks: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, shard=Shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsGuard:
    """When a step is skipped although its numbers are finite, and when the policy is given up. A
    limit that is left out does not apply; each limit is above 0.
    """

    max_grad_norm_to_step: float | None = None
    """Limit of the gradient norm before clipping."""
    max_reference_kl_to_step: float | None = None
    """Limits of StepReport.kl and StepReport.sampler_kl, in nats a token, where the step has them.
    """
    max_sampler_kl_to_step: float | None = None
    """As max_reference_kl_to_step, of StepReport.sampler_kl."""
    max_skipped_in_row: int = 5
    """How many steps in a row that are skipped for their numbers fail the policy. Default 5; 0:
    never.
    """


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """Another policy's checkpoint, by the name that its caller gave it."""

    policy_id: str
    """The other policy."""
    checkpoint_id: str
    """Its checkpoint."""
    _: KW_ONLY
    with_optimizer: bool = False
    """Whether the optimizer's moments and step count come along; otherwise they begin anew."""


@dataclass(frozen=True, slots=True)
class SentModel:
    """A model folder that SendModelFile has brought: these files, of plain names, and no others."""

    files: tuple[WeightFile, ...]

    if TYPE_CHECKING:

        def __init__(self, files: Sequence[WeightFile]) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, files=tuple)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy to create, with exactly one of `preset`, `model_folder` and `sent_model`, and `full`
    (the default) or `lora`.
    """

    policy_id: str
    """The policy's id: [a-z0-9][a-z0-9_-]{0,63}."""
    _: KW_ONLY
    preset: str | None = None
    """A built-in random model: tiny, small."""
    model_folder: str | None = None
    """A Hugging Face model folder below the server's models root."""
    sent_model: SentModel | None = None
    """A model that the service has no folder of. It belongs to the policy, and goes with it."""
    full: FullTuning | None = None
    lora: LoraTuning | None = None
    optimizer: AdamWConfig = AdamWConfig()
    dtype: ModelDtype = ModelDtype.FLOAT32
    seed: int = 0
    """Seed of random initial weights and LoRA adapters."""
    sequencing: Sequencing = Sequencing.CLIENT
    deterministic: bool = True
    """Whether the same operations give the same bits. Default true."""
    recovery: Recovery = Recovery.REPLAY
    on_changed_numerics: OnChangedNumerics = OnChangedNumerics.STOP
    publish: PublishConfig = PublishConfig()
    keep_versions: int = 2
    """How many published versions are kept. Default 2."""
    micro_batch_tokens: int | None = None
    """Most packed tokens of one micro-batch. Default: the server's; absent there, too, each plan
    chooses.
    """
    reference: ReferencePolicy = ReferencePolicy.NONE
    parallel: ParallelLayout = ParallelLayout()
    attention_backend: str | None = None
    """An attention backend by name. Default: the best available."""
    numerics_guard: NumericsGuard = NumericsGuard()
    keep_rollouts: KeepRollouts = KeepRollouts.NONE
    keep_rollouts_bytes: int = 268435456
    """Most bytes of kept rollouts: the oldest steps go first, and of a step that is larger alone
    the least conspicuous rollouts. Default 256 MiB.
    """
    from_checkpoint: CheckpointSource | None = None
    """Weights of version 0, in place of those of the preset or folder, which stay the frozen
    reference. The source has the same base, tuning and dtype, and of an adapter on a preset the
    same seed. It is read once: it may be deleted as soon as the policy is created.
    """
    idle_release_s: float | None = None
    """Seconds without work after which the policy is put away, as by ReleasePolicy; above 0. Not
    while a window is open. Default: never.
    """
    idle_ttl_s: float | None = None
    """Seconds without any call that names the policy, or one of its operations, after which it
    ends; above 0. Its last state stays as a checkpoint, and its other files go. Default: never.
    """
    value_head: bool = False
    """Whether the policy has a value head beside the LM head: a linear map of a hidden state to one
    value, which is trained, with an adapter too (`value_head.weight`, `value_head.bias`). It is
    read from the folder, where the folder has one, else zeros.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            policy_id: str,
            *,
            preset: str | None = None,
            model_folder: str | None = None,
            sent_model: SentModel | None = None,
            full: FullTuning | None = None,
            lora: LoraTuning | None = None,
            optimizer: AdamWConfig = AdamWConfig(),
            dtype: ModelDtype | ModelDtypeName = ModelDtype.FLOAT32,
            seed: int = 0,
            sequencing: Sequencing | SequencingName = Sequencing.CLIENT,
            deterministic: bool = True,
            recovery: Recovery | RecoveryName = Recovery.REPLAY,
            on_changed_numerics: OnChangedNumerics | OnChangedNumericsName = OnChangedNumerics.STOP,
            publish: PublishConfig = PublishConfig(),
            keep_versions: int = 2,
            micro_batch_tokens: int | None = None,
            reference: ReferencePolicy | ReferencePolicyName = ReferencePolicy.NONE,
            parallel: ParallelLayout = ParallelLayout(),
            attention_backend: str | None = None,
            numerics_guard: NumericsGuard = NumericsGuard(),
            keep_rollouts: KeepRollouts | KeepRolloutsName = KeepRollouts.NONE,
            keep_rollouts_bytes: int = 268435456,
            from_checkpoint: CheckpointSource | None = None,
            idle_release_s: float | None = None,
            idle_ttl_s: float | None = None,
            value_head: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(
            self,
            dtype=ModelDtype,
            sequencing=Sequencing,
            recovery=Recovery,
            on_changed_numerics=OnChangedNumerics,
            reference=ReferencePolicy,
            keep_rollouts=KeepRollouts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy as its callers see it."""

    spec: PolicySpec
    state: PolicyState
    version: int
    next_seq: int
    """The seq that the next sequenced operation executes as."""
    created_at: datetime
    num_parameters: int
    num_trainable_parameters: int
    vocab_size: int
    max_sequence_tokens: int
    """Longest sequence, in tokens: max_position_embeddings of the model, with YaRN its original
    length times the factor where that is more; at most the sliding window of its layers, if any has
    one.
    """
    attention_backend: str
    published_version: int | None = None
    """The newest version whose weights can be fetched."""
    failure: str
    """Why the policy failed or ended; empty where it has not."""
    optimizer_states: str
    """The optimizer's states, by their name in worker.optimizer_states; for `auto` those that it
    chose, which stay. Empty until the model is loaded.
    """
    shard: str
    """How its devices are sharded, by a name of ParallelLayout.shard; where that was left out, as
    the service chose, which stays. Empty until the model is loaded.
    """


@dataclass(frozen=True, slots=True)
class OldLogprobs:
    """The source of the ratio's old log-probs."""

    kind: OldLogprobsKind
    _: KW_ONLY
    forward_operation_id: str = ""
    """FROM_FORWARD only: a Forward of the same rollouts on this policy."""

    if TYPE_CHECKING:

        def __init__(
            self,
            kind: OldLogprobsKind | OldLogprobsKindName,
            *,
            forward_operation_id: str = "",
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, kind=OldLogprobsKind)


@dataclass(frozen=True, slots=True)
class Teacher:
    """A policy of the service that answers, before the update runs, what it would have said at each
    response token. Its vocabulary is that of the policy that it teaches, and its answer is kept
    with the batch: a recovery asks nobody again.
    """

    policy_id: str
    """The policy that is asked."""
    _: KW_ONLY
    version: int | None = None
    """The version that it must have when it answers. Absent: whichever it has, which
    `StepResult.teachers` names.
    """
    group_ids: tuple[str, ...] = ()
    """Groups that it is asked about; empty: all that no other teacher of the list names."""

    if TYPE_CHECKING:

        def __init__(
            self,
            policy_id: str,
            *,
            version: int | None = None,
            group_ids: Sequence[str] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, group_ids=tuple)


@dataclass(frozen=True, slots=True)
class KlConfig:
    """A KL term of the loss."""

    kind: KlKind
    coefficient: float
    """The factor of the KL term. Required."""
    reference: ReferenceKind
    _: KW_ONLY
    importance_weighted: bool = False
    """k1 and k3 alone, of a loss with old log-probs: the estimate times exp(logp - old), with the
    gradient of both.
    """
    teachers: tuple[Teacher, ...] = ()
    """Reference teacher alone has them, at least one."""

    if TYPE_CHECKING:

        def __init__(
            self,
            kind: KlKind | KlKindName,
            coefficient: float,
            reference: ReferenceKind | ReferenceKindName,
            *,
            importance_weighted: bool = False,
            teachers: Sequence[Teacher] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, kind=KlKind, reference=ReferenceKind, teachers=tuple)


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """A weight exp(old - sampler) on the policy-gradient term."""

    mode: CorrectionMode
    level: CorrectionLevel
    high: float
    """The upper bound, at least 1. Required."""
    _: KW_ONLY
    low: float = 0.0
    """low <= 1 <= high."""

    if TYPE_CHECKING:

        def __init__(
            self,
            mode: CorrectionMode | CorrectionModeName,
            level: CorrectionLevel | CorrectionLevelName,
            high: float,
            *,
            low: float = 0.0,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, mode=CorrectionMode, level=CorrectionLevel)


@dataclass(frozen=True, slots=True)
class CorrectionMask:
    """A mask: terms whose weight exp(old - sampler) is outside [low, high] have no policy gradient:
    a token's own, or all of a rollout's by its product or geometric mean. Others keep what
    `correction` says.
    """

    level: CorrectionLevel
    low: float
    """Both required; low <= 1 <= high."""
    high: float
    """The upper bound, at least 1. Required."""

    if TYPE_CHECKING:

        def __init__(
            self,
            level: CorrectionLevel | CorrectionLevelName,
            low: float,
            high: float,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, level=CorrectionLevel)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongFilter:
    """A filter that drops truncated rollouts, after advantages are computed."""


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """A soft punishment of length, added to the reward before advantages (DAPO, eq. 13)."""

    max_tokens: int
    """Response tokens from which on the penalty is whole. Required."""
    buffer_tokens: int
    """Tokens before max_tokens over which it grows from 0. Required."""
    scale: float
    """The whole penalty, which the reward is lowered by. Required."""


@dataclass(frozen=True, slots=True)
class StalenessConfig:
    """A limit of age: what becomes of rollouts sampled more than max_versions versions ago."""

    max_versions: int
    """How many versions old a rollout may be. Required."""
    action: StalenessAction

    if TYPE_CHECKING:

        def __init__(
            self,
            max_versions: int,
            action: StalenessAction | StalenessActionName,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, action=StalenessAction)


@dataclass(frozen=True, slots=True)
class DistillationConfig:
    """A divergence from a teacher's likeliest tokens, added to each counted term. Either rollouts
    carry them (teacher_tokens, teacher_logprobs), or `teachers` are asked.
    """

    divergence: Divergence
    _: KW_ONLY
    coefficient: float = 1.0
    """The factor of the term."""
    beta: float | None = None
    """jensen_shannon alone; from 1e-6 to 1 - 1e-6. Default: 0.5."""
    teachers: tuple[Teacher, ...] = ()
    """Empty: rollouts carry the tokens."""
    num_teacher_tokens: int = 0
    """How many tokens `teachers` answer at each position, from 1 to 128 and at most their
    vocabulary.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            divergence: Divergence | DivergenceName,
            *,
            coefficient: float = 1.0,
            beta: float | None = None,
            teachers: Sequence[Teacher] = (),
            num_teacher_tokens: int = 0,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, divergence=Divergence, teachers=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossConfig:
    """A critic's loss, added to each counted term: half the squared difference between the value of
    the policy's value head at the token and the rollout's `returns` there.
    """

    coefficient: float = 1.0
    """The factor of the term."""
    clip: float | None = None
    """With it the term is the larger of that square and the one of the value held within `clip` of
    the rollout's `old_values` (PPO's clipped value loss); above 0. Default: off.
    """


@dataclass(frozen=True, slots=True)
class LossConfig:
    """A loss. Fields that are left out have the loss's own defaults; at most one of
    `overlong_filter` and `overlong_penalty` is given.
    """

    kind: LossKind
    _: KW_ONLY
    advantage: AdvantageKind | None = None
    clip_low: float | None = None
    """Clip widths below (at most 1) and above 1; for cispo the ratio's bounds themselves, low <= 1
    < high; for ipo how far the probability may have fallen and risen, for gmpo how far the log-prob
    may.
    """
    clip_high: float | None = None
    """As clip_low, on the other side. Default: the loss's own."""
    dual_clip: float | None = None
    """ppo_clip family, negative advantages only, above 1 + clip_high; off where absent."""
    old_logprobs: OldLogprobs | None = None
    kl: KlConfig | None = None
    entropy_coefficient: float = 0.0
    """The factor of the entropy that is subtracted from the loss. Default: 0."""
    correction: RolloutCorrection | None = None
    token_weight: TokenWeight | None = None
    shared_tokens: SharedTokens = SharedTokens.SUM
    overlong: OverlongFilter | OverlongPenalty | None = None
    drop_zero_variance_groups: bool | None = None
    """Drop groups of more than one whose rewards are all equal: within eight steps of float32 at
    the size of the largest. Default: true for dapo, else false.
    """
    staleness: StalenessConfig | None = None
    router_aux_loss_coefficient: float = 0.0
    """Coefficient of the router's balance loss of the rollout, summed over layers, which is added
    to each counted term (docs/decisions/0022-experts.md). Only for models with experts, not
    negative. Default: 0, off.
    """
    allow_truncated_sampling: bool = False
    """Sampler log-probs of rollouts with top_p or top_k are renormalised over the tokens that were
    left: without a sampling_mask they are refused where they enter a ratio or a correction, unless
    this says that it is known.
    """
    correction_mask: CorrectionMask | None = None
    """A mask that goes with or without a correction, at the same level or another."""
    tau_positive: float | None = None
    """sapo alone: temperatures of its gate for positive and for other advantages; 1 and 1.05."""
    tau_negative: float | None = None
    """As tau_positive, for other advantages."""
    top_entropy_share: float | None = None
    """Only this share, above 0, of the operation's counted tokens has a policy gradient: those of
    most entropy by the Forward that old_logprobs names, which must have had with_entropy.
    """
    report_groups: bool = False
    """Report every group: `StepReport.groups`."""
    count_untrained: bool = False
    """Whether `sequences` and `constant` divide by rollouts without a trained token, and those that
    overlong_filter drops, too: a mean over all that were sampled.
    """
    distillation: DistillationConfig | None = None
    """Required for kind distillation; any other kind may have it, too."""
    value: ValueLossConfig | None = None
    """Required for kind value; any other kind may have it, too. For policies with a value head."""

    if TYPE_CHECKING:

        def __init__(
            self,
            kind: LossKind | LossKindName,
            *,
            advantage: AdvantageKind | AdvantageKindName | None = None,
            clip_low: float | None = None,
            clip_high: float | None = None,
            dual_clip: float | None = None,
            old_logprobs: OldLogprobs | OldLogprobsKindName | None = None,
            kl: KlConfig | None = None,
            entropy_coefficient: float = 0.0,
            correction: RolloutCorrection | None = None,
            token_weight: TokenWeight | TokenWeightName | None = None,
            shared_tokens: SharedTokens | SharedTokensName = SharedTokens.SUM,
            overlong: OverlongFilter | OverlongPenalty | None = None,
            drop_zero_variance_groups: bool | None = None,
            staleness: StalenessConfig | None = None,
            router_aux_loss_coefficient: float = 0.0,
            allow_truncated_sampling: bool = False,
            correction_mask: CorrectionMask | None = None,
            tau_positive: float | None = None,
            tau_negative: float | None = None,
            top_entropy_share: float | None = None,
            report_groups: bool = False,
            count_untrained: bool = False,
            distillation: DistillationConfig | DivergenceName | None = None,
            value: ValueLossConfig | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(
            self,
            kind=LossKind,
            advantage=AdvantageKind,
            old_logprobs=OldLogprobs,
            token_weight=TokenWeight,
            shared_tokens=SharedTokens,
            distillation=DistillationConfig,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepConfig:
    """One optimizer step. Numbers have bounds: learning_rate 0 to 10,000, betas from 0 to below 1,
    and all others 1e-30 to 1e30 unless they are 0 and may be. learning_rate times weight_decay is
    at most 1.
    """

    learning_rate: float | None = None
    """Default: that of the policy's optimizer.schedule. Required where it has none, also as 0."""
    weight_decay: float | None = None
    """Default: the policy's."""
    max_grad_norm: float | None = None
    """Global gradient-norm clip, after division; 0: off. Default: 1, off where divide_by is NONE.
    """
    divide_by: DivideBy | None = None
    """Default: the loss's own."""
    divide_constant: float | None = None
    """DIVIDE_BY_CONSTANT only, which multiplies it with the sequences: Dr. GRPO's length of a
    response.
    """
    beta1: float | None = None
    """Numbers of AdamW for this step. Default: the policy's."""
    beta2: float | None = None
    """Default: the policy's."""
    eps: float | None = None
    """Default: the policy's."""
    tensor_grad_norms: bool = False
    """Report norm and largest value of each tensor's gradient too: the gradient is read twice more.
    """
    changed_share: bool = False
    """Count the bfloat16 weights that change: some per cent of the step's own time."""
    step_on_zero_gradient: bool = False
    """Step on a gradient that is zero in every element, too: by moments and weight decay alone.
    Without it such a step is skipped.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            learning_rate: float | None = None,
            weight_decay: float | None = None,
            max_grad_norm: float | None = None,
            divide_by: DivideBy | DivideByName | None = None,
            divide_constant: float | None = None,
            beta1: float | None = None,
            beta2: float | None = None,
            eps: float | None = None,
            tensor_grad_norms: bool = False,
            changed_share: bool = False,
            step_on_zero_gradient: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(self, divide_by=DivideBy)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Seconds that each phase took."""

    plan: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    publish: float = 0.0
    """Time to copy the weights, which are published while the next operation runs."""
    digest: float = 0.0
    """Time to digest weights and moments, by which a recovery is known to be exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckReport:
    """One rollout of the batch, packed with others against alone, at version 1 and every
    worker.self_check_every versions from there: what packing changes, which is rounding.
    """

    sequence: int = 0
    """Index of the rollout among all of the request, dropped ones included, and its trained tokens.
    """
    tokens: int = 0
    logprob_max_difference: float = 0.0
    """|log-prob packed - alone| over those tokens, in nats."""
    logprob_mean_difference: float = 0.0
    gradient_difference: float | None = None
    """||gradient packed - alone|| / ||alone|| of the rollout's loss, over all trained parameters
    and of the worst one; absent where its loss has no gradient.
    """
    worst_parameter_difference: float | None = None
    worst_parameter: str = ""
    exceeds_limits: bool = False
    """Some difference is beyond rounding; a warning says which."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGradNorm:
    """The gradient of one trained tensor, after division and before clipping, as grad_norm."""

    name: str
    """The parameter's name: model.layers.3.mlp.up_proj.weight. Fused experts are one tensor."""
    norm: float
    """The root of the sum of squares of its elements, and their largest absolute value."""
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """Figures of the router of one layer of a model with experts. All tokens of the rollouts that
    were run count, prompts too, one that rollouts share as often as each would run it alone.
    """

    layer: int
    """Index of the layer, from 0; dense layers have no report."""
    max_load: float
    """Choices of the busiest expert over the mean of all experts: 1 where all are chosen as often,
    at most experts / experts per token.
    """
    unused_experts: int
    """Experts that no token visits."""
    entropy: float
    """Mean over tokens of the entropy of the router's probabilities, in nats; at most ln(experts).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """The rewards and lengths of one group, dropped rollouts too."""

    group_id: str = ""
    """At most its first 256 characters."""
    num_rollouts: int = 0
    reward_mean: float | None = None
    """Over the rewards as sent, before any penalty; the standard deviation is of the values
    themselves. Absent without rewards.
    """
    reward_std: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    response_length_mean: float = 0.0
    zero_variance: bool = False
    """The group has several rollouts whose rewards are all equal, as for drop_zero_variance_groups.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Offender:
    """Whom a warning is about, by index in request order."""

    group: int = 0
    group_id: str = ""
    rollout: int = 0
    """Index within the group; a whole group is named by its first rollout."""
    token: int | None = None
    """Index among the rollout's response tokens; absent: the whole rollout."""
    value: float | None = None
    """In the unit of the warning's message; absent where it is about no number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRollout:
    """A rollout that was dropped, by index in request order."""

    group: int = 0
    rollout: int = 0
    """Index within the group."""
    reason: BadRolloutReason
    token: int | None = None
    """Index among its response tokens; absent: the whole rollout, or its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWarning(bases.StepWarningMethods):
    """What is wrong or unusual about a batch or a step."""

    kind: str = ""
    """One word in snake_case, a heading of docs/runbook.md."""
    message: str = ""
    offenders: tuple[Offender, ...] = ()
    """At most 8, worst first; of one batch, as several may be in a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(bases.StepReportMethods):
    """Figures of one ForwardBackward or Update, or of an OptimStep's whole window. Means and
    fractions are over what the loss counts (each counted token once, but loss,
    policy_gradient_loss, kl and entropy, which carry the token weight), unless said otherwise. No
    figure depends on how rollouts are cut into calls and micro-batches. A figure that was not
    computed is absent.
    """

    loss: float | None = None
    """Mean loss; absent from a Forward's report, and where no token counts; 0 where rollouts count
    but were not run.
    """
    policy_gradient_loss: float | None = None
    kl: float | None = None
    """Mean of the KL estimate to the reference; absent without a reference."""
    entropy: float | None = None
    """Mean entropy in nats; absent, like every other mean over tokens, where no token was run."""
    clip_fraction_low: float | None = None
    clip_fraction_high: float | None = None
    ratio_max: float | None = None
    """Largest importance ratio; absent where the loss has none."""
    sampler_kl: float | None = None
    """k3 estimate of KL(sampler || trainer) over trained tokens; absent without sampler_logprobs.
    """
    sampler_gap_max: float | None = None
    """Largest |logp - sampler logp|; sampler_gap_mean and sampler_gap_abs_mean are the means."""
    grad_norm: float | None = None
    """Norm of the gradient after division, before clipping; absent before an optimizer step."""
    reward_mean: float | None = None
    """Mean reward over all rollouts as sent, dropped ones too, before any penalty; absent without
    rewards.
    """
    num_groups: int = 0
    num_sequences: int = 0
    trained_tokens: int = 0
    unshared_tokens: int = 0
    """Tokens of all rollouts run, each alone: prompt and response."""
    packed_tokens: int = 0
    token_reduction: float | None = None
    """unshared_tokens / packed_tokens; absent, as the two other ratios of what was run, of an
    OptimStep and where nothing was run.
    """
    attention_pair_reduction: float | None = None
    """Causal attention pairs replicated over packed."""
    num_micro_batches: int = 0
    seconds: PhaseSeconds = PhaseSeconds()
    tokens_per_second: float | None = None
    hardware_mfu: float | None = None
    """De-duplicated FLOPs over the device's peak; absent where the peak is unknown."""
    logical_mfu: float | None = None
    """Replicated FLOPs, attention counted non-causal, over the peak."""
    peak_memory_bytes: int = 0
    staleness_mean: float | None = None
    """Versions between sampling and the step, over rollouts that name a version which the policy
    has reached; for a rollout with spans, that of its oldest.
    """
    staleness_max: int | None = None
    dropped_stale: int = 0
    dropped_truncated: int = 0
    dropped_zero_variance: int = 0
    skipped: bool = False
    """Whether an optimizer step was skipped: its window was discarded, and weights and version are
    as before.
    """
    warnings: tuple[StepWarning, ...] = ()
    self_check: SelfCheckReport | None = None
    """The self-check; absent where none was due."""
    skip_reason: SkipReason | None = None
    """Why the step was skipped; absent unless it was."""
    old_kl: float | None = None
    """k3 estimate of KL(old || policy), token by token, of the old log-probs that the loss uses:
    mean of exp(d) - d - 1, d = logp - old logp. Absent where it uses none.
    """
    ratio_mean: float | None = None
    """Mean and least importance ratio that the loss is built on (for gspo the sequence's, at each
    of its tokens); absent where it has none.
    """
    ratio_min: float | None = None
    ratio_p01: float | None = None
    """Quantiles, from a histogram: the logarithm of each is within 1/16 of itself of the exact
    one's; one within 2^-20 of 1 is taken for 1.
    """
    ratio_p50: float | None = None
    ratio_p99: float | None = None
    clip_fraction_dual: float | None = None
    """Fraction of tokens that the dual clip holds; clip_fraction_high counts them too."""
    correction_masked_fraction: float | None = None
    """Rollout correction and its mask, absent without either: tokens masked, tokens held at `high`,
    mean of the weights as applied (0 where masked), and their effective sample size over the number
    of tokens, (sum of w)^2 / (n sum of w^2). A sequence's weight counts at each of its tokens.
    """
    correction_truncated_fraction: float | None = None
    correction_weight_mean: float | None = None
    correction_ess_fraction: float | None = None
    reward_std: float | None = None
    """Standard deviations are of the values themselves (divided by n)."""
    advantage_mean: float | None = None
    """Advantages over counted tokens, as the loss takes them; absent for cross_entropy."""
    advantage_std: float | None = None
    zero_variance_fraction: float | None = None
    """Groups of more than one whose rewards are all equal (as for drop_zero_variance_groups), over
    all groups as sent, dropped or not; absent without rewards.
    """
    truncated_fraction: float = 0.0
    """Fraction of all rollouts as sent that are marked truncated, and their response tokens,
    context ones too.
    """
    response_length_mean: float = 0.0
    response_length_max: int = 0
    sampler_gap_mean: float | None = None
    """logp - sampler logp, signed and absolute, in nats; absent without sampler_logprobs."""
    sampler_gap_abs_mean: float | None = None
    tensor_grad_norms: tuple[TensorGradNorm, ...] = ()
    """Gradients of single tensors in the model's order, where OptimStepConfig.tensor_grad_norms
    asks for them and a token counts.
    """
    clip_fraction_positive: float | None = None
    """Share of the terms with a positive (negative) advantage that the clip holds; absent without
    such a term, or without a clip.
    """
    clip_fraction_negative: float | None = None
    clamped_ratios: int = 0
    """Terms that a clamp holds: of the loss's ratio (a log-ratio beyond 20), of the KL term (a gap
    beyond 20, a k3 above 10), of sampler_kl (the same). Their gradient through it is 0.
    """
    clamped_kls: int = 0
    clamped_sampler_gaps: int = 0
    zero_advantage_sequences: int = 0
    """Rollouts that count but were not run: all their advantages are zero, and the loss has no KL,
    entropy or router term. Token and attention counts, speeds and means (but the losses) are of
    what was run.
    """
    token_staleness_mean: float | None = None
    """Mean staleness over response tokens, each by the version of its own span."""
    changed_share: float | None = None
    """Share of the trained bfloat16 weights whose bits the step changed, which a delta has to
    carry, where OptimStepConfig.changed_share asks for it. Absent for wider weights and skipped
    steps.
    """
    rank_seconds: tuple[float, ...] = ()
    """Seconds of forward and backward on each of several workers; `seconds` has the longest, for
    which the others wait.
    """
    rank_gap: float | None = None
    """How much longer the longest worker's share is than the mean by the plan's model, as a share
    of the mean. Absent with one worker.
    """
    routers: tuple[RouterReport, ...] = ()
    """The routers, one for each layer with experts."""
    router_aux_loss: float | None = None
    """Mean balance loss of a rollout, weighted as the loss, summed over layers, without its
    coefficient; absent where that is 0.
    """
    route_mismatch: float | None = None
    """Share of the tokens with recorded routes, over layers, whose own router would choose other
    experts, counted as the routers' other figures; absent without routes.
    """
    route_conflicts: int = 0
    """Tokens packed more than once only because the recorded routes of rollouts that share them
    differ there or before; as if all that was run were packed together.
    """
    planned_memory_bytes: int | None = None
    """The most that an optimizer step's peak_memory_bytes was planned to be, on the GPU that was
    planned the most; absent on a CPU.
    """
    reward_min: float | None = None
    """Least and largest reward of all rollouts as sent; absent without rewards."""
    reward_max: float | None = None
    response_length_p50: int = 0
    """Quantiles of response_length_max's lengths: the least that at least this share does not
    exceed.
    """
    response_length_p90: int = 0
    response_length_p99: int = 0
    update_norm: float | None = None
    """Norms of the trained weights after the step and of what it changed, estimated from at most
    2^17 weights spread evenly over all; absent where no step was taken.
    """
    weight_norm: float | None = None
    step_kl: float | None = None
    """k3 estimate of KL(weights before the step || after), in nats per token, on a few response
    tokens of the window's last batch. Measured only where update_norm is unusually large beside
    weight_norm.
    """
    step_kl_tokens: int = 0
    """Tokens that step_kl is the mean of."""
    groups: tuple[GroupReport, ...] = ()
    """The groups in request order, where LossConfig.report_groups asks for them; not of an
    OptimStep.
    """
    learning_rate: float | None = None
    """Learning rate of the step that was asked for, taken or skipped; absent before an optimizer
    step.
    """
    dropped_bad: int = 0
    """Rollouts that on_bad_rollout dropped; no other figure counts them."""
    bad_rollouts: tuple[BadRollout, ...] = ()
    """All of them in request order; not of an OptimStep."""
    teacher_kl: float | None = None
    """KL(policy || teacher) over the teacher's K tokens and all others as one more, and the mass of
    the K by the teacher and by the policy, whatever divergence the loss takes; absent where it
    distils nothing.
    """
    teacher_mass: float | None = None
    policy_mass: float | None = None
    tokens_outside_mask: int = 0
    """Tokens that were not trained because they are outside of their own sampling mask."""
    value_loss: float | None = None
    """A loss with `value`: its term, without its coefficient and weighted as the loss; over the
    counted tokens the mean value and return, 1 - Var(return - value) / Var(return), which is absent
    where all returns are equal, and the share of terms that the clip holds, which have no gradient.
    """
    value_mean: float | None = None
    return_mean: float | None = None
    explained_variance: float | None = None
    value_clip_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a running operation is."""

    micro_batches_done: int = 0
    micro_batches_planned: int = 0
    """0 until planned."""
    tokens_per_second: float = 0.0
    eta_s: float | None = None
    """Seconds to go; absent until known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetail:
    """An error, in trailers (ratoon-error-bin), HTTP bodies and failed operations."""

    code: str
    """Upper snake case, one row of the table in docs/api.md."""
    message: str
    field: str
    """The field at fault, with indexes: groups[3].rollouts[17].sampler_logprobs."""
    got: str
    expected: str
    retryable: bool
    details: Mapping[str, str]
    """Numbers and names that a program may act on, as text (missing_seq, wanted, free, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint of a policy; it holds no gradients."""

    checkpoint_id: str
    version: int
    seq: int
    """The seq of the SaveCheckpoint."""
    replay_from_seq: int
    """First operation of the window open at `seq`, which recovery runs again. 0: a rollback went
    back past this checkpoint, so that no recovery begins at it; LoadCheckpoint does.
    """
    created_at: datetime
    size_bytes: int
    pinned: bool
    """Whether `keep_last` of later ones neither counts nor deletes it."""
    expires_at: datetime | None = None
    """When the service deletes it; absent: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedVersion:
    """A name that keeps a version of the weights, whatever the policy's `keep_versions` says."""

    name: str
    version: int
    size_bytes: int
    """Bytes of the version's files."""
    created_at: datetime
    expires_at: datetime | None = None
    """When the service takes the name away; absent: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile:
    """A result over 4 MiB, kept for the server's result_ttl_s and read by FetchWeights."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Log-probs of a Forward, inline or as a file."""

    file: ResultFile | None = None
    """A serialized ForwardOutput."""
    report: StepReport = StepReport()
    version: int
    """The version of the weights that answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(bases.StepResultMethods):
    """The result of a ForwardBackward, OptimStep or Update."""

    version: int
    """The policy's version after the operation."""
    report: StepReport = StepReport()
    file: ResultFile | None = None
    """A serialized ForwardOutput."""
    teachers: tuple[Teacher, ...] = ()
    """Teachers that the loss asked, in its order, each with the version that answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """The result of an ImportWeights."""

    version: int
    """The policy's version after the operation."""
    num_tensors: int
    """Number of tensors in the folder, and size of its files in bytes."""
    size_bytes: int
    dtypes: tuple[str, ...]
    """Dtypes of the tensors, by safetensors' names: BF16, F32."""
    digest: str
    """Digest of the folder's files, 32 hexadecimal digits: a replay of the operation takes no
    others.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyResult:
    """The result of an operation that has nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(bases.OperationMethods):
    """The handle of a call. It has one of the results once it is final, and none before."""

    operation_id: str
    policy_id: str
    kind: OperationKind
    seq: int
    """0: not sequenced."""
    request_id: str
    state: OperationState
    blocked_by_seq: int
    """The missing seq that this one waits for; 0: none."""
    progress: Progress = Progress()
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error: ErrorDetail | None = None
    policy: Policy | None = None
    step: StepResult | None = None
    forward: ForwardResult | None = None
    checkpoint: CheckpointInfo | None = None
    empty: EmptyResult | None = None
    imported: ImportResult | None = None
    named_version: NamedVersion | None = None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens from `first_token` up to the next span's, or the end, were sampled by
    `version`.
    """

    first_token: int
    version: int


@dataclass(frozen=True, slots=True)
class UploadedBatch:
    """A batch that was sent by UploadPart, parts 0 .. num_parts - 1 in order."""

    upload_id: str
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRollout:
    """A rollout that a ForwardBackward or Update has kept, with what was found of it. Indexes of
    tokens are among its response tokens, figures over its counted ones. Absent is what does not
    exist: without rewards, sampler log-probs at the sampling temperature or a ratio, or where the
    rollout was not run.
    """

    group: int
    """Indexes of the group in the request, and of the rollout in the group."""
    rollout: int
    group_id: str
    """At most its first 256 characters."""
    prompt_tokens: int
    response_tokens: int
    reward: float | None = None
    advantage: float | None = None
    """Mean over tokens."""
    gap_abs_mean: float | None = None
    """|logp - sampler logp|: mean, the largest, and its token."""
    gap_max: float | None = None
    gap_max_token: int | None = None
    ratio_max: float | None = None
    """The largest ratio of the loss, and its token."""
    ratio_max_token: int | None = None
    clip_fraction: float | None = None
    """Share of the tokens that the clip holds."""
    policy_version: int | None = None
    """The version that sampled it, of several the oldest; absent: not said."""
    truncated: bool
    dropped: bool
    """It was dropped, for its age, its length or the equal rewards of its group."""
    leaf: int
    """Node of the forest that holds its last token; -1: it has none."""
    weight_share: float | None = None
    """Share of the step's sum of |gradient of the loss with respect to a token's log-prob|."""
    tokens: tuple[int, ...]
    """GetRollout alone has the rest. Token ids, prompt and response."""
    texts: tuple[str, ...]
    """The text of each token by the policy's tokenizer; empty without one. Of a character that
    several tokens share the last has the text.
    """
    advantages: tuple[float, ...]
    """One value each a response token: advantage, logp - sampler logp, ratio; NaN where there is
    none.
    """
    gaps: tuple[float, ...]
    ratios: tuple[float, ...]
    clipped: tuple[bool, ...]
    """Whether the clip holds the token, and whether it was trained on."""
    trained: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixForest:
    """The prefixes of all rollouts of a step, kept or not: a node is a run of tokens that the same
    rollouts share. Parents come before their children.
    """

    parent: tuple[int, ...]
    """-1: a root."""
    num_tokens: tuple[int, ...]
    num_rollouts: tuple[int, ...]
    """Rollouts through the node, and their mean reward; NaN without rewards."""
    reward_mean: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The kept rollouts of a step in request order, and the forest of all."""

    rollouts: tuple[KeptRollout, ...]
    forest: PrefixForest


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How sequences are drawn, and where they end. Equal requests without a seed are answered
    differently.
    """

    num_samples: int = 1
    max_tokens: int | None = None
    """Length limit of each sequence, without the prompt. Default: what the model's longest sequence
    has left beside the prompt.
    """
    temperature: float = 1.0
    """Divides the logits; 0: the most likely token."""
    top_k: int = 0
    """Draw only from so many of the most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Draw only from the most likely tokens that together have this probability."""
    seed: int | None = None
    """Makes an equal request to the same version give the same sequences, which differ from one
    another.
    """
    stop_token_ids: tuple[int, ...] = ()
    """A sequence ends with any of these tokens, which is its last one."""
    stop: tuple[str, ...] = ()
    """A sequence ends with the token that completes any of these texts; needs the tokenizer of the
    model.
    """
    ignore_eos: bool = False
    """Whether to go on after the model's own end tokens, which otherwise are among
    `stop_token_ids`.
    """
    prompt_logprobs: bool = False
    """Whether to return the log-probs of the prompt's tokens."""
    topk_prompt_logprobs: int = 0
    """Return the most likely tokens at each place of the prompt, so many of them; 0: none."""
    target_places: tuple[int, ...] = ()
    """Return the log-prob of a token at a place of the prompt, for each pair of these two lists:
    places count from 0, at which nothing is predicted, so each is at least 1.
    """
    target_tokens: tuple[int, ...] = ()

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            num_samples: int = 1,
            max_tokens: int | None = None,
            temperature: float = 1.0,
            top_k: int = 0,
            top_p: float = 1.0,
            seed: int | None = None,
            stop_token_ids: Sequence[int] = (),
            stop: Sequence[str] = (),
            ignore_eos: bool = False,
            prompt_logprobs: bool = False,
            topk_prompt_logprobs: int = 0,
            target_places: Sequence[int] = (),
            target_tokens: Sequence[int] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        bases.as_declared(
            self,
            stop_token_ids=tuple,
            stop=tuple,
            target_places=tuple,
            target_tokens=tuple,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One sampled continuation of the prompt."""

    tokens: tuple[int, ...]
    """The stop token or text is among them."""
    logprobs: tuple[float, ...]
    """One value a token, at the sampling temperature (1 where that is 0) over all tokens: top_k and
    top_p are not in them.
    """
    stop_reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What was sampled, and of which version."""

    sequences: tuple[SampledSequence, ...]
    version: int | None = None
    """Absent: the base."""
    prompt_logprobs: tuple[float, ...]
    """One value a token of the prompt, at temperature 1; NaN for the first, which nothing predicts.
    Empty unless asked for.
    """
    topk_prompt_tokens: tuple[int, ...]
    """[P, k], rows one after the other, the most likely token first: token ids, and their log-probs
    at temperature 1. The first row is of zeros and NaN. Empty unless asked for.
    """
    topk_prompt_logprobs: tuple[float, ...]
    target_logprobs: tuple[float, ...]
    """One value a pair of `target_places` and `target_tokens`, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """One figure, a value a point; NaN where no step of the point has it."""

    figure: str
    """Its name: that of a field of StepReport, or `seconds.` and that of a field of PhaseSeconds.
    """
    mean: tuple[float, ...]
    """Mean, least and greatest value over the point's steps. `low` and `high` are empty where every
    point stands for one step.
    """
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMark:
    """What stands out at a step, or an operation between steps that set the weights. Those of one
    point with the same kind and reason are one mark, which stands at the last of them.
    """

    seq: int
    version: int
    """The policy's version after the operation."""
    kind: OperationKind
    warnings: tuple[str, ...]
    """Kinds of the warnings."""
    skip_reason: SkipReason | None = None
    """Why the step was skipped; absent unless it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHistory:
    """Steps as columns: a point stands for one step or for several neighbours, and has seq, version
    and time of the last of these.
    """

    seq: tuple[int, ...]
    version: tuple[int, ...]
    finished_at: tuple[float, ...]
    """Unix seconds; a clock that was set back makes it fall."""
    series: tuple[StepSeries, ...]
    marks: tuple[StepMark, ...]
    num_steps: int
    """How many steps the points stand for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInfo:
    """A published version."""

    version: int
    size_bytes: int
    """Bytes of its files, and of the deltas that lead to it."""
    delta_bytes: int
    published_at: datetime
    is_held: bool
    """Whether a receiver holds it now."""
    names: tuple[NamedVersion, ...]
    """Names that keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverInfo:
    """A receiver by its last acknowledgement."""

    receiver_id: str
    version: int | None = None
    """The version that it serves; absent: none."""
    lag: int | None = None
    """Versions from that one to the newest published."""
    holds_version: int | None = None
    """The version that is kept for it now."""
    last_seen: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionList:
    """A policy's published versions, in the order of their publication, those that only their names
    keep first, and its receivers.
    """

    versions: tuple[VersionInfo, ...]
    receivers: tuple[ReceiverInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of the server; sizes in bytes, waits in seconds."""

    max_body_bytes: int
    max_fetch_bytes: int
    max_groups: int
    max_sequences: int
    max_tokens: int
    max_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """A kernel backend on the workers' device."""

    op: str
    name: str
    available: bool
    unavailable_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """Versions, backends and limits of the server."""

    version: str
    api_version: str
    device: str
    backends: tuple[BackendInfo, ...]
    presets: tuple[str, ...]
    limits: ServerLimits
    library_versions: Mapping[str, str]
