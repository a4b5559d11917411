"""Compiles every kernel ahead, so that an image or a wheel ships machine code.

    python -m ratoon_kernels.jit.prebuild [--out FOLDER]

The manifest is written last, and names nothing that is not beside it. Needs NVRTC, but no GPU.
"""

import argparse
import hashlib
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ratoon_kernels.jit.cache import FORMAT, MANIFEST, PREBUILT_FOLDER
from ratoon_kernels.jit.compiler import compile_kernel, nvrtc_version, read_sources
from ratoon_kernels.jit.spec import ARCH, KernelSpec

_logger = logging.getLogger(__name__)


def prebuild(specs: Sequence[KernelSpec], folder: Path) -> None:
    """Compiles kernels into a folder, replaces its manifest and removes cubins of former sources.

    Raises:
        KernelCompileError: A kernel has an error; the manifest stays as it was.
        ImportError, RuntimeError: cuda-bindings or NVRTC is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cubins: dict[str, dict[str, str]] = {}
    for spec in specs:
        sources = read_sources(spec)
        compiled = compile_kernel(spec, sources)
        for warning in compiled.warnings:
            _logger.warning("kernel=%s warning=%s", spec.name, warning)
        key = sources.key(compiler="")
        file = f"{spec.entry}-{key[:16]}.cubin"
        _write(folder / file, compiled.cubin)
        cubins[key] = {
            "file": file,
            "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
            "kernel": spec.name,
            "nvrtc": nvrtc_version(),
        }
        _logger.info("kernel=%s file=%s size_bytes=%d", spec.name, file, len(compiled.cubin))
    manifest = {"format": FORMAT, "arch": ARCH, "cubins": cubins}
    _write(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    current = {cubin["file"] for cubin in cubins.values()}
    for file in folder.glob("*.cubin"):
        if file.name not in current:
            file.unlink()
    _logger.info("prebuilt kernels: folder=%s num_kernels=%d", folder, len(cubins))


def _write(file: Path, content: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        written = Path(scratch) / file.name
        written.write_bytes(content)
        written.replace(file)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m ratoon_kernels.jit.prebuild")
    parser.add_argument("--out", type=Path, default=PREBUILT_FOLDER, metavar="FOLDER")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    # Late, because the ops' modules import this package.
    from ratoon_kernels.tree_attention.cuda_specs import SPECS

    prebuild(SPECS, arguments.out)


if __name__ == "__main__":
    main()
