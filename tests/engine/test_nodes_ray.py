"""Policies of several ranks on several nodes: where they are put, and what a lost node costs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ray.util.placement_group import remove_placement_group

from ratoon.cluster.placement import find_group, free_gpus_by_node, look_at_nodes
from ratoon.engine.client import EngineClient
from ratoon.engine.engine import Engine
from ratoon.engine.types import Operation
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import ParallelLayout, PolicyState, Recovery, Shard
from tests.engine.harness import update
from tests.engine.node_cluster import Nodes, beside
from tests.engine.ray_engine import SPEC, done, random_batch, submission
from tests.until import until

pytestmark = pytest.mark.more
_SPEC = replace(SPEC, recovery=Recovery.REPLAY, micro_batch_tokens=32)
Run = Callable[[Callable[[Nodes], Awaitable[None]], Path], None]


@pytest.fixture
def on_nodes() -> Iterator[Run]:
    with beside() as run:
        yield run


async def _create(
    client: EngineClient, name: str, num_workers: int = 2, shard: Shard | None = None
) -> None:
    parallel = ParallelLayout(num_workers=num_workers, shard=shard)
    spec = replace(_SPEC, policy_id=name, parallel=parallel)
    await done(client, await client.call(Engine.create_policy, spec))


async def _submit(client: EngineClient, name: str, seq: int) -> Operation:
    return await client.submit(submission(seq, update(0), random_batch(seq, 4), name))


async def _digest(client: EngineClient, name: str) -> str:
    manifest = await client.call(Engine.weight_manifest, name, None)
    return next(file.digest for file in manifest.files if file.name == "model.safetensors")


async def _update(client: EngineClient, name: str, seq: int) -> str:
    await done(client, await _submit(client, name, seq))
    return await _digest(client, name)


async def _placed_and_lost(nodes: Nodes) -> None:
    client = nodes.client
    for _ in range(2):
        nodes.add(2)
    seen = [(node.num_gpus, node.num_free_gpus) for node in look_at_nodes(Path("/"))]
    assert seen == [(0, 0), (2, 2), (2, 2)]
    await _create(client, "together")
    assert len(set(nodes.of_policy("together"))) == 1
    digests = [await _update(client, "together", seq) for seq in range(1, 5)]
    with pytest.raises(RatoonError) as caught:
        await _create(client, "many", num_workers=3)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert caught.value.message == "the policy wants 3 GPUs, 2 are free (by node: 2, 0)"
    await done(client, await client.call(Engine.delete_policy, "together"))

    taken = nodes.take_one_of_each(2)
    await _create(client, "apart")
    first, second = nodes.of_policy("apart")
    assert first != second
    remove_placement_group(taken)
    assert await _update(client, "apart", 1) == digests[0]

    (rank,) = nodes.ranks(second)
    running = await _submit(client, "apart", 2)
    rank.kill()
    await done(client, running)
    assert await _digest(client, "apart") == digests[1]
    assert nodes.of_policy("apart") == [first, second]

    nodes.kill(second)
    assert await _update(client, "apart", 3) == digests[2]
    assert nodes.of_policy("apart") == [first, first]

    # The worker's own now, and there is no other. Refused once, the policy goes on asking for GPUs.
    nodes.kill(first)
    waiting = await _submit(client, "apart", 4)
    await until(lambda: find_group("apart") is None)
    assert not (await client.call(Engine.get_operation, waiting.operation_id, 0.0)).state.is_final
    assert (await client.call(Engine.policy, "apart")).state is PolicyState.READY
    nodes.add(2)
    await done(client, waiting)
    assert await _digest(client, "apart") == digests[3]
    assert (await client.call(Engine.policy, "apart")).version == 4


def test_ranks_are_put_on_one_node_else_apart_and_outlive_the_loss_of_nodes(
    on_nodes: Run, tmp_path: Path
) -> None:
    on_nodes(_placed_and_lost, tmp_path)


async def _shared_by_node(nodes: Nodes) -> None:
    """Every node has all weights, each rank of it a share: the bits of the same ranks on one."""
    client = nodes.client
    nodes.add(4)
    await _create(client, "one", num_workers=4, shard=Shard.WEIGHTS)
    (wide,) = set(nodes.of_policy("one"))
    digests = [await _update(client, "one", seq) for seq in range(1, 4)]
    await done(client, await client.call(Engine.delete_policy, "one"))
    nodes.kill(wide)
    await until(lambda: not free_gpus_by_node())
    for _ in range(2):
        nodes.add(2)
    with pytest.raises(RatoonError, match=r"3 of each of 2 nodes or 2 of each of 3 nodes.*2, 2"):
        await _create(client, "many", num_workers=6, shard=Shard.WEIGHTS)

    await _create(client, "two", num_workers=4, shard=Shard.WEIGHTS)
    first, _, second, last = nodes.of_policy("two")
    assert first != second
    assert second == last
    assert await _update(client, "two", 1) == digests[0]

    # One rank of the node that the worker is not on, while an update runs.
    running = await _submit(client, "two", 2)
    nodes.ranks(second)[0].kill()
    await done(client, running)
    assert await _digest(client, "two") == digests[1]

    # It waits for as many nodes as before.
    nodes.kill(nodes.of_policy("two")[-1])
    waiting = await _submit(client, "two", 3)
    await until(lambda: find_group("two") is None)
    assert not (await client.call(Engine.get_operation, waiting.operation_id, 0.0)).state.is_final
    nodes.add(2)
    await done(client, waiting)
    assert await _digest(client, "two") == digests[2]
    status = await client.call(Engine.policy, "two")
    assert (status.version, len(set(nodes.of_policy("two")))) == (3, 2)


def test_nodes_that_share_weights_each_outlive_the_loss_of_ranks_and_nodes(
    on_nodes: Run, tmp_path: Path
) -> None:
    on_nodes(_shared_by_node, tmp_path)
