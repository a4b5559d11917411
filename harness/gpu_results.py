"""Defines what every GPU result contains, and when one may be written.

A result names the commit, sources, GPU and versions that it was measured on, so that a test can
tell when it is stale. A result that is kept although the sources have changed says why in a
top-level `stale`. Raw samples are under a key `samples` beside each figure made from them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
TESTS = RESULTS / "tests.json"
COMMIT_VARIABLE = "RATOON_COMMIT"
NOT_INSTALLED = "not installed"

SOURCE_FOLDERS = (
    "kernels/src/ratoon_kernels",
    "service/src/ratoon/model",
    "service/src/ratoon/train",
)
SOURCE_SUFFIXES = frozenset({".py", ".cu", ".cuh"})
LIBRARIES = (
    *("torch", "triton", "flash-attn-4", "numpy", "cuda-bindings"),
    *("nvidia-cuda-runtime", "nvidia-cudnn-cu13"),
)


def source_sha256(root: Path = ROOT) -> str:
    """Digest of the paths and contents of all sources that a GPU result depends on."""
    paths = [
        path
        for folder in SOURCE_FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in SOURCE_SUFFIXES and path.is_file()
    ]
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def describe_gpu(seed: int) -> dict[str, object]:
    """Commit, GPU, versions, seed and source digest of the current run."""
    has_gpu = torch.cuda.is_available()
    return {
        "commit": _commit(),
        "source_sha256": source_sha256(),
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
        "num_gpus": torch.cuda.device_count(),
        "versions": _versions(),
        "seed": seed,
    }


def write_result(path: Path, payload: Mapping[str, object], *, seed: int) -> None:
    """Write `payload` and `describe_gpu` as one JSON object, creating the folder.

    Raises:
        ValueError: The payload has a field of `describe_gpu`.
    """
    environment = describe_gpu(seed)
    if clash := sorted(environment.keys() & payload.keys()):
        raise ValueError(f"the payload has {clash}, which describe_gpu gives")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**environment, **payload}, indent=1) + "\n", encoding="utf-8")


def require_green_tests(path: Path = TESTS) -> None:
    """Let a benchmark continue only if the GPU tests passed on these very sources.

    Raises:
        SystemExit: The report is missing, of other sources, or not green; the message says which.
        RuntimeError: This tree's commit is unknown, so no result could be written.
    """
    _commit()
    problem = ""
    if not path.is_file():
        problem = "is absent"
    else:
        report = json.loads(path.read_text(encoding="utf-8"))
        if report["source_sha256"] != source_sha256():
            problem = "is a report on other sources"
        elif red := red_tests(report):
            problem = "\n  ".join([f"is red ({len(red)}):", *red[:10]])
    if problem:
        raise SystemExit(
            f"a benchmark needs green GPU tests of these sources: {path} {problem}\n"
            "`make test-gpu` writes it"
        )


def red_tests(report: Mapping[str, Any]) -> list[str]:
    """Why a report of `make test-gpu` is not green, one line per reason; empty if it is."""
    problems = [f"{t['outcome']}: {t['id']}" for t in report["tests"] if t["outcome"] != "passed"]
    problems += [f"not run: {test_id}" for test_id in report["not_run"]]
    if not report["tests"]:
        problems.append("no test ran")
    return problems


def _commit() -> str:
    """HEAD, with `-dirty` where the tree differs from it by more than result files.

    A copy of the tree without .git gets it from the environment.

    Raises:
        RuntimeError: There is neither.
    """
    if commit := os.environ.get(COMMIT_VARIABLE):
        return commit
    if not (ROOT / ".git").exists():
        raise RuntimeError(f"this tree has no .git: set {COMMIT_VARIABLE} to its commit")
    commit = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    has_gpu = torch.cuda.is_available()
    return {
        "driver": _driver_version() if has_gpu else NOT_INSTALLED,
        "cuda": torch.version.cuda or NOT_INSTALLED,
        "nvrtc": _nvrtc_version() if has_gpu else NOT_INSTALLED,
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
    }


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[0].strip()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def _nvrtc_version() -> str:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError:
        return NOT_INSTALLED
    _error, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"
