"""An engine in this process for each test that asks for one, and databases to keep a journal in."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.policy import teachers, turns
from ratoon.engine.worker import worker
from ratoon.log import configure_logging
from tests.engine.harness import NO_CHECKPOINTS, Machine, policy_spec
from tests.engine.postgres import PostgresServer, running_postgres

MakeMachine = Callable[..., Machine]


@pytest.fixture(scope="module", autouse=True)
def service_logs() -> Iterator[None]:
    """As the service writes them: structlog's default draws all variables of a failure."""
    configure_logging("INFO")
    yield
    structlog.reset_defaults()


@contextmanager
def without_pauses() -> Iterator[None]:
    """Failures are retried at once, and nothing is synced: no power is cut in these tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(turns, "_BACKOFF_S", 0.001)
        patched.setattr(teachers, "_RETRY_S", 0.001)
        patched.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def small_collections() -> Iterator[None]:
    """A worker that loads collects what its process has frozen, too: the millions of objects of the
    whole session. Here it looks at what the module's own tests have made.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker, "collect_all", gc.collect)
        yield


@pytest.fixture
async def make_machine(tmp_path: Path) -> AsyncIterator[MakeMachine]:
    """Machines that are stopped after the test; keywords are fields of spec and limits."""
    machines: list[Machine] = []

    def make(
        *,
        limits: Mapping[str, float] | None = None,
        checkpoints: CheckpointConfig = NO_CHECKPOINTS,
        **spec: Any,
    ) -> Machine:
        folder = tmp_path / str(len(machines))
        folder.mkdir()
        bounds = LimitsConfig.model_validate(limits or {})
        machine = Machine(folder, policy_spec(**spec), bounds, checkpoints=checkpoints)
        machines.append(machine)
        return machine

    with without_pauses():
        yield make
        for machine in machines:
            for hold in machine.faults.holds.values():
                hold.set()
            await machine.controller.close(1.0)


@pytest.fixture
async def machine(make_machine: MakeMachine) -> Machine:
    """A started policy with client sequencing, version 0 published."""
    return await make_machine().start()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of the test session's own."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'journal.sqlite'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create_database()
