"""Environment variables of a process that trains on a GPU, set before CUDA starts."""

from __future__ import annotations

from collections.abc import Sequence

# With a workspace of this size cuBLAS is reproducible, and deterministic torch requires it.
# Expandable segments fragment less when most memory is in use.
GPU_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def visible_first(own: str, of_ranks: Sequence[str]) -> str:
    """What a rank sees where it reads the memory of others' GPUs: its own first, then theirs."""
    return ",".join([own, *(gpus for gpus in of_ranks if gpus != own)])
