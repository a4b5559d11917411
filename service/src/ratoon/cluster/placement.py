"""Reserves GPUs for workers: one placement group per policy, by its name, a bundle per GPU.

All are on one node where one has as many free, since its links are the shortest. A reservation
fails after `_PLACEMENT_S`, and an ended worker holds none.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,  # pyright: ignore[reportUnknownVariableType]
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ratoon.cluster.ray_private import HEAD_RESOURCE, free_resources_by_node
from ratoon.engine.settings import EngineSettings
from ratoon.errors import ErrorCode, RatoonError

# Places an actor on the head, without which nothing runs. An actor that asks for nothing may be put
# on any node.
ON_HEAD = {HEAD_RESOURCE: 0.001}
_PLACEMENT_S = 8.0
_RELEASE_S = 1.0
_POLL_S = 0.1


def worker_device(settings: EngineSettings) -> str:
    """ "cpu" or "cuda:0": a GPU worker sees its own GPU only."""
    if settings.device == "auto":
        return "cuda:0" if float(ray.cluster_resources().get("GPU", 0.0)) > 0 else "cpu"
    return "cuda:0" if settings.device == "cuda" else settings.device


async def place(policy_id: str, num_gpus: int, *, on_one_node: bool = False) -> PlacementGroup:
    """Reserve the GPUs, of one node if they have to be, or find them reserved.

    Raises RESOURCE_EXHAUSTED.
    """
    group = find_group(policy_id)
    if group is None:
        bundles = [{"GPU": 1.0} for _ in range(num_gpus)]
        # "PACK" alone would fill a node that has fewer first.
        fits_one = max(free_gpus_by_node().values(), default=0.0) >= num_gpus
        strategy = "STRICT_PACK" if fits_one or on_one_node else "PACK"
        name = _group_name(policy_id)
        group = placement_group(bundles, strategy=strategy, name=name, lifetime="detached")
    if not await asyncio.to_thread(group.wait, _PLACEMENT_S):
        remove_placement_group(group)
        raise no_gpus(num_gpus, free_gpus_by_node(), on_one_node=on_one_node)
    return group


def bundles_of_ranks(group: PlacementGroup) -> list[int]:
    """The bundle of each rank of a policy that is placed."""
    return by_node(cast("Any", placement_group_table)(group)["bundles_to_node_id"])


def by_node(nodes: Mapping[int, str]) -> list[int]:
    """Bundles, of these nodes, so that those of one node are neighbours, bundle 0's first. Pure."""
    order = list(dict.fromkeys(nodes[bundle] for bundle in sorted(nodes)))
    return sorted(nodes, key=lambda bundle: (order.index(nodes[bundle]), bundle))


def free_gpus(policy_id: str) -> None:
    """Remove the policy's placement group, if any."""
    group = find_group(policy_id)
    if group is not None:
        remove_placement_group(group)


def on_gpu_node() -> Any:
    """A scheduling strategy for a task that must see a GPU without reserving one.

    A task that reserved even a fraction would wait while policies hold all GPUs.
    """
    nodes = cast("list[dict[str, Any]]", ray.nodes())
    for node in nodes:
        if node["Alive"] and node["Resources"].get("GPU", 0.0) > 0:
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
    return "DEFAULT"


async def check_free_gpus(num_gpus: int, *, on_one_node: bool = False) -> None:
    """Raises RESOURCE_EXHAUSTED where fewer GPUs are free, of the cluster or of every one node.

    A policy that has just ended may take a moment to release its own.
    """
    deadline = asyncio.get_running_loop().time() + _RELEASE_S
    while _most(free := free_gpus_by_node(), on_one_node=on_one_node) < num_gpus:
        if asyncio.get_running_loop().time() >= deadline:
            raise no_gpus(num_gpus, free, on_one_node=on_one_node)
        await asyncio.sleep(_POLL_S)


def _most(free: Mapping[str, float], *, on_one_node: bool) -> float:
    return max(free.values(), default=0.0) if on_one_node else sum(free.values())


def _group_name(policy_id: str) -> str:
    return f"ratoon-gpu-{policy_id}"


def find_group(policy_id: str) -> PlacementGroup | None:
    """The policy's placement group."""
    try:
        return get_placement_group(_group_name(policy_id))
    except ValueError:
        return None


def free_gpus_by_node() -> dict[str, float]:
    """Free GPUs by node, of nodes that have any GPU."""
    free = free_resources_by_node()
    found: dict[str, float] = {}
    for node in cast("list[dict[str, Any]]", ray.nodes()):
        if node["Alive"] and node["Resources"].get("GPU", 0.0) > 0:
            found[node["NodeID"]] = free.get(node["NodeID"], {}).get("GPU", 0.0)
    return found


def no_gpus(wanted: int, free: dict[str, float], *, on_one_node: bool = False) -> RatoonError:
    """The refusal of so many; `free`: by node."""
    plural, total = "" if wanted == 1 else "s", sum(free.values())
    counts = ", ".join(f"{count:g}" for count in sorted(free.values(), reverse=True))
    by_node = f" (by node: {counts})" if len(free) > 1 else ""
    where = " of one node, as its ranks read each other's weights" if on_one_node else ""
    return RatoonError(
        ErrorCode.RESOURCE_EXHAUSTED,
        f"the policy wants {wanted} GPU{plural}{where}, {total:g} are free{by_node}",
        details={"resource": "GPU", "wanted": str(wanted), "free": f"{total:g}"},
    )
