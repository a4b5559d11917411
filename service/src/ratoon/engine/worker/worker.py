"""A policy's worker: the one place where its weights change.

It refuses an older fencing token, or a seq other than the next, before it touches any state. For
the last seq it returns the stored outcome.

States: bare -> loaded -> lost. A failure that leaves the trainer's state in doubt, or a failed
device, loses the worker: it refuses every call, and the controller replaces the process. No torch
is imported here: the trainer comes in as an argument.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ratoon.engine.crash_points import CrashPoint, Reach
from ratoon.engine.refusals import disk_fault, unexpected
from ratoon.engine.types import (
    ForwardBackwardCommand,
    ImportWeightsCommand,
    LoadCheckpointCommand,
    OptimStepCommand,
    UpdateCommand,
)
from ratoon.engine.worker.meter import Meter
from ratoon.engine.worker.runner import TaskRunner, write_checkpoint, write_gradients
from ratoon.engine.worker.tasks import (
    CheckpointWeights,
    FencedError,
    GradientFile,
    GradientRequest,
    Loaded,
    LoadRequest,
    Outcome,
    Task,
    UnusableCheckpointError,
    WorkerLostError,
    WorkerStatus,
)
from ratoon.engine.worker.trainer_port import (
    CreateTrainer,
    SnapshotPort,
    TrainerPort,
    WeightsCopyPort,
)
from ratoon.errors import CopyFailedError, ErrorCode, RatoonError, without_folders
from ratoon.garbage import collect_all
from ratoon.log import get_logger
from ratoon.stream.manifest import MadeBy, WeightManifest
from ratoon.stream.versions import publish_version
from ratoon.train.saved_state import AsOf
from ratoon_proto.types import OperationState, Progress, StepResult, WeightKind

T = TypeVar("T")

_LOG = get_logger("worker")
_NO_OPERATION = ""
# What changes weights or moments as soon as it runs; an Update does once its gradients are there.
_CHANGING = OptimStepCommand | LoadCheckpointCommand | ImportWeightsCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldWeights:
    """`seq`, `digest`: the state's that the weights are of; "": it has none."""

    version: int
    kind: WeightKind
    copy: WeightsCopyPort
    seq: int
    digest: str


class WorkerOrderError(Exception):
    """Controller and worker disagree on the order.

    The seq is neither the last nor the next, or it is the last one of another operation.
    """


class WorkerCore:
    """`fence`, `progress` and `cancel` are thread-safe; all else runs on one thread.

    `publish` and `write_snapshot` have a thread of their own each.
    """

    def __init__(self, create_trainer: CreateTrainer, reach: Reach) -> None:
        self._create_trainer = create_trainer
        self._reach = reach
        self._runner: TaskRunner | None = None
        self._token = 0
        self._token_lock = threading.Lock()
        self._is_lost = False
        self._policy_id = ""
        self._last_seq = 0
        self._last_outcome: Outcome | None = None
        self._takes_digests = False
        self._digest = ""
        # To be written by `write_snapshot`.
        self._snapshot: SnapshotPort | None = None
        # Written by `publish`, which has the lock meanwhile, and what it gave.
        self._held: _HeldWeights | None = None
        self._published: WeightManifest | None = None
        self._held_lock = threading.Lock()
        self._meter = Meter()
        self._cancelled_id = _NO_OPERATION

    # From any thread.

    def fence(self, token: int) -> None:
        """Refuse older fencing tokens from now on. Raises `FencedError` where this one is older.

        Raises `WorkerLostError` where the worker is lost, as does every call with a token.
        """
        with self._token_lock:
            if token < self._token:
                raise FencedError(f"token {token} is older than {self._token}")
            self._token = token
        if self._is_lost:
            raise WorkerLostError("the trainer failed, and what it held is not known")

    def progress(self) -> Progress:
        return self._meter.progress()

    def cancel(self, operation_id: str) -> None:
        """Stop this operation, running or next, before it changes weights."""
        self._cancelled_id = operation_id

    # From the compute thread.

    def status(self) -> WorkerStatus:
        """Current state. Runs on the compute thread, so after the task that was running."""
        return WorkerStatus(
            is_loaded=self._runner is not None,
            version=self._runner.version if self._runner else 0,
            numerics=self._runner.trainer.fingerprint() if self._runner else {},
            weights_digest=self._digest,
            last_seq=self._last_seq,
            last_outcome=self._last_outcome,
        )

    def load(self, token: int, policy_id: str, request: LoadRequest) -> Loaded:
        """Load the policy from a checkpoint or its initial weights.

        Raises `RatoonError`, and `UnusableCheckpointError`.
        """
        self.fence(token)
        self._runner = self._snapshot = None
        with self._held_lock:
            self._held = self._published = None
        # Layers have reference cycles: without this an earlier trainer would stay on the device,
        # and the memory that is free decides what is kept for a backward.
        collect_all()
        started = time.perf_counter()
        try:
            trainer = self._create_trainer(request.trainer)
            if isinstance(request.source, CheckpointWeights):
                _load_checkpoint(trainer, request.source)
            trainer.version = request.version
            loaded = time.perf_counter()
            self._takes_digests = request.digests
            self._digest = trainer.state_digest() if request.digests else ""
        except (RatoonError, UnusableCheckpointError):
            raise
        except (WorkerLostError, CopyFailedError) as err:
            raise self._lost(str(err)) from err
        except Exception as err:
            self._is_lost = True
            raise unexpected(err) from err
        self._runner = TaskRunner(request.trainer, trainer)
        self._policy_id = policy_id
        self._last_seq, self._last_outcome = request.last_seq, None
        digest_s = time.perf_counter() - loaded
        seconds = {"load_s": round(loaded - started, 3), "digest_s": round(digest_s, 3)}
        _LOG.info("policy loaded", policy_id=policy_id, version=request.version, **seconds)
        return Loaded(info=trainer.info(), numerics=trainer.fingerprint())

    def apply(self, token: int, task: Task) -> Outcome:
        """Run the task whose seq is next, or return the last one's stored outcome."""
        self.fence(token)
        runner = self._loaded()
        if task.seq == self._last_seq and self._last_outcome is not None:
            self._check_last(task.operation_id)
            return self._last_outcome
        self._check_next(task.seq)
        self._reach(CrashPoint.WORKER_BEFORE_APPLY)
        outcome = self._run(runner, task)
        try:
            outcome = self._with_digest(runner, task, outcome)
        except Exception as err:
            # The step was taken, but its outcome is lost.
            raise self._lost("the trainer's state cannot be read") from err
        self._last_seq, self._last_outcome = task.seq, outcome
        self._reach(CrashPoint.WORKER_AFTER_APPLY)
        return outcome

    def skip(self, token: int, seq: int, outcome: Outcome) -> None:
        """Count a seq that ended without running."""
        self.fence(token)
        self._loaded()
        if seq == self._last_seq:
            self._check_last(outcome.operation_id)
            return
        self._check_next(seq)
        self._last_seq, self._last_outcome = seq, outcome

    def forward(self, token: int, task: Task) -> Outcome:
        """Run a Forward that has no seq."""
        self.fence(token)
        return self._run(self._loaded(), task)

    def restore(self, token: int, tasks: tuple[Task, ...]) -> None:
        """Restore the window by running its ForwardBackwards again. Raises `WorkerLostError`."""
        self.fence(token)
        try:
            self._loaded().restore(tasks)
        except Exception as err:
            raise self._lost("the open window could not be restored") from err

    def hold(self, token: int, version: int) -> None:
        """Hold a copy of the weights, for `publish`; waits for a publication under way.

        Raises `RatoonError` and `WorkerLostError`.
        """
        self.fence(token)
        runner = self._loaded()
        assert version == runner.version, "weights stand still while they are copied"
        with self._held_lock:
            self._held = self._published = None
            copy = self._guarded(runner, "hold", runner.trainer.copy_weights)
            self._held = _HeldWeights(
                version=version,
                kind=runner.weight_kind,
                copy=copy,
                seq=self._last_seq,
                digest=self._digest if self._takes_digests else "",
            )

    def write_gradients(self, token: int, request: GradientRequest) -> GradientFile:
        """Write sums of the open window as a result file; changes nothing.

        Raises INVALID_ARGUMENT, WINDOW_EMPTY, WINDOW_POISONED, RESOURCE_EXHAUSTED, and
        `WorkerLostError`.
        """
        self.fence(token)
        runner = self._loaded()
        return self._guarded(runner, "gradients", partial(write_gradients, runner.trainer, request))

    def snapshot(self, token: int) -> str:
        """Hold a copy of the state at the last step boundary; returns its digest.

        Raises `RatoonError` and `WorkerLostError`.
        """
        self.fence(token)
        runner = self._loaded()
        self._snapshot = None
        self._snapshot = snapshot = self._guarded(runner, "snapshot", runner.trainer.snapshot)
        self._reach(CrashPoint.WORKER_BEFORE_CHECKPOINT)
        return snapshot.digest

    # From threads of their own.

    def publish(
        self, token: int, version: int, weights_root: str, created_at: float, deltas: bool = False
    ) -> WeightManifest:
        """Write the held weights for readers, once; returns their manifest.

        Raises `RatoonError`, with the copy held still, and `WorkerLostError`, where a rank is lost
        that has a share of it; nothing is visible then.
        """
        with self._held_lock:
            self.fence(token)
            held = self._held
            if held is None or held.version != version:
                raise RatoonError(ErrorCode.INTERNAL, f"no copy of version {version} is held")
            if self._published is None:
                self._reach(CrashPoint.WORKER_BEFORE_PUBLISH)
                self._published = self._write(held, Path(weights_root), created_at, deltas)
                self._reach(CrashPoint.WORKER_AFTER_PUBLISH)
            return self._published

    def write_snapshot(self, token: int, folder: str, as_of: AsOf) -> int:
        """Write the held copy, read it back, and release it; returns its size in bytes."""
        self.fence(token)
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            raise RatoonError(ErrorCode.INTERNAL, "no copy of the state is held")
        size_bytes = write_checkpoint(snapshot, Path(folder), as_of)
        self._reach(CrashPoint.WORKER_AFTER_CHECKPOINT)
        return size_bytes

    def _write(
        self, held: _HeldWeights, root: Path, created_at: float, deltas: bool
    ) -> WeightManifest:
        args = root, self._policy_id, held.version, held.kind, held.copy.write, created_at
        made_by = MadeBy(seq=held.seq, state_digest=held.digest)
        try:
            return publish_version(*args, deltas=deltas, made_by=made_by)
        except RatoonError:
            raise
        except WorkerLostError as err:
            raise self._lost(f"version {held.version} was not written: {err}") from err
        except OSError as err:
            raise disk_fault(f"version {held.version}", err) from err
        except Exception as err:
            _LOG.exception("failed", what=f"publication of version {held.version}")
            raise unexpected(err) from err

    def _with_digest(self, runner: TaskRunner, task: Task, outcome: Outcome) -> Outcome:
        """The outcome, with the digest of the resulting state."""
        if outcome.state is not OperationState.DONE or not self._takes_digests:
            return outcome
        if isinstance(task.command, UpdateCommand | _CHANGING):
            started = time.perf_counter()
            self._digest = runner.trainer.state_digest()
            if isinstance(result := outcome.result, StepResult):
                seconds = replace(result.report.seconds, digest=time.perf_counter() - started)
                report = replace(result.report, seconds=seconds)
                outcome = replace(outcome, result=replace(result, report=report))
        return replace(outcome, weights_digest=self._digest)

    def _run(self, runner: TaskRunner, task: Task) -> Outcome:
        self._meter = Meter(started=time.perf_counter())
        name = task.operation_id
        try:
            planned = self._guarded(runner, name, partial(runner.plan, task))
        except RatoonError as error:
            return Outcome.of_error(task, error, must_restore=False)
        run = partial(runner.run, planned, self._on_progress, self._is_cancelled(name))
        may_have_stepped = partial(_may_have_stepped, task, runner.trainer, runner.version)
        try:
            result = self._guarded(runner, name, run, may_have_stepped)
        except RatoonError as error:
            is_torn = isinstance(task.command, ForwardBackwardCommand)
            return Outcome.of_error(planned.task, error, must_restore=is_torn)
        return Outcome(
            operation_id=name,
            state=OperationState.DONE,
            result=result,
            must_restore=False,
            weights_digest="",
            choices=planned.task.choices,
            started_at=task.started_at,
        )

    def _guarded(
        self,
        runner: TaskRunner,
        what: str,
        call: Callable[[], T],
        may_have_stepped: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run a call. Raises `RatoonError` where the trainer is unchanged but for window gradients.

        Raises `WorkerLostError` where more may have changed.
        """
        try:
            return call()
        except RatoonError:
            raise
        except (WorkerLostError, CopyFailedError) as err:
            # One of its ranks, or the way to it.
            raise self._lost(str(err)) from err
        except Exception as err:  # noqa: BLE001 - whatever it is, the caller must hear of it
            _LOG.exception("failed", what=what)
            failure = unexpected(err)
        # Past the handler, whose traceback kept the call's tensors on the device.
        gc.collect()
        if may_have_stepped():
            raise self._lost("the trainer was stopped in the middle of a step")
        try:
            digest = runner.trainer.state_digest()
        except Exception as err:
            raise self._lost("the trainer's state cannot be read") from err
        if self._takes_digests and digest != self._digest:
            raise self._lost("the trainer's state has changed")
        raise failure

    def _lost(self, reason: str) -> WorkerLostError:
        """Mark the worker lost; returns the error to raise."""
        self._is_lost, self._runner = True, None
        _LOG.error("worker lost", reason=reason)
        return WorkerLostError(reason)

    def _on_progress(self, done: int, planned: int, tokens: int) -> None:
        self._meter.done, self._meter.planned, self._meter.tokens = done, planned, tokens
        if done > 0:
            self._reach(CrashPoint.WORKER_IN_APPLY)

    def _is_cancelled(self, operation_id: str) -> Callable[[], bool]:
        return lambda: self._cancelled_id == operation_id

    def _loaded(self) -> TaskRunner:
        if self._runner is None:
            raise WorkerLostError("no policy is loaded")
        return self._runner

    def _check_last(self, operation_id: str) -> None:
        last = self._last_outcome
        if last is not None and last.operation_id != operation_id:
            message = f"{operation_id} has the seq {self._last_seq} of {last.operation_id}"
            raise WorkerOrderError(message)

    def _check_next(self, seq: int) -> None:
        if seq != self._last_seq + 1:
            raise WorkerOrderError(f"seq {seq} after {self._last_seq}")


def _may_have_stepped(task: Task, trainer: TrainerPort, version: int) -> bool:
    """Whether a task that failed unexpectedly may have changed weights or moments.

    An Update that fails before its step leaves the window empty and the version, `version`.
    """
    if isinstance(task.command, UpdateCommand):
        return not trainer.is_window_empty or trainer.version != version
    return isinstance(task.command, _CHANGING)


def _load_checkpoint(trainer: TrainerPort, source: CheckpointWeights) -> None:
    """Raises `UnusableCheckpointError` naming the folder."""
    name = Path(source.folder).name
    try:
        trainer.load_checkpoint(Path(source.folder))
    except (RatoonError, OSError) as err:
        raise UnusableCheckpointError(f"checkpoint {name}: {without_folders(str(err))}") from err
    if source.weights_digest and (digest := trainer.state_digest()) != source.weights_digest:
        raise UnusableCheckpointError(
            f"checkpoint {name}: its state has the digest {digest}, in the journal it is "
            f"{source.weights_digest}"
        )
