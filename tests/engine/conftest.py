"""An engine in this process for each test that asks for one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ratoon.config import LimitsConfig
from tests.engine.harness import Machine, policy_spec

MakeMachine = Callable[..., Machine]


@pytest.fixture
async def make_machine(tmp_path: Path) -> AsyncIterator[MakeMachine]:
    """Machines that are stopped after the test; keywords are fields of spec and limits."""
    machines: list[Machine] = []

    def make(*, limits: Mapping[str, float] | None = None, **spec: Any) -> Machine:
        folder = tmp_path / str(len(machines))
        folder.mkdir()
        bounds = LimitsConfig.model_validate(limits or {})
        machine = Machine(folder, policy_spec(**spec), bounds)
        machines.append(machine)
        return machine

    yield make
    for machine in machines:
        for hold in machine.faults.holds.values():
            hold.set()
        await machine.controller.close(1.0)


@pytest.fixture
async def machine(make_machine: MakeMachine) -> Machine:
    """A started policy with client sequencing, version 0 published."""
    return await make_machine().start()
