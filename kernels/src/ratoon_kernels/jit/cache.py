"""Provides a kernel's machine code: shipped with the package, cached on disk, or compiled now.

Code is loaded only where its sha256 is the recorded one; a torn or altered file counts as absent
and is compiled anew. The folder of shipped cubins has a manifest.json, by key
(`Sources.key(compiler="")`) each cubin's file name and sha256.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ratoon_kernels.config import cache_folder
from ratoon_kernels.jit.compiler import Sources, compile_kernel, nvrtc_version, read_sources
from ratoon_kernels.jit.spec import ARCH, PACKAGE_FOLDER, KernelSpec

_logger = logging.getLogger(__name__)
PREBUILT_FOLDER: Final = PACKAGE_FOLDER / "cubins"
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
# A kept file is this mark, the sha256 of the cubin, the cubin.
_MARK: Final = b"ratoon cubin 1\n\0"
_DIGEST_BYTES: Final = 32


def find_prebuilt(folder: Path, key: str) -> bytes | None:
    """Returns the shipped cubin of a kernel, or None where there is none that is intact."""
    entry = read_manifest(folder).get(key)
    if entry is None:
        return None
    try:
        cubin = (folder / entry["file"]).read_bytes()
    except OSError as error:
        _logger.warning("prebuilt kernel is not readable: file=%s: %s", entry["file"], error)
        return None
    if hashlib.sha256(cubin).hexdigest() != entry["sha256"]:
        _logger.warning("prebuilt kernel is not the manifest's: file=%s", entry["file"])
        return None
    return cubin


def read_manifest(folder: Path) -> dict[str, dict[str, str]]:
    """Returns `file` and `sha256` by key; empty where the folder has no manifest of ours."""
    path = folder / MANIFEST
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
        if (manifest["format"], manifest["arch"]) == (FORMAT, ARCH):
            return {
                key: {"file": Path(entry["file"]).name, "sha256": str(entry["sha256"])}
                for key, entry in manifest["cubins"].items()
            }
        _logger.warning("manifest of prebuilt kernels is of another format: file=%s", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _logger.warning("manifest of prebuilt kernels is damaged: file=%s: %r", path, error)
    return {}


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
