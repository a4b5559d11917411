"""The engine's nouns: policy, operation, command, result. No torch, no wire.

Values are validated before they get here: ids match their patterns, enums are resolved, commands
are complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ratoon.model.spec import ModelInfo, ModelSpec
from ratoon.train.config import (
    DEFAULT_GUARD,
    AdamWConfig,
    NumericsGuard,
    ParallelLayout,
)
from ratoon.train.report.step_report import StepReport

if TYPE_CHECKING:
    # Workers have no settings: they import no pydantic.
    pass


class Sequencing(StrEnum):
    CLIENT = "client"
    SERVER = "server"


class Recovery(StrEnum):
    REPLAY = "replay"
    FAIL = "fail"


class OnChangedNumerics(StrEnum):
    STOP = "stop"
    REBASE = "rebase"


class PublishKind(StrEnum):
    EVERY = "every"
    EVERY_N = "every_n"
    ON_REQUEST = "on_request"


class ReferencePolicy(StrEnum):
    NONE = "none"
    BASE = "base"


class ImportMode(StrEnum):
    """Imported values replace the weights, or are added to them."""

    FULL = "full"
    DELTA = "delta"


class PolicyState(StrEnum):
    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"
    DELETING = "deleting"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """When a version's weights are written for readers; `every_n` counts versions.

    With `deltas` also what makes them out of those of the newest version before.
    """

    kind: PublishKind
    every_n: int
    deltas: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    policy_id: str
    model: ModelSpec
    optimizer: AdamWConfig
    sequencing: Sequencing
    deterministic: bool
    recovery: Recovery
    on_changed_numerics: OnChangedNumerics
    publish: PublishConfig
    keep_versions: int
    # Packed tokens per micro-batch; None: each plan chooses.
    micro_batch_tokens: int | None
    reference: ReferencePolicy
    parallel: ParallelLayout
    # "": the best available.
    attention_backend: str
    numerics_guard: NumericsGuard = DEFAULT_GUARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy as its callers see it; times are seconds since the epoch, versions start at 0."""

    spec: PolicySpec
    state: PolicyState
    version: int
    next_seq: int
    created_at: float
    info: ModelInfo | None
    published_version: int | None
    # Why the policy failed; "": it has not, or the cause is unknown.
    failure: str = ""


class OperationKind(StrEnum):
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

    @property
    def is_lifecycle(self) -> bool:
        """Whether it creates or deletes a policy; such an operation has no command and no seq."""
        return self in (OperationKind.CREATE_POLICY, OperationKind.DELETE_POLICY)


class OperationState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (OperationState.DONE, OperationState.FAILED, OperationState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """What a receiver of weights says of itself.

    `version`: what it serves; None: nothing. `holds_version`: what it reads, kept for it until its
    next acknowledgement, at most `hold_s` seconds; None: nothing.
    """

    receiver_id: str
    version: int | None
    holds_version: int | None
    hold_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counts of micro-batches; `planned` is 0 until the batch is cut."""

    micro_batches_done: int = 0
    micro_batches_planned: int = 0
    tokens_per_second: float = 0.0
    eta_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    version: int
    report: StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """The output is a file of the policy's results folder: a serialized `ForwardOutput`."""

    version: int
    digest: str
    size_bytes: int
    report: StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """`replay_from_seq`: first operation of the window open at `seq`; 0: no recovery begins here.

    Times in Unix seconds.
    """

    checkpoint_id: str
    version: int
    seq: int
    replay_from_seq: int
    created_at: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """`dtypes`, of the folder's tensors, by safetensors' names; `digest`: of its files."""

    version: int
    num_tensors: int
    size_bytes: int
    dtypes: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyResult:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedResult:
    """`RatoonError.to_dict()` of what went wrong."""

    error: dict[str, object]


OperationResult = (
    PolicyResult
    | StepResult
    | ForwardResult
    | CheckpointInfo
    | ImportResult
    | EmptyResult
    | FailedResult
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Handle of an asynchronous operation. seq 0: not sequenced; blocked_by_seq 0: not blocked."""

    operation_id: str
    policy_id: str
    kind: OperationKind
    seq: int
    request_id: str
    state: OperationState
    blocked_by_seq: int
    progress: Progress
    created_at: float
    started_at: float | None
    finished_at: float | None
    # None until the state is final.
    result: OperationResult | None
