"""The texts that a kernel is compiled from: its source and every header of ours in it.

The compiler is given these texts and no folder to search, so what the key covers is all that is
compiled.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ratoon_kernels.jit.errors import KernelCompileError
from ratoon_kernels.jit.spec import ARCH, PACKAGE_FOLDER, KernelSpec

_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)

# The ptxas report is part of every compile: it is where lost performance is told.
_OPTIONS: Final = (
    f"--gpu-architecture={ARCH}",
    "--std=c++17",
    "--device-as-default-execution-space",
    "--ptxas-options=-v",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Texts of one kernel.

    Attributes:
        name: File name of the main source, as it stands in the compiler's messages.
        text: The main source.
        headers: Text of each included header, by the name in its #include.
        options: The compiler's options, defines included.
    """

    name: str
    text: str
    headers: Mapping[str, str]
    options: tuple[str, ...]

    def key(self, compiler: str) -> str:
        """Returns the sha256 in hex of all of this and of the compiler's version ("" for any)."""
        parts = [self.text, sorted(self.headers.items()), self.options, compiler]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_sources(spec: KernelSpec) -> Sources:
    """Reads a kernel's source and, recursively, each header named by `#include "..."`.

    A header is looked for beside the file that includes it, then from the package's folder
    ("tree_attention/csrc/ptx.cuh").

    Raises:
        KernelCompileError: The source or a header is missing, or one name means two headers.
    """
    if not spec.path.is_file():
        raise KernelCompileError(spec.name, f"there is no file {spec.path}")
    text = spec.path.read_text(encoding="utf-8")
    headers: dict[str, Path] = {}
    texts: dict[str, str] = {}
    pending = [(spec.path, text)]
    while pending:
        path, including = pending.pop()
        for name in _INCLUDE.findall(including):
            header = _find_header(spec, path, name)
            if headers.setdefault(name, header) != header:
                raise KernelCompileError(
                    spec.name, f'#include "{name}" is both {headers[name]} and {header}'
                )
            if name not in texts:
                texts[name] = header.read_text(encoding="utf-8")
                pending.append((header, texts[name]))
    defines = tuple(f"--define-macro={name}={value}" for name, value in spec.defines)
    return Sources(
        name=spec.path.name,
        text=text,
        headers=MappingProxyType(texts),
        options=(*_OPTIONS, *defines),
    )


def _find_header(spec: KernelSpec, including: Path, name: str) -> Path:
    for folder in (including.parent, PACKAGE_FOLDER):
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise KernelCompileError(spec.name, f'{including}: there is no file for #include "{name}"')
