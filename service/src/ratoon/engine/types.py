"""The engine's nouns: policy, operation, command, result. No torch, no wire.

Values are validated before they get here: ids match their patterns, enums are resolved, commands
are complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ratoon.model.spec import ModelInfo, ModelSpec
from ratoon.train.config import DEFAULT_GUARD
from ratoon_proto.types import (
    AdamWConfig,
    EmptyResult,
    ImportMode,
    ImportResult,
    LossConfig,
    NumericsGuard,
    OnChangedNumerics,
    OperationKind,
    OperationState,
    OptimStepConfig,
    ParallelLayout,
    PolicyState,
    Progress,
    PublishConfig,
    Recovery,
    ReferencePolicy,
    Sequencing,
    StepReport,
    StepResult,
)

if TYPE_CHECKING:
    # Workers have no settings: they import no pydantic.
    from ratoon.config import KeyLimits


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqKey:
    """Client sequencing: seqs are contiguous from 1."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """Server sequencing: the caller's own idempotency key."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoKey:
    """Not sequenced: a Forward that reads the newest version."""


OperationKey = SeqKey | RequestKey | NoKey


# Commands: what an operation asks of the worker. `body` is the serialized RolloutBatch
# (`rollout.serial`), written as a file beside the journal and named by `body_digest` in it.


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCommand:
    loss: LossConfig
    optim: OptimStepConfig
    expected_version: int | None
    body_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardCommand:
    loss: LossConfig
    expected_version: int | None
    body_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepCommand:
    optim: OptimStepConfig
    expected_version: int | None
    # Empty: the whole window, none of whose operations may have failed.
    include_seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardGradientsCommand:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCommand:
    with_entropy: bool
    use_reference: bool
    expected_version: int | None
    body_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpointCommand:
    # "": named after seq and version.
    checkpoint_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheckpointCommand:
    checkpoint_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportWeightsCommand:
    # Relative to the models root.
    folder: str
    mode: ImportMode
    reset_optimizer: bool
    expected_version: int | None


Command = (
    UpdateCommand
    | ForwardBackwardCommand
    | OptimStepCommand
    | DiscardGradientsCommand
    | ForwardCommand
    | SaveCheckpointCommand
    | LoadCheckpointCommand
    | ImportWeightsCommand
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The API key that an operation belongs to. `key_id` "": none; `limits` do not apply then."""

    key_id: str
    limits: KeyLimits | None


NOBODY = Holder(key_id="", limits=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One sequenced call, validated: what the controller accepts, journals and hashes.

    `body` is b"" for commands without a batch. The payload hash covers command and body, not the
    key. `num_tokens` counts prompt and response of each rollout alone.
    """

    policy_id: str
    key: OperationKey
    command: Command
    body: bytes
    num_tokens: int = 0
    holder: Holder = NOBODY


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

    Times in Unix seconds.
    """

    checkpoint_id: str
    version: int
    seq: int
    replay_from_seq: int
    created_at: float
    size_bytes: int


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
