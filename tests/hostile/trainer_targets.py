"""Requests that are well typed and hostile, through validation and a real trainer.

In: an empty folder. Out: a target that changes fields of small valid requests, and runs what
validation lets through. Invariant: an input is refused by a typed error that is not INTERNAL, or it
is done with finite figures, or its step is skipped; weights are finite in any case.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from ratoon.api import submissions
from ratoon.api.convert.policy import SpecDefaults, policy_spec
from ratoon.config import LimitsConfig
from ratoon.engine.commands import Submission
from ratoon.engine.files.paths import make_policy_folders, policy_paths
from ratoon.engine.policy.executor import forward_file_name
from ratoon.engine.policy.teachers import asking
from ratoon.engine.types import ForwardResult, OperationResult, Policy, PolicySpec
from ratoon.engine.worker.runner import TaskRunner
from ratoon.engine.worker.tasks import NO_FORWARD, Choices, Task, TeacherAnswer
from ratoon.errors import ErrorCode, RatoonError
from ratoon.rollout.questions import asked_batch, questions
from ratoon.rollout.serial import batch_digest, batch_from_bytes, batch_to_bytes
from ratoon.train.spec import NO_HOOKS, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import LossConfig, PolicyState, ReferencePolicy, StepResult
from ratoon_proto.v1 import policy_pb2, rollout_pb2, service_pb2
from tests.api import requests
from tests.hostile import corpus
from tests.hostile.mutate import changed_fields
from tests.tiny_models import write_folder

LIMITS = LimitsConfig(max_groups=64, max_sequences=64, max_tokens=2_000)
_MODEL = "experts"


class FaultError(Exception):
    """What no hostile input may do: an INTERNAL error, or numbers that are not finite."""


class SmallPolicy:
    """A policy of a tiny model with experts, whose state is the same before every input."""

    def __init__(self, folder: Path) -> None:
        write_folder(folder / "models" / _MODEL, "qwen3_moe")
        self.defaults = SpecDefaults(models_root=folder / "models", micro_batch_tokens=64)
        self.paths = policy_paths(folder, requests.POLICY)
        make_policy_folders(self.paths)
        self.policy, self._runner = self.create(policy_spec(_spec().spec, self.defaults))
        self._state = self.trainer.ranks.own.optimizer.state().on_host()
        self._forward = NO_FORWARD
        result = self.run(submissions.with_batch(_forward(), self.policy, _groups(), LIMITS))
        assert isinstance(result, ForwardResult)
        self._forward = forward_file_name(corpus.FORWARD, result.digest)

    def create(self, spec: PolicySpec) -> tuple[Policy, TaskRunner]:
        """A policy as a worker loads it. Raises what its trainer raises."""
        trained = TrainerSpec(
            model=spec.model,
            optimizer=spec.optimizer,
            deterministic=spec.deterministic,
            micro_batch_tokens=spec.micro_batch_tokens,
            keep_reference=spec.reference is not ReferencePolicy.NONE,
            attention_backend=spec.attention_backend,
            device="cpu",
            num_threads=1,
            guard=spec.numerics_guard,
        )
        trainer = Trainer.create(trained)
        policy = Policy(
            spec=spec,
            state=PolicyState.READY,
            version=0,
            next_seq=1,
            created_at=0.0,
            info=trainer.info(),
            published_version=0,
        )
        return policy, TaskRunner(trained, trainer)

    @property
    def trainer(self) -> Trainer:
        return trainer_of(self._runner)

    def take(self, submission: Submission, *, opens_window: bool = False) -> None:
        """Run what was let through, in a window of its own or after a valid ForwardBackward."""
        try:
            if opens_window:
                self.run(_window(self.policy))
            self.judge(self.run(submission), self.trainer)
        finally:
            self.trainer.discard_gradients()
            self.trainer.ranks.own.optimizer.load(self._state)
            self.trainer.version = 0

    def run(self, submission: Submission, runner: TaskRunner | None = None) -> OperationResult:
        if submission.body:
            submission = submission.named(batch_digest(submission.body))
        runner, command = runner or self._runner, submission.command
        body = self.paths.bodies / (command.body_digest or "none")
        body.write_bytes(bytes(submission.body))
        loss = getattr(command, "loss", None)
        old = getattr(loss, "old_logprobs", None)
        names_forward = old is not None and old.forward_operation_id == corpus.FORWARD
        choices = Choices(
            next_version=1,
            old_logprobs=self._forward if names_forward else NO_FORWARD,
            teachers=() if loss is None else self._answers(submission, loss, runner),
        )
        if old is not None and old.forward_operation_id and not names_forward:
            raise RatoonError(ErrorCode.OPERATION_NOT_FOUND, "the engine knows no such Forward")
        task = Task(
            operation_id=corpus.FORWARD,
            seq=1,
            command=command,
            choices=choices,
            paths=self.paths,
            started_at=0.0,
        )
        try:
            return runner.plan(task).run(NO_HOOKS)
        finally:
            body.unlink()

    def _answers(
        self, submission: Submission, loss: LossConfig, runner: TaskRunner
    ) -> tuple[TeacherAnswer, ...]:
        """What the policy itself says, whichever teachers are named."""
        batch = batch_from_bytes(bytes(submission.body))
        answers: list[TeacherAnswer] = []
        for question in questions(loss, batch):
            asked = batch_to_bytes(asked_batch(batch, question.asked_G))
            result = self.run(asking(question, asked), runner)
            assert isinstance(result, ForwardResult)
            data = (self.paths.results / result.digest).read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            (self.paths.bodies / digest).write_bytes(data)
            policy_id = question.teacher.policy_id
            answers.append(TeacherAnswer(policy_id=policy_id, version=0, digest=digest))
        return tuple(answers)

    def judge(self, result: OperationResult, trainer: Trainer) -> None:
        """Raise `FaultError` where weights are not finite, or figures that were not skipped for."""
        weights = trainer.model.named_trainable().values()
        if not all(bool(torch.isfinite(weight).all()) for weight in weights):
            raise FaultError("weights that are not finite")
        if not isinstance(result, StepResult | ForwardResult) or _is_skipped(result):
            return
        bad = next((name for name, value in _numbers("", result) if not math.isfinite(value)), None)
        if bad is None:
            return
        if trainer.is_window_empty:
            raise FaultError(f"{bad} is not finite")
        # A ForwardBackward has no step to skip; the step of its window has.
        step = submissions.without_batch(_optim_step(), self.policy)
        if not _is_skipped(self.run(step)):
            raise FaultError(f"{bad} is not finite, and the window was stepped on")


def trainer_of(runner: TaskRunner) -> Trainer:
    assert isinstance(runner.trainer, Trainer)
    return runner.trainer


def _is_skipped(result: OperationResult) -> bool:
    return isinstance(result, StepResult) and result.report.skipped


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if is_dataclass(value):
        for field in fields(value):
            yield from _numbers(f"{path}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _numbers(f"{path}[{index}]", item)
    elif isinstance(value, float):
        yield path, value


def trainer_requests(folder: Path) -> Callable[[random.Random], None]:
    """One request of any of the calls that train, with one to three fields changed."""
    small = SmallPolicy(folder / "trainer")
    policy, updates = small.policy, corpus.small_updates()

    def update(dice: random.Random) -> None:
        request = changed_fields(dice, dice.choice(updates))
        small.take(submissions.with_batch(request, policy, request.batch.groups, LIMITS))

    def forward_backward(dice: random.Random) -> None:
        update = dice.choice(updates)
        request = service_pb2.ForwardBackwardRequest(
            policy_id=update.policy_id, key=update.key, batch=update.batch, loss=update.loss
        )
        request = changed_fields(dice, request)
        small.take(submissions.with_batch(request, policy, request.batch.groups, LIMITS))

    def optim_step(dice: random.Random) -> None:
        request = changed_fields(dice, _optim_step())
        small.take(submissions.without_batch(request, policy), opens_window=True)

    def forward(dice: random.Random) -> None:
        request = changed_fields(dice, _forward())
        small.take(submissions.with_batch(request, policy, request.batch.groups, LIMITS))

    def import_weights(dice: random.Random) -> None:
        request = service_pb2.ImportWeightsRequest(model_folder=_MODEL, key=_key())
        small.take(submissions.without_batch(changed_fields(dice, request), policy))

    def save(dice: random.Random) -> None:
        request = service_pb2.SaveCheckpointRequest(checkpoint_id="a", key=_key())
        submissions.without_batch(changed_fields(dice, request), policy)

    def create(dice: random.Random) -> None:
        spec = policy_spec(changed_fields(dice, _spec()).spec, small.defaults)
        if spec.parallel.num_workers > 1:
            raise RatoonError(ErrorCode.INVALID_ARGUMENT, "the engine has one core")
        created, runner = small.create(spec)
        request = dice.choice(updates)
        submission = submissions.with_batch(request, created, request.batch.groups, LIMITS)
        small.judge(small.run(submission, runner), trainer_of(runner))

    calls = [*[update] * 10, *[forward_backward] * 4, *[optim_step] * 4, *[forward] * 2]
    calls += [import_weights, save, create]

    def take(dice: random.Random) -> None:
        try:
            dice.choice(calls)(dice)
        except RatoonError as error:
            if error.code is ErrorCode.INTERNAL:
                raise FaultError(str(error)) from error
            raise

    return take


def _spec() -> service_pb2.CreatePolicyRequest:
    spec = policy_pb2.PolicySpec(
        policy_id=requests.POLICY,
        model_folder=_MODEL,
        reference=policy_pb2.REFERENCE_POLICY_BASE,
        numerics_guard=policy_pb2.NumericsGuard(max_grad_norm_to_step=1e6),
    )
    return service_pb2.CreatePolicyRequest(spec=spec)


def _key() -> service_pb2.OperationKey:
    return service_pb2.OperationKey(seq=1)


def _groups() -> list[rollout_pb2.RolloutGroup]:
    return corpus.small_groups()


def _forward() -> service_pb2.ForwardRequest:
    batch = rollout_pb2.RolloutBatch(groups=_groups())
    return service_pb2.ForwardRequest(
        policy_id=requests.POLICY, key=_key(), batch=batch, with_entropy=True
    )


def _optim_step() -> service_pb2.OptimStepRequest:
    optim = requests.update().optim
    return service_pb2.OptimStepRequest(policy_id=requests.POLICY, key=_key(), optim=optim)


def _window(policy: Policy) -> Submission:
    update = corpus.small_updates()[0]
    request = service_pb2.ForwardBackwardRequest(
        policy_id=update.policy_id, key=update.key, batch=update.batch, loss=update.loss
    )
    return submissions.with_batch(request, policy, request.batch.groups, LIMITS)
