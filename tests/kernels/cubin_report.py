"""What a compiled kernel uses and which instructions it has, without a GPU.

In: a spec and its compiled kernel. Out: `CubinReport`, from the compiler's log and from cuobjdump
and nvdisasm of their wheels. Invariant: what their output does not say is an error, never a zero.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratoon_kernels.jit import KernelSpec
from ratoon_kernels.jit.compiler import CompiledKernel, compile_kernel, nvrtc_version, read_sources

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE
)
_PARAM = re.compile(r"Ordinal : 0x([0-9a-f]+)\s+Offset\s+: 0x[0-9a-f]+\s+Size\s+: 0x([0-9a-f]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinReport:
    """Resources of one kernel.

    Attributes:
        registers: Per thread, at entry.
        stack_bytes: Per thread; local memory.
        static_shared_bytes: Per block, with the driver's own 1024.
        spill_bytes: Stores and loads of spilled registers, in bytes of instructions.
        param_sizes_bytes: Sizes of the kernel's parameters, in order.
        opcodes: Number of instructions by opcode without its suffixes: "HGMMA", "UTMALDG".
    """

    registers: int
    stack_bytes: int
    static_shared_bytes: int
    spill_bytes: int
    param_sizes_bytes: tuple[int, ...]
    opcodes: Counter[str]


def missing_tool() -> str | None:
    """Returns which of the compiler and the tools is not installed, or None."""
    try:
        nvrtc_version()
        for tool in ("cuobjdump", "nvdisasm"):
            _tool(tool)
    except (ImportError, RuntimeError) as error:
        return f"{error}: pip install -c constraints.txt -r requirements-dev.txt"
    return None


def require_tools() -> None:
    """Skips the test where a tool is missing; in continuous integration that is a failure."""
    missing = missing_tool()
    if missing is not None:
        assert not os.environ.get("CI"), missing
        pytest.skip(missing)


def compile_once(spec: KernelSpec, folder: Path) -> CompiledKernel:
    """Returns the kernel, from `folder` where these sources were compiled before."""
    sources = read_sources(spec)
    kept = folder / f"{sources.key(nvrtc_version())}.json"
    if kept.is_file():
        texts = json.loads(kept.read_text(encoding="utf-8"))
        return CompiledKernel(cubin=base64.b64decode(texts["cubin"]), log=texts["log"])
    compiled = compile_kernel(spec, sources)
    texts = {"cubin": base64.b64encode(compiled.cubin).decode(), "log": compiled.log}
    # Another worker may compile the same.
    own = kept.with_suffix(f".{os.getpid()}")
    own.write_text(json.dumps(texts), encoding="utf-8")
    own.replace(kept)
    return compiled


def inspect_cubin(spec: KernelSpec, compiled: CompiledKernel, folder: Path) -> CubinReport:
    """Returns the report; the cubin is written below `folder`."""
    file = folder / f"{spec.entry}.cubin"
    file.write_bytes(compiled.cubin)
    function = rf"Function {re.escape(spec.entry)}:\s+(.*)"
    usage = _search(_USAGE, _search(re.compile(function), _dump("-res-usage", file)).group(1))
    registers, stack, shared, local = (int(number) for number in usage.groups())
    spills = [int(number) for found in _SPILLS.findall(compiled.log) for number in found]
    assert spills, compiled.log
    elf = _dump("-elf", file)
    info = elf[elf.index(f"\n.nv.info.{spec.entry}\n") :].split("\n\n\n", 1)[0]
    params = {int(ordinal, 16): int(size, 16) for ordinal, size in _PARAM.findall(info)}
    sass = _dump("-sass", file, "--function", spec.entry)
    opcodes = Counter(_INSTRUCTION.findall(sass))
    assert opcodes["EXIT"], sass[:2000]
    return CubinReport(
        registers=registers,
        stack_bytes=stack + local,
        static_shared_bytes=shared,
        spill_bytes=sum(spills),
        param_sizes_bytes=tuple(params[index] for index in range(len(params))),
        opcodes=opcodes,
    )


def _search(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    found = pattern.search(text)
    assert found, f"no {pattern.pattern} in {text[:2000]}"
    return found


def _dump(what: str, file: Path, *options: str) -> str:
    done = subprocess.run(
        [_tool("cuobjdump"), what, *options, file],
        env={"PATH": str(_tool("nvdisasm").parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def _tool(name: str) -> Path:
    """Returns the tool's file in its wheel.

    Raises:
        ImportError: The wheel is not installed.
    """
    wheel = importlib.metadata.distribution(f"nvidia-cuda-{name}")
    for file in wheel.files or ():
        if file.name == name:
            return Path(str(wheel.locate_file(file)))
    raise ImportError(f"the wheel nvidia-cuda-{name} has no {name}")
