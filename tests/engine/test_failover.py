"""A PostgreSQL standby is promoted: what it lacks is lost, and never taken for something else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import sql
from sqlalchemy import text

from ratoon.config import LimitsConfig
from ratoon.engine.journal.fenced import FencedStore
from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.journal.tables import open_database
from ratoon.engine.policy import turns
from ratoon.engine.types import Operation, version_of
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import configure_logging
from ratoon.stream.versions import version_folder
from ratoon_proto.types import OperationState, Recovery
from tests.engine.harness import RATE, Machine, policy_spec
from tests.engine.postgres import PostgresServer, a_pair, pair_folder
from tests.engine.stores import Stores

WARNING = "no synchronous standby"


@pytest.fixture
def standby_folder() -> Iterator[Path]:
    with pair_folder() as folder:
        yield folder


async def insist(machine: Machine, seq: int, number: float) -> Operation:
    """As a client does it."""
    while True:
        try:
            return await machine.end(await machine.update(seq, number))
        except RatoonError as error:
            assert error.retryable or error.code is ErrorCode.OPERATION_NOT_FOUND, error
        await asyncio.sleep(0.005)


@pytest.mark.more
@pytest.mark.parametrize("is_controller_new", [False, True])
@pytest.mark.parametrize("recovery", [Recovery.REPLAY, Recovery.FAIL])
async def test_a_lost_operation_is_not_taken_for_another_of_its_seq(
    standby_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    recovery: Recovery,
    *,
    is_controller_new: bool,
) -> None:
    """Red once: the worker's outcome of the first completed the record of the second."""
    monkeypatch.setattr(turns, "_AWAY_S", 0.01)
    with a_pair(standby_folder / "standby") as (primary, standby, url):
        spec = policy_spec(recovery=recovery)
        machine = await Machine(standby_folder / "m", spec, LimitsConfig(), url).start()
        await machine.end(await machine.update(1, 1))
        await machine.end(await machine.update(2, 2))
        standby.wait_for(primary)
        standby.stop("fast")  # It lags from here on.
        token, lost = machine.run.token, await machine.end(await machine.update(3, 3))
        assert lost.state is OperationState.DONE
        primary.stop("immediate")
        standby.start()
        standby.promote()
        if is_controller_new:
            await machine.restart_controller()
        ended = await insist(machine, 3, 30)
        assert ended.state is OperationState.DONE
        assert ended.operation_id != lost.operation_id
        kept = [([1.0], RATE), ([2.0], RATE)] if recovery is Recovery.REPLAY else []
        assert machine.weights == [*kept, ([30.0], RATE)]
        assert version_of(ended.result) == 4, "the number of the lost one names other weights"
        assert machine.run.token > token
        # It was published, and is no version of the journal any more.
        kept = [path.name for path in machine.paths.weights_set_aside.rglob("*")]
        assert version_folder(machine.paths.weights, 3).name in kept
        await machine.controller.close(1.0)


@pytest.mark.more
async def test_what_runs_while_its_acceptance_is_lost_fails_explicitly(
    standby_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_AWAY_S", 0.01)
    with a_pair(standby_folder / "standby") as (primary, standby, url):
        spec = policy_spec(recovery=Recovery.REPLAY)
        machine = await Machine(standby_folder / "m", spec, LimitsConfig(), url).start()
        await machine.end(await machine.update(1, 1))
        standby.wait_for(primary)
        standby.stop("fast")
        behind_a_gap = await machine.update(3, 3)
        primary.stop("immediate")
        standby.start()
        standby.promote()
        await insist(machine, 2, 2)
        told = await machine.controller.get_operation(behind_a_gap.operation_id, 0.0)
        assert told.state is OperationState.FAILED
        assert (await insist(machine, 3, 3)).state is OperationState.DONE
        assert machine.weights == [([float(seq)], RATE) for seq in (1, 2, 3)]
        await machine.controller.close(1.0)


def test_a_token_of_before_a_failover_writes_nothing_and_is_not_given_again(
    standby_folder: Path,
) -> None:
    with a_pair(standby_folder / "standby") as (primary, standby, url):
        stores = Stores(url).with_policy()
        standby.wait_for(primary)
        standby.stop("fast")
        lost = [stores.fenced.acquire("p") for _ in range(3)]
        primary.stop("immediate")
        standby.start()
        standby.promote()
        for token in (stores.token, *lost):
            with pytest.raises(JournalAwayError, match="failed over"):
                stores.fenced.set_published(token, "p", (7,))
        assert stores.fenced.acquire("p") > max(lost)
        stores.engine.dispose()


@pytest.mark.more
def test_with_a_synchronous_standby_a_failover_loses_nothing(
    standby_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logging("INFO")
    with a_pair(standby_folder / "standby") as (primary, standby, url):
        open_database(url).dispose()
        assert WARNING in capfd.readouterr().err
        primary.execute(sql.SQL("ALTER SYSTEM SET synchronous_standby_names = '*'"))
        primary.execute(sql.SQL("SELECT pg_reload_conf()"))
        primary.wait_for_setting("synchronous_standby_names", "*")
        stores = Stores(url).with_policy()
        assert WARNING not in capfd.readouterr().err
        for seq in range(1, 21):
            stores.applied(seq, seq)
        before = stores.store.history("p")
        primary.stop("immediate")
        standby.promote()
        assert stores.store.history("p") == before
        stores.engine.dispose()


@pytest.mark.parametrize(
    ("given", "used"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("remote_apply", "remote_apply")],
)
def test_a_commit_waits_for_as_much_as_the_deployment_says_or_more(
    postgres: PostgresServer, given: str, used: str
) -> None:
    url = postgres.create_database()
    name = sql.Identifier(url.rpartition("/")[2])
    change = sql.SQL("ALTER DATABASE {} SET synchronous_commit = {}")
    postgres.execute(change.format(name, sql.Literal(given)))
    engine = open_database(url)
    with engine.begin() as connection:
        assert connection.execute(text("SHOW synchronous_commit")).scalar_one() == used
    engine.dispose()


def test_a_policy_made_again_gets_no_token_of_its_predecessors(database_url: str) -> None:
    """Red once: they began at 1 again, and a controller of the deleted one had the newest."""
    stores = Stores(database_url).with_policy()
    old = [stores.token, stores.fenced.acquire("p")]
    stores.store.remove_policy("p", keep_operation_id="")
    again = Stores(database_url).with_policy()
    assert again.token > max(old)
    assert FencedStore(again.engine).acquire("p") > again.token
    for engine in (stores.engine, again.engine):
        engine.dispose()
