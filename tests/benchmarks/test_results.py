"""The committed GPU results: that they are of this tree, and that the checks see what is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.forests import build
from benchmarks.kernels.attention import ALL_SHAPES, GPU_BACKENDS, GPU_GEOMETRY
from benchmarks.kernels.attention_report import targets, write_markdown
from harness.gpu_results import RESULTS, ROOT, source_sha256
from tests.benchmarks.result_checks import (
    Result,
    attention_problems,
    families_problems,
    gpu_test_files,
    provenance_problems,
    report_problems,
    sanitizer_problems,
    staleness_problems,
)

FILES = sorted(RESULTS.glob("*.json"))
NAMES = [path.name for path in FILES]
TESTS_FOLDER = ROOT / "tests"


def _read(path: Path) -> Result:
    return json.loads(path.read_text(encoding="utf-8"))


def test_required_results_are_committed() -> None:
    assert {"attention.json", "sanitizer.json", "tests.json"} <= set(NAMES)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_result_is_of_these_sources(path: Path) -> None:
    assert list(staleness_problems(_read(path), source_sha256())) == []


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_result_says_what_it_was_measured_on(path: Path) -> None:
    assert list(provenance_problems(path.name, _read(path))) == []


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "tests.json"], ids=str)
def test_every_gpu_test_passed(path: Path) -> None:
    assert list(report_problems(_read(path), TESTS_FOLDER)) == []


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "sanitizer.json"], ids=str)
def test_kernels_are_clean_under_the_sanitizer(path: Path) -> None:
    assert list(sanitizer_problems(_read(path))) == []


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "families.json"], ids=str)
def test_figures_of_families_follow_from_their_samples(path: Path) -> None:
    assert list(families_problems(_read(path))) == []


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "attention.json"], ids=str)
def test_attention_figures_follow_from_their_samples(path: Path) -> None:
    assert list(attention_problems(_read(path))) == []


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "attention.json"], ids=str)
def test_document_shows_the_committed_figures(path: Path, tmp_path: Path) -> None:
    document = ROOT / "docs" / "kernels.md"
    image = Path("images") / "attention.png"
    assert (document.parent / image).is_file()
    written = tmp_path / "kernels.md"
    written.write_text(document.read_text(encoding="utf-8"), encoding="utf-8")
    link = Path("..") / path.relative_to(ROOT)
    write_markdown(_read(path), written, link.as_posix(), image.as_posix())
    assert document.read_text(encoding="utf-8") == written.read_text(encoding="utf-8")


@cache
def _attention() -> Result:
    """A right result, of figures made up."""
    rows: list[Result] = []
    shapes: dict[str, dict[str, int]] = {}
    for shape in ALL_SHAPES:
        nodes = build(shape, 0)
        shapes[shape] = {
            "tokens": nodes.num_tokens,
            "pairs": nodes.num_pairs,
            "replicated_pairs": 3 * nodes.num_pairs,
        }
        for backend in GPU_BACKENDS:
            is_replicated = backend.endswith("-replicated")
            num_pairs = nodes.num_pairs * (3 if is_replicated else 1)
            rows.append(
                {
                    "shape": shape,
                    "backend": backend,
                    "num_pairs": num_pairs,
                    "fwd_ms": 3.0,
                    "bwd_ms": 8.0,
                    "fwd_tflops": GPU_GEOMETRY.forward_flops(num_pairs) / 3e9,
                    "bwd_tflops": GPU_GEOMETRY.backward_flops(num_pairs) / 8e9,
                    "peak_gib": 1.0,
                    "samples": {"fwd_ms": [1.0, 2.0, 3.0, 4.0, 5.0], "bwd_ms": [8.0] * 5},
                }
            )
    return {
        "commit": "0" * 40 + "-dirty",
        "source_sha256": "1" * 64,
        "gpu": "NVIDIA H200",
        "seed": 0,
        "versions": dict.fromkeys(("driver", "cuda", "torch", "python", "numpy"), "1.0"),
        "geometry": {**asdict(GPU_GEOMETRY), "dtype": str(GPU_GEOMETRY.dtype)},
        "runs": [{"shapes": list(ALL_SHAPES)}],
        "targets": [asdict(target) for target in targets(rows)],
        "shapes": shapes,
        "rows": rows,
    }


def _problems(result: Result) -> list[str]:
    return [
        *staleness_problems(result, "1" * 64),
        *provenance_problems("attention.json", result),
        *attention_problems(result),
    ]


def test_a_right_result_has_no_problems() -> None:
    assert _problems(_attention()) == []
    assert _problems({**_attention(), "source_sha256": "2", "stale": "a comment changed"}) == []


def _set(*path: Any, to: Any) -> Callable[[Result], None]:
    def change(result: Result) -> None:
        place: Any = result
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


def _fail(backend: str) -> Callable[[Result], None]:
    def change(result: Result) -> None:
        index = GPU_BACKENDS.index(backend)
        result["rows"][index] = {"shape": ALL_SHAPES[0], "backend": backend, "error": "no memory"}
        result["targets"] = [asdict(target) for target in targets(result["rows"])]

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_set("source_sha256", to="2" * 64), "the sources have changed"),
        (_set("runs", 0, "source_sha256", to="2" * 64), "the sources have changed"),
        (_set("stale", to=" "), "stale"),
        (_set("commit", to="abc"), "commit"),
        (_set("gpu", to="none"), "gpu"),
        (_set("versions", "torch", to="not installed"), "no torch"),
        (_set("geometry", "head_dim", to=64), "geometry"),
        (_set("targets", 0, "is_met", to="maybe"), "targets"),
        (_set("runs", to=[{"shapes": ALL_SHAPES}, {"shapes": ["short"]}]), "short: in 2 runs"),
        (_set("rows", 0, "backend", to="flash"), "t1-28-4k, cuda: 0 rows"),
        (_set("shapes", "paper", "pairs", to=1), "paper: sizes"),
        (_set("rows", 0, "num_pairs", to=1), "1 pairs"),
        (_set("rows", 0, "samples", "fwd_ms", to=[3.0]), "1 samples of fwd"),
        (_set("rows", 0, "samples", "fwd_ms", to=[]), "samples"),
        (_set("rows", 0, "fwd_ms", to=2.9), "median"),
        (_set("rows", 0, "bwd_tflops", to=900.0), "bwd_tflops"),
        (_set("rows", 0, "peak_gib", to=0.0), "peak_gib"),
        (_fail("cuda"), "no memory"),
    ],
)
def test_checks_see_what_is_wrong(change: Callable[[Result], None], problem: str) -> None:
    result = copy.deepcopy(_attention())
    change(result)
    assert any(problem in line for line in _problems(result)), _problems(result)


def test_a_library_may_fail_on_a_shape() -> None:
    result = copy.deepcopy(_attention())
    _fail("flex")(result)
    assert _problems(result) == []


def test_gpu_tests_that_never_ran_are_seen(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    (folder / "kernels").mkdir(parents=True)
    (folder / "kernels" / "test_a.py").write_text("pytestmark = pytest.mark.gpu")
    (folder / "kernels" / "test_b.py").write_text("@pytest.mark.gpu\ndef test_b(): ...")
    (folder / "kernels" / "test_two.py").write_text("pytestmark = pytest.mark.multigpu")
    (folder / "kernels" / "test_c.py").write_text("TEXT = '''\n@pytest.mark.gpu\n'''")
    assert [path.name for path in gpu_test_files(folder)] == ["test_a.py", "test_b.py"]
    passed = {"id": "tests/kernels/test_a.py::test_x", "outcome": "passed", "seconds": 0.1}
    report: Result = {"tests": [passed], "not_run": []}
    assert list(report_problems(report, folder)) == ["no test of tests/kernels/test_b.py ran"]
    report["tests"].append({**passed, "id": "tests/kernels/test_b.py::test_b"})
    assert list(report_problems(report, folder)) == []
    report["tests"][0]["outcome"] = "failed"
    assert list(report_problems(report, folder)) == ["failed: tests/kernels/test_a.py::test_x"]


def test_a_stale_report_names_the_tests_that_it_lacks(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_b.py").write_text("pytestmark = pytest.mark.gpu")
    failed = {"id": "tests/test_a.py::test_x", "outcome": "failed", "seconds": 0.1}
    report: Result = {"tests": [failed], "not_run": [], "stale": "other sources"}
    red = "failed: tests/test_a.py::test_x"
    assert list(report_problems(report, folder)) == [red, "no test of tests/test_b.py ran"]
    report["stale"] = "other sources; tests/test_b.py has not run"
    assert list(report_problems(report, folder)) == [red]


def test_this_trees_gpu_tests_are_found() -> None:
    assert TESTS_FOLDER / "kernels" / "test_gpu_reference.py" in gpu_test_files(TESTS_FOLDER)


def test_a_tool_that_did_not_run_is_not_clean() -> None:
    clean = {"is_clean": True}
    assert list(sanitizer_problems({"tools": {"memcheck": clean, "racecheck": clean}})) == []
    assert list(sanitizer_problems({"tools": {"memcheck": clean}})) == ["racecheck is not clean"]
