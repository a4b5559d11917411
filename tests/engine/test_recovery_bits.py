"""A real trainer on the CPU: what a recovery runs again has the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.cluster.worker_actor import _export
from ratoon.engine.types import (
    Command,
    Operation,
    OperationState,
    Recovery,
    SeqKey,
    StepResult,
    Submission,
)
from ratoon.engine.worker.worker import WorkerCore
from ratoon.rollout.serial import batch_to_bytes
from ratoon.stream.files import digest_file
from ratoon.train.trainer import Trainer
from tests import builders
from tests.engine.harness import Machine, forward_backward, optim_step, policy_spec, save, update
from tests.engine.local_ports import LocalWorker

# Collected at the earliest moment.
KEEP_ONE = CheckpointConfig(every_operations=0, every_s=0, every_bytes=0, keep=1)


class TrainingWorker(LocalWorker):
    """Over the trainer that workers have."""

    def _start(self) -> None:
        super()._start()
        self.core = WorkerCore(Trainer.create, _export, self._reach)


@dataclass(frozen=True)
class Bits:
    """Digests of the journal by seq, and of the published weights."""

    journaled: tuple[str, ...]
    version: int
    weights: str


class Drive:
    """A machine, its batches made of their seqs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seq = folder, 0
        spec = policy_spec(recovery=Recovery.REPLAY, micro_batch_tokens=256)
        self.machine = Machine(
            folder, spec, LimitsConfig(), make_worker=TrainingWorker, checkpoints=KEEP_ONE
        )

    async def run(self, command: Command) -> Operation:
        """The next operation, to its end."""
        self.seq += 1
        body = b""
        if hasattr(command, "body_digest"):
            rng = np.random.default_rng(self.seq)
            groups = builders.random_groups(rng, num_groups=1, kinds=("flat",))
            body = batch_to_bytes(builders.validate_groups(groups, builders.limits()))
            digest = hashlib.sha256(body).hexdigest()
            command = replace(command, body_digest=digest)  # pyright: ignore[reportCallIssue]
        key = SeqKey(seq=self.seq)
        submission = Submission(policy_id="p", key=key, command=command, body=body)
        operation = await self.machine.controller.submit(submission)
        ended = await self.machine.controller.get_operation(operation.operation_id, 60.0)
        assert ended.state is OperationState.DONE, ended
        return ended

    async def kill(self) -> None:
        """Worker and controller."""
        self.machine.worker.is_dead = True
        await self.machine.restart_controller()

    def bits(self) -> Bits:
        store, paths = self.machine.journal.store, self.machine.paths
        version = store.history("p").policy.version
        return Bits(
            journaled=tuple(record.weights_digest for record in store.records_from("p", 1)),
            version=version,
            weights=digest_file(paths.weights / f"{version:08d}" / "model.safetensors"),
        )


async def window_of_six(folder: Path, *, is_killed: bool) -> Bits:
    """An update, and a window with a SaveCheckpoint between its third and fourth part."""
    drive = Drive(folder)
    machine = await drive.machine.start()
    await drive.run(update(0))
    for _ in range(3):
        await drive.run(forward_backward(0))
    await drive.run(save("inside"))
    assert set(machine.journal.store.bodies_in_use("p")) == {
        record.operation_id for record in machine.journal.store.records_from("p", 2)[:3]
    }
    for _ in range(3):
        await drive.run(forward_backward(0))
    if is_killed:
        await drive.kill()
    stepped = await drive.run(optim_step())
    assert isinstance(stepped.result, StepResult)
    assert stepped.result.version == 2
    await drive.run(update(0))
    if is_killed:
        await drive.kill()
    bits = drive.bits()
    await machine.controller.close(1.0)
    return bits


def test_a_window_across_a_checkpoint_and_a_kill_has_the_undisturbed_bits(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = asyncio.run(window_of_six(tmp_path / "whole", is_killed=False))
    killed = asyncio.run(window_of_six(tmp_path / "killed", is_killed=True))
    assert killed == whole
    assert whole.version == 3
    assert len(set(whole.journaled)) == 3, "one for each step"
