"""What decides the bits of a result on one machine: settings, and a fingerprint of them."""

from __future__ import annotations

import math
import platform
import resource
from functools import cache
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch._inductor import config as inductor_config

from ratoon.train.spec import TrainerSpec

# Share of a device kept for its context, kernels' workspaces and fragments of the allocator.
_UNPLANNED_SHARE = 0.04
_BUDGET_STEP = 256 * 2**20
_CPUINFO = Path("/proc/cpuinfo")
# Fields of x86-64 and of ARM.
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")


def configure_torch(spec: TrainerSpec) -> None:
    """Set threads, determinism and plain float32 products; for the worker's own process only."""
    torch.set_num_threads(spec.num_threads)
    torch.use_deterministic_algorithms(spec.deterministic)
    # Filling every empty tensor first is for debugging; every element is written anyway.
    cast("Any", torch.utils.deterministic).fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("highest")
    # Kernels that the compiler picks by timing could be others, with other sums, in a next process.
    cast("Any", inductor_config).deterministic = spec.deterministic


def numerics_fingerprint(spec: TrainerSpec, attention_backend: str) -> dict[str, str]:
    """Names of everything outside of model, batch and plan that the bits depend on."""
    device = torch.device(spec.device)
    return {
        "device": device.type,
        "device_model": device_model(device),
        "num_devices": str(spec.num_workers),
        "layout": _layout(spec),
        "attention_backend": attention_backend,
        "threads": str(torch.get_num_threads()),
        "optimizer_states": spec.kept_states.value,
        # By it stages keep more or less, and what they keep decides how operations are fused.
        "host_activation_bytes": str(spec.host_activation_bytes * (device.type == "cuda")),
        "deterministic": str(spec.deterministic).lower(),
        "numpy": np.__version__,
        **_versions(),
    }


def compiler_kind(device: torch.device) -> dict[str, str]:
    """Names of what compiled code is for, whatever the model, the layout and the mode."""
    return {"device_model": device_model(device), **_versions()}


def _versions() -> dict[str, str]:
    return {
        # A plain string: to read torch's own class, the engine would import torch.
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "ratoon": version("ratoon"),
        "kernels": version("ratoon-kernels"),
    }


def _layout(spec: TrainerSpec) -> str:
    """What ranks share, or how many policies share a GPU, which decides what each may keep."""
    if spec.num_workers > 1:
        # On more nodes a GPU keeps more of the weights, and has less room.
        is_spread = spec.num_nodes > 1 and torch.device(spec.device).type == "cuda"
        return f"{spec.shard.value} on {spec.num_nodes} nodes" if is_spread else spec.shard.value
    is_shared = spec.max_tenants > 1 and torch.device(spec.device).type == "cuda"
    return f"{spec.max_tenants} tenants" if is_shared else "single"


def device_model(device: torch.device) -> str:
    """The name of a GPU; or which instructions a CPU has, its vendor, family and model.

    MKL and oneDNN choose kernels by all of these, and so the order of sums.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_model()}"


@cache
def _cpu_model() -> str:
    """Words of the first processor's entry in Linux's list; elsewhere what Python knows."""
    if not _CPUINFO.is_file():
        return platform.processor()
    entry = _CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0]
    parts = (line.partition(":") for line in entry.splitlines())
    values = {name.strip(): value.strip() for name, _, value in parts}
    return " ".join(values[name] for name in _CPU_FIELDS if name in values)


def total_bytes(device: torch.device) -> int | None:
    """Memory of a device that is the policy's own; None for a CPU: no limit."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def gpus_reach_each_other(device: torch.device) -> bool:
    """Whether each GPU that this process sees has access to the memory of every other one; so it is
    on a CPU. All ranks of a node see the same."""
    if device.type != "cuda":
        return True
    pairs = permutations(range(torch.cuda.device_count()), 2)
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)


def free_bytes(total: int, allocated: int) -> int:
    """Bytes of a GPU to plan with, beside what is allocated; below zero: that does not fit.

    What happens to be free does not enter: plans decide bits, which a replay must find again.
    """
    return math.floor(total * (1 - _UNPLANNED_SHARE)) - allocated


def plannable_bytes(total: int, allocated: int) -> int:
    """Bytes that activations are planned within, once all else is allocated."""
    return max(0, free_bytes(total, allocated) // _BUDGET_STEP * _BUDGET_STEP)


def activation_bytes(device: torch.device, passing_bytes: int = 0) -> int | None:
    """`plannable_bytes` of a GPU as it is, less `passing_bytes`; None for a CPU: no limit."""
    total = total_bytes(device)
    if total is None:
        return None
    return plannable_bytes(total, torch.cuda.memory_allocated(device) + passing_bytes)


def allocated_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that tensors occupy; None for a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: of the device for a GPU, resident in this process for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
