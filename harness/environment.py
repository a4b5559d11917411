"""Describes where and on what a figure was measured, for result files."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "numpy", "ray", "grpcio", "protobuf", "ratoon")


def describe(seed: int) -> dict[str, object]:
    """Commit (with `-dirty` if the tree differs), device, versions and seed of a run."""
    return {
        "commit": _commit(),
        "device": _cpu_model(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in LIBRARIES},
        "seed": seed,
    }


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
