"""Joules that a GPU has taken, by NVML's counter (Volta and newer); a CPU has none."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_LIBRARY = "libnvidia-ml.so.1"


def joules_taken(device: torch.device) -> float | None:
    """Energy since the driver was loaded, in steps of a millijoule; None on a CPU or without a
    counter.

    The counter is updated some ten times a second, so a difference over less time says little.
    """
    if device.type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    found = _handle(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    if found is None:
        return None
    library, handle = found
    millijoules = ctypes.c_ulonglong()
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
        return None
    return millijoules.value / 1e3


@cache
def _handle(uuid: str) -> tuple[Any, ctypes.c_void_p] | None:
    """NVML and its handle of a GPU; None where it does not answer."""
    try:
        library: Any = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2():
        return None
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    return library, handle
