"""What callers give and get: the values of `ratoon.v1` under the names that callers use.

Enums may be given as text. `None` is the service's default, which docs/api.md states; the service
judges numbers. The comments of the .proto files describe each field.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from ratoon_proto.types import (
    AdamWConfig,
    CheckpointInfo,
    CheckpointSource,
    DistillationConfig,
    ImportResult,
    KeepRollouts,
    KeepRolloutsName,
    KlConfig,
    LearningRateSchedule,
    LoraTuning,
    LossConfig,
    ModelDtype,
    ModelDtypeName,
    MuonConfig,
    NamedVersion,
    NumericsGuard,
    OldLogprobs,
    OnChangedNumerics,
    OnChangedNumericsName,
    OptimStepConfig,
    ParallelLayout,
    Policy,
    PublishConfig,
    Recovery,
    RecoveryName,
    ReferencePolicy,
    ReferencePolicyName,
    RolloutCorrection,
    Sequencing,
    SequencingName,
    StalenessConfig,
    StepReport,
    StepResult,
    ValueLossConfig,
)

AdamW = AdamWConfig
Checkpoint = CheckpointInfo
Correction = RolloutCorrection
Distillation = DistillationConfig
Kl = KlConfig
Lora = LoraTuning
Loss = LossConfig
Muon = MuonConfig
Optim = OptimStepConfig
Parallel = ParallelLayout
Publish = PublishConfig
Schedule = LearningRateSchedule
Staleness = StalenessConfig
ValueLoss = ValueLossConfig


class FromForward(OldLogprobs):
    """Old log-probs of a Forward of the same rollouts, which the service has kept."""

    __slots__ = ()

    def __init__(self, operation_id: str) -> None:
        super().__init__("from_forward", forward_operation_id=operation_id)


class PolicyOptions(TypedDict, total=False):
    """Fields of a PolicySpec that `create_policy` takes.

    An absent one, and None, is the service's default.

    One of `preset`, `model_folder` and `send_folder` is required: the last is a model folder of
    this machine, whose files are sent. Without `lora` every parameter is trained.
    """

    preset: str | None
    model_folder: str | None
    send_folder: Path | str | None
    lora: Lora | None
    optimizer: AdamW | None
    dtype: ModelDtype | ModelDtypeName | None
    seed: int | None
    sequencing: Sequencing | SequencingName | None
    deterministic: bool | None
    recovery: Recovery | RecoveryName | None
    on_changed_numerics: OnChangedNumerics | OnChangedNumericsName | None
    publish: Publish | None
    keep_versions: int | None
    micro_batch_tokens: int | None
    reference: ReferencePolicy | ReferencePolicyName | None
    parallel: Parallel | None
    attention_backend: str | None
    numerics_guard: NumericsGuard | None
    keep_rollouts: KeepRollouts | KeepRolloutsName | None
    keep_rollouts_bytes: int | None
    from_checkpoint: CheckpointSource | None
    idle_release_s: float | None
    idle_ttl_s: float | None
    value_head: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Log-probs of a Forward, one float32 [R] array a rollout, in request order.

    Attributes:
        version: The version of the weights that answered.
        logprobs: Zero at tokens that are not trained.
        entropy: None unless it was asked for.
        report: What the Forward did.
        teacher_tokens: The likeliest tokens, or those that were sent, int32 [R, K] a rollout; None
            unless they were asked for.
        teacher_logprobs: Their log-probs, float32 [R, K], likewise.
        values: What the value head says of the state that each token was sampled in, zero at tokens
            that are not trained; None without a value head.
    """

    version: int
    logprobs: tuple[NDArray[np.float32], ...]
    entropy: tuple[NDArray[np.float32], ...] | None
    report: StepReport
    teacher_tokens: tuple[NDArray[np.int32], ...] | None = None
    teacher_logprobs: tuple[NDArray[np.float32], ...] | None = None
    values: tuple[NDArray[np.float32], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardResult(StepResult):
    """A ForwardBackward's result, with its log-probs where it was asked for them.

    Attributes:
        logprobs: One float32 [R] array a rollout, in request order, NaN at tokens without; None
            unless they were asked for.
        entropy: Likewise.
    """

    logprobs: tuple[NDArray[np.float32], ...] | None = None
    entropy: tuple[NDArray[np.float32], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the service can take work: `status` is "ok", or says what is wrong."""

    status: str

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


# What `result()` gives, by the operation's kind; None where there is nothing to say.
OperationResult = (
    Policy | StepResult | ForwardResult | Checkpoint | NamedVersion | ImportResult | None
)
