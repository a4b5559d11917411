"""Policies on all GPUs whose memory others hold: each call is told so in time, and works later."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil
import pytest
import ray
import torch

from ratoon.cluster.bootstrap import start_engine, stop_engine
from ratoon.config import RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.commands import Command
from ratoon.engine.engine import Engine
from ratoon.engine.files.paths import policy_paths
from ratoon.engine.types import FailedResult, Operation, PolicySpec
from ratoon.errors import ErrorCode
from ratoon.model.spec import ModelDtype, PresetBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.stream.versions import version_folder
from ratoon_proto.types import ImportMode, OperationState, ParallelLayout, Recovery, Shard
from tests.conftest import RayCluster
from tests.engine.harness import PATIENCE_S, import_weights, load, save, update
from tests.engine.ray_engine import SPEC, RayEngine, done, random_batch, submission
from tests.until import until

pytestmark = pytest.mark.multigpu
_MODEL = replace(SPEC.model, base=PresetBase(name="small"), dtype=ModelDtype.BFLOAT16)
_EXPERTS = replace(_MODEL, base=PresetBase(name="tiny-gpt-oss"))
_NUM_GPUS = torch.cuda.device_count()
_ON_ALL = ParallelLayout(num_workers=_NUM_GPUS)
_SPEC = replace(SPEC, model=_MODEL, recovery=Recovery.REPLAY, micro_batch_tokens=32)
_LAYOUTS = {
    **{str(s): replace(_SPEC, parallel=replace(_ON_ALL, shard=s)) for s in Shard},
    "sequence": replace(_SPEC, parallel=replace(_ON_ALL, sequence_ranks=_NUM_GPUS)),
    "experts": replace(_SPEC, model=_EXPERTS, parallel=replace(_ON_ALL, shard=Shard.WEIGHTS)),
}
# From the call to its end, which is known in seconds; a library that waits has a minute or more.
_TOLD_S = 40.0
# Reads lines of a GPU and of the MiB of it that stay free, or 16 more; all of them where negative.
_HOLD = """
import sys, torch
kept = {}
for line in sys.stdin:
    gpu, left = map(int, line.split())
    kept.pop(gpu, None)
    torch.cuda.empty_cache()
    torch.zeros(1, device=f"cuda:{gpu}")
    kept[gpu], size = [], 1 << 36 if left >= 0 else 0
    while size >= 1 << 24:
        if torch.cuda.mem_get_info(gpu)[0] - (left << 20) < size:
            size //= 2
            continue
        try:
            kept[gpu].append(torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}"))
        except torch.OutOfMemoryError:
            size //= 2
    print("done", flush=True)
"""


class Holder:
    """A process of somebody else on all GPUs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        for gpu in range(_NUM_GPUS):
            self._say(gpu, -1)

    @contextmanager
    def holding(self, left_mib: int, *gpus: int) -> Iterator[None]:
        """Inside, no more than so many MiB are free of these GPUs."""
        for gpu in gpus:
            self._say(gpu, left_mib)
        try:
            yield
        finally:
            for gpu in gpus:
                self._say(gpu, -1)

    def _say(self, gpu: int, left_mib: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{gpu} {left_mib}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def holder() -> Iterator[Holder]:
    command, pipe = [sys.executable, "-c", _HOLD], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield Holder(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def engine(
    ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayEngine]:
    assert ray_cluster.address, "the namespace below is this module's own"
    config = RatoonConfig(
        data_root=tmp_path_factory.mktemp("engine"),
        ray=RayConfig(namespace=f"gpu-creation-{uuid.uuid4().hex[:8]}"),
        worker=WorkerConfig(device="cuda", num_threads=1),
    )
    ray.get(start_engine(config))
    yield RayEngine(config)
    stop_engine(config)


async def _ended(client: EngineClient, operation: Operation, within_s: float) -> Operation:
    async with asyncio.timeout(within_s):
        while not operation.state.is_final:
            operation = await client.call(Engine.get_operation, operation.operation_id, 60.0)
    return operation


async def _created(client: EngineClient, spec: PolicySpec) -> Operation:
    return await _ended(client, await client.call(Engine.create_policy, spec), _TOLD_S)


def _check_memory_is_told(operation: Operation, *gpus: int) -> None:
    assert isinstance(operation.result, FailedResult), operation
    error = operation.result.error
    assert error["code"] == ErrorCode.RESOURCE_EXHAUSTED, error
    message = str(error["message"])
    assert any(f" on GPU {gpu} of " in message for gpu in gpus), error
    assert "has not enough memory" in message


@pytest.mark.parametrize(
    ("layout", "gpus", "left_mib"),
    [
        # Next to nothing: a process cannot even begin to use the GPU.
        ("states", (1,), 64),
        ("gradients", (0,), 64),
        ("weights", (1,), 64),
        ("sequence", (1,), 64),
        ("experts", (0, 1), 64),
        # Which step lacks memory, or whether none does, depends on what is left.
        ("weights", (1,), 700),
        ("weights", (0,), 1000),
    ],
)
def test_gpus_that_others_have_filled_are_told_and_left(
    engine: RayEngine, holder: Holder, layout: str, gpus: tuple[int, ...], left_mib: int
) -> None:
    """With `weights` the other ranks waited in NCCL, and the policy was being created for ever."""

    async def main(client: EngineClient) -> None:
        used, before = _used_mib(), _processes()
        spec = replace(_LAYOUTS[layout], policy_id=f"{layout}-{gpus[0]}-{left_mib}")
        with holder.holding(left_mib, *gpus):
            created = await _created(client, spec)
        if created.state is OperationState.FAILED:
            _check_memory_is_told(created, *gpus)
        else:
            assert left_mib > 64
            await done(client, await client.call(Engine.delete_policy, spec.policy_id))
        await until(lambda: not _processes() - before)
        # But for what the driver keeps.
        await until(lambda: all(n - o < 64 for n, o in zip(_used_mib(), used, strict=True)))

    engine.run(main)


def test_a_policy_without_memory_refuses_an_update_and_goes_on_once_there_is_some(
    engine: RayEngine, holder: Holder
) -> None:
    """Others take the memory once the policy is created, which plans with all of its GPUs."""
    spec = replace(_LAYOUTS["weights"], policy_id="late", micro_batch_tokens=65_536)
    # Gigabytes of activations.
    large, small = random_batch(1, 1200), random_batch(2, 4)
    seq = 0

    async def run(
        client: EngineClient, command: Command, batch: RolloutBatch | None, within_s: float
    ) -> Operation:
        nonlocal seq
        seq += 1
        started = time.monotonic()
        call = submission(seq, command, batch, spec.policy_id)
        ended = await _ended(client, await client.submit(call), within_s)
        sys.stdout.write(f"seq {seq}: {ended.state} in {time.monotonic() - started:.1f} s\n")
        return ended

    async def main(client: EngineClient) -> None:
        assert (await _created(client, spec)).state is OperationState.DONE
        processes = _processes()
        with holder.holding(8, 1):
            # The other rank compiles meanwhile, and looks up between micro-batches.
            _check_memory_is_told(await run(client, update(0), large, PATIENCE_S), 1)
        with holder.holding(8, 0, 1):
            # The copy of the state and its file take the hosts' memory alone.
            saved = await run(client, save("before"), None, _TOLD_S)
            assert saved.state is OperationState.DONE
        first = await run(client, update(0), small, PATIENCE_S)
        assert first.state is OperationState.DONE
        assert (await client.call(Engine.weight_manifest, "late", None)).version == 1
        paths = policy_paths(engine.config.data_root, "late")
        shutil.copytree(version_folder(paths.weights, 1), paths.models_root / "one")
        again = load("before"), update(0), import_weights(0, folder="one", mode=ImportMode.FULL)
        with holder.holding(8, 0, 1):
            for command, batch in zip(again, (None, small, None), strict=True):
                ended = await run(client, command, batch, _TOLD_S)
                # What torch keeps of an earlier call may be enough for a later one.
                if ended.state is OperationState.FAILED:
                    _check_memory_is_told(ended, 0, 1)
        last = await run(client, update(0), large, PATIENCE_S)
        assert last.state is OperationState.DONE
        assert processes <= _processes(), "nothing was replaced"
        await done(client, await client.call(Engine.delete_policy, "late"))

    engine.run(main)


def _used_mib() -> list[int]:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(query, text=True).split()]


def _processes() -> set[int]:
    """Workers and ranks of this test session's Ray."""
    found: set[int] = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if "ray::WorkerActor" in line or "ray::RankActor" in line:
                found.add(child.pid)
    return found
