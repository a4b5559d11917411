"""Provides a kernel's machine code: shipped, cached on disk, or compiled now.

Code is loaded only where its sha256 is the recorded one; a torn or altered file counts as absent
and is compiled anew.
"""

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratoon_kernels.config import cache_folder
from ratoon_kernels.jit.compiler import compile_kernel, nvrtc_version
from ratoon_kernels.jit.prebuilt import PREBUILT_FOLDER, find_prebuilt
from ratoon_kernels.jit.sources import Sources, read_sources
from ratoon_kernels.jit.spec import KernelSpec

_logger = logging.getLogger(__name__)

# A kept file is this mark, the sha256 of the cubin, the cubin.
_MARK: Final = b"ratoon cubin 1\n\0"
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CubinFolders:
    """Folders in which cubins are looked for.

    Attributes:
        prebuilt: Folder with a manifest of shipped cubins; need not exist.
        cache: Folder that compiled kernels are kept in; None keeps them in this process alone.
    """

    prebuilt: Path
    cache: Path | None


@functools.cache
def get_cubin(spec: KernelSpec) -> bytes:
    """Returns a kernel's machine code, from the first place that has it.

    This process, the package's prebuilt cubins, the cache folder, the compiler.

    Raises:
        KernelCompileError: The kernel has an error.
        ImportError: cuda-bindings is not installed.
        RuntimeError: NVRTC's library is not found.
    """
    return find_cubin(spec, CubinFolders(prebuilt=PREBUILT_FOLDER, cache=cache_folder()))


def find_cubin(spec: KernelSpec, folders: CubinFolders) -> bytes:
    """Returns the machine code of `spec` from the given folders; newly compiled code is kept in
    `folders.cache`."""
    sources = read_sources(spec)
    prebuilt = find_prebuilt(folders.prebuilt, sources.key(compiler=""))
    if prebuilt is not None:
        return prebuilt
    key = sources.key(nvrtc_version())
    if folders.cache is None:
        return _compile(spec, sources)
    file = folders.cache / f"{key}.cubin"
    kept = _read_kept(file)
    if kept is not None:
        return kept
    cubin = _compile(spec, sources)
    try:
        _keep(file, cubin)
    except OSError as error:
        _tell_once(str(folders.cache), str(error))
    return cubin


def _compile(spec: KernelSpec, sources: Sources) -> bytes:
    compiled = compile_kernel(spec, sources)
    for warning in compiled.warnings:
        _logger.warning("kernel compiled with a warning: kernel=%s warning=%s", spec.name, warning)
    _logger.info("kernel compiled: kernel=%s size_bytes=%d", spec.name, len(compiled.cubin))
    return compiled.cubin


def _read_kept(file: Path) -> bytes | None:
    try:
        content = file.read_bytes()
    except OSError:
        return None
    start = len(_MARK) + _DIGEST_BYTES
    mark, digest, cubin = content[: len(_MARK)], content[len(_MARK) : start], content[start:]
    if mark != _MARK or digest != hashlib.sha256(cubin).digest():
        _logger.warning("kept kernel is damaged and compiled anew: file=%s", file)
        return None
    return cubin


def _keep(file: Path, cubin: bytes) -> None:
    """Writes a cubin so that a reader finds all of it or nothing, whoever else writes it."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem[:16]}-")
    try:
        with os.fdopen(handle, "wb") as output:
            output.write(_MARK + hashlib.sha256(cubin).digest() + cubin)
        Path(name).replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


@functools.cache
def _tell_once(folder: str, reason: str) -> None:
    _logger.warning("compiled kernels are not kept: folder=%s reason=%s", folder, reason)
