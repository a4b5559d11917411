"""Describes a CUDA kernel before it is compiled: source, entry, constants, parameters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratoon_kernels.jit.params import Parameter

ARCH: Final = "sm_90a"
CAPABILITY: Final = (9, 0)
PACKAGE_FOLDER: Final = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One variant of one kernel.

    Attributes:
        source: The .cu file, relative to the package ("tree_attention/csrc/forward.cu"), or its
            absolute path.
        entry: Name of its `extern "C" __global__` function.
        defines: Macros given to the compiler as (name, value), sorted by name.
        params: Types of the entry's parameters, in order: `Param`, or a tuple of them for a struct
            passed by value. `load` compares their sizes with the cubin's.
    """

    source: str
    entry: str
    defines: tuple[tuple[str, int], ...]
    params: tuple[Parameter, ...]

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
