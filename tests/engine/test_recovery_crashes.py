"""A kill at every crash point: what callers were told and the weights are those without it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
import structlog

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.crash_points import CrashPoint
from ratoon.stream.versions import list_versions
from ratoon_proto.types import Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.crash_runs import HISTORY, Survivor, Told
from tests.engine.harness import NO_CHECKPOINTS, Machine, policy_spec
from tests.until import until
from tests.work_units import rows

# Often, and collected at the earliest moment.
OFTEN = CheckpointConfig(every_operations=3, every_s=0, every_bytes=0, keep=1)
POINTS = [point for point in CrashPoint if not point.startswith(("ingress-", "rank-"))]
ONCE = [(point, 1, False) for point in POINTS]


async def until_nothing_is_superfluous(machine: Machine) -> None:
    """Files are those that the journal names, once the checkpoint that is under way is written."""
    store = machine.journal.store

    def names() -> set[str]:
        return {checkpoint.info.checkpoint_id for checkpoint in store.checkpoints("p")}

    await until(lambda: {path.name for path in machine.paths.checkpoints.iterdir()} == names())
    await until(lambda: {*list_versions(machine.paths.weights)} == {*machine.run.listed})
    await until(lambda: machine.bodies == {digest for _, digest in store.bodies_in_use("p")})


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Hundreds of failures are logged on purpose."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Told:
    async def run() -> Told:
        folder, spec = tmp_path_factory.mktemp("undisturbed"), policy_spec(recovery=Recovery.REPLAY)
        machine = Machine(folder, spec, LimitsConfig(), checkpoints=OFTEN)
        told = await Survivor(machine, is_put_away=False).run()
        assert len(machine.worker.trainers) == 1
        await until_nothing_is_superfluous(machine)
        await machine.controller.close(1.0)
        return told

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("point", "count", "loses_worker"),
    [
        *rows(ONCE, now=ONCE[::3]),
        *(
            pytest.param(point, 2, True, marks=pytest.mark.more)
            for point in POINTS
            if point.startswith("engine-")
        ),
    ],
)
async def test_a_kill_changes_nothing_that_can_be_seen(
    make_machine: MakeMachine,
    undisturbed: Told,
    point: CrashPoint,
    count: int,
    loses_worker: bool,
) -> None:
    """`loses_worker`: a kill of the engine takes the worker with it, as that of a machine."""
    is_in_replay = point is CrashPoint.ENGINE_IN_REPLAY
    # A checkpoint that is written in time would leave a replay too little to be killed in.
    checkpoints = NO_CHECKPOINTS if is_in_replay else OFTEN
    machine = make_machine(recovery=Recovery.REPLAY, checkpoints=checkpoints)
    machine.crashes.armed[point] = count
    if is_in_replay:
        machine.crashes.armed[CrashPoint.WORKER_AFTER_APPLY] = 15
    told = await Survivor(machine, loses_worker=loses_worker).run()
    assert told == undisturbed
    assert point in machine.crashes.hits
    assert machine.journal.store.history("p").policy.next_seq == len(HISTORY) + 1
    await machine.restart_controller()
    await until_nothing_is_superfluous(machine)
