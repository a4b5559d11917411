"""The engine's nouns: policy, operation, command, result. No torch, no wire.

Values are validated before they get here: ids match their patterns, enums are resolved, commands
are complete.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratoon.model.spec import ModelInfo, ModelSpec
from ratoon.train.spec import DEFAULT_GUARD
from ratoon_proto.types import (
    AdamWConfig,
    CheckpointSource,
    EmptyResult,
    FullTuning,
    ImportResult,
    KeepRollouts,
    NumericsGuard,
    OnChangedNumerics,
    OperationKind,
    OperationState,
    ParallelLayout,
    PolicyState,
    Progress,
    PublishConfig,
    Recovery,
    ReferencePolicy,
    ResultFile,
    Sequencing,
    StepReport,
    StepResult,
)


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
    keep_rollouts: KeepRollouts = KeepRollouts.NONE
    keep_rollouts_bytes: int = 0
    # Where the weights of version 0 come from; None: from the model.
    from_checkpoint: CheckpointSource | None = None
    # Seconds without work until it is put away, and without a call until it ends; None: never.
    idle_release_s: float | None = None
    idle_ttl_s: float | None = None

    @property
    def published_model(self) -> ModelSpec:
        """The model whose weights a version has: a whole one if the adapter is merged into it."""
        return replace(self.model, tuning=FullTuning()) if self.publish.merged else self.model


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
    # Why the policy failed or ended; "": it has not, or the cause is unknown.
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFilter:
    """Which operations to list; what is empty or 0 asks for any."""

    policy_id: str
    kinds: tuple[OperationKind, ...]
    states: tuple[OperationState, ...]
    seq: int


# An operation's place among all, by when it was accepted: seconds since the epoch, then its id.
Place = tuple[float, str]


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
class PolicyResult:
    policy: Policy


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

    `checkpoint_id` names its folder. `name` is what its caller calls it; "": it is the service's
    own, taken by itself or left by a caller. Times in Unix seconds; `expires_at` None: never.
    """

    checkpoint_id: str
    name: str = ""
    version: int
    seq: int
    replay_from_seq: int
    created_at: float
    size_bytes: int
    pinned: bool = False
    expires_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedVersion:
    """A caller's name for a version, which keeps it. Times as of `CheckpointInfo`."""

    name: str
    version: int
    size_bytes: int
    created_at: float = 0.0
    expires_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedResult:
    """`RatoonError.to_dict()` of what went wrong."""

    error: dict[str, object]


OperationResult = (
    PolicyResult
    | StepResult
    | ForwardResult
    | CheckpointInfo
    | NamedVersion
    | ImportResult
    | EmptyResult
    | FailedResult
)


def file_of(result: OperationResult | None) -> ResultFile | None:
    """The file of the policy's results folder that the result names; None: it names none."""
    match result:
        case ForwardResult(digest=digest, size_bytes=size_bytes):
            return ResultFile(digest=digest, size_bytes=size_bytes)
        case StepResult(file=file):
            return file
        case _:
            return None


def version_of(result: OperationResult | None) -> int | None:
    """The policy's version after an operation that may change it; None: any other."""
    changes = isinstance(result, StepResult | CheckpointInfo | ImportResult)
    return result.version if changes else None


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
