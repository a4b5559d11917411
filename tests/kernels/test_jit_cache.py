"""Kept and shipped machine code: what is loaded is what was compiled from these very sources."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ratoon_kernels.config import cache_folder
from ratoon_kernels.jit import KernelCompileError, KernelSpec, cache
from ratoon_kernels.jit.cache import CubinFolders, find_cubin, get_cubin
from ratoon_kernels.jit.compiler import CompiledKernel, Sources, read_sources


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels compiled so far, by a compiler whose code is a function of its input."""
    names: list[str] = []

    def compile_kernel(spec: KernelSpec, sources: Sources) -> CompiledKernel:
        names.append(spec.name)
        code = hashlib.sha256(f"{spec} {sources}".encode()).digest() * 100
        return CompiledKernel(cubin=code, log="ptxas info : Used 12 registers")

    monkeypatch.setattr(cache, "compile_kernel", compile_kernel)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: "13.0")
    cache._tell_once.cache_clear()
    return names


@pytest.fixture
def spec(tmp_path: Path) -> KernelSpec:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "inner.cuh").write_text("using u32 = unsigned;\n")
    (folder / "outer.cuh").write_text('# include "inner.cuh"\n')
    (folder / "k.cu").write_text('#include "outer.cuh"\nextern "C" __global__ void k() {}\n')
    return KernelSpec(source=str(folder / "k.cu"), entry="k", defines=(("A", 1),), params=())


@pytest.fixture
def folders(tmp_path: Path) -> CubinFolders:
    return CubinFolders(prebuilt=tmp_path / "prebuilt", cache=tmp_path / "cache" / "kernels")


def _kept(folders: CubinFolders) -> Path:
    assert folders.cache
    (file,) = folders.cache.iterdir()
    return file


def test_a_kernel_is_compiled_once_for_all_processes(
    compiled: list[str], spec: KernelSpec, folders: CubinFolders
) -> None:
    cubins = {find_cubin(spec, folders) for _ in range(3)}
    assert len(cubins) == 1
    assert compiled == ["k[A=1]"]
    assert _kept(folders).parent.stat().st_mode & 0o777 == 0o700


def _truncated(content: bytes) -> list[bytes]:
    return [content[:stop] for stop in (0, 1, 20, 47, 48, len(content) // 2, len(content) - 1)]


def _altered(content: bytes) -> list[bytes]:
    at = (0, 15, 16, 47, 48, len(content) - 1)
    changed = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in at]
    return [*changed, content + b"\0", b"\0" * len(content)]


@pytest.mark.parametrize("damage", [_truncated, _altered])
def test_a_damaged_file_is_compiled_anew_and_repaired(
    damage: Callable[[bytes], list[bytes]],
    compiled: list[str],
    spec: KernelSpec,
    folders: CubinFolders,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cubin = find_cubin(spec, folders)
    file = _kept(folders)
    intact = file.read_bytes()
    damaged = damage(intact)
    for content in damaged:
        file.write_bytes(content)
        assert find_cubin(spec, folders) == cubin
        assert file.read_bytes() == intact
    assert len(compiled) == 1 + len(damaged)
    assert caplog.text.count("is damaged and compiled anew") == len(damaged)


def test_readers_beside_writers_see_whole_files(tmp_path: Path) -> None:
    """Ranks of one host write the same file at once."""
    file = tmp_path / "cache" / "k.cubin"
    codes = [bytes([letter]) * 300_000 for letter in b"abcd"]
    cache._keep(file, codes[0])
    done = threading.Event()

    def write(code: bytes) -> None:
        while not done.is_set():
            cache._keep(file, code)

    writers = [threading.Thread(target=write, args=(code,)) for code in codes]
    for writer in writers:
        writer.start()
    read = [cache._read_kept(file) for _ in range(300)]
    done.set()
    for writer in writers:
        writer.join()
    assert set(read) <= set(codes)
    assert list(file.parent.iterdir()) == [file]


def test_an_unwritable_folder_costs_a_compile_and_one_log_line(
    compiled: list[str], spec: KernelSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    blocked = CubinFolders(prebuilt=tmp_path, cache=tmp_path / "file" / "kernels")
    nowhere = CubinFolders(prebuilt=tmp_path, cache=None)
    cubins = {find_cubin(spec, where) for where in (blocked, blocked, nowhere)}
    assert len(cubins) == 1
    assert len(compiled) == 3
    assert caplog.text.count("compiled kernels are not kept") == 1


@pytest.mark.usefixtures("compiled")
def test_a_failed_write_leaves_nothing_behind(
    spec: KernelSpec,
    folders: CubinFolders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    find_cubin(spec, folders)
    assert folders.cache
    assert list(folders.cache.iterdir()) == []


def test_the_compiler_s_warnings_are_logged(
    spec: KernelSpec,
    folders: CubinFolders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = "ptxas info : (C7508) Potential Performance Loss: 'setmaxnreg' ignored\nptxas info : 0"
    code = CompiledKernel(cubin=b"code", log=log)
    monkeypatch.setattr(cache, "compile_kernel", lambda *_: code)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: "13.0")
    caplog.set_level(logging.WARNING)
    find_cubin(spec, folders)
    (record,) = caplog.records
    assert "kernel=k[A=1]" in record.getMessage()
    assert "'setmaxnreg' ignored" in record.getMessage()


def test_one_process_reads_a_kernel_once(
    compiled: list[str], spec: KernelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATOON_KERNELS_CACHE", str(tmp_path / "own"))
    cubin = get_cubin(spec)
    (file,) = (tmp_path / "own").iterdir()
    file.unlink()
    assert get_cubin(spec) is cubin
    assert compiled == ["k[A=1]"]


def test_another_header_define_or_compiler_is_another_key(spec: KernelSpec) -> None:
    folder = spec.path.parent
    keys = [read_sources(spec).key("13.0"), read_sources(spec).key("13.1")]
    keys.append(read_sources(spec).key(""))
    (folder / "inner.cuh").write_text("using u32 = unsigned int;\n")
    keys.append(read_sources(spec).key("13.0"))
    (folder / "k.cu").write_text(spec.path.read_text() + "\n")
    keys.append(read_sources(spec).key("13.0"))
    for defines in ((("A", 2),), (("B", 1),), (("A", 1), ("B", 1)), ()):
        other = KernelSpec(source=spec.source, entry="k", defines=defines, params=())
        keys.append(read_sources(other).key("13.0"))
    assert len(set(keys)) == len(keys) == 9


def test_the_key_is_of_the_texts_and_not_of_their_folder(spec: KernelSpec, tmp_path: Path) -> None:
    moved = spec.path.parent.rename(tmp_path / "elsewhere")
    other = KernelSpec(source=str(moved / "k.cu"), entry="k", defines=spec.defines, params=())
    spec.path.parent.mkdir()
    for file in moved.iterdir():
        (spec.path.parent / file.name).write_text(file.read_text())
    assert read_sources(spec).key("13.0") == read_sources(other).key("13.0")


def test_missing_and_ambiguous_files_are_named(spec: KernelSpec) -> None:
    folder = spec.path.parent
    (folder / "sub").mkdir()
    (folder / "sub" / "inner.cuh").write_text("")
    (folder / "sub" / "more.cuh").write_text('#include "inner.cuh"\n')
    (folder / "inner.cuh").write_text('#include "sub/more.cuh"\n')
    with pytest.raises(KernelCompileError, match=r'#include "inner.cuh" is both'):
        read_sources(spec)
    (folder / "inner.cuh").write_text('  #  include "absent.cuh"\n')
    with pytest.raises(KernelCompileError, match=r'inner.cuh: .* #include "absent.cuh"'):
        read_sources(spec)
    spec.path.unlink()
    with pytest.raises(KernelCompileError, match=r"kernel k\[A=1\] .*\n.*no file .*k.cu"):
        read_sources(spec)


def test_defines_out_of_order_are_refused() -> None:
    with pytest.raises(AssertionError, match="not sorted and unique"):
        KernelSpec(source="k.cu", entry="k", defines=(("B", 1), ("A", 1)), params=())
    with pytest.raises(AssertionError, match="not sorted and unique"):
        KernelSpec(source="k.cu", entry="k", defines=(("A", 1), ("A", 2)), params=())


def test_the_cache_folder_is_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("RATOON_KERNELS_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_folder() == Path("/home/user/.cache/ratoon/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/ratoon/kernels")
    monkeypatch.setenv("RATOON_KERNELS_CACHE", "/own")
    assert cache_folder() == Path("/own")
