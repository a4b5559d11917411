"""SQLite's log cut short below a service that had answered for what it held.

Enters the folder of a service that was killed, leaves copies of it whose log ends earlier, and says
what a start on one of them made of the operations that callers had been told of.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.files.paths import policy_paths
from ratoon.engine.types import Command, Operation, PolicySpec
from ratoon.stream.files import digest_file
from ratoon_proto.types import PolicyState, Recovery
from tests.engine.harness import (
    DISCARD,
    Machine,
    forward,
    forward_backward,
    optim_step,
    policy_spec,
    save,
    update,
)
from tests.engine.local_ports import POLICY

DATABASE = "ratoon.sqlite"
LOG = f"{DATABASE}-wal"
_HEADER_BYTES = 32
_FRAME_BYTES = 24 + 4096
_CHECKPOINTS = CheckpointConfig(every_operations=6, every_s=0, every_bytes=0, keep=1)

# Every kind of operation, and an update last: (command, number of its batch).
COMMANDS: tuple[tuple[Command, float], ...] = (
    (update(1), 1),
    (update(2), 2),
    (forward_backward(3), 3),
    (optim_step(), 0),
    (save("mine"), 0),
    (forward(6), 6),
    (update(7), 7),
    (forward_backward(8), 8),
    (DISCARD, 0),
    (update(10), 10),
    (update(11), 11),
    (forward(12), 12),
    (update(13), 13),
    (update(14), 14),
    (update(15), 15),
    (forward_backward(16), 16),
    (optim_step(), 0),
    (update(18), 18),
    (forward(19), 19),
    (update(20), 20),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A service's folder as a kill left it, and what callers had been told by then.

    `ended`: every operation, once it had ended; `queued`: what waits behind a gap.
    """

    root: Path
    spec: PolicySpec
    ended: tuple[Operation, ...]
    queued: tuple[Operation, ...]
    weights: tuple[tuple[tuple[float, ...], float], ...]

    @property
    def version(self) -> int:
        """The newest that was published."""
        return max(getattr(told.result, "version", 0) for told in self.ended)


def machine_at(root: Path, spec: PolicySpec) -> Machine:
    """A service on a folder, with a worker of its own."""
    url = f"sqlite:///{root / DATABASE}"
    return Machine(root, spec, LimitsConfig(gap_wait_s=0.05), url, checkpoints=_CHECKPOINTS)


async def live(folder: Path, num_commands: int, recovery: Recovery = Recovery.REPLAY) -> Life:
    """Run `COMMANDS`, leave two behind a gap, and copy the folder as a kill leaves it."""
    root, spec = folder / "alive", policy_spec(recovery=recovery)
    root.mkdir(parents=True)
    machine = await machine_at(root, spec).start()
    ended: list[Operation] = []
    for seq, (command, number) in enumerate(COMMANDS[:num_commands], start=1):
        ended.append(await machine.end(await machine.submit(seq, command, number)))
    await machine.landed()
    queued = [await machine.update(num_commands + 1 + later, 100 + later) for later in (1, 2)]
    landing = machine.controller._turns._checkpointer._landing
    if landing is not None:
        await asyncio.wait([landing])
    await machine.controller._turns.stop(0.0)
    weights = weights_of(machine)
    # SQLite would fold the log back into the journal if it were closed first.
    shutil.copytree(root, folder / "killed")
    machine.journal.store._engine.dispose()
    return Life(
        root=folder / "killed",
        spec=spec,
        ended=tuple(ended),
        queued=tuple(queued),
        weights=weights,
    )


def weights_of(machine: Machine) -> tuple[tuple[tuple[float, ...], float], ...]:
    return tuple((tuple(numbers), rate) for numbers, rate in machine.weights)


def log_ends(log: bytes) -> Iterator[int]:
    """Where each frame of the log ends that SQLite reads, in bytes, the header's end first."""
    yield _HEADER_BYTES
    salts = log[16:24]
    for start in range(_HEADER_BYTES, len(log) - _FRAME_BYTES + 1, _FRAME_BYTES):
        if log[start + 8 : start + 16] != salts:
            return
        yield start + _FRAME_BYTES


def cut(life: Life, root: Path, size_bytes: int | None, *, has_files: bool = True) -> Path:
    """Make `root` a copy of the folder whose log has `size_bytes`; None: there is no log.

    `has_files`: with the policy's files.
    """
    if has_files:
        shutil.copytree(life.root, root, ignore=shutil.ignore_patterns(f"{DATABASE}*"))
    root.mkdir(exist_ok=True, parents=True)
    (root / f"{DATABASE}-shm").unlink(missing_ok=True)
    (root / LOG).unlink(missing_ok=True)
    shutil.copy(life.root / DATABASE, root)
    if size_bytes is not None:
        (root / LOG).write_bytes((life.root / LOG).read_bytes()[:size_bytes])
    return root


def files_of(root: Path) -> set[tuple[str, str]]:
    """Name and digest of every file of the policy that a start might delete, wherever it lies."""
    paths = policy_paths(root, POLICY)
    folders = [paths.checkpoints, paths.weights, paths.bodies, paths.results, paths.set_aside]
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {(path.name, digest_file(path)) for path in found if ".spare" not in path.parts}


async def judge_start(life: Life, machine: Machine) -> str:
    """Start the service; "": it serves all that callers were told, otherwise why it refuses.

    Raises `AssertionError` where it goes on with less.
    """
    await machine.controller.start()
    if machine.run.state is not PolicyState.READY:
        assert machine.run.state is PolicyState.FAILED
        return machine.run.failure
    for told in (*life.ended, *life.queued):
        record = machine.journal.store.find_operation(told.operation_id)
        assert record is not None, f"seq {told.seq} was acknowledged and is gone"
    for told in life.ended:
        now = await machine.end(told)
        assert now.state is told.state, f"seq {told.seq} was {told.state} and is {now.state}"
        version = getattr(told.result, "version", None)
        assert getattr(now.result, "version", None) == version, f"seq {told.seq}: {version}"
    assert weights_of(machine) == life.weights
    await machine.landed()
    return ""


async def leave(machine: Machine) -> None:
    """Stop without closing the policy."""
    await machine.controller._turns.stop(0.0)
    await machine.worker.kill()
    machine.journal.store._engine.dispose()
