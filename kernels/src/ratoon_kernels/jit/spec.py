"""Describes a CUDA kernel before it is compiled: source, entry, constants, parameters.

A parameter has the size, and each field of a struct the offset, that the C++ compiler gives it.
"""

import enum
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SLOT_BYTES = 8
ARCH: Final = "sm_90a"
CAPABILITY: Final = (9, 0)
PACKAGE_FOLDER: Final = Path(__file__).parents[1]


class Param(enum.Enum):
    """The type of one value; the enum's own value is its code in Python's struct module."""

    POINTER = "Q"  # of device memory: a tensor, or an address (0 is null)
    INT32 = "i"
    INT64 = "q"
    FLOAT32 = "f"
    TENSOR_MAP = "128s"  # of a 128-byte struct aligned to 64, `const __grid_constant__`

    @property
    def size_bytes(self) -> int:
        """Size of the value; its alignment too, but for tensor maps."""
        return struct.calcsize("<" + self.value)


# One parameter: a value, or a struct passed by value with these fields (no tensor maps).
Parameter = Param | tuple[Param, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamLayout:
    """All parameters in one buffer.

    Attributes:
        format: Format of Python's struct module; takes the values in order, fields one by one.
        offsets_bytes: Where each parameter begins, a struct being one parameter.
        sizes_bytes: Size of each, as the kernel has it.
    """

    format: str
    offsets_bytes: tuple[int, ...]
    sizes_bytes: tuple[int, ...]


def layout_params(params: tuple[Parameter, ...]) -> ParamLayout:
    """Returns the layout; every parameter begins at a multiple of 8 bytes."""
    codes: list[str] = []
    offsets: list[int] = []
    sizes: list[int] = []
    offset = 0
    for param in params:
        code = param.value if isinstance(param, Param) else _struct_format(param)
        size = struct.calcsize("<" + code)
        padding = -size % _SLOT_BYTES
        codes.append(f"{code}{padding}x")
        offsets.append(offset)
        sizes.append(size)
        offset += size + padding
    return ParamLayout(
        format="<" + "".join(codes), offsets_bytes=tuple(offsets), sizes_bytes=tuple(sizes)
    )


def _struct_format(fields: tuple[Param, ...]) -> str:
    assert fields, "a struct parameter has no field"
    assert Param.TENSOR_MAP not in fields, "a tensor map is a parameter of its own"
    codes, size = "", 0
    for field in fields:
        padding = -size % field.size_bytes
        codes += f"{padding}x{field.value}"
        size += padding + field.size_bytes
    return f"{codes}{-size % max(field.size_bytes for field in fields)}x"


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
