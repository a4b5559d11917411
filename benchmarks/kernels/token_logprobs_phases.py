"""Profiles our token log-probs on a GPU: each phase separately, and other chunk sizes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.token_logprobs_run import PRODUCTS, Row, Run, peak_gib, samples_of, work_of
from benchmarks.kernels.token_logprobs_subjects import OURS, find
from ratoon_kernels.token_logprobs import fused

SWEPT_ROWS = ((512, 4096), (1024, 1024), (1024, 2048), (1024, 4096), (2048, 4096), (4096, 4096))


def measure_phases(run: Run) -> list[Row]:
    """Milliseconds of each phase, at the chunk sizes that ours chooses."""
    g = run.geometry
    chunk = fused.rows_within(fused.LOGIT_BYTES, g.vocab_size, torch.float32)
    group = fused.rows_within(fused.DLOGIT_BYTES, g.vocab_size, g.dtype)
    found: list[Row] = []
    for name, work in _products(run, chunk, group).items():
        num_rows = chunk if name == "logits" else group
        row = _timed(run, name, num_rows, work)
        row["tflops"] = 2 * num_rows * g.vocab_size * g.width / row["ms"] / 1e9
        found.append(row)
    for name, (work, bytes_a_logit) in _kernels(run, chunk).items():
        row = _timed(run, name, chunk, work)
        row["gb_per_s"] = bytes_a_logit * chunk * g.vocab_size / row["ms"] / 1e6
        found.append(row)
    return found


def measure_sweep(run: Run, num_rows: int) -> list[Row]:
    """Ours with other numbers of rows per chunk and per group."""
    problem, function, g = run.problem(num_rows), find(OURS), run.geometry
    kept = fused.LOGIT_BYTES, fused.DLOGIT_BYTES
    found: list[Row] = []
    try:
        for chunk, group in SWEPT_ROWS:
            _set_budgets(chunk * g.vocab_size * 4, group * g.vocab_size * g.dtype.itemsize)
            row: Row = {"chunk_rows": chunk, "group_rows": group, "num_rows": num_rows}
            for mode in PRODUCTS:
                row[f"{mode}_peak_gib"] = peak_gib(run, function, problem, mode)
                samples = samples_of(run, work_of(function, problem, mode))
                row[f"{mode}_ms"] = statistics.median(samples)
                row[f"{mode}_samples"] = samples
            found.append(row)
    finally:
        _set_budgets(*kept)
    return found


def _set_budgets(logit_bytes: int, dlogit_bytes: int) -> None:
    for name, value in (("LOGIT_BYTES", logit_bytes), ("DLOGIT_BYTES", dlogit_bytes)):
        setattr(fused, name, value)


def _timed(run: Run, name: str, num_rows: int, work: Callable[[], Any]) -> Row:
    samples = samples_of(run, work)
    return {
        "phase": name,
        "num_rows": num_rows,
        "ms": statistics.median(samples),
        "samples": samples,
    }


def _products(run: Run, chunk: int, group: int) -> dict[str, Callable[[], Any]]:
    """The four matrix products, each with fp32 output."""
    g, p, fp32 = run.geometry, run.problem(group), torch.float32
    hidden_CD, head_VD = p.hidden_RD[:chunk], p.lm_head_VD
    logits_CV = torch.empty((chunk, g.vocab_size), device=run.device)
    dlogits_GV = torch.randn((group, g.vocab_size), device=run.device).to(g.dtype)
    dhidden_GD = torch.empty((group, g.width), device=run.device)
    dhead_VD = torch.zeros((g.vocab_size, g.width), device=run.device)
    return {
        "logits": lambda: torch.mm(hidden_CD, head_VD.T, out_dtype=fp32, out=logits_CV),
        "dhidden": lambda: torch.mm(dlogits_GV, head_VD, out_dtype=fp32, out=dhidden_GD),
        "dhead first": lambda: torch.mm(dlogits_GV.T, p.hidden_RD, out_dtype=fp32, out=dhead_VD),
        "dhead added": lambda: torch.addmm(
            dhead_VD, dlogits_GV.T, p.hidden_RD, out_dtype=fp32, out=dhead_VD
        ),
    }


def _kernels(run: Run, chunk: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """The two kernels between them, and the bytes that each moves per logit."""
    from ratoon_kernels.token_logprobs import fused_kernels

    g, p, device = run.geometry, run.problem(chunk), run.device
    logits_CV = torch.randn((chunk, g.vocab_size), device=device)
    dlogits_CV = torch.empty((chunk, g.vocab_size), device=device, dtype=g.dtype)
    first_C1 = torch.arange(chunk + 1, device=device)
    order_C = first_C1[:chunk].contiguous()
    one_C, logprob_C, entropy_C, lse_C = (torch.ones(chunk, device=device) for _ in range(4))

    def reduce_rows() -> None:
        fused_kernels.reduce_rows(
            logits_CV, one_C, first_C1, p.target_R, order_C, logprob_C, entropy_C, lse_C
        )

    def differentiate_logits(dentropy_C: torch.Tensor | None) -> None:
        fused_kernels.differentiate_logits(
            logits_CV, dlogits_CV, one_C, one_C, lse_C, entropy_C, dentropy_C,
            first_C1, p.target_R, one_C,
        )  # fmt: skip

    moved = 4 + g.dtype.itemsize
    return {
        "reduce rows": (reduce_rows, 4),
        "differentiate logits": (lambda: differentiate_logits(None), moved),
        "the same, with entropy": (lambda: differentiate_logits(one_C), moved),
    }
