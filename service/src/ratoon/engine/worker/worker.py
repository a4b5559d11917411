"""A policy's worker: what alone changes its weights, and runs each operation once.

The controller numbers a policy's operations (seq 1, 2, 3, ...) and journals their outcomes. Both
processes, and any call between them, may be lost at any moment. So a controller may send an
operation without knowing whether the worker has already run it. Three checks, made before any state
is touched, keep it from running twice or out of order:

1. The token. Each controller has a higher fencing token than the ones before it, and sends it with
   every call. The worker refuses a token below the highest one it has seen (`fence`), so a
   controller that was replaced can change nothing more.
2. The seq. `apply` runs an operation only if its seq follows the last one; a gap is refused.
3. The stored outcome. If the last seq comes again, for the same operation, `apply` returns the
   outcome that it has stored, and runs nothing.

A task that fails counts as run, with the failure as its outcome, if weights and moments are
provably what they were before it (`_guarded`). If they are not, the worker is lost: it refuses
every call from then on, and the controller replaces the process and rebuilds the state from a
checkpoint and the journal.

States: bare -> loaded -> lost; `load` leads from bare or loaded to loaded, or to bare if it fails,
and `end` from any to lost. A process has a worker for each of its policies (`worker.host`).
No torch is imported here: the trainer is built by a function that the process passes in.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ratoon.engine.crash_points import CrashPoint, Reach
from ratoon.engine.refusals import disk_fault, unexpected
from ratoon.engine.worker.runner import TaskRunner, write_checkpoint, write_gradients
from ratoon.engine.worker.tasks import (
    CheckpointWeights,
    FencedError,
    GradientFile,
    GradientRequest,
    Loaded,
    LoadRequest,
    Meter,
    Outcome,
    Task,
    UnusableCheckpointError,
    WorkerLostError,
    WorkerStatus,
)
from ratoon.errors import CopyFailedError, ErrorCode, RatoonError, without_folders
from ratoon.garbage import collect_all
from ratoon.log import get_logger
from ratoon.stream.manifest import MadeBy, WeightManifest
from ratoon.stream.versions import announce_version, publish_version
from ratoon.train.saved_state import AsOf
from ratoon.train.spec import PassHooks, TrainerSpec
from ratoon_proto.types import OperationState, Progress, SelfCheckReport, StepResult, WeightKind

if TYPE_CHECKING:
    from ratoon.train.checkpoint import Snapshot
    from ratoon.train.ranks.group import HeldWeights
    from ratoon.train.trainer import Trainer

T = TypeVar("T")

_LOG = get_logger("worker")
_NO_OPERATION = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldVersion:
    """A version whose weights are copied; the operation `made_by` made it."""

    version: int
    kind: WeightKind
    copy: HeldWeights
    made_by: MadeBy


class WorkerOrderError(Exception):
    """Controller and worker disagree on the order.

    The seq is neither the last nor the next one, or it is the last one of another operation.
    """


class WorkerCore:
    """The controller calls its public methods, through `RemoteWorker.call`.

    Any thread may call `fence`, `progress`, `cancel` and `end`. `announce` and `publish` have a
    thread of their own, and so has `write_snapshot`. All other methods run on one thread, the
    compute thread.
    """

    def __init__(self, create_trainer: Callable[[TrainerSpec], Trainer], reach: Reach) -> None:
        """`reach`: called at each crash point, where tests may kill the process."""
        self._create_trainer = create_trainer
        self._reach = reach
        self._token = 0
        self._token_lock = threading.Lock()
        self._is_lost = False
        # Whether the process is in doubt, too.
        self.is_process_lost = False
        # The loaded policy; `_unload` resets these.
        self._runner: TaskRunner | None = None
        self._policy_id = ""
        self._last_seq = 0
        self._last_outcome: Outcome | None = None
        self._takes_digests = False
        self._digest = ""
        # A copy of the state, which `write_snapshot` writes.
        self._snapshot: Snapshot | None = None
        self._snapshot_lock = threading.Lock()
        # A copy of the weights, and the manifests once `announce` and `publish` have written what
        # belongs to them. Both hold the lock meanwhile.
        self._held: _HeldVersion | None = None
        self._announced: WeightManifest | None = None
        self._published: WeightManifest | None = None
        self._held_lock = threading.Lock()
        # The running task.
        self._meter = Meter()
        self._cancelled_id = _NO_OPERATION

    # Exactly once: the token, the seq, the stored outcome.

    def fence(self, token: int) -> None:
        """Refuse tokens below this one from now on. Every method with a token calls it first.

        Raises `FencedError` where `token` is itself below an earlier one, and `WorkerLostError`
        where the worker is lost.
        """
        with self._token_lock:
            if token < self._token:
                raise FencedError(f"token {token} is older than {self._token}")
            self._token = token
        if self._is_lost:
            raise WorkerLostError("the trainer failed, and what it held is not known")

    def apply(self, token: int, task: Task) -> Outcome:
        """Run the task whose seq is next, or return the stored outcome of the last one.

        A task's failure is part of its outcome. Raises `FencedError`, `WorkerLostError` and
        `WorkerOrderError`.
        """
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
            raise self._lost("the trainer's state cannot be read", err) from err
        self._last_seq, self._last_outcome = task.seq, outcome
        self._reach(CrashPoint.WORKER_AFTER_APPLY)
        return outcome

    def skip(self, token: int, seq: int, outcome: Outcome) -> Outcome:
        """Count a seq whose operation ended without running, as one that was cancelled.

        `outcome` is stored and returned as if the operation had run. Raises `WorkerLostError`, and
        `WorkerOrderError` as `apply` does.
        """
        self.fence(token)
        self._loaded()
        if seq == self._last_seq:
            self._check_last(outcome.operation_id)
            return self._last_outcome or outcome
        self._check_next(seq)
        if outcome.discards_gradients:
            self.restore(token, ())
            outcome = replace(outcome, weights_digest=self._digest)
        self._last_seq, self._last_outcome = seq, outcome
        return outcome

    def _check_last(self, operation_id: str) -> None:
        last = self._last_outcome
        if last is not None and last.operation_id != operation_id:
            message = f"{operation_id} has the seq {self._last_seq} of {last.operation_id}"
            raise WorkerOrderError(message)

    def _check_next(self, seq: int) -> None:
        if seq != self._last_seq + 1:
            raise WorkerOrderError(f"seq {seq} after {self._last_seq}")

    # Running a task: either it is done, or nothing has changed, or the worker is lost.

    def _run(self, runner: TaskRunner, task: Task) -> Outcome:
        self._meter = Meter(started=time.perf_counter())
        name = task.operation_id
        try:
            planned = self._guarded(runner, name, partial(runner.plan, task))
        except RatoonError as error:
            return Outcome.of_error(name, error, choices=task.choices, started_at=task.started_at)
        hooks = PassHooks(on_progress=self._on_progress, is_cancelled=self._is_cancelled(name))
        may_have_stepped = partial(_may_have_stepped, task, runner.trainer, runner.version)
        try:
            result = self._guarded(runner, name, partial(planned.run, hooks), may_have_stepped)
        except RatoonError as error:
            return Outcome.of_error(
                name,
                error,
                must_restore=task.command.effect.adds_to_window,
                choices=planned.task.choices,
                started_at=task.started_at,
            )
        return Outcome(
            operation_id=name,
            state=OperationState.DONE,
            result=result,
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
        """Run a call of the trainer.

        Raises `RatoonError` where weights and moments are as before (the open window's gradients
        may not be), and otherwise declares the worker lost and raises `WorkerLostError`.
        """
        try:
            return call()
        except RatoonError as err:
            if self._is_lost:
                raise WorkerLostError("the policy has left this process") from err
            raise
        except (WorkerLostError, CopyFailedError) as err:
            # A rank is gone, or cannot be reached.
            raise self._lost(str(err)) from err
        except Exception as err:  # noqa: BLE001 - whatever it is, the caller must hear of it
            _LOG.exception("failed", what=what)
            failure = unexpected(err)
        # Past the handler, whose traceback kept the call's tensors on the device.
        gc.collect()
        if may_have_stepped():
            raise self._lost("the trainer was stopped in the middle of a step", failure)
        try:
            digest = runner.trainer.state_digest()
        except Exception as err:
            raise self._lost("the trainer's state cannot be read", failure) from err
        if self._takes_digests and digest != self._digest:
            raise self._lost("the trainer's state has changed", failure)
        raise failure

    def _with_digest(self, runner: TaskRunner, task: Task, outcome: Outcome) -> Outcome:
        """The outcome, with the digest of the state that the task left."""
        if outcome.state is not OperationState.DONE or not self._takes_digests:
            return outcome
        if task.command.effect.changes_weights:
            started = time.perf_counter()
            self._digest = runner.trainer.state_digest()
            if isinstance(result := outcome.result, StepResult):
                seconds = replace(result.report.seconds, digest=time.perf_counter() - started)
                report = replace(result.report, seconds=seconds)
                outcome = replace(outcome, result=replace(result, report=report))
        return replace(outcome, weights_digest=self._digest)

    def _lost(self, reason: str, cause: Exception | None = None) -> WorkerLostError:
        """Mark the worker and its process as lost; returns the error to raise."""
        self._is_lost, self._runner, self.is_process_lost = True, None, True
        if cause is not None:
            reason = f"{reason}: {unexpected(cause).message}"
        _LOG.error("worker lost", reason=reason)
        return WorkerLostError(reason)

    # Loading, and what has no seq.

    def load(self, token: int, policy_id: str, request: LoadRequest) -> Loaded:
        """Load the policy as of `request.last_seq`, from a checkpoint or its initial weights.

        Raises `RatoonError` where the spec cannot be served, and `UnusableCheckpointError`; the
        worker is bare then, as a new one is.
        """
        self.fence(token)
        self._unload()
        started = time.perf_counter()
        try:
            trainer = self._create_trainer(request.trainer)
            if isinstance(request.source, CheckpointWeights):
                _load_checkpoint(trainer, request.source)
            if request.resets_optimizer:
                trainer.reset_optimizer()
            trainer.version = request.version
            loaded = time.perf_counter()
            digest = trainer.state_digest() if request.digests else ""
        except (RatoonError, UnusableCheckpointError):
            raise
        except (WorkerLostError, CopyFailedError) as err:
            raise self._lost(str(err)) from err
        except Exception as err:
            self._is_lost = True
            raise unexpected(err) from err
        self._runner = TaskRunner(request.trainer, trainer)
        self._policy_id, self._last_seq = policy_id, request.last_seq
        self._takes_digests, self._digest = request.digests, digest
        digest_s = time.perf_counter() - loaded
        seconds = {"load_s": round(loaded - started, 3), "digest_s": round(digest_s, 3)}
        _LOG.info("policy loaded", policy_id=policy_id, version=request.version, **seconds)
        return Loaded(info=trainer.info(), numerics=trainer.fingerprint())

    def _unload(self) -> None:
        """Drop the loaded policy with all that is known of it."""
        if self._runner is not None:
            # It would hold memory of the device.
            self._runner.trainer.await_compiler()
        self._runner = self._last_outcome = self._snapshot = None
        self._policy_id, self._last_seq = "", 0
        self._takes_digests, self._digest = False, ""
        with self._held_lock:
            self._held = self._announced = self._published = None
        # Layers have reference cycles: without this an earlier trainer would stay on the device,
        # and the memory that is free decides what is kept for a backward.
        collect_all()

    def _loaded(self) -> TaskRunner:
        if (runner := self._runner) is None:
            raise WorkerLostError("no policy is loaded")
        return runner

    @property
    def trainer(self) -> Trainer | None:
        """The loaded policy's trainer; None: nothing is loaded."""
        return runner.trainer if (runner := self._runner) else None

    def end(self) -> None:
        """Refuse all calls from now on, cancel the running task, and drop what is loaded.

        Any thread may call it. Nothing is written any more once it returns; the running task may
        compute on until it notices.
        """
        self._is_lost, self._runner = True, None
        with self._snapshot_lock:
            self._snapshot = None
        with self._held_lock:
            self._held = self._announced = self._published = None

    def forward(self, token: int, task: Task) -> Outcome:
        """Run a Forward that has no seq. It changes nothing, so it may run any number of times."""
        self.fence(token)
        return self._run(self._loaded(), task)

    def restore(self, token: int, tasks: tuple[Task, ...]) -> None:
        """Make the open window hold exactly the gradients of these ForwardBackwards.

        Runs them again. Raises `WorkerLostError` where that fails.
        """
        self.fence(token)
        try:
            self._loaded().restore(tasks)
        except Exception as err:
            raise self._lost("the open window could not be restored", err) from err

    def write_gradients(self, token: int, request: GradientRequest) -> GradientFile:
        """Write sums of the open window as a result file; changes nothing.

        Raises INVALID_ARGUMENT, WINDOW_EMPTY, WINDOW_POISONED, RESOURCE_EXHAUSTED, and
        `WorkerLostError`.
        """
        self.fence(token)
        runner = self._loaded()
        return self._guarded(runner, "gradients", partial(write_gradients, runner.trainer, request))

    # Status and progress.

    def status(self) -> WorkerStatus:
        """The state that a new controller finds. Waits for the running task."""
        return WorkerStatus(
            is_loaded=self._runner is not None,
            version=self._runner.version if self._runner else 0,
            numerics=self._runner.trainer.fingerprint() if self._runner else {},
            weights_digest=self._digest,
            last_seq=self._last_seq,
            last_outcome=self._last_outcome,
        )

    def progress(self) -> Progress:
        """The progress of the running task, or else of the last one. Never waits."""
        return self._meter.progress()

    def cancel(self, operation_id: str) -> None:
        """Stop this operation, running or next, before it changes weights. Never waits."""
        self._cancelled_id = operation_id

    def _on_progress(self, done: int, planned: int, tokens: int) -> None:
        self._meter.done, self._meter.planned, self._meter.tokens = done, planned, tokens
        if done > 0:
            self._reach(CrashPoint.WORKER_IN_APPLY)

    def _is_cancelled(self, operation_id: str) -> Callable[[], bool]:
        return lambda: self._is_lost or self._cancelled_id == operation_id

    # Copies of the state and of the weights, which other threads write while training goes on.

    def snapshot(self, token: int) -> str:
        """Copy the state at the last step boundary, for `write_snapshot`; returns its digest.

        The copy replaces an earlier one. Raises `RatoonError` and `WorkerLostError`.
        """
        self.fence(token)
        runner = self._loaded()
        self._snapshot = None
        self._snapshot = snapshot = self._guarded(runner, "snapshot", runner.trainer.snapshot)
        self._reach(CrashPoint.WORKER_BEFORE_CHECKPOINT)
        return snapshot.digest

    def write_snapshot(self, token: int, folder: str, as_of: AsOf) -> int:
        """Write the copied state as a checkpoint, read it back, and drop the copy.

        Runs beside other calls. Returns the size in bytes. Raises `RatoonError`; there is no folder
        then.
        """
        with self._snapshot_lock:
            self.fence(token)
            snapshot, self._snapshot = self._snapshot, None
            if snapshot is None:
                raise RatoonError(ErrorCode.INTERNAL, "no copy of the state is held")
            size_bytes = write_checkpoint(snapshot, Path(folder), as_of)
            self._reach(CrashPoint.WORKER_AFTER_CHECKPOINT)
            return size_bytes

    def hold(self, token: int, version: int, is_requested: bool = False) -> SelfCheckReport | None:
        """Copy the weights, which have this version, for `publish`.

        The copy replaces an earlier one, once a publication under way is over. `is_requested`:
        somebody asks for this version, so a self-check that is due and has not run yet comes first.
        Returns its report, if it was due and had something to compare. Raises `RatoonError` and
        `WorkerLostError`.
        """
        self.fence(token)
        runner = self._loaded()
        assert version == runner.version, "weights stand still while they are copied"
        verdict = self._verdict(runner) if is_requested else None
        with self._held_lock:
            self._held = self._announced = self._published = None
            copy = self._guarded(runner, "hold", runner.trainer.copy_weights)
            self._held = _HeldVersion(
                version=version,
                kind=runner.weight_kind,
                copy=copy,
                made_by=MadeBy(
                    seq=self._last_seq, state_digest=self._digest if self._takes_digests else ""
                ),
            )

        return verdict

    def _verdict(self, runner: TaskRunner) -> SelfCheckReport | None:
        check = self._guarded(runner, "self-check", runner.trainer.check_before_publication)
        for warning in check.warnings:
            _LOG.warning("self-check", policy_id=self._policy_id, reason=warning.message)
        return check.report

    def announce(
        self, token: int, version: int, weights_root: str, created_at: float
    ) -> WeightManifest | None:
        """Write the delta of the copied weights, which `publish` is to write; returns the manifest
        that the version will have, or None where there is no delta before there are files.

        Runs beside other calls. Raises `WorkerLostError`, where a rank is lost; whatever else fails
        is logged, as nobody needs a delta.
        """
        with self._held_lock:
            held = self._held_copy(token, version)
            if self._announced is None and self._published is None:
                args = Path(weights_root), self._policy_id, version, held.kind, held.copy
                try:
                    self._announced = announce_version(*args, created_at, made_by=held.made_by)
                except WorkerLostError as err:
                    raise self._lost(f"version {version} was not written: {err}") from err
                except Exception:  # noqa: BLE001 - files are made of the same copy
                    _LOG.exception("failed", what=f"delta of version {version}")
            return self._announced

    def publish(
        self, token: int, version: int, weights_root: str, created_at: float, deltas: bool = False
    ) -> WeightManifest:
        """Write the copied weights for readers, once; returns their manifest.

        Runs beside other calls. Nothing is visible to readers if it raises `RatoonError`, which
        leaves the copy for another try, or `WorkerLostError`, where a rank with a share of the
        weights is lost.
        """
        with self._held_lock:
            held = self._held_copy(token, version)
            if self._published is None:
                self._reach(CrashPoint.WORKER_BEFORE_PUBLISH)
                self._published = self._write(held, Path(weights_root), created_at, deltas)
                self._reach(CrashPoint.WORKER_AFTER_PUBLISH)
            return self._published

    def _held_copy(self, token: int, version: int) -> _HeldVersion:
        self.fence(token)
        held = self._held
        if held is None or held.version != version:
            raise RatoonError(ErrorCode.INTERNAL, f"no copy of version {version} is held")
        return held

    def _write(
        self, held: _HeldVersion, root: Path, created_at: float, deltas: bool
    ) -> WeightManifest:
        args = root, self._policy_id, held.version, held.kind, held.copy.write, created_at
        try:
            return publish_version(
                *args, deltas=deltas, made_by=held.made_by, announced=self._announced
            )
        except RatoonError:
            raise
        except WorkerLostError as err:
            raise self._lost(f"version {held.version} was not written: {err}") from err
        except OSError as err:
            raise disk_fault(f"version {held.version}", err) from err
        except Exception as err:
            _LOG.exception("failed", what=f"publication of version {held.version}")
            raise unexpected(err) from err


def _may_have_stepped(task: Task, trainer: Trainer, version: int) -> bool:
    """Whether a task that failed unexpectedly may have changed weights or moments.

    An Update that fails before its step leaves the window empty and the version, `version`.
    """
    effect = task.command.effect
    if effect.computes_gradients and effect.takes_step:
        return not trainer.is_window_empty or trainer.version != version
    return effect.changes_weights


def _load_checkpoint(trainer: Trainer, source: CheckpointWeights) -> None:
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
