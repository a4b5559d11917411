"""What a CUDA kernel is before it is compiled: source, entry, constants, parameters.

In: names and numbers written beside the kernel's launcher. Out: `KernelSpec`, by which everything
about a kernel is kept. Invariant: equal specs are equal machine code, for the same sources.
"""

import enum
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ARCH: Final = "sm_90a"
CAPABILITY: Final = (9, 0)
PACKAGE_FOLDER: Final = Path(__file__).parents[1]


class Param(enum.Enum):
    """The type of one parameter of a kernel; the value is its struct code, padded to 8 bytes."""

    POINTER = "Q"  # of device memory: a tensor, or an address (0 is null)
    INT32 = "i4x"
    INT64 = "q"
    FLOAT32 = "f4x"
    TENSOR_MAP = "128s"  # `const __grid_constant__`, of a 128-byte struct aligned to 64

    @property
    def size_bytes(self) -> int:
        """Size of the kernel's own parameter, without the padding."""
        return struct.calcsize("<" + self.value.removesuffix("4x"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One variant of one kernel.

    Attributes:
        source: The .cu file, relative to the package ("tree_attention/csrc/forward.cu"), or its
            absolute path.
        entry: Name of its `extern "C" __global__` function.
        defines: Macros given to the compiler as (name, value), sorted by name.
        params: Types of the entry's parameters, in order; `load` compares them with the cubin.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, int], ...]
    params: tuple[Param, ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.defines]
        assert names == sorted(set(names)), f"defines of {self.entry} are not sorted and unique"

    @property
    def path(self) -> Path:
        """The source file."""
        return PACKAGE_FOLDER / self.source

    @property
    def name(self) -> str:
        """A name for messages: "forward[HEAD_DIM=64]"."""
        defines = ",".join(f"{name}={value}" for name, value in self.defines)
        return f"{self.entry}[{defines}]" if defines else self.entry
