"""Tasks to calls of a trainer: bodies read, losses resolved, reports turned into results.

Enters a task, leaves its outcome, or raises what went wrong. Invariant: everything that can be
refused is refused before the trainer is touched.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ratoon.engine.faults import disk_fault
from ratoon.engine.forward_output import (
    read_entropy,
    read_old_logprobs,
    write_forward_output,
)
from ratoon.engine.tasks import (
    BatchCommand,
    DiscardTask,
    ForwardBackwardTask,
    ForwardTask,
    FromForwardFile,
    FromGiven,
    LoadTask,
    OldLogprobsSource,
    OptimStepTask,
    Outcome,
    SaveTask,
    UpdateTask,
    WorkerTask,
)
from ratoon.engine.trainer_port import IsCancelled, OnProgress, SnapshotPort, TrainerPort
from ratoon.engine.types import (
    CheckpointInfo,
    EmptyResult,
    ForwardCommand,
    ForwardResult,
    OperationResult,
    OperationState,
    StepResult,
)
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import LoraTuning
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.plan import plan_from_dict, plan_to_dict
from ratoon.rollout.serial import batch_from_bytes
from ratoon.stream.files import remove_folder
from ratoon.stream.manifest import WeightKind
from ratoon.train.config import LossRequest, OptimRequest
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Loss, Normalisation, OptimStep
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.report.step_report import StepReport
from ratoon.train.spec import TrainerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """A batch command's files, read."""

    batch: RolloutBatch
    old_logprobs_J: NDArray[np.floating] | None
    entropy_J: NDArray[np.floating] | None


class TaskRunner:
    """Owns a trainer for as long as its state is known."""

    def __init__(self, spec: TrainerSpec, trainer: TrainerPort) -> None:
        self.trainer = trainer
        self._spec = spec
        # What `prepare` read, for the task that follows it.
        self._inputs: tuple[Path, OldLogprobsSource, _Inputs] | None = None

    @property
    def version(self) -> int:
        return self.trainer.version

    @property
    def weight_kind(self) -> WeightKind:
        is_adapter = isinstance(self._spec.model.tuning, LoraTuning)
        return WeightKind.ADAPTER if is_adapter else WeightKind.FULL

    def prepare(
        self, command: BatchCommand, body_path: Path, old_logprobs: OldLogprobsSource
    ) -> dict[str, object]:
        """JSON of the plan. Raises `RatoonError`."""
        loss_request = None if isinstance(command, ForwardCommand) else command.loss
        inputs = self._read(body_path, old_logprobs, loss_request)
        if isinstance(command, ForwardCommand):
            plan = self.trainer.plan_forward(inputs.batch)
        else:
            loss = self._loss(command.loss, inputs.batch)
            plan = self.trainer.prepare(inputs.batch, loss).plan
        return plan_to_dict(plan)

    def run(self, task: WorkerTask, on_progress: OnProgress, is_cancelled: IsCancelled) -> Outcome:
        """The outcome of a task that ended well."""
        try:
            result = self._result(task, on_progress, is_cancelled)
        finally:
            self.forget_inputs()
        return Outcome(
            operation_id=task.operation_id,
            state=OperationState.DONE,
            result=result,
            must_restore=False,
            weights_digest="",
        )

    def restore(self, tasks: tuple[ForwardBackwardTask, ...]) -> None:
        """The window holds the gradients of `tasks` alone."""
        self.trainer.discard_gradients()
        for task in tasks:
            self._forward_backward(task, _no_progress, _never)
            self.forget_inputs()

    def forget_inputs(self) -> None:
        """What was prepared is not run next, or has been."""
        self._inputs = None

    def _result(
        self, task: WorkerTask, on_progress: OnProgress, is_cancelled: IsCancelled
    ) -> OperationResult:
        match task:
            case UpdateTask():
                return self._update(task, on_progress, is_cancelled)
            case ForwardBackwardTask():
                report = self._forward_backward(task, on_progress, is_cancelled)
                return StepResult(version=self.version, report=report)
            case ForwardTask():
                return self._forward(task, on_progress, is_cancelled)
            case OptimStepTask():
                return self._optim_step(task)
            case DiscardTask():
                self.trainer.discard_gradients()
                return EmptyResult()
            case SaveTask():
                return self._save(task)
            case LoadTask():
                self.trainer.load_checkpoint(Path(task.folder))
                self.trainer.version = task.checkpoint.version
                return task.checkpoint

    def _update(
        self, task: UpdateTask, on_progress: OnProgress, is_cancelled: IsCancelled
    ) -> OperationResult:
        inputs = self._read(Path(task.body_path), task.old_logprobs, task.command.loss)
        loss = self._loss(task.command.loss, inputs.batch)
        step = self._step(task.command.optim, loss.normalisation)
        report = self.trainer.update(
            inputs.batch,
            loss,
            step,
            plan_from_dict(task.plan),
            old_logprobs_J=inputs.old_logprobs_J,
            entropy_J=inputs.entropy_J,
            on_progress=on_progress,
            is_cancelled=is_cancelled,
        )
        return self._stepped(report, task.next_version)

    def _forward_backward(
        self, task: ForwardBackwardTask, on_progress: OnProgress, is_cancelled: IsCancelled
    ) -> StepReport:
        inputs = self._read(Path(task.body_path), task.old_logprobs, task.command.loss)
        return self.trainer.forward_backward(
            inputs.batch,
            self._loss(task.command.loss, inputs.batch),
            plan_from_dict(task.plan),
            old_logprobs_J=inputs.old_logprobs_J,
            entropy_J=inputs.entropy_J,
            on_progress=on_progress,
            is_cancelled=is_cancelled,
        )

    def _forward(
        self, task: ForwardTask, on_progress: OnProgress, is_cancelled: IsCancelled
    ) -> OperationResult:
        command = task.command
        inputs = self._read(Path(task.body_path), FromGiven(), None)
        arrays = self.trainer.forward(
            inputs.batch,
            plan_from_dict(task.plan),
            with_entropy=command.with_entropy,
            use_reference=command.use_reference,
            on_progress=on_progress,
            is_cancelled=is_cancelled,
        )
        digest, size_bytes = write_forward_output(
            Path(task.results_folder),
            task.operation_id,
            inputs.batch,
            arrays.logprobs,
            arrays.entropy,
            is_reference=command.use_reference,
        )
        return ForwardResult(
            version=self.version, digest=digest, size_bytes=size_bytes, report=arrays.report
        )

    def _optim_step(self, task: OptimStepTask) -> OperationResult:
        step = self._step(task.optim, self.trainer.normalisation)
        return self._stepped(self.trainer.optim_step(step), task.next_version)

    def _save(self, task: SaveTask) -> OperationResult:
        assert task.version == self.version
        return CheckpointInfo(
            checkpoint_id=task.checkpoint_id,
            version=self.version,
            seq=task.seq,
            replay_from_seq=task.replay_from_seq,
            created_at=0.0,
            size_bytes=write_checkpoint(self.trainer.snapshot(), Path(task.folder)),
        )

    def _stepped(self, report: StepReport, next_version: int) -> StepResult:
        """Numbers of versions that were rolled back are not given again."""
        if not report.skipped:
            self.trainer.version = next_version
        return StepResult(version=self.version, report=report)

    def _loss(self, request: LossRequest, batch: RolloutBatch) -> Loss:
        return resolve_loss(request, batch, has_frozen_reference=self._spec.keep_reference)

    def _step(self, request: OptimRequest, normalisation: Normalisation) -> OptimStep:
        return resolve_optim(request, normalisation, self._spec.optimizer)

    def _read(
        self, body_path: Path, source: OldLogprobsSource, loss: LossRequest | None
    ) -> _Inputs:
        if self._inputs is not None and self._inputs[:2] == (body_path, source):
            return self._inputs[2]
        batch = batch_from_bytes(_read_body(body_path))
        old = entropy = None
        if isinstance(source, FromForwardFile):
            old = read_old_logprobs(Path(source.path), batch)
            if loss is not None and loss.top_entropy_share is not None:
                entropy = read_entropy(Path(source.path), batch)
        inputs = _Inputs(batch=batch, old_logprobs_J=old, entropy_J=entropy)
        self._inputs = (body_path, source, inputs)
        return inputs


def write_checkpoint(snapshot: SnapshotPort, folder: Path) -> int:
    """Write a folder, which may not exist, and read it back; its size in bytes.

    Raises RESOURCE_EXHAUSTED where the disk is full, UNAVAILABLE for its other faults, INTERNAL for
    what reads as damaged; the folder does not exist then.
    """
    try:
        size_bytes = snapshot.write(folder)
    except OSError as err:
        raise disk_fault("checkpoint", err) from err
    try:
        snapshot.verify(folder)
    except (RatoonError, OSError):
        remove_folder(folder)
        raise
    return size_bytes


def _read_body(path: Path) -> bytes:
    """A body, which is named by its SHA-256. Raises INTERNAL where it is another by now."""
    try:
        body = path.read_bytes()
    except FileNotFoundError as err:
        raise _damaged_body(path, "no file") from err
    digest = hashlib.sha256(body).hexdigest()
    if digest != path.name:
        raise _damaged_body(path, f"{len(body)} bytes of SHA-256 {digest}")
    return body


def _damaged_body(path: Path, got: str) -> RatoonError:
    return RatoonError(
        ErrorCode.INTERNAL,
        f"the body {path.name} is damaged: got {got}",
        field="body_digest",
        got=got,
        expected=f"bytes of SHA-256 {path.name}",
    )


def _no_progress(_done: int, _planned: int, _tokens: int) -> None:
    pass


def _never() -> bool:
    return False
