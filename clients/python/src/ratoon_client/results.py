"""What the service answers, as frozen values with the field names of `ratoon.v1`.

A field with a default may be absent on the wire, one without is always there; times are UTC, sizes
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ratoon_client.policy_options import NumericsGuard

PolicyState = Literal["unspecified", "creating", "ready", "failed", "deleting"]
OperationState = Literal["unspecified", "queued", "running", "done", "failed", "cancelled"]
ImportMode = Literal["full", "delta"]
OperationKind = Literal[
    "unspecified",
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
]
FINAL_STATES: frozenset[OperationState] = frozenset({"done", "failed", "cancelled"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTuning:
    rank: int
    alpha: float
    target_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    kind: Literal["unspecified", "every", "every_n", "on_request"]
    every_n: int
    deltas: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    num_workers: int
    shard: Literal["unspecified", "states", "gradients", "weights"] | None = None
    sequence_ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """As the service completed it. `lora` absent: every parameter is trained."""

    policy_id: str
    preset: str | None = None
    model_folder: str | None = None
    lora: LoraTuning | None = None
    optimizer: AdamWConfig
    dtype: Literal["unspecified", "float32", "bfloat16"]
    seed: int
    sequencing: Literal["unspecified", "client", "server"]
    deterministic: bool | None = None
    recovery: Literal["unspecified", "replay", "fail"]
    on_changed_numerics: Literal["unspecified", "stop", "rebase"]
    publish: PublishConfig
    keep_versions: int | None = None
    micro_batch_tokens: int | None = None
    reference: Literal["unspecified", "none", "base"]
    parallel: ParallelLayout
    attention_backend: str | None = None
    numerics_guard: NumericsGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`next_seq` is the seq that the next sequenced call takes."""

    spec: PolicySpec
    state: PolicyState
    version: int
    next_seq: int
    created_at: datetime
    num_parameters: int
    num_trainable_parameters: int
    vocab_size: int
    max_sequence_tokens: int
    attention_backend: str
    # What is kept beside the weights (`worker.optimizer_states`); empty until the model is loaded.
    optimizer_states: str
    # What its devices share out (`ParallelLayout.shard`); empty until the model is loaded.
    shard: str
    published_version: int | None = None
    # Why it is failed; empty where it is not.
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`micro_batches_planned` is 0 until planned."""

    micro_batches_done: int
    micro_batches_planned: int
    tokens_per_second: float
    eta_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetail:
    code: str
    message: str
    field: str
    got: str
    expected: str
    retryable: bool
    details: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    checkpoint_id: str
    version: int
    seq: int
    replay_from_seq: int
    created_at: datetime
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    plan: float
    forward: float
    backward: float
    optimizer: float
    publish: float
    digest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckReport:
    """One rollout, packed against alone; training.proto says what each field is."""

    sequence: int
    tokens: int
    logprob_max_difference: float
    logprob_mean_difference: float
    gradient_difference: float | None = None
    worst_parameter_difference: float | None = None
    worst_parameter: str
    exceeds_limits: bool
    seconds: float


SkipReason = Literal[
    "no_tokens",
    "non_finite_loss",
    "non_finite_gradient",
    "gradient_norm",
    "reference_kl",
    "sampler_kl",
    "non_finite_step",
    "zero_gradient",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGradNorm:
    """`name` is the parameter's, `max_abs` its gradient's largest absolute value."""

    name: str
    norm: float
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """Of one layer's router; entropy in nats, `max_load` over the mean of all experts."""

    layer: int
    max_load: float
    unused_experts: int
    entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one ForwardBackward, Update or OptimStep did; training.proto says what each field is.

    None stands for a figure that was not computed.
    """

    # None of a Forward, and where no token counts.
    loss: float | None = None
    policy_gradient_loss: float | None = None
    kl: float | None = None
    # None, as every other mean over tokens, where no token was run.
    entropy: float | None = None
    clip_fraction_low: float | None = None
    clip_fraction_high: float | None = None
    ratio_max: float | None = None
    sampler_kl: float | None = None
    sampler_gap_max: float | None = None
    grad_norm: float | None = None
    reward_mean: float | None = None
    num_groups: int
    num_sequences: int
    trained_tokens: int
    unshared_tokens: int
    packed_tokens: int
    # Ratios of what was run; None of an OptimStep, and where nothing was run.
    token_reduction: float | None = None
    attention_pair_reduction: float | None = None
    num_micro_batches: int
    seconds: PhaseSeconds
    tokens_per_second: float | None = None
    hardware_mfu: float | None = None
    logical_mfu: float | None = None
    peak_memory_bytes: int
    # Of an optimizer step; absent on a CPU.
    planned_memory_bytes: int | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    dropped_stale: int
    dropped_truncated: int
    dropped_zero_variance: int
    skipped: bool
    warnings: tuple[str, ...]
    self_check: SelfCheckReport | None = None
    # Why the step was skipped, where it was.
    skip_reason: SkipReason | None = None
    old_kl: float | None = None
    ratio_mean: float | None = None
    ratio_min: float | None = None
    ratio_p01: float | None = None
    ratio_p50: float | None = None
    ratio_p99: float | None = None
    clip_fraction_dual: float | None = None
    correction_masked_fraction: float | None = None
    correction_truncated_fraction: float | None = None
    correction_weight_mean: float | None = None
    correction_ess_fraction: float | None = None
    reward_std: float | None = None
    advantage_mean: float | None = None
    advantage_std: float | None = None
    zero_variance_fraction: float | None = None
    truncated_fraction: float
    response_length_mean: float
    response_length_max: int
    sampler_gap_mean: float | None = None
    sampler_gap_abs_mean: float | None = None
    # Only where `Optim.tensor_grad_norms` asked for them.
    tensor_grad_norms: tuple[TensorGradNorm, ...]
    zero_advantage_sequences: int
    clip_fraction_positive: float | None = None
    clip_fraction_negative: float | None = None
    clamped_ratios: int
    clamped_kls: int
    clamped_sampler_gaps: int
    token_staleness_mean: float | None = None
    # Only where `Optim.changed_share` asked for it.
    changed_share: float | None = None
    # Of a policy of several workers.
    rank_seconds: tuple[float, ...]
    rank_gap: float | None = None
    # Of models with experts, each layer that has some.
    routers: tuple[RouterReport, ...]
    router_aux_loss: float | None = None
    # Of rollouts with `routed_experts`.
    route_mismatch: float | None = None
    route_conflicts: int

    def __str__(self) -> str:
        """The figures that a loop prints, in one line; one that was not computed is `none`."""
        shown = [
            f"reward {_figure(self.reward_mean, '.3g')}",
            f"loss {_figure(self.loss, '+.3g')}",
            f"sampler KL {_figure(self.sampler_kl, '.1e')}",
            f"gradient norm {_figure(self.grad_norm, '.3g')}",
        ]
        if self.kl is not None:
            shown.append(f"KL {self.kl:.1e}")
        if self.ratio_min is not None and self.ratio_max is not None:
            shown.append(f"ratio {self.ratio_min:.3f} to {self.ratio_max:.3f}")
            clipped = (self.clip_fraction_low or 0.0) + (self.clip_fraction_high or 0.0)
            shown.append(f"clipped {clipped:.1%}")
        if self.staleness_mean is not None:
            shown.append(f"staleness {self.staleness_mean:.1f}, at most {self.staleness_max}")
        if dropped := self.dropped_stale + self.dropped_truncated + self.dropped_zero_variance:
            shown.append(f"dropped {dropped}")
        if self.skipped:
            shown.append(f"skipped: {self.skip_reason or 'unspecified'}")
        return ", ".join(shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """`version` is the policy's after the operation; as text, version and figures in one line."""

    version: int
    report: StepReport

    def __str__(self) -> str:
        return f"version {self.version}, {self.report}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """One float32 [R] array a rollout, in request order; `entropy` only where asked for.

    `version` is that of the weights that answered.
    """

    version: int
    logprobs: tuple[NDArray[np.float32], ...]
    entropy: tuple[NDArray[np.float32], ...] | None
    report: StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """`version` is the policy's after the operation; the rest is what the folder had."""

    version: int
    num_tensors: int
    size_bytes: int
    # By safetensors' names: BF16, F32.
    dtypes: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A snapshot; `error` where it failed, else what it made, where it made one of these."""

    operation_id: str
    policy_id: str
    kind: OperationKind
    seq: int
    request_id: str
    state: OperationState
    blocked_by_seq: int
    progress: Progress
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error: ErrorDetail | None = None
    policy: Policy | None = None
    step: StepResult | None = None
    checkpoint: Checkpoint | None = None
    imported: ImportResult | None = None

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES


# What `result()` gives, by the operation's kind; None where there is nothing to say.
OperationResult = Policy | StepResult | ForwardResult | Checkpoint | ImportResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """`digest` is xxh3-128 of the whole file, 32 hexadecimal digits."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDelta:
    """What makes a version's files out of those of `parent_version`."""

    parent_version: int
    file: WeightFile


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """`full`: a folder that transformers loads; `adapter`: one that peft loads.

    `changed_share` is of the values of the newest version before; None: not compared.
    """

    policy_id: str
    version: int
    kind: Literal["unspecified", "full", "adapter"]
    files: tuple[WeightFile, ...]
    created_at: datetime
    deltas: tuple[WeightDelta, ...]
    changed_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientManifest:
    """Gradient sums of a window, and what divides them; `seqs` are of its ForwardBackwards."""

    policy_id: str
    version: int
    file: WeightFile
    seqs: tuple[int, ...]
    trained_tokens: int
    num_sequences: int
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    op: str
    name: str
    available: bool
    unavailable_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    max_body_bytes: int
    max_fetch_bytes: int
    max_groups: int
    max_sequences: int
    max_tokens: int
    max_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    version: str
    api_version: str
    device: str
    backends: tuple[BackendInfo, ...]
    presets: tuple[str, ...]
    limits: ServerLimits
    library_versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`status` is "ok", or what is wrong."""

    status: str

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


def _figure(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)
