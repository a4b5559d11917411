"""Turns tasks into calls of a trainer: reads bodies, resolves losses, cuts batches, builds results.

`plan` makes every refusal that can be made without touching state. The trainer comes in as an
argument, so no torch is imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ratoon.engine.commands import (
    DiscardGradientsCommand,
    ForwardBackwardCommand,
    ForwardCommand,
    ImportWeightsCommand,
    LoadCheckpointCommand,
    OptimStepCommand,
    PublishVersionCommand,
    RefusedCommand,
    SaveCheckpointCommand,
    UpdateCommand,
)
from ratoon.engine.files.paths import model_folder
from ratoon.engine.files.results import (
    keep_result,
    num_rollouts,
    read_answer,
    read_entropy,
    read_old_logprobs,
    write_forward_output,
    write_logprobs,
)
from ratoon.engine.files.rollouts import write_rollouts
from ratoon.engine.refusals import cancelled, disk_fault, disk_refusal
from ratoon.engine.types import CheckpointInfo, ForwardResult, OperationResult
from ratoon.engine.worker.tasks import NO_FORWARD, GradientFile, GradientRequest, Task
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.questions import answered_batch, questions
from ratoon.rollout.serial import batch_from_bytes
from ratoon.stream.files import remove_folder
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.loss.spec import Normalisation, OptimStep
from ratoon.train.optim.resolve import resolve_empty, resolve_optim
from ratoon.train.saved_state import AsOf
from ratoon.train.spec import TrainerSpec
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto.types import (
    BadRolloutAction,
    EmptyResult,
    ImportMode,
    ImportResult,
    KeepRollouts,
    LogprobsOf,
    LoraTuning,
    LossConfig,
    OptimStepConfig,
    ResultFile,
    StepReport,
    StepResult,
    Teacher,
    WeightKind,
)

if TYPE_CHECKING:
    from ratoon.train.checkpoint import Snapshot
    from ratoon.train.imported import ImportedWeights
    from ratoon.train.prepare import Prepared, PreparedForward
    from ratoon.train.trainer import Trainer

# Called with (micro-batches done, planned, replicated tokens done).
OnProgress = Callable[[int, int, int], None]
IsCancelled = Callable[[], bool]

_LOG = get_logger("worker")
NEEDLESS_FORWARD = warn(
    WarningKind.NEEDLESS_FORWARD,
    "the Forward that loss.old_logprobs names is of the version trained here, and of these "
    "rollouts alone: on_policy is the same without a Forward, unless a later pass names it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTask:
    """A task with every choice made, and what was read and prepared for its command.

    Attributes:
        task: The task, with the worker's own choices.
        prepared: For an Update or a ForwardBackward.
        forward: For a Forward.
        weights: For an ImportWeights.
        is_again: Its plan was journaled, and its callers have had its answers.
    """

    task: Task
    prepared: Prepared | None = None
    forward: PreparedForward | None = None
    weights: ImportedWeights | None = None
    is_again: bool = False


class TaskRunner:
    """Owns a trainer for as long as its state is known."""

    def __init__(self, spec: TrainerSpec, trainer: Trainer) -> None:
        self.trainer = trainer
        self._spec = spec

    @property
    def version(self) -> int:
        return self.trainer.version

    @property
    def weight_kind(self) -> WeightKind:
        is_adapter = (
            isinstance(self._spec.model.tuning, LoraTuning) and not self._spec.publishes_merged
        )
        return WeightKind.ADAPTER if is_adapter else WeightKind.FULL

    def plan(self, task: Task) -> PlannedTask:
        """Read and prepare what the task needs; its plan is that of its choices, if they have one.

        Raises:
            RatoonError: Every refusal that can be made without touching the trainer's state.
        """
        match task.command:
            case UpdateCommand() as command:
                return self._plan_loss(task, command)
            case ForwardBackwardCommand(with_logprobs=logprobs_of) as command:
                return self._plan_loss(task, command, logprobs_of)
            case ForwardCommand() as command:
                forward = self.trainer.prepare_forward(
                    _read_batch(task),
                    task.choices.plan,
                    num_best=command.num_teacher_tokens,
                    with_teacher=command.with_teacher_logprobs,
                )
                return PlannedTask(task=_with_plan(task, forward.plan), forward=forward)
            case ImportWeightsCommand() as command:
                return self._plan_import(task, command)
            case _:
                return PlannedTask(task=task)

    def run(
        self, planned: PlannedTask, on_progress: OnProgress, is_cancelled: IsCancelled
    ) -> OperationResult:
        task, trainer = planned.task, self.trainer
        match task.command:
            case UpdateCommand(optim=optim):
                prepared = planned.prepared
                assert prepared is not None
                step = self._step(optim, prepared.loss.normalisation)
                report = trainer.update(
                    prepared, step, on_progress=on_progress, is_cancelled=is_cancelled
                )
                self._keep_rollouts(task, report)
                return self._stepped(report, task)
            case ForwardBackwardCommand() as command:
                assert planned.prepared is not None
                report = trainer.forward_backward(
                    planned.prepared, on_progress=on_progress, is_cancelled=is_cancelled
                )
                self._keep_rollouts(task, report)
                file = None if planned.is_again else self._write_logprobs(task, command)
                return StepResult(
                    version=self.version, report=report, file=file, teachers=_answered(task)
                )
            case ForwardCommand() as command:
                return self._forward(planned, command, on_progress, is_cancelled)
            case OptimStepCommand(optim=optim) as command:
                if command.allow_empty and trainer.is_window_empty:
                    step = resolve_empty(optim, self._spec.optimizer, trainer.num_steps)
                else:
                    step = self._step(optim, trainer.normalisation)
                step = replace(step, allow_empty=command.allow_empty)
                return self._stepped(trainer.optim_step(step), task)
            case DiscardGradientsCommand():
                trainer.discard_gradients()
                return EmptyResult()
            case SaveCheckpointCommand():
                return self._save(task)
            case PublishVersionCommand():
                assert task.choices.named is not None
                assert task.choices.named.version == self.version
                return task.choices.named
            case LoadCheckpointCommand():
                return self._load(task)
            case ImportWeightsCommand() as command:
                if is_cancelled():
                    raise cancelled(task.operation_id)
                return self._import(planned, command)
            case RefusedCommand():
                raise AssertionError("it fails before it is sent to a worker")

    def _keep_rollouts(self, task: Task, report: StepReport) -> None:
        """Write what the policy keeps of the task's rollouts; training goes on without them."""
        keep = self._spec.keep_rollouts
        if keep is KeepRollouts.NONE or (found := self.trainer.found) is None:
            return
        named = {(who.group, who.rollout) for each in report.warnings for who in each.offenders}
        folder, most = task.paths.rollouts, self._spec.keep_rollouts_bytes
        try:
            write_rollouts(folder, task.seq, found, named, keep=keep, max_bytes=most)
        except Exception:  # noqa: BLE001 - whatever it is, the step was taken
            _LOG.exception("rollouts not kept", operation_id=task.operation_id)

    def _write_logprobs(self, task: Task, command: ForwardBackwardCommand) -> ResultFile | None:
        """Write what the command asks for of the pass that has run; None: nothing.

        Raises RESOURCE_EXHAUSTED where the disk is full, UNAVAILABLE for its other faults.
        """
        found = self.trainer.found
        if command.with_logprobs is None or found is None or found.answers_2J is None:
            return None
        logprobs_J, entropy_J = found.answers_2J
        entropy = entropy_J if command.with_entropy else None
        try:
            return write_logprobs(task.paths.results, found.prepared.batch, logprobs_J, entropy)
        except OSError as err:
            raise disk_fault("file of log-probs", err) from err

    def restore(self, tasks: tuple[Task, ...]) -> None:
        """Make the window hold exactly the gradients of `tasks`."""
        self.trainer.discard_gradients()
        for task in tasks:
            self.run(self.plan(task), _no_progress, _never)

    def _plan_loss(
        self,
        task: Task,
        command: UpdateCommand | ForwardBackwardCommand,
        logprobs_of: LogprobsOf | None = None,
    ) -> PlannedTask:
        request, batch = command.loss, _with_answers(task, _read_batch(task), command.loss)
        loss = resolve_loss(
            request,
            batch,
            has_frozen_reference=self._spec.keep_reference,
            has_value_head=self._spec.model.value_head,
        )
        if command.on_bad_rollout is BadRolloutAction.DROP:
            batch = self.trainer.without_bad(batch, loss)
        old, entropy = _read_forward(task, batch, entropy_share=request.top_entropy_share)
        prepared = self.trainer.prepare(
            batch,
            loss,
            task.choices.plan,
            old_logprobs_J=old,
            entropy_J=entropy,
            logprobs_of=logprobs_of,
        )
        if entropy is None and self._forward_was_needless(task, batch):
            prepared = replace(prepared, warnings=(*prepared.warnings, NEEDLESS_FORWARD))
        return PlannedTask(
            task=_with_plan(task, prepared.plan),
            prepared=prepared,
            is_again=task.choices.plan is not None,
        )

    def _forward_was_needless(self, task: Task, batch: RolloutBatch) -> bool:
        """Whether the loss names a Forward of this version and of this batch's rollouts alone."""
        choices = task.choices
        if choices.old_version != self.version:
            return False
        return num_rollouts(task.paths.results / choices.old_logprobs) <= batch.num_sequences

    def _forward(
        self,
        planned: PlannedTask,
        command: ForwardCommand,
        on_progress: OnProgress,
        is_cancelled: IsCancelled,
    ) -> OperationResult:
        task, forward = planned.task, planned.forward
        assert forward is not None
        arrays = self.trainer.forward(
            forward,
            with_entropy=command.with_entropy,
            use_reference=command.use_reference,
            on_progress=on_progress,
            is_cancelled=is_cancelled,
        )
        digest, size_bytes = write_forward_output(
            task.paths.results,
            task.operation_id,
            forward.batch,
            arrays.logprobs,
            arrays.entropy,
            is_reference=command.use_reference,
            teacher_JK=arrays.teacher,
            value_J=arrays.values,
        )
        return ForwardResult(
            version=self.version, digest=digest, size_bytes=size_bytes, report=arrays.report
        )

    def _save(self, task: Task) -> CheckpointInfo:
        info = task.choices.checkpoint
        assert info is not None
        assert info.version == self.version
        folder = task.paths.checkpoint(info.checkpoint_id)
        as_of = AsOf(seq=info.seq, replay_from_seq=info.replay_from_seq)
        return replace(info, size_bytes=write_checkpoint(self.trainer.snapshot(), folder, as_of))

    def _load(self, task: Task) -> CheckpointInfo:
        info = task.choices.checkpoint
        assert info is not None
        self.trainer.load_checkpoint(task.paths.checkpoint(info.checkpoint_id))
        self.trainer.version = info.version
        return info

    def _plan_import(self, task: Task, command: ImportWeightsCommand) -> PlannedTask:
        """Read the folder, whose bytes must be those of the task's choices, where it has them."""
        folder = model_folder("model_folder", command.folder, task.paths.models_root)
        weights = self.trainer.read_weights(
            folder, task.choices.folder_digest, adds=command.mode is ImportMode.DELTA
        )
        choices = replace(task.choices, folder_digest=weights.digest)
        return PlannedTask(task=replace(task, choices=choices), weights=weights)

    def _import(self, planned: PlannedTask, command: ImportWeightsCommand) -> ImportResult:
        weights = planned.weights
        assert weights is not None
        adds, resets = command.mode is ImportMode.DELTA, command.reset_optimizer
        self.trainer.import_weights(weights, adds=adds, resets_optimizer=resets)
        self.trainer.version = planned.task.choices.next_version
        return ImportResult(
            version=self.version,
            num_tensors=weights.num_tensors,
            size_bytes=weights.size_bytes,
            dtypes=weights.dtypes,
            digest=weights.digest,
        )

    def _stepped(self, report: StepReport, task: Task) -> StepResult:
        """The step's result. The next version reuses no number of a rolled-back one."""
        if not report.skipped:
            self.trainer.version = task.choices.next_version
        return StepResult(version=self.version, report=report, teachers=_answered(task))

    def _step(self, request: OptimStepConfig, normalisation: Normalisation) -> OptimStep:
        return resolve_optim(request, normalisation, self._spec.optimizer, self.trainer.num_steps)


def write_checkpoint(snapshot: Snapshot, folder: Path, as_of: AsOf) -> int:
    """Write a new folder and read it back; returns its size in bytes.

    Raises RESOURCE_EXHAUSTED where the disk is full, UNAVAILABLE for its other faults, INTERNAL for
    damage found on reading; the folder does not exist then.
    """
    try:
        size_bytes = snapshot.write(folder, as_of)
    except OSError as err:
        raise disk_fault("checkpoint", err) from err
    try:
        snapshot.verify(folder)
    except (RatoonError, OSError):
        remove_folder(folder)
        raise
    return size_bytes


def write_gradients(trainer: Trainer, request: GradientRequest) -> GradientFile:
    """Write sums of the open window as a result file.

    Raises what the trainer raises, INVALID_ARGUMENT for too many bytes, RESOURCE_EXHAUSTED where
    the disk has no room for them, UNAVAILABLE for its other faults.
    """
    counters, num_bytes = trainer.window_counters, trainer.gradient_bytes(request.names)
    if num_bytes > request.max_bytes:
        expected = f"at most {request.max_bytes} (limits.max_gradient_bytes): fewer at a time"
        raise invalid("names", f"{num_bytes} bytes of gradients", expected)
    folder = Path(request.folder)
    refusal = disk_refusal(folder, num_bytes, request.min_free_disk_bytes)
    if refusal is not None:
        raise refusal
    write = partial(trainer.write_gradients, names=request.names)
    try:
        digest, size_bytes = keep_result(folder, write)
    except OSError as err:
        raise disk_fault("file of gradients", err) from err
    return GradientFile(digest=digest, size_bytes=size_bytes, counters=counters)


def _answered(task: Task) -> tuple[Teacher, ...]:
    return tuple(
        Teacher(answer.policy_id, version=answer.version) for answer in task.choices.teachers
    )


def _with_plan(task: Task, plan: UpdatePlan) -> Task:
    return replace(task, choices=replace(task.choices, plan=plan))


def _read_batch(task: Task) -> RolloutBatch:
    assert isinstance(task.command, UpdateCommand | ForwardBackwardCommand | ForwardCommand)
    return batch_from_bytes(_read_body(task.paths.body(task.command.body_digest)))


def _with_answers(task: Task, batch: RolloutBatch, loss: LossConfig) -> RolloutBatch:
    """The batch with what its teachers said of it. Raises INTERNAL where an answer is damaged."""
    if not task.choices.teachers:
        return batch
    files = (_read_body(task.paths.body(answer.digest)) for answer in task.choices.teachers)
    return answered_batch(batch, questions(loss, batch), [read_answer(data) for data in files])


def _read_forward(
    task: Task, batch: RolloutBatch, *, entropy_share: float | None
) -> tuple[NDArray[np.floating] | None, NDArray[np.floating] | None]:
    """Old log-probs and entropies of the Forward that the task names."""
    if task.choices.old_logprobs == NO_FORWARD:
        return None, None
    path = task.paths.results / task.choices.old_logprobs
    entropy = None if entropy_share is None else read_entropy(path, batch)
    return read_old_logprobs(path, batch), entropy


def _read_body(path: Path) -> bytes:
    """A body, which is named by its SHA-256. Raises INTERNAL where the bytes do not match."""
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
