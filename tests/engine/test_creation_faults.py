"""Policies of two ranks that share out weights, of which one fails while they are created."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from ratoon.cluster.ray_cluster import open_engine
from ratoon.cluster.ray_peer import BEHIND_S
from ratoon.config import RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.engine import Engine
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import FailedResult, Operation
from ratoon.errors import ErrorCode
from ratoon_proto.types import OperationState, ParallelLayout, Shard
from tests.conftest import RayCluster
from tests.engine.creation_faults import NO_MEMORY, START, STEPS, Fault, put_in
from tests.engine.ray_engine import SPEC
from tests.until import until

_SILENCE_S = 6.0
# Only a hang has it: a busy machine makes ranks of other cases wait for longer.
_BEHIND_S = 20.0
# From the harm to the end of the operation, by when its processes are told to end: what finds it,
# and what a machine takes that is busy with others. Ray gives a process that hangs 5 s.
_BUSY_S = 15.0
_TOLD_S = {
    "memory": _BUSY_S,
    "error": _BUSY_S,
    "exit": _BUSY_S,
    "stop": _SILENCE_S * 7 / 6 + _BUSY_S,
    "hang": _BEHIND_S + _BUSY_S,
}
# Each way of failing once or twice, each at another step. The rest takes hours.
_MORE = {
    *(
        ("limit_activations", 1, "exit"),
        ("open_memory", 1, "memory"),
        ("connect_groups", 0, "error"),
    ),
    *(("states", 1, "exit"), ("group", 1, "stop")),
}
_SPEC = replace(SPEC, parallel=ParallelLayout(num_workers=2, shard=Shard.WEIGHTS))


# One engine for all cases: each creates the policy that the case before it failed to create.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engine]:
    """An engine in this process, whose workers are real ones."""
    assert ray_cluster.address, "the namespace below is this module's own"
    config = RatoonConfig(
        data_root=tmp_path_factory.mktemp("creation"),
        ray=RayConfig(namespace=f"creation-{uuid.uuid4().hex[:8]}"),
        worker=WorkerConfig(device="cpu", num_threads=1, max_silence_s=_SILENCE_S),
    )
    opened = open_engine(EngineSettings.from_config(config))
    await opened.recover()
    yield opened
    await opened.stop_policies()


async def _created(engine: Engine) -> Operation:
    operation = await engine.create_policy(replace(_SPEC, policy_id="created"))
    while not operation.state.is_final:
        operation = await engine.get_operation(operation.operation_id, 60.0)
    return operation


_REASONS = {
    "memory": NO_MEMORY,
    "error": "LookupError: a fault of this rank",
    "exit": "lost",
    "stop": f"did not answer for {_SILENCE_S:g} s",
    "hang": f"has not gone on for {_BEHIND_S:g} s",
}


def _cases() -> Iterator[object]:
    """Every harm at every step of either rank."""
    for step, rank, harm in product([START, *STEPS], [1, 0], _TOLD_S):
        # A process that does not come up has minutes.
        if step == START and harm in ("stop", "hang"):
            continue
        case = step, rank, harm
        yield pytest.param(*case, marks=pytest.mark.more if case in _MORE else pytest.mark.slow)


@pytest.mark.parametrize(("step", "rank", "harm"), list(_cases()))
async def test_a_rank_that_fails_while_it_is_created_is_told_and_frees_everything(
    engine: Engine, tmp_path: Path, step: str, rank: int, harm: str
) -> None:
    """The other rank waited for it, and its caller for both: in `meet` for ten minutes, elsewhere
    for ever."""
    begun, before = tmp_path / "begun", processes_of_ranks()
    behind_s = _BEHIND_S if harm == "hang" else BEHIND_S
    fault = Fault(rank=rank, step=step, harm=harm, behind_s=behind_s, begun=begun)
    with pytest.MonkeyPatch.context() as patch:
        put_in(fault, patch)
        failed = await _created(engine)
    # Another process may still be importing what this one has.
    assert step == START or time.monotonic() - float(begun.read_text()) < _TOLD_S[harm]
    assert isinstance(failed.result, FailedResult)
    error = failed.result.error
    message = str(error["message"])
    is_apart = harm == "hang" and step in ("join", "connect")
    assert ("could not join the others" if is_apart else _REASONS[harm]) in message
    assert error["code"] == _code(step, harm)
    if rank and harm != "hang":
        assert f"rank {rank}" in message
    await until(lambda: not processes_of_ranks() - before)


async def test_a_policy_that_failed_to_be_created_can_be_created(engine: Engine) -> None:
    """It comes after the cases above, all of which used its name."""
    assert (await _created(engine)).state is OperationState.DONE


def _code(step: str, harm: str) -> ErrorCode:
    # A process that fails in its constructor is lost.
    if step == START:
        return ErrorCode.WORKER_LOST
    codes = {"memory": ErrorCode.RESOURCE_EXHAUSTED, "error": ErrorCode.INTERNAL}
    return codes.get(harm, ErrorCode.WORKER_LOST)


def processes_of_ranks() -> set[int]:
    found: set[int] = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            title = " ".join(child.cmdline())
            if title.startswith("ray::") and ("WorkerActor" in title or "RankActor" in title):
                found.add(child.pid)
    return found
