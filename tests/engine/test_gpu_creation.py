"""A policy on all GPUs, one of which others have filled: it is told in time, and created later."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import ray
import torch

from ratoon.cluster.bootstrap import start_engine, stop_engine
from ratoon.config import RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.engine import Engine
from ratoon.engine.types import FailedResult, Operation, OperationState
from ratoon.errors import ErrorCode
from ratoon.model.spec import ModelDtype, PresetBase
from ratoon.train.config import ParallelLayout, Shard
from tests.conftest import RayCluster
from tests.engine.ray_engine import SPEC, RayEngine

pytestmark = pytest.mark.multigpu
_MODEL = replace(SPEC.model, base=PresetBase(name="small"), dtype=ModelDtype.BFLOAT16)
_SPEC = replace(SPEC, model=_MODEL, micro_batch_tokens=32)
_TOLD_S = 60.0
# Takes a GPU's memory but for so many MiB, until its standard input ends.
_FILL = """
import sys, torch
gpu, left = int(sys.argv[1]), int(sys.argv[2]) << 20
torch.zeros(1, device=f"cuda:{gpu}")
kept = torch.empty(torch.cuda.mem_get_info(gpu)[0] - left, dtype=torch.uint8, device=f"cuda:{gpu}")
print("filled", flush=True)
sys.stdin.read()
"""


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


@contextmanager
def _filled(gpu: int, left_mib: int) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", _FILL, str(gpu), str(left_mib)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "filled\n"
        yield
    finally:
        process.stdin.close()
        assert process.wait(60) == 0


async def _created(client: EngineClient, name: str, shard: Shard) -> Operation:
    parallel = ParallelLayout(num_workers=torch.cuda.device_count(), shard=shard)
    operation = await client.call(
        Engine.create_policy,
        replace(_SPEC, policy_id=name, parallel=parallel),
    )
    while not operation.state.is_final:
        operation = await client.call(Engine.get_operation, operation.operation_id, 60.0)
    return operation


@pytest.mark.parametrize(
    ("shard", "gpu", "left_mib"),
    [
        (Shard.STATES, 1, 64),
        (Shard.GRADIENTS, 1, 64),
        *((Shard.WEIGHTS, gpu, left_mib) for gpu in (1, 0) for left_mib in (64, 600, 900, 1200)),
    ],
)
def test_a_gpu_that_others_have_filled_is_told_and_then_used(
    engine: RayEngine, shard: Shard, gpu: int, left_mib: int
) -> None:
    """With `weights` the other ranks waited in NCCL, and the policy was being created for ever.

    Which step lacks memory, or whether none does, depends on what is left: with next to nothing a
    process cannot even begin to use the GPU.
    """
    name = f"{shard}-{gpu}-{left_mib}"

    async def main(client: EngineClient) -> None:
        started = time.monotonic()
        with _filled(gpu, left_mib):
            first = await _created(client, name, shard)
            took_s = time.monotonic() - started
        if first.state is OperationState.FAILED:
            assert isinstance(first.result, FailedResult)
            error = first.result.error
            assert error["code"] == ErrorCode.RESOURCE_EXHAUSTED, error
            assert f" on GPU {gpu} of " in str(error["message"])
            assert took_s < _TOLD_S
            assert (await _created(client, name, shard)).state is OperationState.DONE
        else:
            assert left_mib > 64
        deleted = await client.call(Engine.delete_policy, name)
        while not deleted.state.is_final:
            deleted = await client.call(Engine.get_operation, deleted.operation_id, 60.0)

    engine.run(main)
