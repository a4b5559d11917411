"""The case that runs under compute-sanitizer, and how its logs are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels.sanitizer import SUCCESS, read_log
from harness.gpu_results import ROOT
from ratoon_kernels.tree_attention import reference
from tests.kernels.sanitize_case import HEAD_DIMS, check_backend

pytestmark = pytest.mark.more

CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
DIRTY = {
    "memcheck": "========= Invalid __global__ read\n========= ERROR SUMMARY: 1 error",
    "racecheck": "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)",
}


@pytest.mark.parametrize(("head_dim", "value_dim"), HEAD_DIMS)
def test_case_holds_for_the_reference(head_dim: int, value_dim: int) -> None:
    check_backend("reference", "cpu", head_dim, value_dim)


def test_case_sees_a_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.partial_backward

    def wrong(operands, upstream, dk_acc_SKH, dv_acc_SKH):
        dq_QNH = right(operands, upstream, dk_acc_SKH, dv_acc_SKH)
        dv_acc_SKH[0] *= 2
        return dq_QNH

    monkeypatch.setattr(reference, "partial_backward", wrong)
    with pytest.raises(AssertionError, match="dv"):
        check_backend("reference", "cpu", 64, 64)


@pytest.mark.parametrize("tool", CLEAN)
def test_logs_are_clean_by_their_last_summary(tool: str) -> None:
    good = f"========= COMPUTE-SANITIZER\n{SUCCESS}\n{CLEAN[tool]}\n"
    entry = read_log(tool, good, 0)
    assert entry["is_clean"]
    assert not any(entry["counts"].values())
    assert not read_log(tool, good, 1)["is_clean"]
    assert not read_log(tool, good.replace(SUCCESS, ""), 0)["is_clean"]
    assert not read_log(tool, f"{SUCCESS}\n{DIRTY[tool]}\n", 0)["is_clean"]
    assert not read_log(tool, f"{SUCCESS}\n", 0)["is_clean"]
    assert not read_log(tool, f"{good}{DIRTY[tool]}", 0)["is_clean"]


@pytest.mark.parametrize("log", [CLEAN, DIRTY])
def test_script_runs_both_tools_and_records_them(tmp_path: Path, log: dict[str, str]) -> None:
    """With a stand-in for compute-sanitizer that prints a log of it."""
    sanitizer = tmp_path / "sanitizer"
    cases = "\n".join(f"{tool}) echo '{text}' ;;" for tool, text in log.items())
    sanitizer.write_text(f"#!/bin/sh\necho '{SUCCESS}'\ncase $2 in\n{cases}\nesac\n")
    sanitizer.chmod(0o755)
    result = tmp_path / "sanitizer.json"
    done = subprocess.run(
        [ROOT / "scripts" / "sanitize-gpu.sh", result],
        env={
            **os.environ,
            "COMPUTE_SANITIZER": str(sanitizer),
            "PYTHON": sys.executable,
            "RATOON_COMMIT": "abc",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    tools = json.loads(result.read_text())["tools"]
    assert {name: entry["is_clean"] for name, entry in tools.items()} == {
        "memcheck": log is CLEAN,
        "racecheck": log is CLEAN,
    }
    assert (done.returncode == 0) == (log is CLEAN), done.stderr
