"""A database fails over to a lagging standby, under an engine whose processes are being killed.

Callers are told that what the standby lacks is lost. None of it may be mistaken for what they send
again under the same seqs.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

from ratoon.config import LimitsConfig
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.types import Operation
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationState, Recovery, StepResult
from tests.engine.crash_runs import Survivor
from tests.engine.harness import RATE, Machine, policy_spec, update
from tests.engine.postgres import PostgresServer, a_pair, find_commands, pair_folder
from tests.faults.judge.history import Verdict

# Where the engine is while the database goes: at rest, or killed here with an operation in flight.
PLACES: tuple[CrashPoint | None, ...] = (
    None,
    CrashPoint.ENGINE_AFTER_ACCEPT,
    CrashPoint.WORKER_AFTER_APPLY,
    CrashPoint.ENGINE_BEFORE_END,
    CrashPoint.ENGINE_AFTER_END,
    CrashPoint.ENGINE_AFTER_PUBLISH,
)
_LOST, _AGAIN = 100.0, 200.0
_LOOK_S = 0.01


@dataclass
class FailoverResult:
    """`forgotten`: operations that had ended for their callers, and that the standby lacked."""

    failovers: int = 0
    forgotten: int = 0
    operations: int = 0
    verdict: Verdict = field(default_factory=Verdict)


def run_failovers(seed: int) -> FailoverResult:
    """One at each of `PLACES`, for each way to recover.

    Raises `RuntimeError` where PostgreSQL is not installed.
    """
    if find_commands() is None:
        raise RuntimeError("postgresql is not installed: scripts/install-test-services.sh")
    result, rng = FailoverResult(), random.Random(seed)
    for place in PLACES:
        for recovery in Recovery:
            with pair_folder() as folder, a_pair(folder / "standby") as (primary, standby, url):
                servers = (primary, standby)
                asyncio.run(_Failover(folder / "m", url, recovery, rng).run(servers, place, result))
    return result


class _Failover:
    """One policy: updates that the standby has, updates that it lacks, and those once more."""

    def __init__(self, root: Path, url: str, recovery: Recovery, rng: random.Random) -> None:
        self._machine = Machine(root, policy_spec(recovery=recovery), LimitsConfig(), url)
        self._survivor = Survivor(self._machine)
        self._is_replayed = recovery is Recovery.REPLAY
        self._num_kept, self._num_lost = rng.randint(1, 3), rng.randint(1, 3)
        self._is_controller_new = rng.random() < 0.5

    async def run(
        self,
        servers: tuple[PostgresServer, PostgresServer],
        place: CrashPoint | None,
        result: FailoverResult,
    ) -> None:
        primary, standby = servers
        await self._survivor.revive(is_first=True)
        for seq in range(1, self._num_kept + 1):
            await self._end(seq, seq)
        standby.wait_for(primary)
        standby.stop("fast")  # It lags from here on.
        last = self._num_kept + self._num_lost
        lost = [await self._end(seq, _LOST + seq) for seq in range(self._num_kept + 1, last + 1)]
        if place is not None:
            await self._in_flight(last + 1, place)
        primary.stop("immediate")
        standby.start()
        standby.promote()
        if self._is_controller_new:
            await self._machine.restart_controller()
        seqs = range(self._num_kept + 1, last + 2)
        again = [await self._end(seq, _AGAIN + seq) for seq in seqs]
        self._judge(lost, again, result)
        await self._machine.controller.close(1.0)

    async def _in_flight(self, seq: int, place: CrashPoint) -> None:
        """An operation whose acknowledgement, end or version is on its way when all goes."""
        self._machine.crashes.armed[place] = 1
        await self._survivor.submit(seq, update(_LOST + seq), _LOST + seq)
        while True:
            if place in self._machine.crashes.hits:
                return
            await asyncio.sleep(_LOOK_S)

    async def _end(self, seq: int, number: float) -> Operation:
        """As a client does it: again after all that may be tried again."""
        while True:
            try:
                return await self._survivor.end(seq, update(number), number)
            except RatoonError as error:
                if not error.retryable and error.code is not ErrorCode.OPERATION_NOT_FOUND:
                    raise
            await asyncio.sleep(_LOOK_S)

    def _judge(self, lost: list[Operation], again: list[Operation], result: FailoverResult) -> None:
        result.failovers += 1
        result.forgotten += len(lost)
        result.operations += self._num_kept + len(lost) + len(again)
        verdict, ids = result.verdict, {operation.operation_id for operation in lost}
        versions = {_version(operation) for operation in lost}
        for operation in again:
            name = f"failover: {operation.operation_id}, seq {operation.seq}"
            if operation.state is not OperationState.DONE:
                verdict.lost.append(f"{name} is {operation.state}")
            elif operation.operation_id in ids or _version(operation) in versions:
                verdict.doubled.append(f"{name} has the name of one that was lost")
        kept = range(1, self._num_kept + 1) if self._is_replayed else ()
        numbers = [*kept, *(_AGAIN + operation.seq for operation in again)]
        wanted = [([float(number)], RATE) for number in numbers]
        if self._machine.weights != wanted:
            verdict.lost.append(f"failover: weights of {self._machine.weights}, not of {wanted}")


def _version(operation: Operation) -> int | None:
    return operation.result.version if isinstance(operation.result, StepResult) else None
