"""Machine code that is shipped: taken where it is intact and of these sources, else compiled."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratoon_kernels.jit import KernelCompileError, KernelSpec, cache, prebuild
from ratoon_kernels.jit.cache import MANIFEST, CubinFolders, find_cubin, find_prebuilt
from ratoon_kernels.jit.compiler import CompiledKernel, read_sources

KERNELS = Path(__file__).parents[2] / "kernels"
CODE = b"\x7fELF machine code"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels compiled so far by a compiler that refuses the entry "wrong"."""
    names: list[str] = []

    def compile_kernel(spec: KernelSpec, _: object) -> CompiledKernel:
        if spec.entry == "wrong":
            raise KernelCompileError(spec.name, "syntax error")
        names.append(spec.name)
        return CompiledKernel(cubin=CODE + spec.entry.encode(), log="")

    for module in (cache, prebuild):
        monkeypatch.setattr(module, "compile_kernel", compile_kernel)
        monkeypatch.setattr(module, "nvrtc_version", lambda: "13.0")
    return names


@pytest.fixture
def spec(tmp_path: Path) -> KernelSpec:
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k() {}\n')
    return KernelSpec(source=str(tmp_path / "k.cu"), entry="k", defines=(), params=())


@pytest.fixture
def folders(compiled: list[str], spec: KernelSpec, tmp_path: Path) -> CubinFolders:
    """The prebuilt folder holds the kernel, the cache nothing."""
    folder = tmp_path / "cubins"
    prebuild.prebuild([spec, replace(spec, defines=(("A", 1),))], folder)
    compiled.clear()
    return CubinFolders(prebuilt=folder, cache=None)


def _cubin_file(folders: CubinFolders, spec: KernelSpec) -> Path:
    manifest = json.loads((folders.prebuilt / MANIFEST).read_text())
    return folders.prebuilt / manifest["cubins"][read_sources(spec).key("")]["file"]


def test_a_shipped_kernel_needs_no_compiler(
    compiled: list[str],
    folders: CubinFolders,
    spec: KernelSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the compiler's version is another one, or there is none."""

    def absent() -> str:
        raise ImportError("no NVRTC")

    monkeypatch.setattr(cache, "nvrtc_version", absent)
    assert find_cubin(spec, folders) == CODE + b"k"
    assert compiled == []


def test_a_kernel_of_other_sources_is_compiled(
    compiled: list[str], folders: CubinFolders, spec: KernelSpec
) -> None:
    spec.path.write_text("// changed\n")
    assert find_cubin(spec, folders) == CODE + b"k"
    assert compiled == ["k"]


def test_an_altered_or_absent_shipped_kernel_is_compiled(
    compiled: list[str],
    folders: CubinFolders,
    spec: KernelSpec,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = _cubin_file(folders, spec)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert find_cubin(spec, folders) == CODE + b"k"
    assert "prebuilt kernel is not the manifest's" in caplog.text
    file.unlink()
    assert find_cubin(spec, folders) == CODE + b"k"
    assert "prebuilt kernel is not readable" in caplog.text
    assert compiled == ["k", "k"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"format": 2, "arch": "sm_90a", "cubins": {}}',
        b'{"format": 1, "arch": "sm_100a", "cubins": {}}',
        b'{"format": 1, "arch": "sm_90a", "cubins": []}',
        b'{"format": 1, "arch": "sm_90a", "cubins": {"k": {"file": 3, "sha256": ""}}}',
        b'{"format": 1, "arch": "sm_90a", "cubins": {"k": {"file": "k"}}}',
    ],
)
def test_a_manifest_that_is_not_ours_counts_as_none(
    content: bytes,
    compiled: list[str],
    folders: CubinFolders,
    spec: KernelSpec,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (folders.prebuilt / MANIFEST).write_bytes(content)
    assert find_cubin(spec, folders) == CODE + b"k"
    assert compiled == ["k"]
    assert "manifest of prebuilt kernels" in caplog.text


def test_a_manifest_reaches_no_file_outside_its_folder(
    folders: CubinFolders, spec: KernelSpec, tmp_path: Path
) -> None:
    key = read_sources(spec).key("")
    path = folders.prebuilt / MANIFEST
    manifest: dict[str, Any] = json.loads(path.read_text())
    entry = manifest["cubins"][key]
    (folders.prebuilt / entry["file"]).rename(tmp_path / "outside.cubin")
    for outside in ("../outside.cubin", str(tmp_path / "outside.cubin")):
        entry["file"] = outside
        path.write_text(json.dumps(manifest))
        assert find_prebuilt(folders.prebuilt, key) is None


def test_building_again_leaves_what_the_manifest_names(
    folders: CubinFolders, spec: KernelSpec
) -> None:
    before = {file.name for file in folders.prebuilt.iterdir()}
    assert len(before) == 3
    kept = _cubin_file(folders, spec).name
    prebuild.prebuild([spec], folders.prebuilt)
    assert {file.name for file in folders.prebuilt.iterdir()} == {MANIFEST, kept}


def test_a_kernel_that_does_not_compile_leaves_the_manifest_as_it_was(
    folders: CubinFolders, spec: KernelSpec
) -> None:
    with pytest.raises(KernelCompileError, match="wrong"):
        prebuild.prebuild([replace(spec, entry="wrong")], folders.prebuilt)
    assert find_prebuilt(folders.prebuilt, read_sources(spec).key("")) == CODE + b"k"


def test_the_wheel_ships_sources_and_cubins(tmp_path: Path) -> None:
    """A file that package data misses is found by no import: the kernel fails at its first use."""
    source = tmp_path / "kernels"
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__", "cubins", "build")
    shutil.copytree(KERNELS, source, ignore=ignored)
    package = source / "src" / "ratoon_kernels"
    (package / "cubins").mkdir()
    (package / "cubins" / MANIFEST).write_text("{}")
    (package / "cubins" / "k.cubin").write_bytes(CODE)
    csrc = package / "tree_attention" / "csrc"
    csrc.mkdir(exist_ok=True)
    (csrc / "probe.cu").write_text("")
    (csrc / "probe.cuh").write_text("")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", tmp_path / "wheels", source],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (file for file in package.rglob("*") if file.is_file())
    wanted = {
        str(file.relative_to(package.parent))
        for file in files
        if file.suffix in {".py", ".cu", ".cuh", ".cubin"} or file.name in {MANIFEST, "py.typed"}
    }
    assert shipped == wanted
    assert "ratoon_kernels/tree_attention/csrc/probe.cuh" in shipped
    assert "ratoon_kernels/cubins/k.cubin" in shipped
