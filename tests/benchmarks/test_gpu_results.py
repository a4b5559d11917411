"""The digest of the sources, and the benchmarks' gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import gpu_results


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _tree(root: Path) -> Path:
    for folder in gpu_results.SOURCE_FOLDERS:
        _write(root / folder / "module.py", folder)
    _write(root / gpu_results.SOURCE_FOLDERS[0] / "csrc" / "kernel.cu", "int x;")
    return root


def test_digest_changes_with_content_path_and_new_files(tmp_path: Path) -> None:
    root = _tree(tmp_path)
    kernels = root / gpu_results.SOURCE_FOLDERS[0]
    digests = [gpu_results.source_sha256(root)]
    _write(kernels / "csrc" / "kernel.cu", "int y;")
    digests.append(gpu_results.source_sha256(root))
    _write(kernels / "csrc" / "wgmma.cuh", "")
    digests.append(gpu_results.source_sha256(root))
    (kernels / "csrc" / "wgmma.cuh").rename(kernels / "csrc" / "tma.cuh")
    digests.append(gpu_results.source_sha256(root))
    _write(root / gpu_results.SOURCE_FOLDERS[2] / "loss" / "new.py", "1")
    digests.append(gpu_results.source_sha256(root))
    assert len(set(digests)) == len(digests)


def test_digest_ignores_what_is_built_and_where_the_tree_lies(tmp_path: Path) -> None:
    root = _tree(tmp_path / "one")
    expected = gpu_results.source_sha256(root)
    _write(root / gpu_results.SOURCE_FOLDERS[0] / "__pycache__" / "module.pyc", "x")
    _write(root / gpu_results.SOURCE_FOLDERS[0] / "cubins" / "kernel.cubin", "x")
    _write(root / "service" / "src" / "ratoon" / "api" / "other.py", "x")
    assert gpu_results.source_sha256(root) == expected
    assert gpu_results.source_sha256(_tree(tmp_path / "two")) == expected


def test_digest_covers_the_real_tree() -> None:
    """A renamed folder must not leave a digest of nothing."""
    for folder in gpu_results.SOURCE_FOLDERS:
        assert any((gpu_results.ROOT / folder).rglob("*.py")), folder


def test_result_names_where_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gpu_results.COMMIT_VARIABLE, "abc-dirty")
    path = tmp_path / "new" / "result.json"
    gpu_results.write_result(path, {"rows": [{"samples": [1.0]}]}, seed=3)
    result = json.loads(path.read_text())
    assert result["rows"] == [{"samples": [1.0]}]
    assert (result["commit"], result["seed"]) == ("abc-dirty", 3)
    assert result["source_sha256"] == gpu_results.source_sha256()
    assert result["versions"]["torch"].startswith("2.")
    with pytest.raises(ValueError, match="seed"):
        gpu_results.write_result(path, {"seed": 4}, seed=3)


def test_commit_is_head_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gpu_results.COMMIT_VARIABLE, raising=False)
    commit = gpu_results.describe_gpu(0)["commit"]
    assert isinstance(commit, str)
    digest, _, suffix = commit.partition("-")
    assert len(bytes.fromhex(digest)) == 20
    assert suffix in {"", "dirty"}


def _report(**changes: object) -> dict[str, object]:
    return {
        "source_sha256": gpu_results.source_sha256(),
        "tests": [{"id": "a", "outcome": "passed", "seconds": 0.1}],
        "not_run": [],
        **changes,
    }


def test_gate_opens_for_green_tests_of_these_sources(tmp_path: Path) -> None:
    _write(tmp_path / "tests.json", json.dumps(_report()))
    gpu_results.require_green_tests(tmp_path / "tests.json")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"source_sha256": "0" * 64}, "other sources"),
        ({"tests": [{"id": "b", "outcome": "failed", "seconds": 0}]}, "failed: b"),
        ({"tests": [{"id": "b", "outcome": "skipped", "seconds": 0}]}, "skipped: b"),
        ({"not_run": ["c"]}, "not run: c"),
        ({"tests": []}, "no test ran"),
    ],
)
def test_gate_names_what_keeps_it_shut(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    _write(tmp_path / "tests.json", json.dumps(_report(**changes)))
    with pytest.raises(SystemExit, match=reason):
        gpu_results.require_green_tests(tmp_path / "tests.json")


def test_gate_is_shut_without_a_report(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="absent"):
        gpu_results.require_green_tests(tmp_path / "tests.json")
