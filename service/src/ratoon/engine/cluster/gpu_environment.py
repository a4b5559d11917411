"""What a process that trains on a GPU has in its environment before CUDA starts."""

from __future__ import annotations

# cuBLAS repeats its bits with workspaces of this size, and deterministic torch refuses to go
# without; segments that grow leave fewer fragments where most memory is in use.
GPU_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
