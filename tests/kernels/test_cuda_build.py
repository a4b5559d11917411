"""Every CUDA kernel compiles for sm_90a without a GPU, without warnings, and within its gate."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ratoon_kernels.jit import KernelCompileError, KernelSpec, Param
from ratoon_kernels.jit.compiler import CompiledKernel, nvrtc_version
from ratoon_kernels.tree_attention.cuda_specs import SPECS
from tests.kernels import cubin_report
from tests.kernels.cubin_report import (
    CubinReport,
    compile_once,
    inspect_cubin,
    missing_tool,
    require_tools,
)
from tests.kernels.cuda_gates import GATES, Gate, gate_of, violations
from tests.kernels.cuda_kernels import SCALARS, SPILLS, TILE_COPY, kernel, tile_copy, warpgroup_mma


def _every_kernel() -> list[object]:
    """The first of each entry; its other variants are left to `make test-slow`."""
    entries: set[str] = set()
    params: list[object] = []
    for spec in SPECS:
        marks = [pytest.mark.slow] if spec.entry in entries else []
        entries.add(spec.entry)
        params.append(pytest.param(spec, id=spec.name, marks=marks))
    return params


EVERY_KERNEL = pytest.mark.parametrize("spec", _every_kernel())
WIDE = Gate(entry="any", defines={}, max_registers=255, min_opcodes={})


@pytest.fixture(scope="session")
def compiled(pytestconfig: pytest.Config) -> Callable[[KernelSpec], CompiledKernel]:
    """Compiles a kernel once per text of its sources."""
    require_tools()
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("cubins")
    return functools.cache(lambda spec: compile_once(spec, folder))


@pytest.fixture
def report(
    compiled: Callable[[KernelSpec], CompiledKernel], tmp_path: Path
) -> Callable[[KernelSpec], CubinReport]:
    return lambda spec: inspect_cubin(spec, compiled(spec), tmp_path)


def test_every_kernel_has_a_name_of_its_own_and_one_gate() -> None:
    specs = SPECS
    assert len({spec.name for spec in specs}) == len(specs)
    gates = {spec.name: sum(gate.is_of(spec) for gate in GATES) for spec in specs}
    assert [name for name, count in gates.items() if count != 1] == []
    assert [gate for gate in GATES if not any(gate.is_of(spec) for spec in specs)] == []


def test_a_gate_is_of_the_variants_with_its_defines() -> None:
    gate = replace(WIDE, entry="tile_copy", defines={"HEAD_DIM": 128})
    assert gate.is_of(TILE_COPY)
    assert not gate.is_of(tile_copy(head_dim=64, rows=64, is_bf16=True))
    assert not gate.is_of(SPILLS)
    assert not replace(gate, defines={"HEAD_DIM": 128, "OTHER": 1}).is_of(TILE_COPY)


@EVERY_KERNEL
def test_kernel_compiles_without_warnings(
    spec: KernelSpec, compiled: Callable[[KernelSpec], CompiledKernel]
) -> None:
    assert compiled(spec).warnings == ()


@EVERY_KERNEL
def test_kernel_is_within_its_gate(
    spec: KernelSpec, report: Callable[[KernelSpec], CubinReport]
) -> None:
    assert violations(spec, gate_of(spec), report(spec)) == []


def test_gate_passes_a_kernel_that_has_what_it_asks_for(
    report: Callable[[KernelSpec], CubinReport],
) -> None:
    mma = warpgroup_mma(is_serialized=False)
    assert violations(mma, replace(WIDE, min_opcodes={"HGMMA": 2}), report(mma)) == []
    loads = replace(WIDE, min_opcodes={"UTMALDG": 1, "SYNCS": 1})
    assert violations(TILE_COPY, loads, report(TILE_COPY)) == []
    assert violations(SCALARS, WIDE, report(SCALARS)) == []


@pytest.mark.more
def test_gate_refuses_spills_and_local_memory(
    report: Callable[[KernelSpec], CubinReport],
) -> None:
    spilled = report(SPILLS)
    assert spilled.registers == 64
    wrong = violations(SPILLS, WIDE, spilled)
    for what in ("bytes of spills", "bytes of local memory", "STL and LDL"):
        assert sum(what in line for line in wrong) == 1, wrong


@pytest.mark.more
def test_gate_refuses_too_many_registers(report: Callable[[KernelSpec], CubinReport]) -> None:
    tight = replace(WIDE, max_registers=63)
    assert "64 registers, at most 63" in violations(SPILLS, tight, report(SPILLS))


@pytest.mark.more
def test_gate_refuses_a_kernel_without_the_instructions_it_needs(
    report: Callable[[KernelSpec], CubinReport],
) -> None:
    asked = replace(WIDE, min_opcodes={"HGMMA": 1, "UTMALDG": 1})
    assert violations(TILE_COPY, asked, report(TILE_COPY)) == ["0 HGMMA, at least 1"]
    mma = warpgroup_mma(is_serialized=False)
    asked = replace(WIDE, min_opcodes={"HGMMA": 3})
    assert violations(mma, asked, report(mma)) == ["2 HGMMA, at least 3"]


@pytest.mark.more
@pytest.mark.parametrize(
    "params",
    [TILE_COPY.params[:-1], (*TILE_COPY.params[:-1], Param.INT64), TILE_COPY.params[::-1]],
    ids=["one less", "one wider", "another order"],
)
def test_gate_refuses_a_spec_with_other_parameters(
    params: tuple[Param, ...], report: Callable[[KernelSpec], CubinReport]
) -> None:
    spec = replace(TILE_COPY, params=params)
    (wrong,) = violations(spec, WIDE, report(spec))
    assert wrong.startswith("parameters of (128, 8, 4, 8, 4) bytes, the spec says")


@pytest.mark.more
def test_serialized_matrix_instructions_are_a_warning(
    compiled: Callable[[KernelSpec], CompiledKernel],
) -> None:
    assert compiled(warpgroup_mma(is_serialized=False)).warnings == ()
    warnings = compiled(warpgroup_mma(is_serialized=True)).warnings
    assert any("wgmma.mma_async instructions are serialized" in line for line in warnings)


@pytest.mark.more
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");', "'setmaxnreg' ignored"),
        ("int unused;", '"unused" was declared but never referenced'),
    ],
)
def test_what_the_compiler_ignores_is_a_warning(
    body: str,
    expected: str,
    compiled: Callable[[KernelSpec], CompiledKernel],
    tmp_path: Path,
) -> None:
    source = tmp_path / "doubtful.cu"
    source.write_text(f'extern "C" __global__ void doubtful(int* out) {{ {body} out[0] = 1; }}')
    spec = replace(kernel("doubtful", (Param.POINTER,)), source=str(source))
    assert any(expected in line for line in compiled(spec).warnings)


def test_an_error_of_the_source_is_the_compiler_s_message(
    compiled: Callable[[KernelSpec], CompiledKernel], tmp_path: Path
) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text('extern "C" __global__ void wrong(int* out) {\n  out[0] = missing;\n}\n')
    spec = replace(kernel("wrong", (Param.POINTER,)), source=str(source))
    with pytest.raises(KernelCompileError, match=r"wrong.cu\(2\).*missing") as error:
        compiled(spec)
    assert error.value.kernel == "wrong"


def test_a_missing_tool_fails_in_continuous_integration_and_skips_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cubin_report, "missing_tool", lambda: "no cuobjdump")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match="no cuobjdump"):
        require_tools()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no cuobjdump"):
        require_tools()


def test_a_tool_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    nvrtc_version.cache_clear()
    assert "cuda.bindings.nvrtc" in str(missing_tool())
