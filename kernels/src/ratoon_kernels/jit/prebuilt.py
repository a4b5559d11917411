"""Cubins shipped with the package, so that an image compiles nothing at its first step.

The folder has a manifest.json, by key (`Sources.key(compiler="")`) each cubin's file name and
sha256. A cubin that is not the manifest's is never returned.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any, Final

from ratoon_kernels.jit.spec import ARCH, PACKAGE_FOLDER

_logger = logging.getLogger(__name__)

PREBUILT_FOLDER: Final = PACKAGE_FOLDER / "cubins"
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1


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
