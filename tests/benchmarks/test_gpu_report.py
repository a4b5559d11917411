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


class Runs:
    """Runs pytest over a folder as a machine without this project's environment does."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.path = folder, folder / "out" / "tests.json"
        self.path.parent.mkdir()
        self._capsys = capsys

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def run(self, *arguments: str) -> tuple[int, str]:
        """In this process; gives the status and what was printed."""
        before = set(sys.modules)
        try:
            status = pytest.main(self._options(arguments))
        finally:
            # Another folder has test files of the same names.
            for name in set(sys.modules) - before:
                if name.startswith("test_"):
                    del sys.modules[name]
        return status, "".join(self._capsys.readouterr())

    def run_apart(self, *arguments: str) -> tuple[int, str]:
        """In a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *self._options(arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": "kernels/src:."},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def report(self, *arguments: str) -> dict[str, Any]:
        _, printed = self.run(*arguments)
        assert self.path.is_file(), printed
        return json.loads(self.path.read_text())

    def _options(self, arguments: tuple[str, ...]) -> list[str]:
        if "--gpu-report-again" not in arguments:
            self.path.write_text("of the run before")
        return [
            *("-q", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib"),
            *("-o", "asyncio_default_fixture_loop_scope=function"),
            # The names of tests are relative to `--rootdir`.
            *("--confcutdir", str(self.folder), "--rootdir", str(self.folder)),
            *("-p", "tests.conftest", "--gpu-report", str(self.path), *arguments),
            str(self.folder),
        ]


@pytest.fixture
def runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Runs:
    monkeypatch.setenv("RATOON_COMMIT", "abc")
    made = Runs(tmp_path, capsys)
    made.write("test_some.py", TESTS)
    return made


def test_report_holds_every_outcome(runs: Runs) -> None:
    report = runs.report("-m", "gpu or multigpu")
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


def test_a_part_of_the_gpu_tests_is_not_green(runs: Runs) -> None:
    report = runs.report("-m", "gpu or multigpu", "-k", "test_good")
    assert [test["outcome"] for test in report["tests"]] == ["passed"]
    assert len(report["not_run"]) == 4
    assert len(red_tests(report)) == 4


def test_red_tests_can_run_again_alone(runs: Runs) -> None:
    """By several workers, which tell the run what they collected."""
    runs.report("-m", "gpu", "-k", "not set_up")
    runs.write("test_some.py", TESTS.replace("assert value % 2", "pass"))
    runs.run_apart("-m", "gpu", "-k", "odd", "--gpu-report-again", "-n", "2")
    report = json.loads(runs.path.read_text())
    outcomes = {test["id"].split("::")[1]: test["outcome"] for test in report["tests"]}
    assert outcomes == dict.fromkeys(("test_good", "test_odd[1]", "test_odd[2]"), "passed")
    assert report["num_earlier"] == 1
    # The test of several GPUs was not requested.
    assert report["not_run"] == ["test_some.py::test_set_up"]


def test_only_a_report_on_the_same_sources_can_be_kept(runs: Runs) -> None:
    kept = json.dumps({"source_sha256": "of others", "tests": []})
    runs.path.write_text(kept)
    status, printed = runs.run("-m", "gpu", "--gpu-report-again")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "no report on these sources" in printed
    assert runs.path.read_text() == kept


def test_a_file_that_cannot_be_collected_is_not_green(runs: Runs) -> None:
    runs.write("test_some.py", "def test_good(): pass")
    runs.write("test_broken.py", "import no_such_package")
    report = runs.report("--continue-on-collection-errors")
    outcomes = {Path(test["id"]).name: test["outcome"] for test in report["tests"]}
    assert outcomes == {"test_broken.py": "error", "test_some.py::test_good": "passed"}
    assert red_tests(report)


def test_all_green(runs: Runs) -> None:
    runs.write(
        "test_some.py",
        "import pytest\n@pytest.mark.gpu\ndef test_good(): pass\ndef test_cpu(): pass",
    )
    report = runs.report("-m", "gpu")
    assert red_tests(report) == []
    assert report["tests"][0]["seconds"] > 0


def test_a_run_that_dies_leaves_no_report(runs: Runs) -> None:
    runs.write("test_some.py", "import os\ndef test_dead(): os._exit(9)")
    status, _ = runs.run_apart()
    assert status == 9
    assert not runs.path.exists()
