"""The benchmark of token log-probs, small and on a CPU: its gate, its result and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import token_logprobs, token_logprobs_run
from benchmarks.kernels.token_logprobs_report import format_table
from benchmarks.kernels.token_logprobs_subjects import Problem

pytestmark = pytest.mark.more

ON_CPU = ("--device", "cpu", "--samples", "2", "--subjects")


def test_result_holds_every_subject_with_figures_or_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    token_logprobs.main([*ON_CPU, "fused,reference,torch-full", "--out", str(path)])
    printed = capsys.readouterr().out
    result = json.loads(path.read_text())
    fused, reference, full = result["rows"]
    assert "unavailable" in fused["error"]
    for row in (reference, full):
        assert [len(samples) for samples in row["samples"].values()] == [2, 2, 2]
        flops = 4 * 2 * 40 * 307 * 32
        assert row["fwd_bwd_tflops"] == pytest.approx(flops / row["fwd_bwd_ms"] / 1e9)
    assert reference["errors"]["logprob"] < 1e-6 < full["errors"]["logprob"]
    token_logprobs.main(["--report", str(path)])
    assert capsys.readouterr().out == printed
    assert fused["error"] in printed


def test_wrong_values_and_wrong_gradients_have_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_off(problem: Problem) -> torch.Tensor:
        return 1.1 * token_logprobs_run._truth(problem)

    def gradient_off(problem: Problem) -> torch.Tensor:
        logprob_R = token_logprobs_run._truth(problem)
        return logprob_R + 0.2 * (logprob_R - logprob_R.detach())

    wrong = {"reference": forward_off, "torch-full": gradient_off}
    monkeypatch.setattr(token_logprobs_run, "find", wrong.__getitem__)
    run = token_logprobs_run.Run(
        geometry=token_logprobs_run.Geometry(
            vocab_size=101, width=16, dtype=torch.float32, gate_rows=8
        ),
        subjects=tuple(wrong),
        num_samples=1,
        device=torch.device("cpu"),
        clock=token_logprobs.HostClock(),
        seed=0,
    )
    errors = token_logprobs_run.gate(run)
    assert "logprob" in errors["reference"]["error"]
    assert "dhidden" in errors["torch-full"]["error"]
    assert "'logprob'" not in errors["torch-full"]["error"]
    rows = list(token_logprobs_run.measure(run, 4, errors))
    assert all("fwd_ms" not in row for row in rows)


def test_table_shows_the_parts_and_the_sweep() -> None:
    result = {
        "gpu": "NVIDIA H200",
        "versions": {"torch": "2.11.0"},
        "commit": "0123456789abcdef-dirty",
        "gemm": {"tflops": 800.0},
        "geometry": {"vocab_size": 151_936, "width": 4096},
        "rows": [],
        "phases": [
            {"phase": "logits", "num_rows": 1024, "ms": 1.5, "tflops": 700.4},
            {"phase": "reduce rows", "num_rows": 1024, "ms": 0.25, "gb_per_s": 4100.0},
        ],
        "sweep": [
            {
                "chunk_rows": 512, "group_rows": 2048,
                "fwd_ms": 61.25, "fwd_bwd_ms": 250.0, "frozen_ms": 190.0,
                "fwd_peak_gib": 0.5, "fwd_bwd_peak_gib": 4.25, "frozen_peak_gib": 1.0,
            }
        ],
    }  # fmt: skip
    lines = format_table(result).splitlines()
    assert "0123456789ab" in lines[0]
    assert any(line.split() == ["logits", "1024", "1.500", "700", "TFLOP/s"] for line in lines)
    assert any(line.split()[-2:] == ["4100", "GB/s"] for line in lines)
    assert lines[-1].split() == ["512", "2048", "61.2", "250.0", "190.0", "0.50", "4.25", "1.00"]
