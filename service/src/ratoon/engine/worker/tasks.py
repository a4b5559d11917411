"""What a controller asks of a worker, and what it gets back. No torch: both sides import it.

Paths are absolute, on storage that both sides see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ratoon.engine.files.paths import PolicyPaths
from ratoon.engine.types import (
    CheckpointInfo,
    Command,
    FailedResult,
    OperationResult,
    OperationState,
    Progress,
)
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import ModelInfo
from ratoon.stream.manifest import WeightManifest
from ratoon.train.spec import TrainerSpec

NO_FORWARD = ""


class FencedError(Exception):
    """A newer controller owns the policy: whoever gets this stops, and touches nothing more."""


class WorkerLostError(Exception):
    """The worker is gone, or its state is no longer known; nothing on it can be relied on."""


class UnusableCheckpointError(Exception):
    """A checkpoint is damaged, gone or another trainer's; the message names it and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What is decided of an operation beside its command, so that running it again is the same.

    The journal has it once the operation has ended; until then nobody was told, and it may be
    decided anew.
    """

    # How the batch is cut; None: the worker decides, or there is no batch.
    plan: dict[str, object] | None = None
    # The file among the results that says whose old log-probs there are (`forward_output`).
    old_logprobs: str = NO_FORWARD
    # What the weights are called if they change; 0: they do not.
    next_version: int = 0
    # To be loaded, or to be saved; of the latter size and time are not known yet.
    checkpoint: CheckpointInfo | None = None


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

    `operation_id`: whose it is; a seq may have been another's that a failed-over database has lost.
    `must_restore`: the open window's gradients are gone or mixed with a part of this task's.
    `weights_digest`: of weights, moments and counters afterwards, of a task that is done; "" where
    the worker was not asked to take digests. `choices`: those it was run with, the worker's own
    among them; None: it was not run.
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
        """Of an operation that fails, or is cancelled, before the worker has it."""
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
        """Of a task that has failed or was cancelled."""
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
    """Those of the model spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """`weights_digest` "": not known."""

    folder: str
    weights_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """How a worker becomes the policy as of `last_seq`. `digests`: it takes them from then on."""

    trainer: TrainerSpec
    source: InitialWeights | CheckpointWeights
    version: int
    last_seq: int
    digests: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a trainer that was built says of itself; `numerics` as it names the fields."""

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
    a newer token. `apply` raises nothing else; what went wrong with the task is its outcome.
    """

    async def fence(self, token: int) -> WorkerStatus:
        """Raise the token, let what runs come to its end, and say where the worker stands.

        Makes a worker where there is none. Raises RESOURCE_EXHAUSTED where there is no room for it.
        """
        ...

    async def load(self, token: int, request: LoadRequest) -> Loaded:
        """Build the trainer.

        Raises `RatoonError` where the spec cannot be served, `UnusableCheckpointError`.
        """
        ...

    async def replace(self) -> None:
        """Drop the worker; the next `fence` has a bare one."""
        ...

    async def release(self) -> None:
        """End the worker and give back what it holds; until the next `fence` there is none."""
        ...

    async def apply(self, token: int, task: Task) -> Outcome:
        """Plan and run the task whose seq is next; for the last one again, say how it ended."""
        ...

    async def skip(self, token: int, seq: int, outcome: Outcome) -> None:
        """Count a seq that is not run."""
        ...

    async def forward(self, token: int, task: Task) -> Outcome:
        """Run a Forward that has no seq."""
        ...

    async def restore(self, token: int, tasks: tuple[Task, ...]) -> None:
        """Make the open window hold the gradients of these ForwardBackwards and of nothing else."""
        ...

    async def publish(
        self, token: int, version: int, weights_root: str, created_at: float
    ) -> WeightManifest: ...

    async def snapshot(self, token: int) -> str:
        """Copy the state at the last step boundary; its digest. Raises `RatoonError`.

        The copy is held, instead of an earlier one, until it is written.
        """
        ...

    async def write_snapshot(self, token: int, folder: str) -> int:
        """Write the copy as a checkpoint and read it back; its size in bytes.

        Other calls go on meanwhile. Raises `RatoonError`; there is no folder then.
        """
        ...

    async def progress(self) -> Progress: ...

    async def cancel(self, operation_id: str) -> None:
        """Ask what runs, or is about to, to stop before it changes weights."""
        ...
