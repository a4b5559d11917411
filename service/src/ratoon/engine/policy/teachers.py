"""Asks teachers what an operation needs of them, before its turn.

    accepted -> its turn is near -> a Forward on each teacher -> the answers are durable -> its turn

A teacher runs the Forward between its own turns, and no turn waits while it is asked: policies that
teach each other, or themselves, never wait in a circle. An answer is a file beside the operation's
body, held as the body is. Its name is one of the operation's choices, which are journaled when it
ends: a replay reads the file, whatever has become of the teacher. Before that nobody has been told,
and what a crash loses is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable

from ratoon.engine.commands import (
    Command,
    ForwardBackwardCommand,
    ForwardCommand,
    NoKey,
    Submission,
    UpdateCommand,
)
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.journal.records import JournalAwayError, OperationRecord
from ratoon.engine.policy.queue import LiveOperation
from ratoon.engine.policy.run import MAX_LOSSES, PolicyRun
from ratoon.engine.refusals import (
    disk_full,
    policy_not_found,
    policy_not_ready,
    superseded,
    unexpected,
)
from ratoon.engine.types import FailedResult, ForwardResult, Operation
from ratoon.engine.worker.tasks import TeacherAnswer
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger
from ratoon.model.tokenizer import token_conflict
from ratoon.rollout.batch import RolloutBatch, group_of_sequence, sent_field, sequence_lengths
from ratoon.rollout.questions import Question, asked_batch, questions
from ratoon.rollout.raw import first_true
from ratoon.rollout.serial import BatchBytes, batch_digest, batch_from_bytes
from ratoon_proto.types import LossConfig, PolicyState

_LOG = get_logger("teachers")
# Operations from the one whose turn it is on for which teachers are asked: one is asked ahead.
_NEAR = 2
# How long a Forward is waited for at a time; in between its policy is looked at.
_WAIT_S = 5.0
_RETRY_S, _MAX_RETRY_S = 1.0, 30.0
_IN_USE = (PolicyState.READY, PolicyState.RELEASED)


class Teachers:
    """Asks for the operations of one policy; `wake` is called when one has its answers."""

    def __init__(self, run: PolicyRun, wake: Callable[[], None]) -> None:
        self._run = run
        self._wake = wake
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def refusal(self, submission: Submission) -> RatoonError | None:
        """Why a teacher of a submission cannot be asked; None: all can, or it has none.

        POLICY_NOT_FOUND, POLICY_NOT_READY, POLICY_FAILED, VERSION_MISMATCH, INVALID_ARGUMENT.
        """
        if not submission.command.teachers:
            return None
        loss = _loss_of(submission.command)
        batch = await asyncio.to_thread(self._sent_batch, submission)
        for question in questions(loss, batch):
            refusal = await self._refusal(question, batch)
            if refusal is not None:
                return refusal
        return None

    def _sent_batch(self, submission: Submission) -> RolloutBatch:
        if submission.sent is None:
            return batch_from_bytes(bytes(submission.body))
        try:
            body = (self._run.paths.bodies / submission.sent.name).read_bytes()
        except FileNotFoundError as err:
            # A newly started controller has removed the temporary file as a leftover.
            raise superseded() from err
        return batch_from_bytes(body)

    def follow(self) -> None:
        """Ask for what comes next, and no longer for what has ended. Its caller holds the lock."""
        turn, lives = self._run.sequencer.turn, self._run.ledger.open_operations()
        near = {
            live.operation_id: live
            for live in lives
            if live.awaits_teachers and turn <= live.record.seq < turn + _NEAR
        }
        for operation_id in self._asking.keys() - near.keys():
            self._asking.pop(operation_id).cancel()
        for operation_id in near.keys() - self._asking.keys():
            task = asyncio.get_running_loop().create_task(self._ask(near[operation_id]))
            self._asking[operation_id] = task

    def abandon(self) -> None:
        """Ask for nothing any more; what was asked for is cancelled."""
        for task in self._asking.values():
            task.cancel()

    async def stop(self) -> None:
        """As `abandon`, and wait until nothing is written any more."""
        self.abandon()
        asking = set(self._asking.values())
        self._asking.clear()
        if asking:
            await asyncio.wait(asking, timeout=_WAIT_S)

    async def _ask(self, live: LiveOperation) -> None:
        """Have an operation answered, or say why it cannot be."""
        record, tasks = live.record, list[asyncio.Task[TeacherAnswer | RatoonError]]()
        try:
            body = await asyncio.to_thread(self._run.paths.body(record.body_digest).read_bytes)
            batch = await asyncio.to_thread(batch_from_bytes, body)
            for question in questions(_loss_of(record.command), batch):
                answer = self._answer(record, question, batch)
                tasks.append(asyncio.get_running_loop().create_task(answer))
            found = await asyncio.gather(*tasks)
            answers = tuple(each for each in found if isinstance(each, TeacherAnswer))
            live.unanswered = next((each for each in found if isinstance(each, RatoonError)), None)
            live.answers = answers if live.unanswered is None else None
        except Exception as err:  # noqa: BLE001 - whatever it is, the operation must not wait for it
            _LOG.exception("teachers not asked", operation_id=record.operation_id)
            live.unanswered = unexpected(err)
        finally:
            if live.answers is None:
                await self._release(record, tasks)
        self._wake()

    async def _release(
        self, record: OperationRecord, tasks: list[asyncio.Task[TeacherAnswer | RatoonError]]
    ) -> None:
        """Release the answers that some teachers gave, where another gives none."""
        for task in tasks:
            task.cancel()
            if task.done() and not task.cancelled() and task.exception() is None:
                answer = task.result()
                if isinstance(answer, TeacherAnswer):
                    await self._run.bodies.release(record.operation_id, answer.digest)

    async def _answer(
        self, record: OperationRecord, question: Question, batch: RolloutBatch
    ) -> TeacherAnswer | RatoonError:
        """The answer to one question, durable and held by the operation, or why there is none.

        What may pass is waited for. A Forward that fails is run `MAX_LOSSES` times at most: it may
        be what its teacher's workers are lost to.
        """
        body = await asyncio.to_thread(lambda: BatchBytes(asked_batch(batch, question.asked_G)))
        num_failed, wait_s = 0, _RETRY_S
        while True:
            try:
                refusal = await self._refusal(question, batch, record.created_at)
                if refusal is not None:
                    return refusal
                forward = await self._forwarded(question, body, batch, record.created_at)
                result = forward.result
                if isinstance(result, ForwardResult):
                    return await self._kept(record, question, result)
                if result is None:
                    continue  # The refusal says what has become of the teacher.
                assert isinstance(result, FailedResult)
                error, num_failed = RatoonError.from_dict(result.error), num_failed + 1
            except JournalAwayError as err:
                error = RatoonError(ErrorCode.UNAVAILABLE, str(err))
            except OSError as err:
                error = disk_full(err) or unexpected(err)
            except RatoonError as err:
                error = err
            may_pass = error.retryable or error.code in _ASK_AGAIN
            if not may_pass or num_failed == MAX_LOSSES:
                return _named(error, question)
            _LOG.warning("teacher asked again", operation_id=record.operation_id, reason=str(error))
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_RETRY_S)

    async def _forwarded(
        self, question: Question, body: BatchBytes, batch: RolloutBatch, before: float
    ) -> Operation:
        """A Forward of the teacher once it has ended, or cannot end any more."""
        policies = self._run.policies
        # Submitted half, it would be held by the teacher for ever.
        submitting = asyncio.get_running_loop().create_task(policies.submit(asking(question, body)))
        try:
            asked = await asyncio.shield(submitting)
            while not asked.state.is_final:
                asked = await policies.get_operation(asked.operation_id, _WAIT_S)
                if not asked.state.is_final and await self._refusal(question, batch, before):
                    # It may have ended before what the refusal is for.
                    return await policies.get_operation(asked.operation_id, 0.0)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # It is of no use, and does no harm.
                await policies.cancel_operation((await submitting).operation_id)
            raise
        return asked

    async def _kept(
        self, record: OperationRecord, question: Question, result: ForwardResult
    ) -> TeacherAnswer:
        """Make an answer durable beside the operation's body."""
        policy_id = question.teacher.policy_id
        data = await self._run.policies.read_output(policy_id, result.digest)
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        await self._run.bodies.hold(record.operation_id, digest, data)
        self._run.bodies.land(record.operation_id)
        self._run.reach(CrashPoint.ENGINE_AFTER_ANSWER)
        return TeacherAnswer(policy_id=policy_id, version=result.version, digest=digest)

    async def _refusal(
        self, question: Question, batch: RolloutBatch, before: float | None = None
    ) -> RatoonError | None:
        """Why a teacher cannot be asked. `before`: it must have been created by then."""
        teacher, policy_id = question.teacher, question.teacher.policy_id
        try:
            policy = await self._run.policies.policy(policy_id)
        except RatoonError as err:
            if err.code is ErrorCode.POLICY_NOT_FOUND:
                return _named(err, question)
            raise
        if before is not None and policy.created_at > before:
            return _named(policy_not_found(policy_id), question)
        if policy.state not in _IN_USE or policy.info is None:
            error = policy_not_ready(policy_id, policy.state, policy.failure)
            return _named(error, question)
        if teacher.version is not None and teacher.version != policy.version:
            return RatoonError(
                ErrorCode.VERSION_MISMATCH,
                f"{question.field}.version: got {teacher.version}, {policy_id} is at"
                f" {policy.version}",
                field=f"{question.field}.version",
                got=str(teacher.version),
                expected=str(policy.version),
            )
        info, own = policy.info, (await self._run.policies.policy(self._run.policy_id)).info
        bases = self._run.spec.model.base, policy.spec.model.base
        if own is not None and own.vocab_size != info.vocab_size:
            got = f"{policy_id}, whose vocabulary has {info.vocab_size} tokens"
            expected = f"a policy with a vocabulary of {own.vocab_size}"
            return invalid(f"{question.field}.policy_id", got, expected)
        if bases[0] != bases[1]:
            root = self._run.paths.models_root
            token = await asyncio.to_thread(token_conflict, *bases, root)
            if token is not None:
                got = f"{policy_id}, whose token {token} is another one"
                return invalid(f"{question.field}.policy_id", got, "a policy of the same tokenizer")
        length_S = sequence_lengths(batch)
        length_S[~question.asked_G[group_of_sequence(batch)]] = 0
        long = first_true(length_S > info.max_sequence_tokens)
        if long is not None:
            got = f"{length_S[long]} tokens in {sent_field(batch, long)}"
            expected = f"at most {info.max_sequence_tokens}, which {policy_id} takes"
            return invalid(question.field, got, expected)
        return None


# Errors that a second try may not have, though they are no caller's to retry.
_ASK_AGAIN = (ErrorCode.OPERATION_NOT_FOUND, ErrorCode.CANCELLED)


def _loss_of(command: Command | None) -> LossConfig:
    assert isinstance(command, UpdateCommand | ForwardBackwardCommand), "it has teachers"
    return command.loss


def asking(question: Question, body: bytes | BatchBytes) -> Submission:
    """The Forward that answers a question; `body`: the serialized batch of its groups."""
    command = ForwardCommand(
        with_entropy=False,
        use_reference=False,
        expected_version=question.teacher.version,
        body_digest=batch_digest(body),
        num_teacher_tokens=question.num_tokens,
    )
    return Submission(
        policy_id=question.teacher.policy_id,
        key=NoKey(),
        command=command,
        body=body,
        is_awaited=True,
    )


def _named(error: RatoonError, question: Question) -> RatoonError:
    """The error, for the callers of the policy that is taught."""
    policy_id = question.teacher.policy_id
    return RatoonError(
        error.code,
        f"{question.field}: the teacher {policy_id} does not answer: {error.message}",
        field=question.field,
        got=policy_id,
        expected="a policy that answers",
        details=error.details,
    )
