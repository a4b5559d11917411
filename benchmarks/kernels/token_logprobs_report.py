"""Tables of a token log-probs result.

A subject without figures shows its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common.document import aligned

Row = dict[str, Any]
MODES = ("fwd", "fwd_bwd", "frozen")


def format_table(result: Row) -> str:
    """Milliseconds, rates, memory and errors by subject; then our phases and the sweep."""
    gemm = result["gemm"]["tflops"]
    commit = result["commit"].partition("-")[0][:12]
    head = result["geometry"]
    lines = [
        f"{result['gpu']}, torch {result['versions']['torch']}, commit {commit}",
        f"V={head['vocab_size']} D={head['width']}; bf16 GEMM {gemm:.0f} TFLOP/s",
        *_table(
            ("rows", "subject", *(f"{m} ms" for m in MODES), *(f"{m} % GEMM" for m in MODES),
             *(f"{m} GiB" for m in MODES), "err logprob", "err dhidden", "err dhead"),
            [_subject(row, gemm) for row in result["rows"]],
        ),
        *(f"{r['num_rows']} {r['subject']}: {r['error']}" for r in result["rows"] if "error" in r),
    ]  # fmt: skip
    phases = [(r["phase"], r["num_rows"], f"{r['ms']:.3f}", *_rate(r)) for r in result["phases"]]
    if phases:
        lines += ["", *_table(("phase", "rows", "ms", "rate", "unit"), phases)]
    sweep = [
        (
            r["chunk_rows"],
            r["group_rows"],
            *(f"{r[f'{m}_ms']:.1f}" for m in MODES),
            *(f"{r[f'{m}_peak_gib']:.2f}" for m in MODES),
        )
        for r in result["sweep"]
    ]
    if sweep:
        columns = ("chunk", "group", *(f"{m} ms" for m in MODES), *(f"{m} GiB" for m in MODES))
        lines += ["", *_table(columns, sweep)]
    return "\n".join(lines)


def _subject(row: Row, gemm_tflops: float) -> Sequence[object]:
    start = (row["num_rows"], row["subject"])
    if "error" in row:
        return (*start, *["-"] * (3 * len(MODES) + 3))
    errors = row["errors"]
    return (
        *start,
        *(f"{row[f'{mode}_ms']:.2f}" for mode in MODES),
        *(f"{100 * row[f'{mode}_tflops'] / gemm_tflops:.0f}" for mode in MODES),
        *(f"{row['peak_gib'][mode]:.2f}" for mode in MODES),
        *(f"{errors[name]:.1e}" for name in ("logprob", "dhidden", "dlm_head")),
    )


def _rate(row: Row) -> tuple[str, str]:
    if "tflops" in row:
        return f"{row['tflops']:.0f}", "TFLOP/s"
    return f"{row['gb_per_s']:.0f}", "GB/s"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    return aligned(cells, num_text_columns=0)
