"""The journal in either database: fences, repeated writes, unique keys, roll-backs, reopening."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from sqlalchemy.exc import IntegrityError

from ratoon.engine.commands import RequestKey, SeqKey
from ratoon.engine.journal.records import (
    NO_RECOVERY,
    JournalState,
    RollBack,
)
from ratoon.engine.types import CheckpointInfo, FailedResult
from ratoon.engine.worker.tasks import Choices, FencedError
from ratoon.errors import ErrorCode
from ratoon_proto.types import EmptyResult, OperationKind, PolicyState
from tests.engine.fake_trainer import INFO
from tests.engine.harness import life_record, policy_spec, update
from tests.engine.refusals import raises
from tests.engine.stores import Stores, end_of, journaled, record_of
from tests.plans import PLAN


@pytest.fixture
def stores(database_url: str) -> Iterator[Stores]:
    opened = Stores(database_url).with_policy()
    yield opened
    opened.engine.dispose()


def test_a_record_comes_back_as_it_was_written(stores: Stores) -> None:
    choices = Choices(plan=PLAN, old_logprobs="00.1", next_version=4)
    record = replace(record_of(3), request_id="r", choices=choices)
    stores.fenced.accept(stores.token, record, 1)
    assert stores.store.find_operation("p.3") == record
    assert stores.store.find_key("p", SeqKey(seq=3)) == record
    assert stores.store.find_key("p", RequestKey(request_id="r")) == record
    assert stores.store.find_key("p", SeqKey(seq=4)) is None


def test_a_key_names_at_most_one_operation(stores: Stores) -> None:
    stores.accept(1)
    with pytest.raises(IntegrityError):
        stores.fenced.accept(stores.token, replace(record_of(1), operation_id="p.other"), 2)
    assert stores.store.find_operation("p.other") is None


def test_an_older_token_writes_nothing(stores: Stores) -> None:
    stores.accept(1)
    newer = stores.fenced.acquire("p")
    assert newer == stores.token + 1
    fenced, old = stores.fenced, stores.token
    for write in (
        lambda: fenced.accept(old, record_of(2), 3),
        lambda: fenced.end(old, "p", end_of(1, 1)),
        lambda: fenced.set_published(old, "p", (1,)),
        lambda: fenced.check_token(old, "p"),
        lambda: fenced.set_policy(old, "p", PolicyState.READY, INFO),
        lambda: fenced.end_policy(old, "p", "nobody has called it"),
        lambda: fenced.roll_back(old, "p", roll_back_to(0)),
    ):
        with pytest.raises(FencedError):
            write()
    policy = stores.policy
    assert (policy.version, policy.published, policy.info) == (0, (), None)
    found = stores.record(1)
    assert found.state is JournalState.ACCEPTED


def test_a_repeated_write_changes_nothing(stores: Stores) -> None:
    record = stores.accept(1)
    stores.fenced.accept(stores.token, record, 2)
    stores.end(1, 1)
    stores.end(1, 7, state=JournalState.FAILED)
    found, policy = stores.record(1), stores.policy
    assert (found.state, found.version, found.started_at) == (JournalState.APPLIED, 1, 5.0)
    assert (policy.version, policy.max_version, policy.next_seq) == (1, 1, 2)


@pytest.mark.parametrize("state", [JournalState.CANCELLED, JournalState.FAILED])
def test_what_was_not_applied_leaves_the_version(stores: Stores, state: JournalState) -> None:
    """An operation that is cancelled beside a running one knows the version before that one's."""
    stores.accept(1)
    stores.accept(2)
    stores.end(1, 1)
    stores.end(2, 0, state=state, frees_window=False)
    policy = stores.store.history("p").policy
    assert (policy.version, policy.max_version) == (1, 1)


def test_a_closed_window_keeps_hashes_and_drops_plans(stores: Stores) -> None:
    stores.applied(1, 0, OperationKind.FORWARD_BACKWARD)
    stores.accept(3)
    stores.applied(2, 1, OperationKind.OPTIM_STEP)
    first, later = stores.record(1), stores.record(3)
    assert (first.command, first.choices, first.payload_hash) == (None, None, "hash1")
    assert first.result is not None
    assert later.command == update(3)


def test_history_begins_after_the_last_closed_window(stores: Stores) -> None:
    stores.applied(1, 1)
    stores.applied(2, 1, OperationKind.FORWARD_BACKWARD)
    stores.accept(3, OperationKind.FORWARD_BACKWARD)
    stores.end(3, 1, state=JournalState.FAILED, frees_window=False)
    stores.accept(5)
    history = stores.store.history("p")
    assert [record.seq for record in history.records] == [2, 3, 5]
    assert history.policy.version == 1
    assert history.checkpoints == ()
    assert history.closed is not None
    assert (history.closed.seq, history.kept_from_seq) == (1, 2)


def roll_back_to(seq: int, replay_from_seq: int | None = None) -> RollBack:
    return RollBack(
        seq=seq,
        replay_from_seq=seq + 1 if replay_from_seq is None else replay_from_seq,
        version=1 if seq else 0,
        checkpoint_id="c" if seq else "",
        finished_at=20.0,
    )


def test_a_roll_back_fails_what_is_past_the_checkpoint_and_retires_versions(
    stores: Stores,
) -> None:
    stores.applied(1, 1)
    stores.applied(2, 1, OperationKind.FORWARD_BACKWARD)
    checkpoint = CheckpointInfo(
        checkpoint_id="c", version=1, seq=3, replay_from_seq=2, created_at=3.0, size_bytes=8
    )
    stores.accept(3, OperationKind.SAVE_CHECKPOINT)
    stores.end(3, 1, result=checkpoint, checkpoint=journaled(checkpoint), frees_window=False)
    stores.applied(4, 2, OperationKind.OPTIM_STEP)
    stores.applied(5, 2, OperationKind.FORWARD)
    stores.accept(6)
    later = replace(checkpoint, checkpoint_id="d", seq=8)
    stores.accept(8, OperationKind.SAVE_CHECKPOINT)
    stores.end(8, 2, result=later, checkpoint=journaled(later), frees_window=False)
    stores.accept(9)
    known = journaled(checkpoint), journaled(later)
    assert stores.store.history("p").checkpoints == known
    changed = stores.fenced.roll_back(stores.token, "p", roll_back_to(3, 2))
    assert [record.seq for record in changed] == [2, 4, 6, 9]
    states = {
        seq: record.state
        for seq in (1, 2, 3, 4, 5, 6, 9)
        if (record := stores.store.find_operation(f"p.{seq}"))
    }
    failed, applied = JournalState.FAILED, JournalState.APPLIED
    assert states == {
        1: applied,
        2: failed,
        3: applied,
        4: failed,
        5: applied,
        6: failed,
        9: failed,
    }
    step = stores.record(4)
    assert isinstance(step.result, FailedResult)
    assert step.result.error["code"] == "WORKER_LOST"
    assert step.result.error["details"] == {
        "version": "1",
        "checkpoint_id": "c",
        "retired_version": "2",
    }
    known = journaled(checkpoint), journaled(replace(later, replay_from_seq=NO_RECOVERY))
    assert stores.store.history("p").checkpoints == known
    policy = stores.policy
    assert (policy.version, policy.max_version, policy.next_seq) == (1, 2, 10)


def test_a_reopened_database_has_everything_that_was_committed(
    stores: Stores, database_url: str
) -> None:
    first = stores
    first.applied(1, 1)
    first.fenced.set_published(first.token, "p", (0, 1))
    first.fenced.set_policy(first.token, "p", PolicyState.READY, INFO)
    second = Stores(database_url)
    assert second.store.policies() == first.store.policies()
    policy = second.store.policies()[0]
    assert (policy.info, policy.published, policy.token) == (INFO, (0, 1), first.token)
    assert second.store.find_operation("p.1") == first.store.find_operation("p.1")


def test_lives_of_policies(stores: Stores) -> None:
    with raises(ErrorCode.POLICY_EXISTS):
        stores.store.insert_policy(policy_spec(), life_record("p", "p.again"))
    created = stores.store.find_lifecycle_operation("p", OperationKind.CREATE_POLICY)
    assert created is not None
    assert created.operation_id == "p.create"
    stores.accept(1)
    deletion = life_record("p", "p.delete", OperationKind.DELETE_POLICY)
    stores.store.mark_deleting("p", deletion)
    assert stores.store.find_lifecycle_operation("p", OperationKind.DELETE_POLICY) == deletion
    stores.store.remove_policy("p", keep_operation_id="p.delete")
    stores.store.end_lifecycle_operation("p.delete", JournalState.APPLIED, EmptyResult(), 30.0)
    assert stores.store.policies() == ()
    assert stores.store.find_operation("p.1") is None
    assert stores.store.count_operations() == {("p", "delete_policy", "applied"): 1}
    stores.store.forget_ended_lifecycle_operations(before=30.0)
    assert stores.store.find_operation("p.delete") is not None
    stores.store.forget_ended_lifecycle_operations(before=31.0)
    assert stores.store.find_operation("p.delete") is None
    stores.with_policy()
    assert stores.store.history("p").records == ()


def test_a_policy_being_deleted_stays_so(stores: Stores) -> None:
    """A controller or a failed start that wrote its state last made a restart forget the delete."""
    deletion = life_record("p", "p.delete", OperationKind.DELETE_POLICY)
    stores.store.mark_deleting("p", deletion)
    stores.fenced.fail(stores.token, "p", "gone")
    stores.fenced.set_policy(stores.token, "p", PolicyState.READY, INFO)
    policy = stores.policy
    assert (policy.state, policy.info) == (PolicyState.DELETING, INFO)
    with raises(ErrorCode.POLICY_NOT_READY, match="policy p is deleting"):
        stores.store.mark_deleting("p", replace(deletion, operation_id="p.other"))
    stores.store.end_lifecycle_operation("p.delete", JournalState.FAILED, EmptyResult(), 3.0)
    again = replace(deletion, operation_id="p.again")
    stores.store.mark_deleting("p", again)
    assert stores.store.find_lifecycle_operation("p", OperationKind.DELETE_POLICY) == again


def test_numbers_of_64_bits_fit(stores: Stores) -> None:
    """32 bits did not hold a checkpoint of 2 GiB; SQLite never minded."""
    large = 2**63 - 1
    checkpoint = CheckpointInfo(
        checkpoint_id="c",
        version=2**40,
        seq=large - 1,
        replay_from_seq=large - 1,
        created_at=3.0,
        size_bytes=2**45,
    )
    stores.fenced.accept(stores.token, record_of(large - 1), large)
    stores.end(large - 1, 2**40, result=checkpoint, checkpoint=journaled(checkpoint))
    assert stores.store.checkpoints("p") == (journaled(checkpoint),)
    history = stores.store.history("p")
    assert (history.policy.next_seq, history.policy.version) == (large, 2**40)
