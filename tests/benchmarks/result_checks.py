"""What a committed GPU result must hold.

In: a result's content. Out: what is wrong with it, one line each. Invariant: a figure is only right
where the samples and sizes beside it give it again.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.forests import build
from benchmarks.families.main import SECTIONS, headline
from benchmarks.families.models import PRECISE
from benchmarks.kernels.attention import ALL_SHAPES, GPU_BACKENDS, GPU_GEOMETRY
from benchmarks.kernels.attention_report import OURS, targets
from benchmarks.kernels.attention_timing import MIN_SAMPLES
from harness.gpu_results import NOT_INSTALLED, red_tests

Result = dict[str, Any]

COMMIT = re.compile(r"[0-9a-f]{40}(-dirty)?")
# Their raw output stands in the place of samples.
WITHOUT_SAMPLES = ("tests.json", "sanitizer.json", "start.json", "start_1.7b.json")
GPU_MARKERS = {"gpu"}
FIGURES = ("fwd", "bwd")
# Figures of a step, and of how precise it is.
_FIGURE_OF = ("seconds", "ratio")


def staleness_problems(result: Result, source_sha256: str) -> Iterator[str]:
    stale = result.get("stale", "")
    if not isinstance(stale, str) or ("stale" in result and not stale.strip()):
        yield "stale: it is to be a reason in words"
    elif not stale and any(found != source_sha256 for found in _sources(result)):
        yield "the sources have changed: measure again, or say why not in a top-level `stale`"


def _sources(result: Result) -> Iterator[object]:
    """Source digests of the whole result, and of runs that have their own."""
    yield result.get("source_sha256")
    yield from (run["source_sha256"] for run in result.get("runs", ()) if "source_sha256" in run)


def provenance_problems(name: str, result: Result) -> Iterator[str]:
    if not COMMIT.fullmatch(str(result.get("commit"))):
        yield f"commit: {result.get('commit')}"
    if "H200" not in str(result.get("gpu")):
        yield f"gpu: {result.get('gpu')}, in the folder of the H200"
    if not isinstance(result.get("seed"), int):
        yield "seed: absent"
    for library in ("driver", "cuda", "torch", "python", "numpy"):
        if result.get("versions", {}).get(library, NOT_INSTALLED) == NOT_INSTALLED:
            yield f"versions: no {library}"
    if name not in WITHOUT_SAMPLES:
        samples = list(_samples(result))
        if not samples:
            yield "samples: none"
        if not all(_is_positive(values) for values in samples):
            yield "samples: a list is empty or has a value that is no positive number"


def report_problems(result: Result, tests_folder: Path) -> Iterator[str]:
    yield from red_tests(result)
    reported = {test["id"].partition("::")[0] for test in result["tests"]}
    root = tests_folder.parent
    for path in gpu_test_files(tests_folder):
        name = path.relative_to(root).as_posix()
        # What was added after a report that is of other sources, it has to name.
        if name not in reported and name not in result.get("stale", ""):
            yield f"no test of {path.relative_to(root)} ran"


def sanitizer_problems(result: Result) -> Iterator[str]:
    for tool in ("memcheck", "racecheck"):
        entry = result["tools"].get(tool)
        if entry is None or not entry["is_clean"]:
            yield f"{tool} is not clean"


def attention_problems(result: Result) -> Iterator[str]:
    geometry = {**asdict(GPU_GEOMETRY), "dtype": str(GPU_GEOMETRY.dtype)}
    if result["geometry"] != geometry:
        yield f"geometry: {result['geometry']}"
    if result["targets"] != [asdict(target) for target in targets(result["rows"])]:
        yield "targets: not those of the rows"
    runs = Counter(shape for run in result["runs"] for shape in run["shapes"])
    cells = Counter((row["shape"], row["backend"]) for row in result["rows"])
    for shape in ALL_SHAPES:
        if runs[shape] != 1:
            yield f"{shape}: in {runs[shape]} runs"
        for backend in GPU_BACKENDS:
            if cells[shape, backend] != 1:
                yield f"{shape}, {backend}: {cells[shape, backend]} rows"
        nodes = build(shape, result["seed"])
        sizes = result["shapes"].get(shape, {})
        if (sizes.get("tokens"), sizes.get("pairs")) != (nodes.num_tokens, nodes.num_pairs):
            yield f"{shape}: sizes are not those of the forest"
    for row in result["rows"]:
        cell = f"{row['shape']}, {row['backend']}"
        sizes = result["shapes"].get(row["shape"], {})
        yield from (f"{cell}: {problem}" for problem in _row_problems(row, sizes))


def families_problems(result: Result) -> Iterator[str]:
    for kind, figures in headline(result).items():
        if result[kind] != figures:
            yield f"{kind}: not that of the rows"
    cells = Counter((name, row["case"], row["how"]) for name in SECTIONS for row in result[name])
    yield from (f"{cell}: {count} rows" for cell, count in cells.items() if count > 1)
    for name in SECTIONS:
        for row in result[name]:
            problems = _family_row_problems(row)
            yield from (f"{name}, {row['case']}, {row['how']}: {each}" for each in problems)


def _family_row_problems(row: Result) -> Iterator[str]:
    if "error" in row:
        # A library may fail; its name is beside ours, or in its place.
        if row["how"] == "ours" or not row["error"].strip():
            yield f"error: {row['error']}"
        return
    samples = row["samples"]
    of_figure = (
        samples if isinstance(samples, dict) else {_FIGURE_OF[row["how"] == PRECISE]: samples}
    )
    for figure, values in of_figure.items():
        if row[figure] != statistics.median(values):
            yield f"{figure} is not the median of its samples"
    for name in FIGURES:
        rate, flops = row.get(f"{name}_tflops"), row.get(f"{name}_flops")
        if flops and rate != flops / row[f"{name}_ms"] / 1e9:
            yield f"{name}_tflops is not what {name}_ms gives"


def gpu_test_files(tests_folder: Path) -> Iterator[Path]:
    """Files that mark a test, or all of theirs, as one for GPUs."""
    for path in sorted(tests_folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(_is_gpu_marker(node) for node in ast.walk(tree)):
            yield path


def _row_problems(row: Result, sizes: Result) -> Iterator[str]:
    if "error" in row:
        if row["backend"] == OURS or not row["error"].strip():
            yield f"error: {row['error']}"
        return
    pairs = sizes.get("replicated_pairs" if row["backend"].endswith("-replicated") else "pairs")
    if row["num_pairs"] != pairs:
        yield f"{row['num_pairs']} pairs, not {pairs}"
    flops = {
        "fwd": GPU_GEOMETRY.forward_flops(row["num_pairs"]),
        "bwd": GPU_GEOMETRY.backward_flops(row["num_pairs"]),
    }
    for name in FIGURES:
        samples = row["samples"][f"{name}_ms"]
        if len(samples) < MIN_SAMPLES:
            yield f"{len(samples)} samples of {name}"
        elif abs(row[f"{name}_ms"] / statistics.median(samples) - 1) > 1e-9:
            yield f"{name}_ms is not the median of its samples"
        if abs(row[f"{name}_tflops"] * row[f"{name}_ms"] * 1e9 / flops[name] - 1) > 1e-9:
            yield f"{name}_tflops is not what {name}_ms gives"
    if not row.get("peak_gib", 0) > 0:
        yield "no peak_gib"


def _is_gpu_marker(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in GPU_MARKERS
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
    )


def _samples(value: Any) -> Iterator[list[Any]]:
    """Every list of numbers that is, or is anywhere below, a value of the key `samples`."""
    if isinstance(value, list):
        for item in value:
            yield from _samples(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "samples":
                yield from item.values() if isinstance(item, dict) else [item]
            else:
                yield from _samples(item)


def _is_positive(values: Any) -> bool:
    return bool(values) and all(isinstance(v, int | float) and v > 0 for v in values)
