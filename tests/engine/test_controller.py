"""Order, retries, checkpoints and versions of a policy: its weights are its steps' history."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ratoon.engine.commands import SeqKey, Submission
from ratoon.engine.policy import controller
from ratoon.engine.refusals import is_policy_replaced
from ratoon.engine.types import FailedResult, ForwardResult, version_of
from ratoon.errors import ErrorCode, RatoonError
from ratoon.metrics import OPERATIONS, Sample
from ratoon.stream.versions import publish_version
from ratoon_proto.codec import decode_tensor
from ratoon_proto.types import (
    LogprobsOf,
    OperationState,
    PublishConfig,
    PublishKind,
    Recovery,
    Sequencing,
    StepResult,
    WeightKind,
)
from ratoon_proto.v1.training_pb2 import ForwardOutput
from tests.engine.conftest import MakeMachine
from tests.engine.fake_trainer import number_body
from tests.engine.harness import (
    RATE,
    Machine,
    code_of,
    forward,
    from_forward,
    load,
    save,
    started,
    update,
)
from tests.engine.refusals import raises
from tests.until import until


async def test_arrival_order_2_3_4_1_gives_the_weights_of_1_2_3_4(machine: Machine) -> None:
    """Trap 12: chunks that arrive out of order (real clients send seq 2, 3, 4, 1)."""
    operations = [await machine.update(seq, seq) for seq in (2, 3, 4)]
    assert [operation.blocked_by_seq for operation in operations] == [1, 1, 1]
    assert {operation.state for operation in operations} == {OperationState.QUEUED}
    operations.append(await machine.update(1, 1))
    ended = [await machine.end(operation) for operation in operations]
    assert machine.weights == [([1.0], RATE), ([2.0], RATE), ([3.0], RATE), ([4.0], RATE)]
    versions = [op.result.version for op in ended if isinstance(op.result, StepResult)]
    assert versions == [2, 3, 4, 1]


async def test_a_retried_update_is_the_first_one_queued_running_and_done(machine: Machine) -> None:
    """Trap 9: a retried POST is a second Adam step."""
    machine.faults.holds[1.0] = threading.Event()
    first = await machine.update(1, 1)
    second = await machine.update(2, 2)
    await started(machine, first)
    assert (await machine.update(1, 1)).operation_id == first.operation_id
    assert (await machine.update(2, 2)).operation_id == second.operation_id
    machine.faults.holds[1.0].set()
    await machine.end(second)
    again = await machine.update(1, 1)
    assert (again.operation_id, again.state) == (first.operation_id, OperationState.DONE)
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]


async def test_a_reused_seq_with_another_payload_is_refused(machine: Machine) -> None:
    first = await machine.update(1, 1)
    for _ in range(2):  # While it is open, and once it is done.
        with raises(ErrorCode.KEY_REUSED) as caught:
            await machine.update(1, 7)
        assert caught.value.details == {"operation_id": first.operation_id}
        await machine.end(first)
    assert machine.weights == [([1.0], RATE)]
    assert machine.bodies == set()


async def test_the_caller_that_goes_away_does_not_stop_the_update(machine: Machine) -> None:
    """Trap 15: a request coroutine owning the update: Serve cancels it when the caller leaves."""
    machine.faults.holds[1.0] = threading.Event()

    async def caller() -> None:
        operation = await machine.update(1, 1)
        await machine.controller.get_operation(operation.operation_id, 30.0)

    task = asyncio.create_task(caller())
    await until(lambda: machine.run.ledger.num_open == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    machine.faults.holds[1.0].set()
    operation = await machine.update(1, 1)
    assert (await machine.end(operation)).state is OperationState.DONE
    assert machine.weights == [([1.0], RATE)]


async def test_a_seq_far_ahead_is_refused_and_one_that_may_come_is_not(
    make_machine: MakeMachine,
) -> None:
    """A slip of a caller, 2**62, was queued for ever."""
    machine = await make_machine(limits={"max_open_operations": 3}).start()
    await machine.update(2, 2)
    for seq in (5, 2**62):
        with pytest.raises(RatoonError) as caught:
            await machine.update(seq, seq)
        assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "key.seq")
        assert caught.value.expected == "at most 4, as 1 has not arrived"
    far = await machine.update(4, 4)
    await machine.end(await machine.update(1, 1))
    await machine.update(3, 3)
    assert (await machine.end(far)).state is OperationState.DONE


async def test_short_waits_behind_a_gap_add_up(make_machine: MakeMachine) -> None:
    """Each of them was refused at its own end, and polls never waited for `gap_wait_s`."""
    machine = await make_machine(limits={"gap_wait_s": 0.3}).start()
    operation = await machine.update(2, 2)
    begin = time.monotonic()
    for _ in range(2):
        seen = await machine.controller.get_operation(operation.operation_id, 0.05)
        assert (seen.state, seen.blocked_by_seq) == (OperationState.QUEUED, 1)
    for least_s in (0.3, 0.55):
        with pytest.raises(RatoonError, match="which has not arrived"):
            await machine.controller.get_operation(operation.operation_id, 0.3)
        assert time.monotonic() - begin >= least_s


async def test_a_wait_behind_a_gap_names_the_missing_seq(make_machine: MakeMachine) -> None:
    machine = await make_machine(limits={"gap_wait_s": 0.05}).start()
    operation = await machine.update(3, 3)
    assert (await machine.controller.get_operation(operation.operation_id, 0.0)).blocked_by_seq == 1
    with raises(ErrorCode.SEQ_GAP) as caught:
        await machine.controller.get_operation(operation.operation_id, 20.0)
    assert caught.value.retryable
    assert caught.value.details == {"missing_seq": "1"}
    await machine.update(1, 1)
    with pytest.raises(RatoonError) as caught:
        await machine.controller.get_operation(operation.operation_id, 20.0)
    assert caught.value.details == {"missing_seq": "2"}
    await machine.update(2, 2)
    assert (await machine.end(operation)).state is OperationState.DONE


async def test_an_operation_refused_at_validation_takes_no_seq(machine: Machine) -> None:
    for key, command in (
        ("a-request-id", update(1)),
        (0, update(1)),
        (1, save("../escape")),
        (1, load("..")),
        (None, update(1)),
    ):
        with raises(ErrorCode.INVALID_ARGUMENT):
            await machine.submit(key, command, 1)
    assert (await machine.end(await machine.update(1, 5))).state is OperationState.DONE
    assert machine.weights == [([5.0], RATE)]


async def test_what_an_earlier_policy_of_the_id_validated_takes_no_seq(machine: Machine) -> None:
    row = machine.journal.store.policy(machine.spec.policy_id)
    assert row is not None
    submission = Submission(
        policy_id=machine.spec.policy_id,
        key=SeqKey(seq=1),
        command=update(1),
        body=number_body(1),
        policy_created_at=row.created_at - 1.0,
    )
    with pytest.raises(RatoonError) as caught:
        await machine.controller.submit(submission)
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert is_policy_replaced(caught.value)
    assert machine.bodies == set()
    now = replace(submission, policy_created_at=row.created_at)
    assert (await machine.end(await machine.controller.submit(now))).state is OperationState.DONE


async def test_a_body_other_than_its_digest_is_never_applied(machine: Machine) -> None:
    ended = await machine.end(await machine.submit(1, update(1), 2))
    assert ended.state is OperationState.FAILED
    assert isinstance(ended.result, FailedResult)
    assert ended.result.error["field"] == "body_digest"
    assert machine.weights == []
    assert (await machine.end(await machine.update(2, 3))).state is OperationState.DONE
    assert machine.weights == [([3.0], RATE)]


async def test_server_sequencing_assigns_seqs_on_arrival(make_machine: MakeMachine) -> None:
    machine = await make_machine(sequencing=Sequencing.SERVER).start()
    first = await machine.update("a", 1)
    second = await machine.update("b", 2)
    again = await machine.update("a", 1)
    assert [first.seq, second.seq, again.seq] == [1, 2, 1]
    assert first.request_id == "a"
    assert again.operation_id == first.operation_id
    with raises(ErrorCode.KEY_REUSED):
        await machine.update("a", 3)
    await machine.end(second)
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]


async def test_expected_version_is_checked_at_the_turn(machine: Machine) -> None:
    await machine.update(1, 1)
    right = await machine.update(2, 2, expected_version=1)
    stale = await machine.end(await machine.update(3, 3, expected_version=1))
    assert (await machine.end(right)).state is OperationState.DONE
    assert code_of(stale) == ErrorCode.VERSION_MISMATCH
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]


async def test_a_skipped_step_is_done_and_keeps_the_version(machine: Machine) -> None:
    machine.faults.skips.add(1.0)
    skipped = await machine.end(await machine.update(1, 1))
    assert skipped.state is OperationState.DONE
    assert isinstance(skipped.result, StepResult)
    assert (skipped.result.version, skipped.result.report.skipped) == (0, True)
    await machine.end(await machine.update(2, 2))
    assert machine.weights == [([2.0], RATE)]


async def test_a_loaded_checkpoint_never_gives_a_version_number_twice(machine: Machine) -> None:
    await machine.update(1, 1)
    await machine.submit(2, save("one"), 0)
    await machine.update(3, 3)
    await machine.forward_backward(4, 40)
    loaded = await machine.end(await machine.submit(5, load("one"), 0))
    assert version_of(loaded.result) == 1
    assert machine.weights == [([1.0], RATE)]
    assert (await machine.controller.weight_manifest(None)).version == 1
    after = await machine.end(await machine.update(6, 6))
    assert version_of(after.result) == 3
    missing = await machine.end(await machine.submit(7, load("none"), 0))
    assert code_of(missing) == ErrorCode.CHECKPOINT_NOT_FOUND


async def test_versions_are_published_and_pruned(machine: Machine) -> None:
    await machine.updates(1, 2, 3)
    assert (await machine.controller.weight_manifest(None)).version == 3
    assert (await machine.controller.weight_manifest(2)).version == 2
    for version in (1, 9):
        with raises(ErrorCode.WEIGHTS_NOT_FOUND):
            await machine.controller.weight_manifest(version)
    await machine.landed()
    assert sorted(path.name for path in machine.paths.weights.iterdir()) == [
        ".spare",
        "00000002",
        "00000003",
    ]


async def test_a_version_that_the_journal_does_not_know_is_published_anew(
    make_machine: MakeMachine,
) -> None:
    """A folder of weights may outlive the journal that it was beside."""
    machine = make_machine()

    def write(folder: Path) -> dict[str, str]:
        (folder / "old").touch()
        return {}

    old = publish_version(machine.paths.weights, "p", 0, WeightKind.FULL, write, 0.0)
    await machine.start()
    new = await machine.controller.weight_manifest(0)
    assert {file.name for file in new.files}.isdisjoint({file.name for file in old.files})
    await machine.landed()
    assert sorted(path.name for path in machine.paths.weights.iterdir()) == ["00000000"]


async def test_publish_on_request_happens_between_two_operations(make_machine: MakeMachine) -> None:
    publish = PublishConfig(kind=PublishKind.ON_REQUEST, every_n=1)
    machine = await make_machine(publish=publish).start()
    await machine.running(1)
    asked = asyncio.create_task(machine.controller.weight_manifest(None))
    await asyncio.sleep(0.02)
    assert not asked.done()
    machine.faults.holds[1.0].set()
    assert (await asked).version == 1


async def test_publish_every_n_skips_the_versions_between(make_machine: MakeMachine) -> None:
    publish = PublishConfig(kind=PublishKind.EVERY_N, every_n=2)
    machine = await make_machine(publish=publish).start()
    seen: list[int] = []
    for seq in (1, 2, 3):
        await machine.end(await machine.update(seq, seq))
        seen.append((await machine.controller.weight_manifest(None)).version)
    assert seen == [0, 2, 2]


async def test_a_forward_without_a_key_runs_between_and_is_not_journaled(machine: Machine) -> None:
    await machine.forward_backward(1, 10)
    read = await machine.end(await machine.submit(None, forward(1), 1))
    assert isinstance(read.result, ForwardResult)
    assert (machine.paths.results / read.result.digest).stat().st_size == read.result.size_bytes
    await machine.end(await machine.step(2))
    assert machine.weights == [([10.0], RATE)]
    assert machine.journal.store.find_operation(read.operation_id) is None


async def test_a_forward_backward_answers_log_probs_once(make_machine: MakeMachine) -> None:
    """They are there for whoever asks after a restart. A window that is computed again, and a
    replay, write no file: it may have expired, and the disk may be full."""
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    ended = await machine.end(
        await machine.forward_backward(1, 10, with_logprobs=LogprobsOf.ALL, with_entropy=True)
    )
    plain = await machine.end(await machine.forward_backward(2, 11))
    assert isinstance(ended.result, StepResult)
    assert isinstance(plain.result, StepResult)
    file = ended.result.file
    assert file is not None
    assert plain.result.file is None
    path = machine.paths.results / file.digest
    output = ForwardOutput.FromString(path.read_bytes())
    assert len(path.read_bytes()) == file.size_bytes
    for column in (output.logprobs, output.entropy):
        assert decode_tensor(column, max_bytes=64).tolist() == [-10, -10]
    assert decode_tensor(output.offsets, max_bytes=64).tolist() == [0, 2]
    await machine.restart_controller()
    assert (await machine.end(ended)).result == ended.result
    assert path.exists()
    path.unlink()
    await machine.worker.kill()
    await machine.restart_controller()
    assert machine.worker.trainer.gradients == [10, 11]
    assert not path.exists()
    await machine.end(await machine.step(3))
    assert machine.weights == [([10.0, 11.0], RATE)]


async def test_old_logprobs_come_from_the_forward_that_is_named(machine: Machine) -> None:
    """The fake's gradient is then the sum of the log-probs, two tokens of minus the version."""
    await machine.update(1, 1)
    read = await machine.end(await machine.submit(2, forward(5), 5))
    for seq in (3, 4):
        update = await machine.end(await machine.update(seq, 5, loss=from_forward(read)))
        assert isinstance(update.result, StepResult)
        # The first update's Forward is of the version that it trains.
        assert len(update.result.report.warnings) == (seq == 3)
    assert machine.weights == [([1.0], RATE), ([-2.0], RATE), ([-2.0], RATE)]


async def test_old_logprobs_of_no_forward_are_refused(machine: Machine) -> None:
    done = await machine.end(await machine.update(1, 1))
    absent = await machine.end(await machine.update(2, 2, loss=from_forward(done)))
    assert code_of(absent) == ErrorCode.INVALID_ARGUMENT
    assert machine.weights == [([1.0], RATE)]


async def test_a_full_queue_still_takes_the_seq_that_all_wait_for(
    make_machine: MakeMachine,
) -> None:
    machine = await make_machine(limits={"max_open_operations": 2}).start()
    waiting = [await machine.update(seq, seq) for seq in (2, 3)]
    with raises(ErrorCode.RESOURCE_EXHAUSTED):
        await machine.update(4, 4)
    await machine.update(1, 1)
    for operation in waiting:
        await machine.end(operation)
    assert machine.weights == [([1.0], RATE), ([2.0], RATE), ([3.0], RATE)]


async def test_watching_a_blocked_operation_shows_which_seq_it_waits_for(machine: Machine) -> None:
    seen = await machine.update(3, 3)
    watching = asyncio.create_task(machine.controller.watch_operation(seen, 20.0))
    await asyncio.sleep(0.02)
    await machine.update(1, 1)
    seen = await watching
    assert (seen.state, seen.blocked_by_seq) == (OperationState.QUEUED, 2)


async def test_an_unknown_operation_is_not_found(machine: Machine) -> None:
    for operation_id in ("p.0", "p.create", "q.0"):
        with raises(ErrorCode.OPERATION_NOT_FOUND):
            await machine.controller.get_operation(operation_id, 0.0)


async def test_counters_are_the_journals(machine: Machine) -> None:
    machine.faults.breaks.add(2.0)
    await machine.update(1, 1)
    await machine.update(2, 2)
    await machine.update(1, 1)
    blocked = await machine.update(9, 9)
    await machine.controller.cancel_operation(blocked.operation_id)
    await machine.end(await machine.forward_backward(3, 3))
    counted: dict[tuple[str, ...], float] = {}
    for change in machine.metrics.changes:
        if isinstance(change, Sample) and change.metric == OPERATIONS.name:
            counted[change.labels] = counted.get(change.labels, 0.0) + (change.value or 0.0)
    states = {"applied": "done", "failed": "failed", "cancelled": "cancelled"}
    journal = {
        (policy_id, kind, states[state]): count
        for (policy_id, kind, state), count in machine.journal.store.count_operations().items()
        if state in states
    }
    ended = {labels: n for labels, n in counted.items() if labels[2] in states.values()}
    assert ended == journal
    assert counted["p", "update", "queued"] == 3


async def test_a_submission_does_not_wait_for_a_long_recovery(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body is in memory, and that of each retry is another."""
    monkeypatch.setattr(controller, "_QUEUE_S", 0.01)
    async with machine.controller._lock:
        with pytest.raises(RatoonError, match="ask again") as caught:
            await machine.update(1, 1)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert machine.bodies == set()
    assert (await machine.end(await machine.update(1, 1))).state is OperationState.DONE


async def test_each_operation_that_ends_has_one_line_in_the_log(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    """An update had none: a run left no trace in its own service's log."""
    machine.faults.breaks.add(2.0)
    machine.faults.skips.add(3.0)
    for seq in (1, 2, 3):
        await machine.end(await machine.update(seq, float(seq)))
    await machine.end(await machine.forward_backward(4, 4.0))
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    lines = [event for event in events if event["event"] == "operation ended"]
    said = [(line["seq"], line["kind"], line["state"], line["level"]) for line in lines]
    assert said == [
        (1, "update", "done", "info"),
        (2, "update", "failed", "warning"),
        (3, "update", "done", "warning"),
        (4, "forward_backward", "done", "info"),
    ]
    assert all(line["policy_id"] == machine.spec.policy_id for line in lines)
    assert (lines[0]["version"], lines[2]["version"], "version" in lines[1]) == (1, 1, False)
    assert lines[0]["seconds"] >= 0
    assert "error" in lines[1]
    assert "skip_reason" in lines[2]
