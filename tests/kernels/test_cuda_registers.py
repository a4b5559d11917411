"""The register shares of the kernels' roles: a mistake there is a hang on the GPU, or nothing.

A block is launched with as many registers a thread as its kernel has at entry. `setmaxnreg` moves
them from the warpgroup that loads to those that multiply; what these ask for beyond what there is,
they wait for without end.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ratoon_kernels.jit import KernelCompileError, KernelSpec
from ratoon_kernels.jit.compiler import Sources, compile_kernel, read_sources
from ratoon_kernels.tree_attention.cuda_specs import SPECS
from tests.kernels.cubin_report import inspect_cubin, require_tools

NUM_CONSUMERS = 2
NUM_WARPGROUPS = 1 + NUM_CONSUMERS


def _first_of_each_source() -> list[KernelSpec]:
    """One kernel of each source that moves registers, which all of its variants do alike."""
    first: dict[str, KernelSpec] = {}
    for spec in SPECS:
        if "give_registers<" in read_sources(spec).text:
            first.setdefault(spec.source, spec)
    return list(first.values())


EVERY_SOURCE = pytest.mark.parametrize(
    "spec", _first_of_each_source(), ids=lambda spec: Path(spec.source).stem
)


def _constant(role: str) -> re.Pattern[str]:
    return re.compile(rf"(constexpr int {role}_REGISTERS = )(\d+);")


def _shares(sources: Sources) -> tuple[int, int]:
    """Registers of a producer's thread and of a consumer's."""
    text = "\n".join((sources.text, *sources.headers.values()))
    (producer,), (consumer,) = (_constant(role).findall(text) for role in ("PRODUCER", "CONSUMER"))
    return int(producer[1]), int(consumer[1])


def _with_share(sources: Sources, role: str, registers: int) -> Sources:
    """The sources with another number in the one place where a role's share stands."""

    def plant(text: str) -> str:
        return _constant(role).sub(rf"\g<1>{registers};", text)

    headers = {name: plant(text) for name, text in sources.headers.items()}
    return replace(sources, text=plant(sources.text), headers=headers)


def test_the_three_kernels_with_roles_are_found() -> None:
    names = {Path(spec.source).stem for spec in _first_of_each_source()}
    assert names == {"forward", "backward", "backward_queries"}


@EVERY_SOURCE
def test_the_roles_take_no_more_registers_than_the_block_has(
    spec: KernelSpec, tmp_path: Path
) -> None:
    """Read from the cubin: the sources' assertion trusts the compiler to give 168."""
    require_tools()
    sources = read_sources(spec)
    producer, consumer = _shares(sources)
    report = inspect_cubin(spec, compile_kernel(spec, sources), tmp_path)
    assert producer + NUM_CONSUMERS * consumer <= NUM_WARPGROUPS * report.registers
    # The instruction takes multiples of 8 from 24 to 256.
    assert producer % 8 == consumer % 8 == 0
    assert 24 <= producer < report.registers < consumer <= 255


@EVERY_SOURCE
@pytest.mark.parametrize("role", ["PRODUCER", "CONSUMER"])
def test_a_share_that_does_not_fit_is_refused_by_the_compiler(spec: KernelSpec, role: str) -> None:
    require_tools()
    sources = read_sources(spec)
    producer, consumer = _shares(sources)
    room = NUM_WARPGROUPS * 168 - producer - NUM_CONSUMERS * consumer
    own, count = (producer, 1) if role == "PRODUCER" else (consumer, NUM_CONSUMERS)
    too_many = own + room // count // 8 * 8 + 8  # the least multiple of 8 that is
    planted = _with_share(sources, role, too_many)
    assert planted != sources
    with pytest.raises(KernelCompileError, match="static assertion failed"):
        compile_kernel(spec, planted)
