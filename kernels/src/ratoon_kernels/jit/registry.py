"""Lists every CUDA kernel of this distribution.

A kernel that a launcher loads is listed by its op, in the op folder's `cuda_specs.py`.
"""

from ratoon_kernels.jit.spec import KernelSpec


def all_specs() -> tuple[KernelSpec, ...]:
    """Returns every variant of every kernel of every op; their names differ."""
    # Late, because the ops' modules import this package.
    from ratoon_kernels.tree_attention import cuda_specs

    return cuda_specs.SPECS
