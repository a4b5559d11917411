"""Policies of two ranks, of which one has no memory at a step of a call: told, and nothing lost.

A rank that fails where others wait for it loses the worker, and the call is run again. Anywhere
else the call fails, and the policy is as before. Neither takes the time that a copy may.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio

from ratoon.cluster.ray_cluster import open_engine
from ratoon.config import RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.commands import Command
from ratoon.engine.engine import Engine
from ratoon.engine.files.paths import policy_paths
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import FailedResult, Operation, version_of
from ratoon.errors import ErrorCode
from ratoon.model.spec import PresetBase
from ratoon.stream.versions import version_folder
from ratoon_proto.types import ImportMode, OperationState, ParallelLayout, Recovery, Shard
from tests.conftest import RayCluster
from tests.engine.creation_faults import NO_MEMORY, put_traps
from tests.engine.harness import import_weights, load, save, update
from tests.engine.ray_engine import SPEC, random_batch, submission
from tests.engine.test_creation_faults import processes_of_ranks
from tests.until import until

# One engine, and one policy of each layout, which every case takes back to its checkpoint.
pytestmark = pytest.mark.asyncio(loop_scope="module")

# With few tokens there are several micro-batches, so that both ranks have some.
_SPEC = replace(SPEC, recovery=Recovery.REPLAY, micro_batch_tokens=32)
_EXPERTS = replace(SPEC.model, base=PresetBase(name="tiny-gpt-oss"))
_LAYOUTS = {
    "weights": replace(_SPEC, parallel=ParallelLayout(num_workers=2, shard=Shard.WEIGHTS)),
    "gradients": replace(_SPEC, parallel=ParallelLayout(num_workers=2, shard=Shard.GRADIENTS)),
    "states": replace(_SPEC, parallel=ParallelLayout(num_workers=2, shard=Shard.STATES)),
    "sequence": replace(_SPEC, parallel=ParallelLayout(num_workers=2, sequence_ranks=2)),
    "experts": replace(
        _SPEC, model=_EXPERTS, parallel=ParallelLayout(num_workers=2, shard=Shard.WEIGHTS)
    ),
}
_BEGIN, _STEPPED = "begin", "stepped"
_UPDATE, _SAVE, _LOAD = update(0), save("another", overwrite=True), load(_BEGIN)
_IMPORT = import_weights(0, folder=_STEPPED, mode=ImportMode.FULL)
# Where nobody waits for the rank, or hears of it by a word.
_REFUSED = {
    "enter a pass": _UPDATE,
    "run a pass": _UPDATE,
    "receive gradients": _UPDATE,
    "add gradients": _UPDATE,
    "exchange tokens": _UPDATE,
    "copy states": _SAVE,
    "write states": _SAVE,
}
# Where the others wait, or the state is in doubt.
_LOST = {
    "add up sums": _UPDATE,
    "measure the norm": _UPDATE,
    "step": _UPDATE,
    "take the digest": _UPDATE,
    "receive an import": _IMPORT,
    "import": _IMPORT,
    "read states": _LOAD,
    "take states": _LOAD,
}
_UNPUBLISHED = {"copy a version": _UPDATE, "write a version": _UPDATE}
_ONLY = {
    "receive gradients": ("weights", "gradients", "experts"),
    "add gradients": ("weights", "gradients", "experts"),
    "exchange tokens": ("sequence",),
}
# A copy may wait for `_SILENCE_S`, a stopped pass for ten minutes: what ends sooner was told.
# A new worker is a start of two processes, on a machine that is busy with others.
_SILENCE_S, _TOLD_S, _RUN_AGAIN_S = 300.0, 60.0, 150.0


@dataclass
class Bench:
    """An engine in this process, whose workers are real ones, and its only policy."""

    engine: Engine
    traps: Path
    data_root: Path
    layout: str = ""
    seq: int = 0
    # Weights after the first update.
    stepped: str = ""

    async def take(self, layout: str) -> None:
        """Have a policy of this layout, as it was created."""
        if layout != self.layout:
            await self.drop()
            self.layout, self.seq = layout, 0
            spec = replace(_LAYOUTS[layout], policy_id=layout)
            await self.done(await self.engine.create_policy(spec))
            await self.run(save(_BEGIN))
            await self.run(_UPDATE)
            manifest = await self.engine.weight_manifest(layout, None)
            self.stepped = await self.weights()
            folder = version_folder(policy_paths(self.data_root, layout).weights, manifest.version)
            shutil.copytree(folder, self.data_root / "models" / _STEPPED, dirs_exist_ok=True)
        await self.run(_LOAD)
        assert await self.weights() != self.stepped

    async def drop(self) -> None:
        if self.layout:
            await self.done(await self.engine.delete_policy(self.layout))

    async def begin(self, command: Command) -> Operation:
        self.seq += 1
        batch = random_batch(1, 4) if command.body_digest else None
        return await self.engine.submit(submission(self.seq, command, batch, self.layout))

    async def ended(self, operation: Operation) -> Operation:
        while not operation.state.is_final:
            operation = await self.engine.get_operation(operation.operation_id, 60.0)
        return operation

    async def done(self, operation: Operation) -> None:
        ended = await self.ended(operation)
        assert ended.state is OperationState.DONE, ended

    async def run(self, command: Command) -> None:
        await self.done(await self.begin(command))

    async def weights(self, version: int | None = None) -> str:
        """Digest of a version; None: the newest."""
        manifest = await self.engine.weight_manifest(self.layout, version)
        (digest,) = (f.digest for f in manifest.files if f.name == "model.safetensors")
        return digest

    async def without_memory(
        self, step: str, rank: int, command: Command, count: int = 1
    ) -> tuple[Operation, float]:
        """The call's end, and the seconds to it, where a rank has no memory so many times."""
        trap = self.traps / f"{step} {rank}"
        trap.write_text(str(count))
        started = time.monotonic()
        ended = await self.ended(await self.begin(command))
        return ended, time.monotonic() - started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(
    ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    assert ray_cluster.address, "the namespace below is this module's own"
    folder = tmp_path_factory.mktemp("memory")
    traps = folder / "traps"
    traps.mkdir()
    config = RatoonConfig(
        data_root=folder / "data",
        ray=RayConfig(namespace=f"memory-{uuid.uuid4().hex[:8]}"),
        worker=WorkerConfig(device="cpu", num_threads=1, max_silence_s=_SILENCE_S),
    )
    with pytest.MonkeyPatch.context() as patch:
        put_traps(traps, patch)
        engine = open_engine(EngineSettings.from_config(config))
        await engine.recover()
        made = Bench(engine, traps, config.data_root)
        yield made
        await made.drop()
        await engine.stop_policies()


def _cases(table: Mapping[str, Command]) -> Iterator[object]:
    """Every step on either rank, of every layout that has it; those in `_FEW` where all run."""
    for layout in _LAYOUTS:
        for step, command in table.items():
            for rank in (1, 0) if layout in _ONLY.get(step, _LAYOUTS) else ():
                marks = _FEW.get((layout, step, rank), pytest.mark.slow)
                yield pytest.param(layout, step, rank, command, marks=marks)


_FEW = {
    ("weights", "enter a pass", 1): (),
    ("weights", "add up sums", 1): (),
    ("weights", "copy a version", 1): (),
    ("weights", "receive gradients", 0): pytest.mark.more,
    ("weights", "write states", 1): pytest.mark.more,
    ("weights", "receive an import", 1): pytest.mark.more,
    ("weights", "take states", 0): pytest.mark.more,
    ("gradients", "receive gradients", 1): pytest.mark.more,
    ("gradients", "step", 0): pytest.mark.more,
    ("sequence", "enter a pass", 0): pytest.mark.more,
}


@pytest.mark.parametrize(("layout", "step", "rank", "command"), list(_cases(_REFUSED)))
async def test_a_rank_without_memory_costs_its_call_alone(
    bench: Bench, layout: str, step: str, rank: int, command: Command
) -> None:
    """Where a rank failed before it had joined a pass, the other one waited for ten minutes."""
    await bench.take(layout)
    before = processes_of_ranks()
    failed, took_s = await bench.without_memory(step, rank, command)
    assert isinstance(failed.result, FailedResult)
    error = failed.result.error
    assert (error["code"], error["retryable"]) == (ErrorCode.RESOURCE_EXHAUSTED, True)
    message = str(error["message"])
    assert message.startswith(f"rank {rank} on the CPU of ")
    assert NO_MEMORY in message
    assert took_s < _TOLD_S
    await bench.run(_UPDATE)
    assert await bench.weights() == bench.stepped
    assert processes_of_ranks() == before


@pytest.mark.parametrize(("layout", "step", "rank", "command"), list(_cases(_LOST)))
async def test_a_rank_without_memory_that_others_wait_for_costs_no_bit(
    bench: Bench, layout: str, step: str, rank: int, command: Command
) -> None:
    """The others waited for a minute, and then did not know for whom."""
    await bench.take(layout)
    before = processes_of_ranks()
    ended, took_s = await bench.without_memory(step, rank, command)
    assert ended.state is OperationState.DONE, ended
    assert took_s < _RUN_AGAIN_S
    assert _reason(bench, ended).endswith(f"has not enough memory: {NO_MEMORY}")
    assert f"rank {rank} on the CPU of " in _reason(bench, ended)
    if command is _LOAD:
        await bench.run(_UPDATE)
    assert await bench.weights() == bench.stepped
    await until(lambda: not processes_of_ranks() & before)


@pytest.mark.parametrize(("layout", "step", "rank", "command"), list(_cases(_UNPUBLISHED)))
async def test_a_version_that_a_rank_has_no_memory_for_is_written_for_who_asks(
    bench: Bench, layout: str, step: str, rank: int, command: Command
) -> None:
    await bench.take(layout)
    before = processes_of_ranks()
    ended, took_s = await bench.without_memory(step, rank, command)
    assert ended.state is OperationState.DONE, ended
    assert took_s < _TOLD_S
    assert await bench.weights(version_of(ended.result)) == bench.stepped
    assert not [*bench.traps.iterdir()], "the first try failed"
    assert processes_of_ranks() == before


@pytest.mark.more
async def test_a_call_for_which_there_is_never_memory_fails_with_the_reason(bench: Bench) -> None:
    await bench.take("weights")
    # A new worker runs nothing again before the call.
    await bench.run(_SAVE)
    failed, _ = await bench.without_memory("step", 1, _UPDATE, 4)
    assert isinstance(failed.result, FailedResult)
    error = failed.result.error
    assert (error["code"], error["retryable"]) == (ErrorCode.WORKER_LOST, True)
    message = str(error["message"])
    assert message.startswith("4 workers in a row were lost to it, the last: rank 1 on the CPU of ")
    assert message.endswith(NO_MEMORY)
    await bench.run(_UPDATE)
    assert await bench.weights() == bench.stepped


def _reason(bench: Bench, operation: Operation) -> str:
    """Why the last worker was lost to an operation."""
    controller = bench.engine._controllers.find_started(bench.layout)
    assert controller is not None
    lost = controller._turns._executor._lost_workers
    assert lost._name == operation.operation_id
    return lost._reasons[-1]
