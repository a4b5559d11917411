"""Examines the nodes of a cluster for policies of several ranks, for `ratoon doctor`.

A short task runs on each node. Nothing is reserved.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
import shutil
import subprocess  # nosec B404
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ratoon.cluster.placement import free_gpus_by_node
from ratoon.cluster.ray_private import HEAD_RESOURCE
from ratoon.config import interface_of

# Distributions that must be the same on all nodes, for a policy's bits or for its processes to
# understand one another.
_DISTRIBUTIONS = ("ratoon", "ratoon-kernels", "torch", "transformers", "numpy")
_SMI = "nvidia-smi"
_SMI_S = 30.0
_NODE_S = 120.0
_ACCELERATOR = "accelerator_type:"
_CONTROL = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d+)")


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
