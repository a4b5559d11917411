"""The values that pass between a controller and its policy's worker. No torch is imported here.

Paths are absolute, on storage that both processes see. Equal digests of `Numerics` mean equal
fields.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from ratoon.engine.commands import Command
from ratoon.engine.files.paths import PolicyPaths
from ratoon.engine.types import CheckpointInfo, FailedResult, NamedVersion, OperationResult
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import ModelInfo
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.selection import Counters
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import OperationState, Progress

if TYPE_CHECKING:
    from ratoon.engine.worker.worker import WorkerCore


P = ParamSpec("P")
T = TypeVar("T")
NO_FORWARD = ""


class FencedError(Exception):
    """A newer controller owns the policy: whoever gets this must stop, and touch nothing more."""


class WorkerLostError(Exception):
    """The worker is gone or its state unknown, so nothing on it can be relied on."""


class NeighbourLostError(WorkerLostError):
    """The worker is gone, and nothing that the policy has asked of it is to blame."""


class UnusableCheckpointError(Exception):
    """A checkpoint is damaged, gone or another trainer's; the message names it and says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherAnswer:
    """What a teacher said of a batch: a serialized `ForwardOutput` beside the batch's body.

    `version`: of the weights that answered. `digest`: SHA-256 of the file, which is its name.
    """

    policy_id: str
    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The decisions that, with its command, make an operation's replay exact.

    They are journaled when the operation ends. Until then no caller has been told, and they may be
    made anew.
    """

    # How the batch is cut into micro-batches; None: the worker decides, or there is no batch.
    plan: UpdatePlan | None = None
    # The results file that maps old log-probs to rollouts (`files.results`).
    old_logprobs: str = NO_FORWARD
    # Version of the weights that computed them; None: there are none, or it is not known.
    old_version: int | None = None
    # Version of the weights if they change; 0: they do not.
    next_version: int = 0
    # The checkpoint to load, or to save; size and time of the latter are not known yet.
    checkpoint: CheckpointInfo | None = None
    # The version that was published under a name; when is not known yet.
    named: NamedVersion | None = None
    # Digest of the imported folder's files; "": nothing is imported, or they are not read yet.
    folder_digest: str = ""
    # Answers to the loss's questions, in their order (`rollout.questions`).
    teachers: tuple[TeacherAnswer, ...] = ()


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
    worker takes no digests. `discards_gradients`: it failed, and those of the open window are
    discarded by it. `choices`: those it ran with, including the worker's own; None: it did
    not run.
    """

    operation_id: str
    state: OperationState
    result: OperationResult
    must_restore: bool = False
    discards_gradients: bool = False
    weights_digest: str = ""
    choices: Choices | None = None
    started_at: float | None = None

    @classmethod
    def of_error(
        cls,
        operation_id: str,
        error: RatoonError,
        *,
        must_restore: bool = False,
        choices: Choices | None = None,
        started_at: float | None = None,
    ) -> Outcome:
        """Outcome of an operation that has failed or was cancelled, as the error's code says."""
        is_cancelled = error.code is ErrorCode.CANCELLED
        return cls(
            operation_id=operation_id,
            state=OperationState.CANCELLED if is_cancelled else OperationState.FAILED,
            result=FailedResult(error=error.to_dict()),
            must_restore=must_restore,
            choices=choices,
            started_at=started_at,
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
    """State to load: the policy as of `last_seq`. `digests`: take digests from then on.

    `resets_optimizer`: moments and step count of the source are left behind.
    """

    trainer: TrainerSpec
    source: InitialWeights | CheckpointWeights
    version: int
    last_seq: int
    digests: bool
    resets_optimizer: bool = False


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


class RemoteWorker(Protocol):
    """A policy's worker, as its controller reaches it.

    Every method raises `WorkerLostError` where the worker is gone and `FencedError` where it has
    seen a newer fencing token.
    """

    async def fence(self, token: int, *, evenly: bool = False, num_nodes: int = 0) -> WorkerStatus:
        """Raise the fencing token, let the running task end, and return the worker's status.

        Starts a worker where there is none: with `evenly`, on as many GPUs of each node, of as few
        as have room or of `num_nodes`. Raises RESOURCE_EXHAUSTED where there is no capacity.
        """
        ...

    async def call(
        self,
        method: Callable[Concatenate[WorkerCore, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Call a method of the worker's `WorkerCore`. Raises what the method raises."""
        ...

    async def replace(self) -> None:
        """End the worker; the next `fence` starts another one."""
        ...

    async def release(self) -> None:
        """End the worker and release its resources, until the next `fence`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """`fields` as the trainer names them; `digest` is of their JSON, 32 hexadecimal digits."""

    digest: str
    fields: Mapping[str, str]

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Numerics:
        digest = hashlib.sha256(_text(fields).encode()).hexdigest()[:32]
        return cls(digest=digest, fields=dict(fields))

    @property
    def text(self) -> str:
        return _text(self.fields)


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The fields that differ, as `name: then -> now`."""
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    return ", ".join(f"{name}: {then.get(name, '')} -> {now.get(name, '')}" for name in names)


def _text(fields: Mapping[str, str]) -> str:
    return json.dumps(dict(fields), sort_keys=True, separators=(",", ":"))


@dataclass(slots=True)
class Meter:
    """Progress of the running task; written by the compute thread, read by any."""

    done: int = 0
    planned: int = 0
    tokens: int = 0
    started: float = 0.0

    def progress(self) -> Progress:
        seconds = time.perf_counter() - self.started
        rate = self.tokens / seconds if self.tokens and seconds > 0 else 0.0
        remaining = seconds * (self.planned - self.done) / self.done if self.done else None
        return Progress(
            micro_batches_done=self.done,
            micro_batches_planned=self.planned,
            tokens_per_second=rate,
            eta_s=remaining,
        )
