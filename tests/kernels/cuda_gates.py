"""What each CUDA kernel may use and must contain.

A kernel that spills, or that fell back from the tensor cores or the copy engine, still computes the
right values: only this table says that it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ratoon_kernels.jit import KernelSpec
from ratoon_kernels.jit.params import layout_params
from tests.kernels.cubin_report import CubinReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Bounds of one kernel. Spills and local memory have none: they are never allowed.

    Attributes:
        max_registers: Per thread at entry, before any setmaxnreg.
        min_opcodes: The least number of instructions by opcode, such as {"HGMMA": 32}.
    """

    max_registers: int
    min_opcodes: Mapping[str, int]


# By the spec's name.
GATES: dict[str, Gate] = {}


def violations(spec: KernelSpec, gate: Gate, report: CubinReport) -> list[str]:
    """Returns what is wrong with a kernel, a line each; empty where it passes."""
    wrong: list[str] = []
    if report.registers > gate.max_registers:
        wrong.append(f"{report.registers} registers, at most {gate.max_registers}")
    if report.spill_bytes:
        wrong.append(f"{report.spill_bytes} bytes of spills")
    if report.stack_bytes:
        wrong.append(f"{report.stack_bytes} bytes of local memory")
    local = report.opcodes["STL"] + report.opcodes["LDL"]
    if local:
        wrong.append(f"{local} STL and LDL, which are accesses of local memory")
    wrong.extend(
        f"{report.opcodes[opcode]} {opcode}, at least {least}"
        for opcode, least in gate.min_opcodes.items()
        if report.opcodes[opcode] < least
    )
    declared = layout_params(spec.params).sizes_bytes
    if report.param_sizes_bytes != declared:
        wrong.append(f"parameters of {report.param_sizes_bytes} bytes, the spec says {declared}")
    return wrong
