"""A Ray cluster of several nodes on one machine, and an engine on it, in a process of their own.

Nodes are raylets with declared GPUs: policies are placed as on these, and train on CPUs. A test
process may be connected to another Ray, and to one alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table

from ratoon.cluster.placement import bundles_of_ranks, find_group
from ratoon.cluster.ray_cluster import RayCluster
from ratoon.config import RatoonConfig, RayConfig, WorkerConfig
from ratoon.engine.client import EngineClient
from ratoon.engine.engine import Engine
from ratoon.engine.journal.journal import Journal
from ratoon.engine.journal.tables import open_database
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import PolicySpec
from ratoon.train.spec import TrainerSpec

_NAMESPACE = "nodes"
_MEMORY = 80 * 2**20


class _FakeGpus(RayCluster):
    def trainer(self, spec: PolicySpec) -> TrainerSpec:
        return replace(super().trainer(spec), device="cpu", num_threads=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """`client`: of the engine."""

    cluster: Cluster
    client: EngineClient

    def of_policy(self, policy_id: str) -> list[str]:
        """The node of each of its ranks."""
        group = find_group(policy_id)
        assert group is not None
        nodes = placement_group_table(group)["bundles_to_node_id"]
        return [nodes[bundle] for bundle in bundles_of_ranks(group)]

    def ranks(self, node_id: str) -> list[psutil.Process]:
        """Processes of ranks there, but for the workers'."""
        _, raylet = self._find(node_id)
        return [each for each in raylet.children() if "RankActor" in " ".join(each.cmdline())]

    def kill(self, node_id: str) -> None:
        """The raylet, and at once all that it has started."""
        node, raylet = self._find(node_id)
        lost = raylet.children(recursive=True)
        self.cluster.remove_node(node, allow_graceful=False)
        for process in lost:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def add(self, num_gpus: int) -> None:
        self.cluster.add_node(num_cpus=1, num_gpus=num_gpus, object_store_memory=_MEMORY)

    def _find(self, node_id: str) -> tuple[Any, psutil.Process]:
        """A node, and its raylet."""
        (node,) = (node for node in self.cluster.worker_nodes if node.node_id == node_id)
        return node, psutil.Process(node.all_processes["raylet"][0].process.pid)

    def take_one_of_each(self, num_nodes: int) -> PlacementGroup:
        """Reserve a GPU of so many nodes."""
        taken = placement_group([{"GPU": 1.0}] * num_nodes, strategy="STRICT_SPREAD")
        assert taken.wait(30.0)
        return taken


@contextmanager
def beside() -> Iterator[Callable[[Callable[[Nodes], Awaitable[None]], Path], None]]:
    """What runs a coroutine function, of a module, with nodes of its own, that it adds to a head
    without GPUs."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        yield lambda main, folder: process.submit(_run, main, folder).result()


def _run(main: Callable[[Nodes], Awaitable[None]], folder: Path) -> None:
    temp_dir = tempfile.mkdtemp(prefix="rt-", dir="/tmp")
    # Where the cluster writes its address, for others to find: below a folder that exists.
    os.environ["RAY_TMPDIR"] = temp_dir
    Path(temp_dir, "ray").mkdir()
    head: dict[str, Any] = {
        "num_cpus": 1,
        "num_gpus": 0,
        "object_store_memory": _MEMORY,
        "temp_dir": temp_dir,
        "include_dashboard": False,
        "_system_config": {
            "worker_niceness": 0,
            # A node that leaves is noticed in seconds.
            "health_check_initial_delay_ms": 1000,
            "health_check_period_ms": 500,
            "health_check_timeout_ms": 5000,
            "health_check_failure_threshold": 4,
        },
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, namespace=_NAMESPACE, log_to_driver=False)
        asyncio.run(_on_nodes(main, cluster, folder))
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


async def _on_nodes(
    main: Callable[[Nodes], Awaitable[None]], cluster: Cluster, folder: Path
) -> None:
    async with _engine(folder) as client:
        await main(Nodes(cluster=cluster, client=client))


@asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[EngineClient]:
    config = RatoonConfig(
        data_root=folder,
        ray=RayConfig(namespace=_NAMESPACE),
        worker=WorkerConfig(device="cuda", max_silence_s=10.0),
    )
    settings = EngineSettings.from_config(config)
    engine = Engine(settings, Journal(open_database(settings.database_url)), _FakeGpus(settings))
    await engine.recover()
    yield EngineClient(lambda call: call.on(engine), settings)
    await engine.stop_policies()
