"""NVRTC: from a kernel's texts to machine code.

Needs no GPU and no driver; what costs performance is among the warnings.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any, Final

from ratoon_kernels.jit.calls import check_nvrtc, nvrtc
from ratoon_kernels.jit.errors import KernelCompileError
from ratoon_kernels.jit.sources import Sources
from ratoon_kernels.jit.spec import KernelSpec

# ptxas tells of ignored setmaxnreg (C7508) and of serialized wgmma (C7510) as mere information.
_WARNING: Final = re.compile(r"warning|Potential Performance Loss|\(C\d+\)", re.IGNORECASE)


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
