"""The report of `make test-gpu`, from runs of pytest over small files of tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.gpu_results import ROOT, red_tests

pytestmark = pytest.mark.more

TESTS = """
import pytest

@pytest.mark.gpu
def test_good():
    pass

@pytest.mark.gpu
@pytest.mark.parametrize("value", [1, 2])
def test_odd(value):
    assert value % 2

@pytest.mark.multigpu
def test_two():
    pytest.skip("one GPU")

@pytest.fixture
def broken():
    raise OSError("no such device")

@pytest.mark.gpu
def test_set_up(broken):
    pass

def test_cpu():
    pass
"""


def _run_pytest(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs pytest as a machine without this project's environment does."""
    path = folder / "out" / "tests.json"
    path.parent.mkdir(exist_ok=True)
    if "--gpu-report-again" not in arguments:
        path.write_text("of the run before")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-o", "addopts=", "--import-mode=importlib", "--confcutdir", folder),
        # Which the names of tests are below.
        *("--rootdir", folder),
        *("-p", "tests.conftest", "--gpu-report", path, *arguments, folder),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "kernels/src:.", "RATOON_COMMIT": "abc"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, path


def _report(folder: Path, *arguments: str) -> dict[str, Any]:
    done, path = _run_pytest(folder, *arguments)
    assert path.is_file(), done.stdout + done.stderr
    return json.loads(path.read_text())


def test_report_holds_every_outcome(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    report = _report(tmp_path, "-m", "gpu or multigpu")
    outcomes = {test["id"].split("::")[1]: test["outcome"] for test in report["tests"]}
    assert outcomes == {
        "test_good": "passed",
        "test_odd[1]": "passed",
        "test_odd[2]": "failed",
        "test_two": "skipped",
        "test_set_up": "error",
    }
    assert report["num_passed"] == 2
    assert report["not_run"] == []
    messages = {test["id"].split("::")[1]: test["message"] for test in report["tests"]}
    assert "no such device" in messages["test_set_up"]
    assert len(red_tests(report)) == 3


def test_a_part_of_the_gpu_tests_is_not_green(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    report = _report(tmp_path, "-m", "gpu or multigpu", "-k", "test_good")
    assert [test["outcome"] for test in report["tests"]] == ["passed"]
    assert len(report["not_run"]) == 4
    assert len(red_tests(report)) == 4


def test_red_tests_can_run_again_alone(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    _report(tmp_path, "-m", "gpu", "-k", "not set_up")
    (tmp_path / "test_some.py").write_text(TESTS.replace("assert value % 2", "pass"))
    again = ("-m", "gpu", "-k", "odd", "--gpu-report-again", "-n", "2")
    report = _report(tmp_path, *again)
    outcomes = {test["id"].split("::")[1]: test["outcome"] for test in report["tests"]}
    assert outcomes == dict.fromkeys(("test_good", "test_odd[1]", "test_odd[2]"), "passed")
    assert report["num_earlier"] == 1
    # The test of several GPUs was not requested.
    assert report["not_run"] == ["test_some.py::test_set_up"]


def test_only_a_report_on_the_same_sources_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "out").mkdir()
    kept = json.dumps({"source_sha256": "of others", "tests": []})
    (tmp_path / "out" / "tests.json").write_text(kept)
    done, path = _run_pytest(tmp_path, "-m", "gpu", "--gpu-report-again")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no report on these sources" in done.stderr
    assert path.read_text() == kept


def test_a_file_that_cannot_be_collected_is_not_green(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text("def test_good(): pass")
    (tmp_path / "test_broken.py").write_text("import no_such_package")
    report = _report(tmp_path, "--continue-on-collection-errors")
    outcomes = {Path(test["id"]).name: test["outcome"] for test in report["tests"]}
    assert outcomes == {"test_broken.py": "error", "test_good.py::test_good": "passed"}
    assert red_tests(report)


def test_all_green(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_good(): pass\ndef test_cpu(): pass"
    )
    report = _report(tmp_path, "-m", "gpu")
    assert red_tests(report) == []
    assert report["tests"][0]["seconds"] > 0


def test_a_run_that_dies_leaves_no_report(tmp_path: Path) -> None:
    (tmp_path / "test_dead.py").write_text("import os\ndef test_dead(): os._exit(9)")
    done, path = _run_pytest(tmp_path)
    assert done.returncode == 9
    assert not path.exists()
