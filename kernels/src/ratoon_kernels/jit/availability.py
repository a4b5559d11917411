"""Decides whether the CUDA kernels can run here.

A machine without CUDA gets a reason, never an error, and nothing is compiled to find out.
"""

import functools

import torch

from ratoon_kernels.jit.cache import PREBUILT_FOLDER, read_manifest
from ratoon_kernels.jit.calls import CudaCallError, KernelCompileError, driver
from ratoon_kernels.jit.compiler import nvrtc_version, read_sources
from ratoon_kernels.jit.spec import CAPABILITY, KernelSpec


@functools.cache
def unavailable_reason(specs: tuple[KernelSpec, ...]) -> str | None:
    """Returns why this machine cannot run such kernels at all, or None. Asked once per process."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capabilities = [_capability(index) for index in range(torch.cuda.device_count())]
    if CAPABILITY not in capabilities:
        return f"no GPU of compute capability 9.0, only {capabilities}"
    try:
        driver()
    except ImportError as error:
        return f"the package cuda-bindings is not installed: {error}"
    except (CudaCallError, RuntimeError) as error:
        return f"the CUDA driver does not answer: {error}"
    return _code_missing_reason(specs)


def unsupported_reason(device: torch.device) -> str | None:
    """Returns why the kernels do not run on a device of this machine, or None."""
    if device.type != "cuda":
        return f"no support for {device.type}"
    capability = _capability(torch.cuda.current_device() if device.index is None else device.index)
    if capability != CAPABILITY:
        return f"{device} has compute capability {capability}, expected {CAPABILITY}"
    return None


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def _code_missing_reason(specs: tuple[KernelSpec, ...]) -> str | None:
    """Returns why a kernel could be neither compiled nor found prebuilt, or None."""
    try:
        nvrtc_version()
    except (ImportError, RuntimeError) as error:
        missing = f"NVRTC is not installed: {error}"
    else:
        return None
    prebuilt = read_manifest(PREBUILT_FOLDER)
    try:
        absent = [
            spec.name for spec in specs if read_sources(spec).key(compiler="") not in prebuilt
        ]
    except KernelCompileError as error:
        return str(error)
    return f"{missing}, and there is no prebuilt {absent[0]}" if absent else None
