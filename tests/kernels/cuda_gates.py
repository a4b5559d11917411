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
        entry: The kernel's entry.
        defines: Which of its variants: those whose spec has these defines, and any others.
        max_registers: Per thread at entry, before any setmaxnreg.
        min_opcodes: The least number of instructions by opcode, such as {"HGMMA": 32}.
    """

    entry: str
    defines: Mapping[str, int]
    max_registers: int
    min_opcodes: Mapping[str, int]

    def is_of(self, spec: KernelSpec) -> bool:
        """Returns whether the gate is this kernel's."""
        return spec.entry == self.entry and self.defines.items() <= dict(spec.defines).items()


# Each kernel has exactly one.
GATES: tuple[Gate, ...] = ()


def gate_of(spec: KernelSpec) -> Gate:
    """Returns the gate of a kernel of the registry."""
    (gate,) = (gate for gate in GATES if gate.is_of(spec))
    return gate


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
