"""What each CUDA kernel may use and must contain.

A kernel that spills, or that fell back from the tensor cores or the copy engine, still computes the
right values: only this table says that it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ratoon_kernels.jit import KernelSpec
from ratoon_kernels.jit.spec import layout_params
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


# setmaxnreg of both roles; loads of tiles, then of rows of `end` and of statistics, in all copies
# that the compiler makes of the producer's loop.
_LOADS_OF_FORWARD: Final = {"USETMAXREG": 2, "UTMALDG": 6, "UBLKCP": 2}
_LOADS_OF_BACKWARD: Final = {"USETMAXREG": 2, "UTMALDG": 4, "UBLKCP": 2}
_LOADS_OF_QUERIES: Final = {"USETMAXREG": 2, "UTMALDG": 16, "UBLKCP": 7}
_LOADS_OF_WIDE_QUERIES: Final = {"USETMAXREG": 2, "UTMALDG": 4, "UBLKCP": 1}
# dS goes through shared memory; each consumer's dQ is added up, that of wide heads from registers.
_SUMS_OF_DQ: Final = {"STSM": 4 * 5, "UBLKRED": 2}
_SUMS_OF_WIDE_DQ: Final = {"STSM": 4 * 5}

# Each kernel has exactly one.
#
# HGMMA: a product that sums over d takes d / 16, and has a copy at each place that issues it. The
# forward has two: in its loop, and before or behind it. The backward has four: two stages, times
# the first step of a piece and the others; of dQ, a step late, stages times the others and the end.
# All copies are counted, so that no product can disappear or fall back to other instructions
# unseen. With 192 dimensions dQ has the consumer's own 64 and the last. With 256 the consumers have
# a product of logits and one of gradients each, and REDG adds 16 bytes of a thread: 64 dimensions
# of dQ take 10. UTMASTG stores 64 channels.
GATES: tuple[Gate, ...] = (
    Gate(
        entry="tree_attention_forward",
        defines={"HEAD_DIM": 64, "PARTIAL": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 2 * (4 + 8), "UTMASTG": 1, "STSM": 4, **_LOADS_OF_FORWARD},
    ),
    Gate(
        entry="tree_attention_forward",
        defines={"HEAD_DIM": 64, "PARTIAL": 1},
        max_registers=168,
        min_opcodes={"HGMMA": 2 * (4 + 8), **_LOADS_OF_FORWARD},
    ),
    Gate(
        entry="tree_attention_forward",
        defines={"HEAD_DIM": 128, "PARTIAL": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 2 * (8 + 8), "UTMASTG": 2, "STSM": 8, **_LOADS_OF_FORWARD},
    ),
    Gate(
        entry="tree_attention_forward",
        defines={"HEAD_DIM": 128, "PARTIAL": 1},
        max_registers=168,
        min_opcodes={"HGMMA": 2 * (8 + 8), **_LOADS_OF_FORWARD},
    ),
    Gate(
        entry="tree_attention_forward",
        defines={"HEAD_DIM": 192, "PARTIAL": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 2 * (12 + 8), "UTMASTG": 2, "STSM": 8, **_LOADS_OF_FORWARD},
    ),
    Gate(
        entry="tree_attention_forward",
        defines={"HEAD_DIM": 192, "PARTIAL": 1},
        max_registers=168,
        min_opcodes={"HGMMA": 2 * (12 + 8), **_LOADS_OF_FORWARD},
    ),
    Gate(
        entry="tree_attention_forward",
        defines={"HEAD_DIM": 256, "PARTIAL": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 2 * (16 + 4), "UTMASTG": 4, "STSM": 16, **_LOADS_OF_FORWARD},
    ),
    Gate(
        entry="tree_attention_forward",
        defines={"HEAD_DIM": 256, "PARTIAL": 1},
        max_registers=168,
        min_opcodes={"HGMMA": 2 * (16 + 4), **_LOADS_OF_FORWARD},
    ),
    Gate(
        entry="tree_attention_backward",
        defines={"HEAD_DIM": 64, "WITH_DQ": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 4 * (4 + 4 + 5 + 5), **_LOADS_OF_BACKWARD},
    ),
    Gate(
        entry="tree_attention_backward",
        defines={"HEAD_DIM": 64, "WITH_DQ": 1},
        max_registers=168,
        min_opcodes={"HGMMA": 4 * (4 + 4 + 5 + 5 + 8), **_LOADS_OF_BACKWARD, **_SUMS_OF_DQ},
    ),
    Gate(
        entry="tree_attention_backward",
        defines={"HEAD_DIM": 128, "WITH_DQ": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 4 * (8 + 8 + 5 + 5), **_LOADS_OF_BACKWARD},
    ),
    Gate(
        entry="tree_attention_backward",
        defines={"HEAD_DIM": 128, "WITH_DQ": 1},
        max_registers=168,
        min_opcodes={"HGMMA": 4 * (8 + 8 + 5 + 5 + 8), **_LOADS_OF_BACKWARD, **_SUMS_OF_DQ},
    ),
    Gate(
        entry="tree_attention_backward",
        defines={"HEAD_DIM": 192, "WITH_DQ": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 4 * (12 + 8 + 3 + 3), **_LOADS_OF_BACKWARD},
    ),
    Gate(
        entry="tree_attention_backward",
        defines={"HEAD_DIM": 192, "WITH_DQ": 1},
        max_registers=168,
        min_opcodes={
            "HGMMA": 4 * (12 + 8 + 3 + 3 + 2 * 8),
            **_LOADS_OF_BACKWARD,
            "STSM": 4 * 3,
            "UBLKRED": 4,
        },
    ),
    Gate(
        entry="tree_attention_backward",
        defines={"HEAD_DIM": 256, "WITH_DQ": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 4 * (16 + 16 + 5 + 5), **_LOADS_OF_BACKWARD},
    ),
    Gate(
        entry="tree_attention_backward",
        defines={"HEAD_DIM": 256, "WITH_DQ": 1},
        max_registers=168,
        min_opcodes={
            "HGMMA": 4 * (16 + 16 + 5 + 5 + 4 * 4),
            "REDG": 4 * 4 * 10,
            **_LOADS_OF_BACKWARD,
            **_SUMS_OF_WIDE_DQ,
        },
    ),
    Gate(
        entry="tree_attention_backward_queries",
        defines={"HEAD_DIM": 64, "PARTIAL": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 4 + 4 + 8, "UTMASTG": 1, "STSM": 4, **_LOADS_OF_QUERIES},
    ),
    Gate(
        entry="tree_attention_backward_queries",
        defines={"HEAD_DIM": 64, "PARTIAL": 1},
        max_registers=168,
        min_opcodes={"HGMMA": 4 + 4 + 8, **_LOADS_OF_QUERIES},
    ),
    Gate(
        entry="tree_attention_backward_queries",
        defines={"HEAD_DIM": 128, "PARTIAL": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 8 + 8 + 8, "UTMASTG": 2, "STSM": 8, **_LOADS_OF_QUERIES},
    ),
    Gate(
        entry="tree_attention_backward_queries",
        defines={"HEAD_DIM": 128, "PARTIAL": 1},
        max_registers=168,
        min_opcodes={"HGMMA": 8 + 8 + 8, **_LOADS_OF_QUERIES},
    ),
    Gate(
        entry="tree_attention_backward_queries",
        defines={"HEAD_DIM": 192, "PARTIAL": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 12 + 8 + 4, "UTMASTG": 3, "STSM": 12, **_LOADS_OF_WIDE_QUERIES},
    ),
    Gate(
        entry="tree_attention_backward_queries",
        defines={"HEAD_DIM": 192, "PARTIAL": 1},
        max_registers=168,
        min_opcodes={"HGMMA": 12 + 8 + 4, **_LOADS_OF_WIDE_QUERIES},
    ),
    Gate(
        entry="tree_attention_backward_queries",
        defines={"HEAD_DIM": 256, "PARTIAL": 0},
        max_registers=168,
        min_opcodes={"HGMMA": 16 + 16 + 4, "UTMASTG": 4, "STSM": 16, **_LOADS_OF_WIDE_QUERIES},
    ),
    Gate(
        entry="tree_attention_backward_queries",
        defines={"HEAD_DIM": 256, "PARTIAL": 1},
        max_registers=168,
        min_opcodes={"HGMMA": 16 + 16 + 4, **_LOADS_OF_WIDE_QUERIES},
    ),
    Gate(
        entry="tree_attention_backward_prepare",
        defines={},
        max_registers=40,
        min_opcodes={},
    ),
    Gate(
        entry="tree_attention_backward_finish_queries",
        defines={},
        max_registers=48,
        min_opcodes={},
    ),
    Gate(
        entry="tree_attention_backward_finish_keys",
        defines={},
        max_registers=40,
        min_opcodes={},
    ),
)


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
