"""What a controller asks of a worker, and what it gets back. No torch: both sides import it.

Paths are absolute, on storage that both sides see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ratoon.engine.files.paths import PolicyPaths
from ratoon.engine.types import CheckpointInfo, Command, FailedResult, OperationResult
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import ModelInfo
from ratoon.rollout.selection import Counters
from ratoon.stream.manifest import WeightManifest
from ratoon.train.saved_state import AsOf
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import OperationState, Progress

NO_FORWARD = ""


class FencedError(Exception):
    """A newer controller owns the policy: whoever gets this must stop, and touch nothing more."""


class WorkerLostError(Exception):
    """The worker is gone or its state unknown, so nothing on it can be relied on."""


class UnusableCheckpointError(Exception):
    """A checkpoint is damaged, gone or another trainer's; the message names it and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The decisions that, with its command, make an operation's replay exact.

    They are journaled when the operation ends. Until then no caller has been told, and they may be
    made anew.
    """

    # The batch's cut into micro-batches; None: the worker decides, or there is no batch.
    plan: dict[str, object] | None = None
    # The results file that maps old log-probs to rollouts (`files.results`).
    old_logprobs: str = NO_FORWARD
    # Version of the weights that those are of; None: there are none, or it is not known.
    old_version: int | None = None
    # Version of the weights if they change; 0: they do not.
    next_version: int = 0
    # The checkpoint to load, or to save; size and time of the latter are not known yet.
    checkpoint: CheckpointInfo | None = None
    # Of the imported folder's files; "": nothing is imported, or they are not read yet.
    folder_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One operation for the worker to run; seq 0: not sequenced."""

    operation_id: str
    seq: int
    command: Command
    choices: Choices
    paths: PolicyPaths
    # Seconds since the epoch.
    started_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a task ended: done, failed or cancelled.

    `operation_id`: the operation's; after a database failover the same seq may have been another's.
    `must_restore`: the open window's gradients are gone or include part of this task's.
    `weights_digest`: of weights, moments and counters after a task that is done; "" where the
    worker takes no digests. `choices`: those it ran with, including the worker's own; None: it did
    not run.
    """

    operation_id: str
    state: OperationState
    result: OperationResult
    must_restore: bool
    weights_digest: str
    choices: Choices | None
    started_at: float | None

    @classmethod
    def unrun(
        cls,
        operation_id: str,
        state: OperationState,
        error: RatoonError,
        started_at: float | None = None,
    ) -> Outcome:
        """Outcome of an operation that fails, or is cancelled, before it reaches the worker."""
        return cls(
            operation_id=operation_id,
            state=state,
            result=FailedResult(error=error.to_dict()),
            must_restore=False,
            weights_digest="",
            choices=None,
            started_at=started_at,
        )

    @classmethod
    def of_error(cls, task: Task, error: RatoonError, *, must_restore: bool) -> Outcome:
        """Outcome of a task that has failed or was cancelled."""
        is_cancelled = error.code is ErrorCode.CANCELLED
        return cls(
            operation_id=task.operation_id,
            state=OperationState.CANCELLED if is_cancelled else OperationState.FAILED,
            result=FailedResult(error=error.to_dict()),
            must_restore=must_restore,
            weights_digest="",
            choices=task.choices,
            started_at=task.started_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """The weights of the model spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """`weights_digest` "": not known."""

    folder: str
    weights_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """State to load: the policy as of `last_seq`. `digests`: take digests from then on."""

    trainer: TrainerSpec
    source: InitialWeights | CheckpointWeights
    version: int
    last_seq: int
    digests: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRequest:
    """The sums to write to `folder`, by their names in exported weights; bounds in bytes."""

    names: tuple[str, ...]
    folder: str
    max_bytes: int
    min_free_disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFile:
    """A result file of gradient sums, and the counters of their window."""

    digest: str
    size_bytes: int
    counters: Counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A new trainer's own description, and its numerics by field name."""

    info: ModelInfo
    numerics: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a new controller must know of a worker that outlived the old one.

    `last_outcome` None: nothing was applied since the worker was loaded. `numerics` is empty where
    nothing is loaded, `weights_digest` where none was taken.
    """

    is_loaded: bool
    version: int
    numerics: Mapping[str, str]
    weights_digest: str
    last_seq: int
    last_outcome: Outcome | None


class WorkerPort(Protocol):
    """A policy's worker, as its controller sees it.

    Every call raises `WorkerLostError` where the worker is gone and `FencedError` where it has seen
    a newer fencing token. `apply` raises nothing else: a task's failure is part of its outcome.
    """

    async def fence(self, token: int, *, on_one_node: bool = False) -> WorkerStatus:
        """Raise the fencing token, let the running task end, and return the worker's status.

        Starts a worker where there is none, on GPUs of one node if they have to be. Raises
        RESOURCE_EXHAUSTED where there is no capacity.
        """
        ...

    async def load(self, token: int, request: LoadRequest) -> Loaded:
        """Build the trainer.

        Raises `RatoonError` where the spec cannot be served, `UnusableCheckpointError`.
        """
        ...

    async def replace(self) -> None:
        """End the worker; the next `fence` starts another."""
        ...

    async def release(self) -> None:
        """End the worker and release its resources, until the next `fence`."""
        ...

    async def apply(self, token: int, task: Task) -> Outcome:
        """Plan and run the task whose seq is next; for the last seq, return its stored outcome."""
        ...

    async def skip(self, token: int, seq: int, outcome: Outcome) -> None:
        """Count a seq that does not run."""
        ...

    async def forward(self, token: int, task: Task) -> Outcome:
        """Run a Forward that has no seq."""
        ...

    async def restore(self, token: int, tasks: tuple[Task, ...]) -> None:
        """Make the open window hold exactly the gradients of these ForwardBackwards."""
        ...

    async def hold(self, token: int, version: int) -> None:
        """Copy the weights, which are of this version; raises `RatoonError`.

        The copy replaces an earlier one, once a publication under way is over.
        """
        ...

    async def publish(
        self, token: int, version: int, weights_root: str, created_at: float, deltas: bool
    ) -> WeightManifest:
        """Write the copy for readers. Runs beside other calls. Raises `RatoonError`."""
        ...

    async def write_gradients(self, token: int, request: GradientRequest) -> GradientFile:
        """Write sums of the open window as a result file. Raises `RatoonError`."""
        ...

    async def snapshot(self, token: int) -> str:
        """Copy the state at the last step boundary; returns its digest. Raises `RatoonError`.

        The copy replaces an earlier one, and is held until it is written.
        """
        ...

    async def write_snapshot(self, token: int, folder: str, as_of: AsOf) -> int:
        """Write the copy as a checkpoint and read it back; returns its size in bytes.

        Runs beside other calls. Raises `RatoonError`; there is no folder then.
        """
        ...

    async def progress(self) -> Progress: ...

    async def cancel(self, operation_id: str) -> None:
        """Ask the running or next task to stop before it changes weights."""
        ...
