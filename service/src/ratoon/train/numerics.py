"""What decides the bits of a result on one machine: settings, and a fingerprint of them."""

from __future__ import annotations

import platform
import resource
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, cast

import numpy as np
import torch
from torch._inductor import config as inductor_config

from ratoon.train.spec import TrainerSpec

# Of a device, for its context, kernels' workspaces and fragments of the allocator.
_UNPLANNED_SHARE = 0.04
_BUDGET_STEP = 256 * 2**20


def configure_torch(spec: TrainerSpec) -> None:
    """Set threads, determinism and plain float32 products; for the worker's own process only."""
    torch.set_num_threads(spec.num_threads)
    torch.use_deterministic_algorithms(spec.deterministic)
    # Filling every empty tensor first is for debugging; every element is written anyway.
    cast("Any", torch.utils.deterministic).fill_uninitialized_memory = False
    torch.set_float32_matmul_precision("highest")
    # Kernels that the compiler picks by timing could be others, with other sums, in a next process.
    cast("Any", inductor_config).deterministic = spec.deterministic
    if spec.deterministic:
        # Both decide by the number of tokens; a graph of `layers` is for a range of them.
        cast("Any", inductor_config).triton.mix_order_reduction = False
        cast("Any", inductor_config).shape_padding = False


def numerics_fingerprint(spec: TrainerSpec, attention_backend: str) -> dict[str, str]:
    """Names of everything outside of model, batch and plan that the bits depend on."""
    device = torch.device(spec.device)
    return {
        "device": device.type,
        "device_model": device_model(device),
        "num_devices": str(spec.num_workers),
        "layout": "single" if spec.num_workers == 1 else spec.shard.value,
        "attention_backend": attention_backend,
        "threads": str(torch.get_num_threads()),
        "optimizer_states": spec.kept_states.value,
        # By it stages keep more or less, and what they keep decides how operations are fused.
        "host_activation_bytes": str(spec.host_activation_bytes * (device.type == "cuda")),
        "deterministic": str(spec.deterministic).lower(),
        # A plain string: to read torch's own class, the engine would import torch.
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "kernels": version("ratoon-kernels"),
        "numpy": np.__version__,
    }


def device_model(device: torch.device) -> str:
    """The name of a GPU, or which instructions a CPU has."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of a GPU that is the policy's own: all of it, and what is not allocated yet.

    Not what happens to be free: what is kept by it decides bits, which a replay must find again.
    """

    total: int
    free: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """None for a CPU: no limit."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return memory_of(total, torch.cuda.memory_allocated(device))


def memory_of(total_bytes: int, allocated_bytes: int) -> DeviceMemory:
    """What a GPU of so many bytes has free beside what is allocated of it."""
    free = total_bytes * (1 - _UNPLANNED_SHARE) - allocated_bytes
    return DeviceMemory(total=total_bytes, free=max(0, int(free)))


def plannable_bytes(memory: DeviceMemory) -> int:
    """What activations are planned within, once all else is allocated."""
    return memory.free // _BUDGET_STEP * _BUDGET_STEP


def activation_bytes(device: torch.device, passing_bytes: int = 0) -> int | None:
    """The same of a GPU that is there, less what passes beside them; None for a CPU: no limit."""
    memory = device_memory(device)
    if memory is None:
        return None
    return plannable_bytes(replace(memory, free=max(0, memory.free - passing_bytes)))


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: of the device for a GPU, resident in this process for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
