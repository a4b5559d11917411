"""Policies that teach each other in one engine: what is asked, and what becomes of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ratoon.config import CheckpointConfig
from ratoon.engine.commands import Command, SentBody, SeqKey, Submission
from ratoon.engine.policy import teachers
from ratoon.engine.types import Operation
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import FolderBase
from ratoon_proto.types import (
    KlConfig,
    KlKind,
    LossConfig,
    LossKind,
    OperationState,
    PolicyState,
    Recovery,
    ReferenceKind,
    StepResult,
    Teacher,
)
from tests.engine.conftest import MakeMachine, without_pauses
from tests.engine.fake_trainer import ASKED, INFO, FakeTrainer, number_body
from tests.engine.harness import (
    RATE,
    code_of,
    digest_of,
    forward_backward,
    optim_step,
    policy_spec,
    taught,
)
from tests.engine.harness import update as update_of
from tests.engine.test_engine import House
from tests.until import until

TEACHER = Teacher("a")
FIELD = "loss.distillation.teachers[0]"
# What three of its teacher's tokens add to a batch of two response tokens, by teacher's version.
SAID = [6.0 * (version + 1) for version in range(4)]


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    """Policies a and b, which replay what is lost."""
    monkeypatch.setattr(teachers, "_MAX_RETRY_S", 0.01)
    monkeypatch.setattr(teachers, "_WAIT_S", 0.05)
    house = House(tmp_path)
    with without_pauses():
        for name in ("a", "b"):
            spec = policy_spec(name, recovery=Recovery.REPLAY)
            await house.end(await house.engine.create_policy(spec))
        yield house
        for worker in house.cluster.workers.values():
            for hold in worker._faults.holds.values():
                hold.set()
        await house.leave()


async def send(
    house: House, policy_id: str, seq: int, loss: LossConfig, *, number: float | None = None
) -> Operation:
    number = seq if number is None else number
    return await submit(house, policy_id, seq, update_of(number, loss=loss), number)


async def submit(
    house: House, policy_id: str, seq: int, command: Command, number: float = 0.0
) -> Operation:
    body = number_body(number) if command.body_digest else b""
    key = SeqKey(seq=seq)
    return await house.engine.submit(
        Submission(policy_id=policy_id, key=key, command=command, body=body)
    )


def hold(house: House, policy_id: str) -> threading.Event:
    """Have the policy's answers wait for the event."""
    held = threading.Event()
    house.cluster.workers[policy_id]._faults.holds[ASKED] = held
    return held


def answering(house: House, policy_id: str) -> bool:
    controller = house.engine._controllers._kept[policy_id].controller
    lives = controller._run.ledger.open_operations()
    return any(live.record.seq == 0 and live.is_started for live in lives)


@contextmanager
def refused(code: ErrorCode, field: str) -> Generator[None]:
    with pytest.raises(RatoonError) as caught:
        yield
    assert (caught.value.code, caught.value.field) == (code, field)


def bodies(house: House, policy_id: str) -> int:
    return len([*house.settings.paths(policy_id).bodies.iterdir()])


async def test_a_student_learns_from_what_its_teacher_says(house: House) -> None:
    ended = await house.end(await send(house, "b", 1, taught(TEACHER)))
    assert isinstance(ended.result, StepResult)
    assert ended.result.teachers == (Teacher("a", version=0),)
    await house.done("a", 1)
    ended = await house.end(await send(house, "b", 2, taught(Teacher("a", version=1))))
    assert isinstance(ended.result, StepResult)
    assert ended.result.teachers == (Teacher("a", version=1),)
    assert house.weights("b") == [([1 + SAID[0]], RATE), ([2 + SAID[1]], RATE)]
    assert bodies(house, "b") == 4  # Two batches, and what was said of each.
    assert bodies(house, "a") == 1  # No question.


async def test_a_teacher_is_asked_of_a_body_that_went_ahead(house: House) -> None:
    command, body = update_of(1, loss=taught(TEACHER)), number_body(1)
    ahead = SentBody(name=".ahead", num_bytes=len(body))
    sent = Submission(policy_id="b", key=SeqKey(seq=1), command=command, body=b"", sent=ahead)
    with pytest.raises(RatoonError) as caught:
        await house.engine.submit(sent)
    assert caught.value.code is ErrorCode.UNAVAILABLE  # Its file was removed as a leftover.
    (house.settings.paths("b").bodies / ahead.name).write_bytes(body)
    ended = await house.end(await house.engine.submit(sent))
    assert isinstance(ended.result, StepResult)
    assert ended.result.teachers == (Teacher("a", version=0),)


async def test_a_window_is_of_several_answers(house: House) -> None:
    for seq in (1, 2):
        command = forward_backward(seq, loss=taught(TEACHER))
        await house.end(await submit(house, "b", seq, command, seq))
        await house.done("a", seq)
    third = forward_backward(3, loss=taught(Teacher("a", version=7)))
    with refused(ErrorCode.VERSION_MISMATCH, f"{FIELD}.version"):
        await submit(house, "b", 3, third, 3)
    await house.end(await submit(house, "b", 3, optim_step(2)))
    assert house.weights("b") == [([2 + SAID[1]], RATE)]


async def test_policies_that_teach_each_other_and_themselves_do_not_wait_in_a_circle(
    house: House,
) -> None:
    sent = [
        await send(house, policy_id, seq, taught(Teacher(teacher)))
        for seq, pairs in enumerate((("ab", "ba"), ("aa", "bb"), ("ab", "ba")), 1)
        for policy_id, teacher in pairs
    ]
    for operation in sent:
        assert (await house.end(operation)).state is OperationState.DONE
    assert len(house.weights("a")) == len(house.weights("b")) == 3


async def test_a_replay_reads_the_answer_whatever_became_of_the_teacher(house: House) -> None:
    await house.end(await send(house, "b", 1, taught(TEACHER)))
    command = forward_backward(2, loss=taught(TEACHER))
    await house.end(await submit(house, "b", 2, command, 2))
    before = house.weights("b")
    await house.end(await house.engine.delete_policy("a"))
    await house.cluster.workers["b"].kill()
    await house.crash()
    await house.end(await submit(house, "b", 3, optim_step()))
    assert len(house.cluster.workers["b"].trainers) == 2
    assert house.weights("b") == [*before, ([2 + SAID[0]], RATE)]


async def test_a_retry_finds_its_operation_though_the_teacher_is_gone(house: House) -> None:
    first = await house.end(await send(house, "b", 1, taught(TEACHER)))
    await house.end(await house.engine.delete_policy("a"))
    again = await send(house, "b", 1, taught(TEACHER))
    assert again.operation_id == first.operation_id
    with refused(ErrorCode.POLICY_NOT_FOUND, FIELD):
        await send(house, "b", 2, taught(TEACHER))
    await house.done("b", 2)
    assert bodies(house, "b") == 3


@pytest.mark.parametrize(
    ("loss", "code", "field"),
    [
        (taught(Teacher("c")), ErrorCode.POLICY_NOT_FOUND, FIELD),
        (taught(Teacher("a", version=1)), ErrorCode.VERSION_MISMATCH, f"{FIELD}.version"),
    ],
)
async def test_a_teacher_that_cannot_be_asked_is_refused_by_name_and_takes_no_seq(
    house: House, loss: LossConfig, code: ErrorCode, field: str
) -> None:
    with refused(code, field):
        await send(house, "b", 1, loss)
    assert bodies(house, "b") == 0
    await house.done("b", 1)


async def test_a_teacher_of_another_model_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy_id, changes in (
        ("words", {"vocab_size": 255}),
        ("short", {"max_sequence_tokens": 2}),
    ):
        info = replace(INFO, **changes)
        monkeypatch.setattr(FakeTrainer, "info", lambda _, info=info: info)
        await house.end(await house.engine.create_policy(policy_spec(policy_id)))
    with refused(ErrorCode.INVALID_ARGUMENT, f"{FIELD}.policy_id"):
        await send(house, "b", 1, taught(Teacher("words")))
    with refused(ErrorCode.INVALID_ARGUMENT, FIELD):
        await send(house, "b", 1, taught(Teacher("short")))
    await house.done("b", 1)


async def test_a_teacher_of_another_tokenizer_is_refused(house: House) -> None:
    """Its vocabulary is of the same size, as are those of Llama 2 and Mistral."""
    root = house.settings.paths("b").models_root
    for name, vocab in (
        ("plain", {"x": 0, "y": 1}),
        ("more", {"x": 0, "y": 1, "z": 2}),
        ("swapped", {"y": 0, "x": 1}),
    ):
        (root / name).mkdir(parents=True)
        Tokenizer(WordLevel(vocab, unk_token="x")).save(str(root / name / "tokenizer.json"))
        model = replace(policy_spec().model, base=FolderBase(folder=str(root / name)))
        await house.end(await house.engine.create_policy(policy_spec(name, model=model)))
    with refused(ErrorCode.INVALID_ARGUMENT, f"{FIELD}.policy_id"):
        await send(house, "plain", 1, taught(Teacher("swapped")))
    ended = await house.end(await send(house, "plain", 1, taught(Teacher("more"))))
    assert ended.state is OperationState.DONE


async def test_a_teacher_that_failed_or_is_being_deleted_is_refused(house: House) -> None:
    held = threading.Event()
    house.cluster.workers["a"]._faults.holds[1.0] = held
    await house.update("a", 1)
    deletion = await house.engine.delete_policy("a")
    with refused(ErrorCode.POLICY_NOT_READY, FIELD):
        await send(house, "b", 1, taught(TEACHER))
    held.set()
    await house.end(deletion)
    await house.engine._controllers._kept["b"].controller._turns._give_up("on purpose")
    await house.end(await house.engine.create_policy(policy_spec("a")))
    with refused(ErrorCode.POLICY_FAILED, FIELD):
        await send(house, "a", 1, taught(Teacher("b")))


async def test_a_teacher_in_mid_update_answers_after_it(house: House) -> None:
    held = threading.Event()
    house.cluster.workers["a"]._faults.holds[1.0] = held
    await house.update("a", 1)
    of_any = await send(house, "b", 1, taught(TEACHER))
    of_past = await send(house, "b", 2, taught(Teacher("a", version=0)))
    held.set()
    ended = await house.end(of_any)
    assert isinstance(ended.result, StepResult)
    assert ended.result.teachers == (Teacher("a", version=1),)
    assert code_of(await house.end(of_past)) == "VERSION_MISMATCH"
    await house.done("b", 3)
    assert house.weights("b") == [([1 + SAID[1]], RATE), ([3.0], RATE)]


async def test_a_cancelled_operation_is_asked_for_no_longer(house: House) -> None:
    held = hold(house, "a")
    operation = await send(house, "b", 1, taught(TEACHER))
    await until(lambda: answering(house, "a"))
    cancelled = await house.engine.cancel_operation(operation.operation_id)
    assert cancelled.state is OperationState.CANCELLED
    await until(lambda: not answering(house, "a"))
    assert not held.is_set()
    await house.done("b", 2)
    assert house.weights("b") == [([2.0], RATE)]
    await until(lambda: bodies(house, "a") == 0)
    assert bodies(house, "b") == 1


async def test_an_answered_operation_that_is_cancelled_leaves_no_answer(house: House) -> None:
    """It was answered while the one before it ran."""
    held = threading.Event()
    house.cluster.workers["b"]._faults.holds[1.0] = held
    first = await house.update("b", 1)
    second = await send(house, "b", 2, taught(TEACHER))
    await until(lambda: bodies(house, "b") == 3)
    await house.engine.cancel_operation(second.operation_id)
    assert bodies(house, "b") == 1
    held.set()
    await house.end(first)


async def test_the_loss_of_a_teacher_fails_what_waits_for_it_by_name(house: House) -> None:
    hold(house, "a")
    operation = await send(house, "b", 1, taught(TEACHER))
    await until(lambda: answering(house, "a"))
    await house.end(await house.engine.delete_policy("a"))
    ended = await house.end(operation)
    assert code_of(ended) in ("POLICY_NOT_FOUND", "POLICY_NOT_READY")
    assert "teacher a" in str(ended.result)
    await house.done("b", 2)
    assert house.weights("b") == [([2.0], RATE)]


async def test_another_policy_of_the_teachers_name_is_not_asked(house: House) -> None:
    hold(house, "a")
    operation = await send(house, "b", 1, taught(TEACHER))
    await until(lambda: answering(house, "a"))
    for task in house.engine._controllers._kept["b"].controller._turns.teachers._asking.values():
        task.cancel()
    await house.end(await house.engine.delete_policy("a"))
    await house.end(await house.engine.create_policy(policy_spec("a")))
    await house.crash()
    await house.engine.recover()
    assert code_of(await house.end(operation)) == "POLICY_NOT_FOUND"


async def test_a_student_that_is_deleted_asks_no_longer(house: House) -> None:
    hold(house, "a")
    await send(house, "b", 1, taught(TEACHER))
    await until(lambda: answering(house, "a"))
    await house.end(await house.engine.delete_policy("b"))
    await until(lambda: not answering(house, "a"))
    await house.done("a", 1)


async def test_a_lost_teacher_is_asked_again(house: House) -> None:
    house.cluster.workers["a"]._faults.kills_device[ASKED] = 2
    ended = await house.end(await send(house, "b", 1, taught(TEACHER)))
    assert ended.state is OperationState.DONE
    assert len(house.cluster.workers["a"].trainers) == 3
    assert house.weights("b") == [([1 + SAID[0]], RATE)]


async def test_a_question_that_loses_every_worker_is_given_up(house: House) -> None:
    house.cluster.workers["a"]._faults.kills_device[ASKED] = 100
    ended = await house.end(await send(house, "b", 1, taught(TEACHER)))
    assert code_of(ended) == "WORKER_LOST"
    await house.done("b", 2)
    await house.done("a", 1)


async def test_a_question_has_room_where_a_queue_has_none(house: House) -> None:
    """The queue would wait for its own end."""
    house.engine._claims._max_total_bytes = 0
    with refused(ErrorCode.RESOURCE_EXHAUSTED, ""):
        await send(house, "b", 2, taught(TEACHER))
    ended = await house.end(await send(house, "b", 1, taught(TEACHER)))
    assert ended.state is OperationState.DONE


async def test_a_new_engine_asks_again(house: House) -> None:
    held = hold(house, "a")
    operation = await send(house, "b", 1, taught(TEACHER))
    await until(lambda: answering(house, "a"))
    await house.crash()
    await house.engine.recover()
    held.set()
    ended = await house.end(operation)
    assert ended.state is OperationState.DONE
    assert house.weights("b") == [([1 + SAID[0]], RATE)]


async def test_groups_have_teachers_of_their_own(house: House) -> None:
    """The only group is b's; a, asked about all others, is asked about none."""
    loss = taught(TEACHER, Teacher("b", group_ids=["g"]))
    await house.done("b", 1)
    ended = await house.end(await send(house, "b", 2, loss))
    assert isinstance(ended.result, StepResult)
    assert ended.result.teachers == (Teacher("b", version=1),)


async def test_a_teacher_of_both_terms_is_asked_once(house: House) -> None:
    kl = KlConfig(KlKind.K3, 0.1, ReferenceKind.TEACHER, teachers=[TEACHER])
    await house.done("a", 1)
    await house.end(await send(house, "b", 1, replace(taught(TEACHER), kl=kl)))
    await house.end(await send(house, "b", 2, LossConfig(kind=LossKind.GRPO, kl=kl)))
    assert house.weights("b") == [([1 + SAID[1] + 2], RATE), ([2 + 2.0], RATE)]
    # The first has both columns, the second the log-probs alone.
    assert bodies(house, "b") == 4


async def test_a_student_that_waits_gives_up_its_worker(make_machine: MakeMachine) -> None:
    """A teacher may need its device."""
    machine = await make_machine(idle_release_s=0.01, recovery=Recovery.REPLAY).start()
    refused = asyncio.Event()
    policies, submit = machine.run.policies, machine.run.policies.submit

    async def away(submission: Submission) -> Operation:
        if not refused.is_set():
            raise RatoonError(ErrorCode.UNAVAILABLE, "it waits for a GPU")
        return await submit(submission)

    policies.submit = away  # pyright: ignore[reportAttributeAccessIssue]
    operation = await machine.update(1, 1, loss=taught(Teacher("p")))
    await until(lambda: machine.run.state is PolicyState.RELEASED)
    refused.set()
    ended = await machine.end(operation)
    assert ended.state is OperationState.DONE
    assert machine.weights == [([1 + SAID[0]], RATE)]


@pytest.mark.parametrize("recovery", [Recovery.FAIL, Recovery.REPLAY])
async def test_answers_go_with_their_batches(make_machine: MakeMachine, recovery: Recovery) -> None:
    """Without a replay once the window is closed; with one once a checkpoint covers them."""
    often = CheckpointConfig(every_operations=2, every_s=0, every_bytes=0, keep=1)
    machine = await make_machine(recovery=recovery, checkpoints=often).start()
    for seq in (1, 2):
        command = forward_backward(seq, loss=taught(Teacher("p")))
        await machine.end(await machine.submit(seq, command, seq))
    assert len(machine.bodies) == 3
    failed = await machine.end(await machine.update(3, 3, loss=taught(Teacher("p"))))
    assert code_of(failed) == "WINDOW_OPEN"
    await machine.end(await machine.step(4))
    batches = {digest_of(number) for number in range(1, 9)}
    if recovery is Recovery.REPLAY:
        assert len(machine.bodies - batches) == 1
        await machine.updates(5, 6, 7, 8)
        await until(lambda: not machine.bodies - batches)
    else:
        assert machine.bodies == set()
