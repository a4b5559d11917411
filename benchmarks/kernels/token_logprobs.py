"""Benchmarks token log-probs at the size of Qwen3-8B: ours, torch and Liger, and our time by phase.

Measures into a result file, or prints a file's tables. A file is written only if the GPU tests are
green for these sources; a subject with wrong values or gradients has no figures.

    python benchmarks/kernels/token_logprobs.py --out benchmarks/results/h200/token_logprobs.json
    python benchmarks/kernels/token_logprobs.py --report benchmarks/results/h200/token_logprobs.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

# Run as a script, its own folder is on the path instead of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.command import is_for_gpu, make_parser, names
from benchmarks.kernels.attention_timing import CudaClock, HostClock, measure_gemm
from benchmarks.kernels.token_logprobs_phases import measure_phases, measure_sweep
from benchmarks.kernels.token_logprobs_report import format_table
from benchmarks.kernels.token_logprobs_run import Geometry, Run, gate, measure
from benchmarks.kernels.token_logprobs_subjects import SUBJECTS
from harness.gpu_results import describe_gpu, write_result

# The LM head of Qwen3-8B; rows of a micro-batch, and of all responses of the forest `paper`.
GPU_GEOMETRY = Geometry(vocab_size=151_936, width=4096, dtype=torch.bfloat16, gate_rows=2048)
GPU_ROWS = (4096, 36_264)
CPU_GEOMETRY = Geometry(vocab_size=307, width=32, dtype=torch.bfloat16, gate_rows=16)
CPU_ROWS = (40,)


def main(arguments: list[str] | None = None) -> None:
    args = _parse(arguments)
    if args.report is not None:
        print(format_table(json.loads(args.report.read_text(encoding="utf-8"))))
        return
    is_gpu = is_for_gpu(args)
    run = Run(
        geometry=GPU_GEOMETRY if is_gpu else CPU_GEOMETRY,
        subjects=args.subjects,
        num_samples=args.samples,
        device=torch.device(args.device),
        clock=CudaClock() if is_gpu else HostClock(),
        seed=args.seed,
    )
    row_counts = args.rows or (GPU_ROWS if is_gpu else CPU_ROWS)
    errors = gate(run)
    payload: dict[str, Any] = {
        "geometry": run.geometry.as_json(),
        "gemm": measure_gemm(run.device, run.clock),
        "rows": [row for num_rows in row_counts for row in measure(run, num_rows, errors)],
        "phases": measure_phases(run) if is_gpu else [],
        "sweep": measure_sweep(run, max(row_counts)) if is_gpu else [],
    }
    if args.out is not None:
        write_result(args.out, payload, seed=run.seed)
    print(format_table({**describe_gpu(run.seed), **payload}))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=_numbers, help="1,2,3")
    parser.add_argument("--subjects", type=names, default=SUBJECTS, help="a,b,c")
    parser.add_argument("--samples", type=int, default=7, help="of each figure")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.subjects if name not in SUBJECTS]:
        parser.error(f"no subject is called {unknown}, only {list(SUBJECTS)}")
    return args


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()
