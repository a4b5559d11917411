"""The CUDA kernels of tree attention.

In: nothing. Out: `SPECS`. Invariant: every kernel that the launcher loads is listed here.
"""

from typing import Final

from ratoon_kernels.jit import KernelSpec

SPECS: Final[tuple[KernelSpec, ...]] = ()
