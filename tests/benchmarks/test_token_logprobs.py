"""The benchmark of token log-probs, small and on a CPU: its gate, its result and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import token_logprobs, token_logprobs_run
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
