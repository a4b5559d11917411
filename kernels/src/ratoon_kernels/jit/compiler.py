"""From a kernel's source, and every header of ours in it, to machine code by NVRTC.

The compiler is given these texts and no folder to search, so what their key covers is all that is
compiled. Needs no GPU and no driver; what costs performance is among the warnings.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ratoon_kernels.jit.calls import KernelCompileError, check_nvrtc, nvrtc
from ratoon_kernels.jit.spec import ARCH, PACKAGE_FOLDER, KernelSpec

_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
# The ptxas report is part of every compile: it is where lost performance is told.
_OPTIONS: Final = (
    f"--gpu-architecture={ARCH}",
    "--std=c++17",
    "--device-as-default-execution-space",
    "--ptxas-options=-v",
)
# ptxas tells of ignored setmaxnreg (C7508) and of serialized wgmma (C7510) as mere information.
_WARNING: Final = re.compile(r"warning|Potential Performance Loss|\(C\d+\)", re.IGNORECASE)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A compiled kernel.

    Attributes:
        cubin: The ELF image.
        log: All messages of the compiler and of ptxas, with its resource report.
    """

    cubin: bytes
    log: str

    @property
    def warnings(self) -> tuple[str, ...]:
        """The log's lines that tell of a mistake or of lost performance."""
        return tuple(line.strip() for line in self.log.splitlines() if _WARNING.search(line))


@functools.cache
def nvrtc_version() -> str:
    """Returns NVRTC's version, such as "13.0".

    Raises:
        ImportError: cuda-bindings is not installed.
        RuntimeError: NVRTC's library is not found.
    """
    major, minor = check_nvrtc("nvrtcVersion", nvrtc().nvrtcVersion())
    return f"{major}.{minor}"


def compile_kernel(spec: KernelSpec, sources: Sources) -> CompiledKernel:
    """Compiles one kernel, in 0.1 to 2 seconds.

    Args:
        spec: The kernel, for messages.
        sources: What `read_sources(spec)` returned.

    Raises:
        KernelCompileError: The sources have an error; its text is the compiler's.
        CudaCallError: NVRTC itself failed.
        ImportError: cuda-bindings is not installed.
    """
    compiler = nvrtc()
    names, texts = list(sources.headers), list(sources.headers.values())
    program = check_nvrtc(
        "nvrtcCreateProgram",
        compiler.nvrtcCreateProgram(
            sources.text.encode(), sources.name.encode(), len(names),
            [text.encode() for text in texts], [name.encode() for name in names],
        ),
    )  # fmt: skip
    try:
        options = [option.encode() for option in sources.options]
        (status,) = compiler.nvrtcCompileProgram(program, len(options), options)
        log = _read(compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if status == compiler.nvrtcResult.NVRTC_ERROR_COMPILATION:
            raise KernelCompileError(spec.name, text)
        check_nvrtc(f"nvrtcCompileProgram of {spec.name}", (status,))
        cubin = _read(compiler.nvrtcGetCUBINSize, compiler.nvrtcGetCUBIN, program)
        return CompiledKernel(cubin=cubin, log=text)
    finally:
        check_nvrtc("nvrtcDestroyProgram", compiler.nvrtcDestroyProgram(program))


def _read(size_of: Any, read: Any, program: Any) -> bytes:
    """Returns the bytes of a pair of NVRTC calls: one gives the size, the other the bytes."""
    buffer = bytearray(check_nvrtc("NVRTC's size of an output", size_of(program)))
    check_nvrtc("NVRTC's copy of an output", read(program, buffer))
    return bytes(buffer)
