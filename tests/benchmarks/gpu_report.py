"""`--gpu-report PATH`: what became of every GPU test, as a result file.

In: the run of pytest that it is registered with, and with `--gpu-report-again` the report of an
earlier one on the same sources, whose tests stand where this one does not run them. Out: one JSON
file, written when the run ends.
Invariant: a GPU test that was collected is in it, with its outcome or as not run; so is a file that
could not be collected. Imports nothing of the tests, so that it works wherever pytest does; with
several workers (pytest-xdist), which tell the run what they collected, the run alone writes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.gpu_results import ROOT, describe_gpu, source_sha256, write_result

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

MARKERS = ("gpu", "multigpu")
MAX_MESSAGE_CHARACTERS = 2000
_COLLECTED = "gpu_tests"


class CollectedInWorker:
    """In a worker: tells the run which GPU tests there are."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        vars(config)["workeroutput"][_COLLECTED] = _gpu_tests(config, items)


class GpuReport:
    """Gathers outcomes while pytest runs and writes them at its end."""

    def __init__(self, path: Path, *, is_again: bool) -> None:
        self._path = path
        self._is_again = is_again
        self._expected: set[str] = set()
        self._tests: dict[str, dict[str, Any]] = {}
        self._earlier: list[dict[str, Any]] = []

    def pytest_sessionstart(self) -> None:
        """A run that dies must not leave the report of the one before it."""
        if self._is_again:
            self._earlier = _read_tests(self._path)
        self._path.unlink(missing_ok=True)
        # Raises now, not after the tests, where no report could be written.
        describe_gpu(seed=0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Before -m and -k deselect: what a full run would have run."""
        self._expected.update(_gpu_tests(config, items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController) -> None:
        """A worker that died has told nothing; a test was red then, or another worker took over."""
        self._expected.update(vars(node).get("workeroutput", {}).get(_COLLECTED, ()))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tests[report.nodeid] = _entry(
                report.nodeid, "error", report.longreprtext[-MAX_MESSAGE_CHARACTERS:]
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, _entry(report.nodeid, "passed", ""))
        test["seconds"] += report.duration
        if not report.passed and test["outcome"] == "passed":
            is_error = report.failed and report.when != "call"
            test["outcome"] = "error" if is_error else report.outcome
            test["message"] = report.longreprtext[-MAX_MESSAGE_CHARACTERS:]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        earlier = [test for test in self._earlier if test["id"] not in self._tests]
        tests = [*earlier, *self._tests.values()]
        payload = {
            # Wherever the project lies.
            "arguments": [
                str(argument).replace(str(ROOT), ".")
                for argument in session.config.invocation_params.args
            ],
            "num_earlier": len(earlier),
            "num_passed": sum(test["outcome"] == "passed" for test in tests),
            "seconds": sum(test["seconds"] for test in tests),
            "not_run": sorted(self._expected - {test["id"] for test in tests}),
            "tests": tests,
        }
        write_result(self._path, payload, seed=0)


def _read_tests(path: Path) -> list[dict[str, Any]]:
    """Raises `pytest.UsageError`: the report is absent, or of other sources."""
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if report.get("source_sha256") != source_sha256():
        raise pytest.UsageError(f"--gpu-report-again: {path} is no report on these sources")
    return report["tests"]


def _gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Ids of the tests with the markers that -m names: of one GPU or of several."""
    named = re.findall(r"\w+", config.option.markexpr)
    markers = [marker for marker in MARKERS if marker in named] or MARKERS
    return [item.nodeid for item in items if any(map(item.get_closest_marker, markers))]


def _entry(test_id: str, outcome: str, message: str) -> dict[str, Any]:
    return {"id": test_id, "outcome": outcome, "seconds": 0.0, "message": message}
