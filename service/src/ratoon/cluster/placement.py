"""The GPUs of a cluster: which node has them, which policy, and how its processes see them.

A policy, or a process that several share, has one placement group by its name. All of its GPUs are
on one node where one has as many free, since its links are the shortest; otherwise each of the
fewest nodes that have room gets as many, at least two, and a bundle is a node's share. Where none
have, a bundle is a GPU of any node, unless the policy's ranks read each other's weights. A
reservation fails after `_PLACEMENT_S`, and an ended worker holds none. Policies on CPUs reserve
nothing, and are spread by the same rule over the CPUs that Ray knows. For `ratoon doctor` a short
task looks at each node; it reserves nothing.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess  # nosec B404
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
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
from ratoon.config import interface_of
from ratoon.engine.settings import EngineSettings
from ratoon.errors import ErrorCode, RatoonError

# Places an actor on the head, without which nothing runs. An actor that asks for nothing may be put
# on any node.
ON_HEAD = {HEAD_RESOURCE: 0.001}
_GROUP = "ratoon-gpu-"
_PLACEMENT_S = 8.0
_RELEASE_S = 1.0
_POLL_S = 0.1
# Distributions that must be the same on all nodes, for a policy's bits or for its processes to
# understand one another.
_DISTRIBUTIONS = ("ratoon", "ratoon-kernels", "torch", "transformers", "numpy")
_SMI = "nvidia-smi"
_SMI_S = 30.0
_NODE_S = 120.0
_ACCELERATOR = "accelerator_type:"
_CONTROL = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")


def worker_device(settings: EngineSettings) -> str:
    """ "cpu" or "cuda:0": a GPU worker sees its own GPU only."""
    if settings.device == "auto":
        return "cuda:0" if float(ray.cluster_resources().get("GPU", 0.0)) > 0 else "cpu"
    return "cuda:0" if settings.device == "cuda" else settings.device


async def place(
    name: str, num_gpus: int, *, evenly: bool = False, num_nodes: int = 0
) -> PlacementGroup:
    """Reserve the GPUs, or find them reserved.

    `evenly`: as many of each node, as ranks of a node read each other's weights. `num_nodes`: that
    many then; 0: as few as have room. Raises RESOURCE_EXHAUSTED.
    """
    group = find_group(name)
    if group is None:
        nodes = even_nodes(num_gpus, free_gpus_by_node().values(), num_nodes)
        if nodes or evenly:
            # Where there is no room now, there may be before the reservation fails.
            nodes = nodes or num_nodes or 1
            bundles, strategy = [{"GPU": float(num_gpus // nodes)}] * nodes, "STRICT_SPREAD"
        else:
            bundles, strategy = [{"GPU": 1.0}] * num_gpus, "PACK"
        own = f"{_GROUP}{name}"
        group = placement_group(bundles, strategy=strategy, name=own, lifetime="detached")
    if not await asyncio.to_thread(group.wait, _PLACEMENT_S):
        remove_placement_group(group)
        raise no_gpus(num_gpus, free_gpus_by_node(), evenly=evenly, num_nodes=num_nodes)
    return group


def even_nodes(num_ranks: int, free: Collection[float], num_nodes: int = 0) -> int:
    """The fewest nodes that have room for as many ranks each; 0: there are none. Pure.

    `free`: by node, what is free for ranks. `num_nodes`: no other number will do; 0: any.
    """
    return next(
        (
            nodes
            for nodes in _splits(num_ranks)
            if num_nodes in (0, nodes)
            and sum(count >= num_ranks // nodes for count in free) >= nodes
        ),
        0,
    )


def _splits(num_ranks: int) -> list[int]:
    """Numbers of nodes that may have as many ranks each: one, or several with at least two."""
    return [1, *(n for n in range(2, num_ranks // 2 + 1) if num_ranks % n == 0)]


def bundles_of_ranks(group: PlacementGroup) -> list[int]:
    """The bundle of each rank of a policy that is placed."""
    table = cast("Any", placement_group_table)(group)
    sizes = {bundle: int(resources["GPU"]) for bundle, resources in table["bundles"].items()}
    return by_node(table["bundles_to_node_id"], sizes)


def by_node(nodes: Mapping[int, str], sizes: Mapping[int, int]) -> list[int]:
    """The bundle of each rank, so that those of one node are neighbours, bundle 0's first. Pure.

    `nodes`, `sizes`: the node and the ranks of each bundle.
    """
    order = list(dict.fromkeys(nodes[bundle] for bundle in sorted(nodes)))
    bundles = sorted(nodes, key=lambda bundle: (order.index(nodes[bundle]), bundle))
    return [bundle for bundle in bundles for _ in range(sizes[bundle])]


def cpus_by_node() -> dict[str, int]:
    """The CPUs that Ray knows of each live node that has any. Policies share and reserve none."""
    alive = [node for node in cast("list[dict[str, Any]]", ray.nodes()) if node["Alive"]]
    cpus = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in alive}
    return {node: count for node, count in cpus.items() if count}


def nodes_of_ranks(num_ranks: int, cpus: Mapping[str, int], own: str) -> list[str]:
    """The node of each rank of a policy on CPUs, whose first rank is on `own`. Pure.

    Nodes have as many each where there is room for that, otherwise `own` is filled first, and then
    those with most. Where there are more ranks than CPUs, the rest is on `own`.
    """
    others = sorted(cpus.keys() - {own}, key=lambda node: (-cpus[node], node))
    cpus = {**cpus, own: max(1, cpus.get(own, 0))}
    for nodes in _splits(num_ranks):
        each = num_ranks // nodes
        chosen = [own, *others][:nodes]
        if len(chosen) == nodes and all(cpus[node] >= each for node in chosen):
            return [node for node in chosen for _ in range(each)]
    filled = [node for node in (own, *others) for _ in range(cpus[node])][:num_ranks]
    return [*[own] * (num_ranks - len(filled)), *filled]


def free_gpus(name: str) -> None:
    """Remove the placement group of a policy or a shared process, if any."""
    group = find_group(name)
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


async def check_free_gpus(num_gpus: int, *, evenly: bool = False) -> None:
    """Raises RESOURCE_EXHAUSTED where `place` would now.

    A policy that has just ended may take a moment to release its own.
    """
    deadline = asyncio.get_running_loop().time() + _RELEASE_S
    while not _has_room(num_gpus, free := free_gpus_by_node(), evenly=evenly):
        if asyncio.get_running_loop().time() >= deadline:
            raise no_gpus(num_gpus, free, evenly=evenly)
        await asyncio.sleep(_POLL_S)


def _has_room(num_gpus: int, free: Mapping[str, float], *, evenly: bool) -> bool:
    if evenly:
        return even_nodes(num_gpus, free.values()) > 0
    return sum(free.values()) >= num_gpus


def placed_names(prefix: str) -> list[str]:
    """The names, with this prefix, that have a placement group."""
    table = cast("dict[str, dict[str, Any]]", placement_group_table())
    there = [each["name"] for each in table.values() if each["state"] != "REMOVED"]
    named = [name.removeprefix(_GROUP) for name in there if name.startswith(_GROUP)]
    return [name for name in named if name.startswith(prefix)]


def find_group(name: str) -> PlacementGroup | None:
    """The placement group of a policy or a shared process."""
    try:
        return get_placement_group(f"{_GROUP}{name}")
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


def no_gpus(
    wanted: int, free: dict[str, float], *, evenly: bool = False, num_nodes: int = 0
) -> RatoonError:
    """The refusal of so many; `free`: by node. The other arguments: those of `place`."""
    plural, total = "" if wanted == 1 else "s", sum(free.values())
    counts = ", ".join(f"{count:g}" for count in sorted(free.values(), reverse=True))
    by_node = f" (by node: {counts})" if len(free) > 1 else ""
    where = f", {_ways(wanted, num_nodes)}, as ranks of a node share weights" if evenly else ""
    return RatoonError(
        ErrorCode.RESOURCE_EXHAUSTED,
        f"the policy wants {wanted} GPU{plural}{where}, {total:g} are free{by_node}",
        details={"resource": "GPU", "wanted": str(wanted), "free": f"{total:g}"},
    )


def _ways(num_ranks: int, num_nodes: int) -> str:
    """How ranks may be spread evenly, in words."""
    splits = [num_nodes] if num_nodes else _splits(num_ranks)
    return " or ".join(
        f"{num_ranks // nodes} of {'one node' if nodes == 1 else f'each of {nodes} nodes'}"
        for nodes in splits
    )


def seen_by_ranks(places: Sequence[tuple[str, str]]) -> list[str]:
    """The GPUs that each rank is to see, from the node and the GPU of each rank.

    A rank sees those of all ranks of its node, which may read each other's weights, its own first.
    """
    gpus: dict[str, list[str]] = defaultdict(list)
    for node, gpu in places:
        gpus[node].append(gpu)
    return [",".join([own, *(gpu for gpu in gpus[node] if gpu != own)]) for node, own in places]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a process sees on its node. `folder`: the data root's inode; None: there is no folder.

    `interface`: the network interface of the node's address. `links`: the result of `gpu_links`.
    """

    versions: Mapping[str, str]
    folder: int | None
    interface: str | None
    links: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """`gpu`: the model, "" where Ray does not know it."""

    address: str
    gpu: str
    num_gpus: int
    num_free_gpus: int
    seen: Seen


def look_at_nodes(data_root: Path) -> list[Node]:
    """Every node, the head first, of the cluster that this process is connected to.

    Raises what a task raises that a node does not run.
    """
    alive = [node for node in cast("list[dict[str, Any]]", ray.nodes()) if node["Alive"]]
    alive.sort(key=lambda node: HEAD_RESOURCE not in node["Resources"])
    look = ray.remote(num_cpus=0, max_calls=1)(look_around)
    answers = [
        look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(node["NodeManagerAddress"], data_root)
        for node in alive
    ]
    free = free_gpus_by_node()
    return [
        Node(
            address=node["NodeManagerAddress"],
            gpu=next(
                (
                    name.removeprefix(_ACCELERATOR)
                    for name in node["Resources"]
                    if name.startswith(_ACCELERATOR)
                ),
                "",
            ),
            num_gpus=int(node["Resources"].get("GPU", 0)),
            num_free_gpus=int(free.get(node["NodeID"], 0)),
            seen=seen,
        )
        for node, seen in zip(alive, ray.get(answers, timeout=_NODE_S), strict=True)
    ]


def look_around(address: str, data_root: Path) -> Seen:
    """Look at the node of this process."""
    return Seen(
        versions={name: metadata.version(name) for name in _DISTRIBUTIONS},
        folder=data_root.stat().st_ino if data_root.is_dir() else None,
        interface=interface_of(address),
        links=gpu_links(),
    )


def gpu_links() -> str:
    """How this machine's GPUs are linked, pair by pair; "" for fewer than two."""
    smi = shutil.which(_SMI)
    if smi is None:
        return ""
    done = subprocess.run(  # nosec B603
        [smi, "topo", "-m"], capture_output=True, text=True, timeout=_SMI_S, check=False
    )
    return links_of(done.stdout)


def links_of(matrix: str) -> str:
    """The result of `gpu_links`, from the output of `nvidia-smi topo -m`. Pure."""
    rows = [line.split("\t") for line in _CONTROL.sub("", matrix).splitlines()]
    gpus = [[field.strip() for field in row] for row in rows if _GPU.fullmatch(row[0].strip())]
    pairs: dict[str, list[str]] = defaultdict(list)
    for one, row in enumerate(gpus):
        for other in range(one + 1, len(gpus)):
            pairs[row[1 + other]].append(f"{one}-{other}")
    if len(pairs) == 1:
        return f"every pair by {next(iter(pairs))}"
    return "; ".join(f"{link}: {' '.join(names)}" for link, names in pairs.items())
