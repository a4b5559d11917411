"""Updates through the service: what its result says, and a run of it with a tiny model."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service import main as service
from benchmarks.service.main import format_table, is_same_as_steady, measured_rows, write_markdown
from benchmarks.service.run import FULL, KILLED, RESUMED, SMALL, Plan

pytestmark = pytest.mark.more

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = [path for path in [ROOT / "benchmarks/results/h200/service.json"] if path.is_file()]


def _update(seconds: float, *, is_killed: bool = False, loss: float = 0.25) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "trained_s": 1.0,
        "publish_s": 0.5,
        "beyond_s": seconds - 1.5,
        "is_killed": is_killed,
        "version": 1,
        "loss": loss,
        "grad_norm": 2.0,
        "peak_gib": 3.0,
    }


def _row(policy: str, updates: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "policy": policy,
        "failure": "",
        "created_s": 9.0,
        "updates": updates,
        "pull_s": 2.0,
        "pulled_gib": 3.0,
        "digests": {"model.safetensors": "abc"},
    }


def _result() -> dict[str, Any]:
    whole = [_update(30.0), _update(2.0), _update(2.0), _update(1.8)]
    killed = [_update(9.0), _update(2.0), _update(40.0, is_killed=True), _update(2.0)]
    return {
        "gpu": "NVIDIA H200",
        "commit": "0" * 40,
        "versions": {"torch": "2.11.0"},
        "plan": {
            "model": {"name": "Qwen3-1.7B"},
            "dtype": "bfloat16",
            "group": {"prompt": 10, "responses": [1, 2]},
            "longer_by": 3,
            "num_updates": 4,
        },
        "weights_root": "/dev/shm/versions",
        "start_s": 7.0,
        "rows": [
            _row("steady", whole),
            _row("resumed", killed),
            _row("killed", killed),
            _row("fast", whole),
        ],
    }


@pytest.mark.parametrize("policy", [RESUMED, KILLED])
@pytest.mark.parametrize("what", ["loss", "grad_norm", "version", "digest", "failure"])
def test_a_bit_that_differs_after_the_kill_is_a_miss(what: str, policy: str) -> None:
    result = deepcopy(_result())
    assert is_same_as_steady(result, policy)
    row = next(row for row in result["rows"] if row["policy"] == policy)
    if what == "digest":
        row["digests"]["model.safetensors"] = "abd"
    elif what == "failure":
        row["failure"] = "POLICY_FAILED: other bits"
    else:
        row["updates"][-1][what] += 1
    assert not is_same_as_steady(result, policy)
    text = format_table(result)
    assert f"missed: what {policy} was told" in text
    assert ("other bits" in text) == (what == "failure")


@pytest.mark.parametrize("plan", [FULL, SMALL])
def test_a_plan_has_whole_updates_before_and_after_the_kill(plan: Plan) -> None:
    assert 1 < plan.killed_in < plan.num_updates


@pytest.mark.parametrize("path", COMMITTED, ids=str)
def test_document_shows_the_committed_figures(path: Path, tmp_path: Path) -> None:
    document, written = ROOT / "docs" / "performance.md", tmp_path / "performance.md"
    written.write_text(document.read_text(encoding="utf-8"), encoding="utf-8")
    result = json.loads(path.read_text(encoding="utf-8"))
    write_markdown(result, written, (Path("..") / path.relative_to(ROOT)).as_posix())
    assert document.read_text(encoding="utf-8") == written.read_text(encoding="utf-8")
    repeated = {RESUMED, KILLED} & measured_rows(result).keys()
    assert RESUMED in repeated
    assert all(is_same_as_steady(result, policy) for policy in repeated)


@pytest.mark.slow
def test_a_tiny_model_is_trained_and_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.main(["--draft", "--device", "cpu", "--weights-root", str(tmp_path)])
    text = capsys.readouterr().out
    assert text.count("met: ") == 2
    assert [line.split()[0] for line in text.splitlines() if line.startswith(KILLED)] == [KILLED]
