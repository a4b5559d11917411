"""What the coordinator's process does for many callers at once, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
import ray
from sqlalchemy.exc import OperationalError

from ratoon.engine import coordinator_actor
from ratoon.engine.coordinator_actor import CoordinatorActor


async def test_callers_that_ask_for_backends_at_once_share_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hundred clients that connected at once started two hundred processes that load torch."""
    started: list[object] = []

    async def ask(_reference: object) -> tuple[str]:
        await asyncio.sleep(0.01)
        return ("reference",)

    def remote(**_options: object) -> object:
        def wrap(function: object) -> object:
            return SimpleNamespace(remote=lambda: started.append(function))

        return wrap

    monkeypatch.setattr(coordinator_actor, "ask", ask)
    monkeypatch.setattr(ray, "remote", remote)
    actor: Any = object.__new__(CoordinatorActor)
    actor._fleet = SimpleNamespace(device="cpu")
    actor._backends, actor._backends_lock = None, asyncio.Lock()
    answers = await asyncio.gather(*(actor.backends() for _ in range(20)))
    assert set(answers) == {("reference",)}
    assert len(started) == 1


@pytest.mark.parametrize(
    ("reason", "is_waited_for"),
    [
        ("connection refused", True),
        ("FATAL: the database system is starting up", True),
        ('FATAL: password authentication failed for user "r"', False),
    ],
)
def test_a_database_server_that_is_away_at_start_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, reason: str, is_waited_for: bool
) -> None:
    """The coordinator ended after a minute, and nothing started it again."""
    away = OperationalError("connect", {}, psycopg.OperationalError(reason))
    answers: list[object] = [away, away, "engine"]

    def open_database(_url: str) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(coordinator_actor, "open_database", open_database)
    if is_waited_for:
        assert coordinator_actor._open_database("postgresql://h/d") == "engine"
    else:
        with pytest.raises(OperationalError):
            coordinator_actor._open_database("postgresql://h/d")
