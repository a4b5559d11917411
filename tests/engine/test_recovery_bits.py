"""A real trainer on the CPU: what a recovery runs again has the bits of an undisturbed run."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.commands import Command, SeqKey, Submission
from ratoon.engine.types import Operation, version_of
from ratoon.engine.worker.tasks import WorkerStatus
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import ModelDtype
from ratoon.planner.device_costs import DeviceRates
from ratoon.planner.planning import device_planner
from ratoon.rollout.raw import RawGroup
from ratoon.rollout.serial import batch_to_bytes
from ratoon.stream.files import digest_file
from ratoon.train.saved_state import AsOf
from ratoon.train.spec import OptimizerStates, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    AdamWConfig,
    DivideBy,
    ImportMode,
    LearningRateSchedule,
    LossConfig,
    LossKind,
    MuonConfig,
    NumericsGuard,
    OperationState,
    OptimStepConfig,
    ParameterGroup,
    Recovery,
    ScheduleKind,
    SkipReason,
    StalenessAction,
    StalenessConfig,
    StepResult,
)
from tests import builders
from tests.engine.fake_trainer import Faults
from tests.engine.harness import (
    Machine,
    forward_backward,
    import_weights,
    load,
    optim_step,
    policy_spec,
    save,
    update,
)
from tests.engine.local_ports import LocalWorker
from tests.until import until

# Collected at the earliest moment.
KEEP_ONE = CheckpointConfig(every_operations=0, every_s=0, every_bytes=0, keep=1)


HALF_A_MIB = 2**19
FREE_CALLS = DeviceRates(
    linear_flops=1e3,
    attention_flops=1e12,
    head_flops=1e12,
    memory_bytes=1e12,
    layer_call_s=1e-12,
    link_bytes=1e12,
    exchange_s=1e-12,
)
FREE_PRODUCTS = replace(FREE_CALLS, linear_flops=1e12, layer_call_s=1.0)


class TrainingWorker(LocalWorker):
    """Over the trainer that workers have, and a disk that may have no room for checkpoints."""

    has_room = True

    async def write_snapshot(self, token: int, folder: str, as_of: AsOf) -> int:
        if not self.has_room:
            raise RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "no room")
        return await super().write_snapshot(token, folder, as_of)

    def _start(self) -> None:
        super()._start()
        self.core = WorkerCore(Trainer.create, self._reach)


class RoundingWorker(TrainingWorker):
    """Whose bfloat16 weights are all there is."""

    def _start(self) -> None:
        super()._start()
        self.core = WorkerCore(_without_masters, self._reach)


class PlanningWorker(TrainingWorker):
    """On a device that holds little; each trainer plans by the next of `rates`."""

    def __init__(self, faults: Faults, rates: Sequence[DeviceRates]) -> None:
        self._rates = iter(rates)
        super().__init__(faults)

    def _start(self) -> None:
        super()._start()
        self.core = WorkerCore(self._plan_by_next, self._reach)

    def _plan_by_next(self, spec: TrainerSpec) -> Trainer:
        trainer = Trainer.create(spec)
        trainer._planner = device_planner(  # pyright: ignore[reportPrivateUsage]
            None,
            trainer.model.sizes,
            HALF_A_MIB,
            0,
            rates=next(self._rates),
            layers_are_trained=True,
        )
        return trainer


def _without_masters(spec: TrainerSpec) -> Trainer:
    model = replace(spec.model, dtype=ModelDtype.BFLOAT16)
    states = OptimizerStates.BF16_STOCHASTIC
    return Trainer.create(replace(spec, model=model, optimizer_states=states))


@dataclass(frozen=True)
class Bits:
    """Digests of the journal by seq, and of the published weights."""

    journaled: tuple[str, ...]
    version: int
    weights: str


class Drive:
    """A machine, its batches made of their seqs."""

    def __init__(
        self,
        folder: Path,
        make_worker: Callable[[Faults], LocalWorker] = TrainingWorker,
        optimizer: AdamWConfig = AdamWConfig(),  # noqa: B008  it is frozen
        guard: NumericsGuard = NumericsGuard(),  # noqa: B008  it is frozen
    ) -> None:
        self.folder, self.seq = folder, 0
        spec = policy_spec(
            recovery=Recovery.REPLAY,
            micro_batch_tokens=256,
            optimizer=optimizer,
            numerics_guard=guard,
        )
        self.machine = Machine(
            folder, spec, LimitsConfig(), make_worker=make_worker, checkpoints=KEEP_ONE
        )

    async def run(self, command: Command, versions: tuple[tuple[int, int], ...] = ()) -> Operation:
        """The next operation, to its end. `versions`: of its first rollout's tokens."""
        self.seq += 1
        body = b""
        if command.body_digest:
            rng = np.random.default_rng(self.seq)
            groups = builders.random_groups(
                rng,
                num_groups=1,
                kinds=("flat",),
                policy_version=versions[-1][1] if versions else None,
            )
            groups = [_sampled_across(group, versions) for group in groups]
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
        await self.machine.worker.kill()
        await self.machine.restart_controller()

    async def bits(self) -> Bits:
        store, paths = self.machine.journal.store, self.machine.paths
        version = store.history("p").policy.version
        await self.machine.landed()
        return Bits(
            journaled=tuple(record.weights_digest for record in store.records_from("p", 1)),
            version=version,
            weights=digest_file(paths.weights / f"{version:08d}" / "model.safetensors"),
        )


def _sampled_across(group: RawGroup, versions: tuple[tuple[int, int], ...]) -> RawGroup:
    """`group`, with a first rollout whose tokens come from several versions."""
    first, *others = group.rollouts
    if versions:
        first = replace(first, policy_version=None, version_spans=versions)
    return replace(group, rollouts=(first, *others))


async def window_of_six(folder: Path, *, is_killed: bool) -> Bits:
    """An update, and a window with a SaveCheckpoint between its third and fourth part."""
    drive = Drive(folder)
    machine = await drive.machine.start()
    await drive.run(update(0))
    for _ in range(3):
        await drive.run(forward_backward(0))
    await drive.run(save("inside"))
    assert {holder for holder, _ in machine.journal.store.bodies_in_use("p")} == {
        record.operation_id for record in machine.journal.store.records_from("p", 2)[:3]
    }
    for _ in range(3):
        await drive.run(forward_backward(0))
    if is_killed:
        await drive.kill()
    stepped = await drive.run(optim_step())
    assert version_of(stepped.result) == 2
    await drive.run(update(0))
    if is_killed:
        await drive.kill()
    bits = await drive.bits()
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


async def steps_that_say_more(folder: Path, *, is_killed: bool, beta1: float = 0.5) -> Bits:
    """Two updates with betas of their own, of which the second drops what is a version old."""
    drive = Drive(folder)
    machine = await drive.machine.start()
    optim = OptimStepConfig(learning_rate=0.5, beta1=beta1, beta2=0.75, eps=1e-3)
    await drive.run(update(0, optim=optim))
    fresh = LossConfig(
        kind=LossKind.GRPO, staleness=StalenessConfig(max_versions=0, action=StalenessAction.DROP)
    )
    stepped = await drive.run(update(0, optim=optim, loss=fresh), versions=((0, 0), (1, 1)))
    assert isinstance(stepped.result, StepResult)
    assert stepped.result.report.dropped_stale == 1
    if is_killed:
        await drive.kill()
    await drive.run(update(0))
    bits = await drive.bits()
    await machine.controller.close(1.0)
    return bits


def test_what_a_step_says_of_optimizer_and_versions_is_replayed(tmp_path: Path) -> None:
    for name in ("whole", "killed", "other"):
        (tmp_path / name).mkdir()
    whole = asyncio.run(steps_that_say_more(tmp_path / "whole", is_killed=False))
    killed = asyncio.run(steps_that_say_more(tmp_path / "killed", is_killed=True))
    other = asyncio.run(steps_that_say_more(tmp_path / "other", is_killed=False, beta1=0.9))
    assert killed == whole
    assert len({*whole.journaled, *other.journaled}) == 6


async def failed_and_back(folder: Path, *, is_failed: bool) -> Bits:
    """Updates around a checkpoint and a load of it; `is_failed`: the load brings the policy back
    from steps whose gradients are too large."""
    drive = Drive(folder, guard=NumericsGuard(max_skipped_in_row=2 * is_failed))
    machine = await drive.machine.start()
    good = OptimStepConfig(learning_rate=1e-3)
    huge = OptimStepConfig(
        learning_rate=1e-3, divide_by=DivideBy.CONSTANT, divide_constant=1e-30, max_grad_norm=0.0
    )
    for name in ("one", "two"):
        await drive.run(update(0, optim=good))
        await drive.run(save(name))
    for _ in range(2):
        skipped = await drive.run(update(0, optim=huge))
        assert isinstance(skipped.result, StepResult)
        assert skipped.result.report.skip_reason is SkipReason.NON_FINITE_STEP
    if is_failed:
        await until(lambda: machine.worker.is_released)
    await drive.run(load("one"))
    await drive.run(update(0, optim=good))
    if is_failed:
        await drive.kill()
    await drive.run(update(0, optim=good))
    bits = await drive.bits()
    await machine.controller.close(1.0)
    return bits


def test_a_policy_that_comes_back_from_failed_has_the_moments_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    for name in ("whole", "failed"):
        (tmp_path / name).mkdir()
    whole = asyncio.run(failed_and_back(tmp_path / "whole", is_failed=False))
    failed = asyncio.run(failed_and_back(tmp_path / "failed", is_failed=True))
    assert failed == whole


async def stepped_by_muon(folder: Path, *, is_killed: bool) -> Bits:
    """Updates around a checkpoint, some of them run again after a kill."""
    groups = (ParameterGroup("*.mlp.*", lr_factor=0.5, decays=False),)
    drive = Drive(folder, optimizer=AdamWConfig(muon=MuonConfig(), groups=groups))
    machine = await drive.machine.start()
    optim = OptimStepConfig(learning_rate=1e-3)
    await drive.run(update(0, optim=optim))
    await drive.run(save("one"))
    for _ in range(2):
        await drive.run(update(0, optim=optim))
    if is_killed:
        await drive.kill()
    await drive.run(update(0, optim=optim))
    bits = await drive.bits()
    await machine.controller.close(1.0)
    return bits


def test_muon_is_replayed_to_the_same_bits(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = asyncio.run(stepped_by_muon(tmp_path / "whole", is_killed=False))
    killed = asyncio.run(stepped_by_muon(tmp_path / "killed", is_killed=True))
    assert killed == whole
    assert whole.version >= 3


SCHEDULE = LearningRateSchedule(ScheduleKind.LINEAR, 2**-11, warmup_steps=1, total_steps=5)


async def scheduled(
    folder: Path, rates: Sequence[float | None], *, is_killed: bool
) -> tuple[list[float], Bits]:
    """A step, a checkpoint, a step, one of stale rollouts alone, another, and from the checkpoint
    one more. `rates`: what each says; None: nothing, and the policy has SCHEDULE.
    """
    fresh = StalenessConfig(max_versions=0, action=StalenessAction.DROP)
    optimizer = AdamWConfig(schedule=SCHEDULE if None in rates else None)
    drive, told = Drive(folder, optimizer=optimizer), list[float]()
    machine = await drive.machine.start()
    for index, rate in enumerate(rates):
        if index == 1:
            await drive.run(save("one"))
        if index == len(rates) - 1:
            await drive.run(load("one"))
            if is_killed:
                await drive.kill()
        loss = LossConfig(kind=LossKind.GRPO, staleness=fresh if index == 2 else None)
        optim = OptimStepConfig(learning_rate=rate, step_on_zero_gradient=True)
        step = update(0, optim=optim, loss=loss)
        stepped = await drive.run(step, versions=((0, 0),) if index == 2 else ())
        assert isinstance(stepped.result, StepResult)
        assert stepped.result.report.skipped == (index == 2)
        rate = stepped.result.report.learning_rate
        assert rate is not None
        told.append(rate)
    bits = await drive.bits()
    await machine.controller.close(1.0)
    return told, bits


def test_a_schedule_counts_the_optimizers_steps(tmp_path: Path) -> None:
    """As a caller that says these rates itself, also when it is run again."""
    rates = [2**-12, 2**-11, 0.75 * 2**-11, 0.75 * 2**-11, 2**-11]
    found: list[tuple[list[float], Bits]] = []
    for name, said, is_killed in (
        ("said", rates, False),
        ("whole", [None] * 5, False),
        ("killed", [None] * 5, True),
    ):
        (tmp_path / name).mkdir()
        found.append(asyncio.run(scheduled(tmp_path / name, said, is_killed=is_killed)))
    assert found[0][0] == rates
    assert found[1] == found[0]
    assert found[2] == found[0]


async def by_rates(folder: Path, rates: Sequence[DeviceRates]) -> Bits:
    """An update, and another; with more than one of `rates` the worker is lost in between."""
    drive = Drive(folder, partial(PlanningWorker, rates=rates))
    machine = await drive.machine.start()
    await drive.run(update(0))
    if len(rates) > 1:
        await drive.kill()
    await drive.run(save("between"))
    bits = await drive.bits()
    await machine.controller.close(1.0)
    return bits


def test_a_replay_by_other_rates_runs_the_cuts_of_the_journal(tmp_path: Path) -> None:
    """Which are not those that it would make: by these rates calls are free, or products are."""
    names = {
        "whole": (FREE_CALLS,),
        "killed": (FREE_CALLS, FREE_PRODUCTS),
        "other": (FREE_PRODUCTS,),
    }
    found: dict[str, Bits] = {}
    for name, rates in names.items():
        (tmp_path / name).mkdir()
        found[name] = asyncio.run(by_rates(tmp_path / name, rates))
    assert found["killed"] == found["whole"]
    assert found["killed"].journaled != found["other"].journaled


async def imports(
    folder: Path, make_worker: Callable[[Faults], LocalWorker], *, is_killed: bool
) -> Bits:
    """Updates, between them version 1 again, then its values added, and no checkpoint of any."""
    drive = Drive(folder, make_worker)
    machine = await drive.machine.start()
    assert isinstance(machine.worker, TrainingWorker)
    machine.worker.has_room = False
    await drive.run(update(0))
    await machine.landed()
    shutil.copytree(machine.paths.weights / "00000001", machine.paths.models_root / "one")
    await drive.run(update(0))
    again = import_weights(0, folder="one", mode=ImportMode.FULL, reset_optimizer=True)
    await drive.run(again)
    await machine.landed()
    published = [
        digest_file(machine.paths.weights / f"{version:08d}" / "model.safetensors")
        for version in (2, 3)
    ]
    assert digest_file(machine.paths.models_root / "one" / "model.safetensors") == published[1]
    assert published[0] != published[1]
    await drive.run(update(0))
    await drive.run(import_weights(0, folder="one"))
    if is_killed:
        await drive.kill()
    # Twice its weights leave the policy so far from the sampler that no term has a gradient.
    await drive.run(update(0, optim=OptimStepConfig(learning_rate=0.5, step_on_zero_gradient=True)))
    bits = await drive.bits()
    await machine.controller.close(1.0)
    return bits


@pytest.mark.parametrize("make_worker", [TrainingWorker, RoundingWorker])
def test_imported_weights_are_replayed_from_their_folder(
    tmp_path: Path, make_worker: type[LocalWorker]
) -> None:
    """With their rounding, where values are added to weights without masters."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = asyncio.run(imports(tmp_path / "whole", make_worker, is_killed=False))
    killed = asyncio.run(imports(tmp_path / "killed", make_worker, is_killed=True))
    assert killed == whole
    assert whole.version == len(set(whole.journaled)) == 6


def test_what_a_worker_answers_is_read_without_torch(tmp_path: Path) -> None:
    """One string of torch's own class would have the engine import torch."""

    async def main() -> WorkerStatus:
        drive = Drive(tmp_path)
        machine = await drive.machine.start()
        ended = await drive.run(update(0))
        assert isinstance(ended.result, StepResult)
        assert ended.result.report.seconds.digest > 0
        status = machine.worker.core.status()
        await machine.controller.close(1.0)
        return status

    status = asyncio.run(main())
    assert status.numerics
    assert status.last_outcome is not None
    (tmp_path / "status").write_bytes(pickle.dumps(status))
    script = (
        "import pathlib, pickle, sys; pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "status")]
    subprocess.run(command, check=True, timeout=120)
