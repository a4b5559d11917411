"""Benchmarks attention over packed forests: our kernels, other backends and replicated baselines.

Measures into a result file, or prints a file's table, plot and section of a document. A file is
written only if the GPU tests are green for these sources; all rows of a shape are of one run.

    python benchmarks/kernels/attention.py --out benchmarks/results/h200/attention.json
    python benchmarks/kernels/attention.py --report benchmarks/results/h200/attention.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

# Run as a script, its own folder is on the path instead of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.command import (
    add_document_options,
    is_for_gpu,
    make_parser,
    names,
    write_report,
)
from benchmarks.common.forests import SHAPES
from benchmarks.kernels.attention_inputs import Geometry
from benchmarks.kernels.attention_plot import plot
from benchmarks.kernels.attention_report import format_table, targets, write_markdown
from benchmarks.kernels.attention_run import Run, measure
from benchmarks.kernels.attention_subjects import CPU_BACKENDS, GPU_BACKENDS
from benchmarks.kernels.attention_timing import BUSY_CYCLES, FLUSH_BYTES, MIN_SAMPLES, measure_gemm
from harness.gpu_results import describe_gpu, write_result

# A forest of one token per node is for the layout; it says nothing about attention.
ALL_SHAPES = tuple(name for name in SHAPES if name != "one_token_nodes")
GPU_GEOMETRY = Geometry(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
CPU_GEOMETRY = Geometry(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
SAME_ON_MERGE = ("source_sha256", "gpu", "versions", "seed", "geometry")


def main(arguments: list[str] | None = None) -> None:
    args = _parse(arguments)
    if args.report is None:
        _measure(args)
    else:
        write_report(args, format_table, plot, write_markdown)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_document_options(parser)
    parser.add_argument("--merge", action="store_true", help="keep other shapes of --out's file")
    parser.add_argument("--shapes", type=names, default=ALL_SHAPES, help="a,b,c")
    parser.add_argument("--backends", type=names, help="a,b,c; all by default")
    parser.add_argument("--budget-s", type=float, default=330.0, help="seconds, set-up included")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.shapes if name not in SHAPES]:
        parser.error(f"no shape is called {unknown}, only {list(SHAPES)}")
    return args


def _measure(args: argparse.Namespace) -> None:
    is_gpu = is_for_gpu(args)
    run = Run(
        shapes=args.shapes,
        backends=args.backends or (GPU_BACKENDS if is_gpu else CPU_BACKENDS),
        geometry=GPU_GEOMETRY if is_gpu else CPU_GEOMETRY,
        device=torch.device(args.device),
        budget_s=args.budget_s,
        seed=args.seed,
    )
    payload = _empty_payload(run)
    if args.merge and args.out.is_file():
        payload = _mergeable(json.loads(args.out.read_text(encoding="utf-8")), payload, run)
    start = time.monotonic()
    for shape, sizes, rows in measure(run):
        _add(payload, shape, sizes, rows)
        payload["runs"][-1]["seconds"] = time.monotonic() - start
        print(f"{shape}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if args.out is not None:
            # The result is written after every shape, so that an interrupted run keeps its
            # measurements.
            write_result(args.out, payload, seed=run.seed)
    if left_out := [name for name in run.shapes if name not in payload["runs"][-1]["shapes"]]:
        print(f"out of time, left out: {left_out}", file=sys.stderr)
    print(format_table({**describe_gpu(run.seed), **payload}))


def _empty_payload(run: Run) -> dict[str, Any]:
    return {
        "geometry": {**asdict(run.geometry), "dtype": str(run.geometry.dtype)},
        "method": {
            "clock": "CUDA events" if run.is_gpu else "perf_counter",
            "l2_flush_bytes": FLUSH_BYTES if run.is_gpu else 0,
            "busy_cycles": BUSY_CYCLES if run.is_gpu else 0,
            "min_samples": MIN_SAMPLES,
            "order": "round-robin, a later subject first in each round",
            "statistic": "median",
            "inputs": "normal",
        },
        "is_one_run": True,
        "runs": [_new_run(run)],
        "targets": [],
        "shapes": {},
        "rows": [],
    }


def _new_run(run: Run) -> dict[str, Any]:
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": describe_gpu(0)["commit"],
        "gemm": measure_gemm(run.device, run.clock()),
        "shapes": [],
        "seconds": 0.0,
    }


def _mergeable(old: dict[str, Any], new: dict[str, Any], run: Run) -> dict[str, Any]:
    """The old result's payload with a new run added.

    Raises:
        SystemExit: The old result is of other sources, or another machine, seed or geometry.
    """
    now = {**describe_gpu(run.seed), **new}
    if differing := [name for name in SAME_ON_MERGE if old[name] != now[name]]:
        raise SystemExit(f"cannot merge into a result of another {', '.join(differing)}")
    kept = {name: old[name] for name in new}
    kept["runs"] = [*kept["runs"], *new["runs"]]
    return kept


def _add(
    payload: dict[str, Any], shape: str, sizes: dict[str, int], rows: list[dict[str, Any]]
) -> None:
    """Replaces a shape's rows; runs that are left without shapes are dropped."""
    current = payload["runs"][-1]
    for run in payload["runs"]:
        run["shapes"] = [name for name in run["shapes"] if name != shape]
    current["shapes"].append(shape)
    payload["runs"] = [run for run in payload["runs"] if run["shapes"]]
    payload["is_one_run"] = len(payload["runs"]) == 1
    payload["shapes"][shape] = sizes
    payload["rows"] = [row for row in payload["rows"] if row["shape"] != shape] + rows
    payload["rows"].sort(key=lambda row: list(SHAPES).index(row["shape"]))
    payload["targets"] = [asdict(target) for target in targets(payload["rows"])]


if __name__ == "__main__":
    main()
