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
from ratoon.engine.types import CheckpointInfo, ForwardResult, NamedVersion, OperationResult
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
from ratoon.train.prepare import without_bad
from ratoon.train.saved_state import AsOf
from ratoon.train.spec import NO_HOOKS, PassHooks, TrainerSpec
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

_LOG = get_logger("worker")
NEEDLESS_FORWARD = warn(
    WarningKind.NEEDLESS_FORWARD,
    "the Forward that loss.old_logprobs names is of the version trained here, and of these "
    "rollouts alone: on_policy is the same without a Forward, unless a later pass names it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTask:
    """A task with every choice made, those of the worker too. `run` runs it, once."""

    task: Task
    run: Callable[[PassHooks], OperationResult]


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
                task, prepared = self._prepare(task, command)
                run = partial(self._update, task, command, prepared)
            case ForwardBackwardCommand() as command:
                # Callers of a replayed one have had its answers.
                is_again = task.choices.plan is not None
                task, prepared = self._prepare(task, command, command.with_logprobs)
                answers = None if is_again else command
                run = partial(self._forward_backward, task, answers, prepared)
            case OptimStepCommand() as command:
                run = partial(self._optim_step, task, command)
            case DiscardGradientsCommand():
                run = self._discard_gradients
            case ForwardCommand() as command:
                forward = self.trainer.prepare_forward(
                    _read_batch(task),
                    task.choices.plan,
                    num_best=command.num_teacher_tokens,
                    with_teacher=command.with_teacher_logprobs,
                )
                task = _with_plan(task, forward.plan)
                run = partial(self._forward, task, command, forward)
            case SaveCheckpointCommand():
                run = partial(self._save, task)
            case PublishVersionCommand():
                run = partial(self._name, task)
            case LoadCheckpointCommand():
                run = partial(self._load, task)
            case ImportWeightsCommand() as command:
                # The folder's bytes must be those of the task's choices, where it has them.
                folder = model_folder("model_folder", command.folder, task.paths.models_root)
                weights = self.trainer.read_weights(
                    folder, task.choices.folder_digest, adds=command.mode is ImportMode.DELTA
                )
                choices = replace(task.choices, folder_digest=weights.digest)
                task = replace(task, choices=choices)
                run = partial(self._import, task, command, weights)
            case RefusedCommand():
                raise AssertionError("it fails before it is sent to a worker")
        return PlannedTask(task=task, run=run)

    def restore(self, tasks: tuple[Task, ...]) -> None:
        """Make the window hold exactly the gradients of `tasks`."""
        self.trainer.discard_gradients()
        for task in tasks:
            self.plan(task).run(NO_HOOKS)

    def _prepare(
        self,
        task: Task,
        command: UpdateCommand | ForwardBackwardCommand,
        logprobs_of: LogprobsOf | None = None,
    ) -> tuple[Task, Prepared]:
        request, batch = command.loss, _with_answers(task, _read_batch(task), command.loss)
        loss = resolve_loss(
            request,
            batch,
            has_frozen_reference=self._spec.keep_reference,
            has_value_head=self._spec.model.value_head,
        )
        if command.on_bad_rollout is BadRolloutAction.DROP:
            batch = without_bad(batch, loss, self.version)
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
        return _with_plan(task, prepared.plan), prepared

    def _forward_was_needless(self, task: Task, batch: RolloutBatch) -> bool:
        """Whether the loss names a Forward of this version and of this batch's rollouts alone."""
        choices = task.choices
        if choices.old_version != self.version:
            return False
        return num_rollouts(task.paths.results / choices.old_logprobs) <= batch.num_sequences

    def _update(
        self, task: Task, command: UpdateCommand, prepared: Prepared, hooks: PassHooks
    ) -> StepResult:
        step = self._step(command.optim, prepared.loss.normalisation)
        report = self.trainer.update(prepared, step, hooks)
        self._keep_rollouts(task, report)
        return self._stepped(report, task)

    def _forward_backward(
        self,
        task: Task,
        answers: ForwardBackwardCommand | None,
        prepared: Prepared,
        hooks: PassHooks,
    ) -> StepResult:
        """`answers`: the command whose log-probs are written; None: of none."""
        report = self.trainer.forward_backward(prepared, hooks)
        self._keep_rollouts(task, report)
        file = None if answers is None else self._write_logprobs(task, answers)
        return StepResult(version=self.version, report=report, file=file, teachers=_answered(task))

    def _optim_step(self, task: Task, command: OptimStepCommand, _: PassHooks) -> StepResult:
        trainer, optim = self.trainer, command.optim
        if command.allow_empty and trainer.is_window_empty:
            step = resolve_empty(optim, self._spec.optimizer, trainer.num_steps)
        else:
            step = self._step(optim, trainer.normalisation)
        step = replace(step, allow_empty=command.allow_empty)
        return self._stepped(trainer.optim_step(step), task)

    def _step(self, request: OptimStepConfig, normalisation: Normalisation) -> OptimStep:
        return resolve_optim(request, normalisation, self._spec.optimizer, self.trainer.num_steps)

    def _stepped(self, report: StepReport, task: Task) -> StepResult:
        """The step's result. The next version reuses no number of a rolled-back one."""
        if not report.skipped:
            self.trainer.version = task.choices.next_version
        return StepResult(version=self.version, report=report, teachers=_answered(task))

    def _discard_gradients(self, _: PassHooks) -> EmptyResult:
        self.trainer.discard_gradients()
        return EmptyResult()

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

    def _forward(
        self, task: Task, command: ForwardCommand, forward: PreparedForward, hooks: PassHooks
    ) -> ForwardResult:
        arrays = self.trainer.forward(
            forward,
            hooks,
            with_entropy=command.with_entropy,
            use_reference=command.use_reference,
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

    def _save(self, task: Task, _: PassHooks) -> CheckpointInfo:
        info = task.choices.checkpoint
        assert info is not None
        assert info.version == self.version
        folder = task.paths.checkpoint(info.checkpoint_id)
        as_of = AsOf(seq=info.seq, replay_from_seq=info.replay_from_seq)
        return replace(info, size_bytes=write_checkpoint(self.trainer.snapshot(), folder, as_of))

    def _name(self, task: Task, _: PassHooks) -> NamedVersion:
        named = task.choices.named
        assert named is not None
        assert named.version == self.version
        return named

    def _load(self, task: Task, _: PassHooks) -> CheckpointInfo:
        info = task.choices.checkpoint
        assert info is not None
        self.trainer.load_checkpoint(task.paths.checkpoint(info.checkpoint_id))
        self.trainer.version = info.version
        return info

    def _import(
        self,
        task: Task,
        command: ImportWeightsCommand,
        weights: ImportedWeights,
        hooks: PassHooks,
    ) -> ImportResult:
        if hooks.is_cancelled():
            raise cancelled(task.operation_id)
        adds, resets = command.mode is ImportMode.DELTA, command.reset_optimizer
        self.trainer.import_weights(weights, adds=adds, resets_optimizer=resets)
        self.trainer.version = task.choices.next_version
        return ImportResult(
            version=self.version,
            num_tensors=weights.num_tensors,
            size_bytes=weights.size_bytes,
            dtypes=weights.dtypes,
            digest=weights.digest,
        )


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
