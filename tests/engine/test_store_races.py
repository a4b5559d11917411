"""Two processes at one database: each write comes whole before or whole after another's.

A process is an engine of its own, with its own connection. Where order matters, one holds the
policy's lock until the other has asked for it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError

from ratoon.engine.journal.records import JournalState
from ratoon.engine.journal.tables import open_database, select_policy, set_operation, set_policy
from ratoon.engine.worker.tasks import FencedError
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import EmptyResult, OperationKind, PolicyState
from tests.engine.harness import life_record, policy_spec
from tests.engine.stores import Stores, end_of, record_of

# Long enough for a thread to reach the lock that it will wait for.
BLOCKED_S = 0.2


@pytest.fixture
def pair(database_url: str) -> Iterator[tuple[Stores, Stores]]:
    """Two processes; policy `p` is owned by the first, whose token the second knows too."""
    first, second = Stores(database_url).with_policy(), Stores(database_url)
    second.token = first.token
    yield first, second
    first.engine.dispose()
    second.engine.dispose()


def at_once(*calls: Callable[[], object]) -> list[object]:
    """What the calls return or raise, each in a thread of its own."""
    barrier = Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        barrier.wait(10)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(run, call) for call in calls]
        return [future.exception(30) or future.result() for future in futures]


def while_locked(holder: Stores, call: Callable[[], object], **operation: object) -> Future[object]:
    """Begin `call` while `holder` has the policy locked, then change operation `p.1` and commit."""
    with ThreadPoolExecutor(1) as pool, holder.engine.begin() as connection:
        select_policy(connection, "p")
        future = pool.submit(call)
        time.sleep(BLOCKED_S)
        assert not future.done()
        set_operation(connection, "p.1", **operation)
    return future


def test_tokens_are_given_once(database_url: str) -> None:
    """Two controllers that read a token before either wrote it would both be the newest."""
    owners = [Stores(database_url) for _ in range(4)]
    owners[0].with_policy()

    def acquire(owner: Stores) -> list[int]:
        return [owner.fenced.acquire("p") for _ in range(10)]

    taken = at_once(*(lambda owner=owner: acquire(owner) for owner in owners))
    tokens = [token for tokens in taken if isinstance(tokens, list) for token in tokens]
    first = owners[0].token + 1
    assert sorted(tokens) == list(range(first, first + 40))
    for owner in owners:
        owner.engine.dispose()


def test_a_policy_is_made_once(pair: tuple[Stores, Stores]) -> None:
    def make(stores: Stores, name: str) -> None:
        stores.store.insert_policy(policy_spec(policy_id="q"), life_record("q", name))

    first, second = pair
    ends = at_once(lambda: make(first, "q.first"), lambda: make(second, "q.second"))
    errors = [end for end in ends if isinstance(end, RatoonError)]
    assert [error.code for error in errors] == [ErrorCode.POLICY_EXISTS]
    assert ends.count(None) == 1
    assert first.store.count_operations() == {
        ("p", "create_policy", "accepted"): 1,
        ("q", "create_policy", "accepted"): 1,
    }


def test_a_policy_is_deleted_once(pair: tuple[Stores, Stores]) -> None:
    def delete(stores: Stores, name: str) -> None:
        stores.store.mark_deleting("p", life_record("p", name, OperationKind.DELETE_POLICY))

    first, second = pair
    ends = at_once(lambda: delete(first, "p.one"), lambda: delete(second, "p.two"))
    errors = [end for end in ends if isinstance(end, RatoonError)]
    assert [error.code for error in errors] == [ErrorCode.POLICY_NOT_READY]
    assert first.store.count_operations()["p", "delete_policy", "accepted"] == 1


def test_a_key_is_accepted_once(pair: tuple[Stores, Stores]) -> None:
    def accept(stores: Stores, name: str) -> None:
        stores.fenced.accept(stores.token, replace(record_of(1), operation_id=name), 2)

    first, second = pair
    ends = at_once(lambda: accept(first, "p.one"), lambda: accept(second, "p.two"))
    assert ends.count(None) == 1
    assert sum(isinstance(end, IntegrityError) for end in ends) == 1


def test_a_token_raised_meanwhile_fences_a_write_that_waited(pair: tuple[Stores, Stores]) -> None:
    first, second = pair
    first.accept(1)
    with ThreadPoolExecutor(1) as pool, second.engine.begin() as connection:
        select_policy(connection, "p")
        late = pool.submit(first.fenced.end, first.token, "p", end_of(1, 1))
        time.sleep(BLOCKED_S)
        assert not late.done()
        set_policy(connection, "p", token=first.token + 1)
    assert isinstance(late.exception(30), FencedError)
    found = first.record(1)
    assert found.state is JournalState.ACCEPTED


def test_an_operation_ends_once(pair: tuple[Stores, Stores]) -> None:
    first, second = pair
    first.accept(1)
    ended = while_locked(
        second,
        lambda: first.end(1, 7, state=JournalState.FAILED, result=EmptyResult()),
        state=JournalState.CANCELLED,
    )
    assert ended.exception(30) is None
    found, policy = first.record(1), first.policy
    assert (found.state, found.result, policy.version) == (JournalState.CANCELLED, None, 0)


def test_a_removed_policy_leaves_no_records_of_a_late_controller(
    pair: tuple[Stores, Stores],
) -> None:
    first, second = pair
    first.accept(1)
    accepts = [
        lambda seq=seq: first.fenced.accept(first.token, record_of(seq), seq + 1)
        for seq in range(2, 12)
    ]

    def accept_all() -> None:
        for accept in accepts:
            accept()

    ends = at_once(
        accept_all, lambda: second.store.remove_policy("p", keep_operation_id="p.create")
    )
    assert ends[1] is None
    assert ends[0] is None or isinstance(ends[0], FencedError)
    assert first.store.count_operations() == {("p", "create_policy", "accepted"): 1}


def test_a_start_waits_for_another_that_switches_a_new_file_to_wal(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(lambda: open_database(f"sqlite:///{path}").dispose())
        time.sleep(BLOCKED_S)
        assert not starting.done()
        other.execute("ROLLBACK")
        starting.result(10)
    other.close()


def test_processes_that_start_at_once_upgrade_once(database_url: str) -> None:
    engines = at_once(*[lambda: open_database(database_url)] * 4)
    first = Stores(database_url).with_policy()
    policy = first.policy
    assert policy.state is PolicyState.CREATING
    for engine in engines:
        assert isinstance(engine, Engine), engine
        engine.dispose()
