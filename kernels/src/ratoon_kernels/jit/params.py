"""Lays out the values of a launch in memory for the driver to copy.

Each value has the size, and each field of a struct the offset, that the C++ compiler gives it.
"""

import enum
import struct
from dataclasses import dataclass

_SLOT_BYTES = 8


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
