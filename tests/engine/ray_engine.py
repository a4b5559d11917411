"""An engine on Ray for tests, and what they submit to it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ratoon.cluster.bootstrap import connect
from ratoon.config import RatoonConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.commands import Command, NoKey, SeqKey, Submission
from ratoon.engine.engine import Engine
from ratoon.engine.types import Operation
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.serial import batch_to_bytes
from ratoon_proto.types import OperationState
from tests import builders
from tests.engine.harness import PATIENCE_S, policy_spec

POLICY = "tiny-policy"
SPEC = policy_spec(POLICY, micro_batch_tokens=256)


def random_batch(seed: int, num_groups: int = 2, *, with_returns: bool = False) -> RolloutBatch:
    """`with_returns`: with what a critic is trained on."""
    rng = np.random.default_rng(seed)
    groups = builders.random_groups(
        rng, num_groups=num_groups, kinds=("flat",), with_returns=with_returns
    )
    return builders.validate_groups(groups, builders.limits())


@dataclass(frozen=True)
class RayEngine:
    """A running engine; `run` gives a coroutine its own loop and a client."""

    config: RatoonConfig

    def run(self, main: Callable[[EngineClient], Coroutine[Any, Any, Any]]) -> Any:
        async def connected() -> Any:
            return await main(await connect(self.config.ray.namespace))

        return asyncio.run(connected())


def submission(
    seq: int | None, command: Command, batch: RolloutBatch | None, policy_id: str = POLICY
) -> Submission:
    """The command on `batch`, whose digest it gets."""
    body = b"" if batch is None else batch_to_bytes(batch)
    if batch is not None:
        assert command.body_digest
        command = replace(command, body_digest=hashlib.sha256(body).hexdigest())
    key = NoKey() if seq is None else SeqKey(seq=seq)
    return Submission(policy_id=policy_id, key=key, command=command, body=body)


async def done(client: EngineClient, operation: Operation) -> Operation:
    """Its end, for which a GPU that compiles takes minutes."""
    async with asyncio.timeout(PATIENCE_S):
        while not operation.state.is_final:
            operation = await client.call(Engine.get_operation, operation.operation_id, 60.0)
    assert operation.state is OperationState.DONE, operation
    return operation


async def manifest_digest(client: EngineClient) -> tuple[int, str]:
    """Number and digest of the newest published weights."""
    manifest = await client.call(Engine.weight_manifest, POLICY, None)
    files = {file.name: file.digest for file in manifest.files}
    return manifest.version, files["model.safetensors"]
