"""Environment variables of a process that trains on a GPU, set before CUDA starts."""

from __future__ import annotations

from collections.abc import Sequence

# With a workspace of this size cuBLAS is reproducible, and deterministic torch requires it.
# Expandable segments fragment less when most memory is in use. Which GPUs there are is asked of the
# driver's library: with CUDA itself, as libraries ask it where flash-attn is installed, a process
# has chosen its GPUs before its ranks are told to see all.
GPU_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def seen_by_ranks(places: Sequence[tuple[str, str]]) -> list[str]:
    """The GPUs that each rank is to see, from the node and the GPU of each rank.

    On one node, where ranks may read each other's weights, a rank sees all GPUs, its own first. On
    several nodes it sees its own only, as a GPU's number is not unique there.
    """
    gpus = [gpu for _, gpu in places]
    if len({node for node, _ in places}) > 1:
        return gpus
    return [",".join([own, *(gpu for gpu in gpus if gpu != own)]) for own in gpus]
