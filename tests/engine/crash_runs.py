"""One history of every kind of operation, run on a machine whose processes are killed meanwhile.

Enters a machine with crash points armed, leaves what every caller was told and where the policy
stands, to be compared with the same history undisturbed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from ratoon.engine.commands import Command
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.types import CheckpointInfo, NamedVersion, Operation, OperationResult
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationState, PhaseSeconds, PolicyState, StepResult, Teacher
from tests.engine.harness import (
    DISCARD,
    SAVE,
    Crash,
    Machine,
    forward,
    forward_backward,
    import_weights,
    load,
    optim_step,
    publish,
    save,
    taught,
    update,
)
from tests.engine.stores import assert_steps_are_reports
from tests.until import until

BROKEN, SKIPPED = 30.0, 8.0
_RETRYABLE = (ErrorCode.UNAVAILABLE, ErrorCode.POLICY_NOT_READY)
_PATIENCE_S = 240.0

# Windows with a failed, a saved-in-between, a discarded and a replaced part; (command, its batch).
HISTORY: tuple[tuple[Command, float], ...] = (
    (update(1), 1),
    (forward_backward(10), 10),
    (forward_backward(20), 20),
    (forward_backward(BROKEN), BROKEN),
    (save("mine"), 0),
    (forward_backward(40), 40),
    (optim_step(2, 3, 6), 0),
    (update(SKIPPED), SKIPPED),
    (forward_backward(50), 50),
    (DISCARD, 0),
    (update(2), 2),
    (forward_backward(60), 60),
    (load("mine"), 0),
    (forward(3), 3),
    (forward_backward(70), 70),
    (forward_backward(80), 80),
    (save("mine", overwrite=True), 0),
    (SAVE, 0),
    (load("mine"), 0),
    (save("last", keep_last=2, ttl_s=3600.0), 0),
    (publish("kept"), 0),
    (forward_backward(90), 90),
    (publish("gone", ttl_s=3600.0), 0),
    (optim_step(), 0),
    (publish("kept"), 0),
    (import_weights(5), 5),
    (update(4), 4),
    (publish("twin", overwrite=True), 0),
    # Teachers are asked from the turn before on, which does not change the version that answers.
    (update(9, loss=taught(Teacher("p"))), 9),
    (DISCARD, 0),
    (forward_backward(95, loss=taught(Teacher("p"))), 95),
)
# Seqs after which no window is open.
_REST = (11, 21)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What can be seen of a policy; without times."""

    states: tuple[OperationState, ...]
    results: tuple[OperationResult | None, ...]
    weights: list[tuple[list[float], float]]
    gradients: list[float]
    versions: tuple[int, int, tuple[int, ...]]
    checkpoints: list[tuple[str, int]]
    named: list[tuple[str, int]]


class Survivor:
    """Submits the history to a machine and starts anew what was killed."""

    def __init__(
        self, machine: Machine, *, loses_worker: bool = False, is_put_away: bool = True
    ) -> None:
        """`is_put_away`: the policy is, twice on its way."""
        self.machine = machine
        self._bounds = (*(_REST if is_put_away else ()), len(HISTORY))
        machine.faults.breaks.add(BROKEN)
        machine.faults.skips.add(SKIPPED)
        # A kill of the controller takes the worker with it.
        self.loses_worker = loses_worker
        self._num_seen = 0

    async def run(self) -> Told:
        await self.revive(is_first=True)
        calls = [(seq, *call) for seq, call in enumerate(HISTORY, 1)]
        ended: list[Operation] = []
        for bound in self._bounds:
            chunk = calls[len(ended) : bound]
            for call in chunk:
                await self.submit(*call)
            ended += [await self.end(*call) for call in chunk]
            if bound < len(HISTORY):
                await asyncio.wait_for(self._put_away(), _PATIENCE_S)
        await self.delete("last", of_version=False)
        await self.delete("gone", of_version=True)
        machine = self.machine
        await asyncio.wait_for(self._rest(), _PATIENCE_S)
        known = await machine.journal.checkpoints("p")
        policy = machine.journal.store.history("p").policy
        assert_steps_are_reports(machine.journal.store, "p")
        return Told(
            states=tuple(operation.state for operation in ended),
            results=tuple(_timeless(operation.result) for operation in ended),
            weights=machine.weights,
            gradients=machine.worker.trainer.gradients,
            versions=(policy.version, policy.max_version, policy.published),
            checkpoints=[(c.info.name, c.info.seq) for c in known if c.info.name],
            named=sorted((each.name, each.version) for each in machine.run.named),
        )

    async def _put_away(self) -> None:
        """Until the policy is put away; a kill leaves it so, or in use."""
        machine, hits = self.machine, self.machine.crashes.hits
        while machine.journal.store.history("p").policy.state is not PolicyState.RELEASED:
            await self.revive()
            asking = asyncio.ensure_future(machine.controller.release())
            while not (asking.done() or self._is_dead(hits)):
                await asyncio.wait({asking}, timeout=0.002)
            asking.cancel()
            await asyncio.wait({asking})
        await self.revive()
        assert machine.run.state is PolicyState.RELEASED
        await until(lambda: machine.worker.is_released)

    async def _rest(self) -> None:
        """Until no publication or checkpoint is under way."""
        while True:
            await self.revive()
            turns = self.machine.controller._turns
            landings = turns._publisher._landing, turns._checkpointer._landing
            if all(landing is None or landing.done() for landing in landings):
                return
            await asyncio.sleep(0.002)

    async def submit(self, seq: int, command: Command, number: float) -> Operation:
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while asyncio.get_running_loop().time() < deadline:
            await self.revive()
            try:
                return await self.machine.submit(seq, command, number)
            except Crash:
                continue
            except RatoonError as error:
                if error.code not in _RETRYABLE:
                    raise
            await asyncio.sleep(0.005)
        raise AssertionError(f"seq {seq} is not accepted: {self.machine.run.failure}")

    async def end(self, seq: int, command: Command, number: float) -> Operation:
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while asyncio.get_running_loop().time() < deadline:
            operation = await self.submit(seq, command, number)
            if operation.state.is_final:
                return operation
            await self.machine.controller.get_operation(operation.operation_id, 0.02)
        raise AssertionError(f"seq {seq} does not end: {self.machine.run.failure}")

    async def delete(self, name: str, *, of_version: bool) -> None:
        """Delete a checkpoint, or a version's name; where a kill has hidden that, it is gone."""
        deadline = asyncio.get_running_loop().time() + _PATIENCE_S
        while asyncio.get_running_loop().time() < deadline:
            await self.revive()
            try:
                controller = self.machine.controller
                delete = controller.delete_version if of_version else controller.delete_checkpoint
                await delete(name)
            except Crash:
                continue
            except RatoonError as error:
                if error.code in (ErrorCode.CHECKPOINT_NOT_FOUND, ErrorCode.WEIGHTS_NOT_FOUND):
                    return
                if error.code not in _RETRYABLE:
                    raise
            await asyncio.sleep(0.005)
        raise AssertionError(f"{name} is not deleted: {self.machine.run.failure}")

    async def revive(self, *, is_first: bool = False) -> None:
        """A new controller for one that was killed."""
        hits = self.machine.crashes.hits
        while is_first or self._is_dead(hits):
            self._num_seen = len(hits)
            if not is_first and self.loses_worker:
                await self.machine.worker.kill()
            try:
                if is_first:
                    await self.machine.start()
                else:
                    await self.machine.restart_controller()
            except Crash:
                pass
            is_first = False

    def _is_dead(self, hits: list[CrashPoint]) -> bool:
        return any(point.startswith("engine-") for point in hits[self._num_seen :])


def _timeless(result: OperationResult | None) -> OperationResult | None:
    match result:
        case StepResult(report=report):
            return replace(result, report=replace(report, seconds=PhaseSeconds()))
        case CheckpointInfo() | NamedVersion():
            expires_at = None if result.expires_at is None else 0.0
            timeless = replace(result, created_at=0.0, expires_at=expires_at)
            is_named = isinstance(timeless, NamedVersion)
            return timeless if is_named else replace(timeless, checkpoint_id="")
        case _:
            return result
