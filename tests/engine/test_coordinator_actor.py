"""What the coordinator's process does for many callers at once, without Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

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
