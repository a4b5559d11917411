"""Benchmarks what optimizer states do to training: losses and weights against float32 states.

Measures into a result file, or prints a file's table, plot and section of a document. A file is
written only if the GPU tests are green for these sources.

    python benchmarks/optim/main.py --out benchmarks/results/h200/optimizer_states.json
    python benchmarks/optim/main.py --report benchmarks/results/h200/optimizer_states.json
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Run as a script, its own folder is on the path instead of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.command import add_document_options, is_for_gpu, make_parser, write_report
from benchmarks.optim.judge import LAST, MIN_SHARE_WITHIN, WINDOW, conclusions
from benchmarks.optim.report import format_table, plot, write_markdown
from benchmarks.optim.run import FULL, SMALL, Plan, Run, train_seed
from benchmarks.optim.task import best_loss
from harness.gpu_results import describe_gpu, write_result


def main(arguments: list[str] | None = None) -> None:
    args = _parse(arguments)
    if args.report is None:
        _measure(args)
    else:
        write_report(args, format_table, plot, write_markdown)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_document_options(parser)
    return parser.parse_args(arguments)


def _measure(args: argparse.Namespace) -> None:
    is_gpu = is_for_gpu(args)
    plan = FULL if is_gpu else SMALL
    payload = _payload(plan, _run(plan, args.device))
    if args.out is not None:
        write_result(args.out, payload, seed=0)
    print(format_table({**describe_gpu(0), **payload}))


def _run(plan: Plan, device: str) -> list[Run]:
    """All runs: seeds in turn on a CPU, at once on a GPU, which one small model does not fill."""
    seeds = range(plan.baseline_seeds)
    if device == "cpu":
        return [run for seed in seeds for run in train_seed(plan, seed, device)]
    with ProcessPoolExecutor(len(seeds), mp_context=get_context("spawn")) as pool:
        found = pool.map(train_seed, repeat(plan), seeds, repeat(device))
        return [run for runs in found for run in runs]


def _payload(plan: Plan, runs: list[Run]) -> dict[str, Any]:
    return {
        "plan": asdict(plan),
        "method": {
            "loss": "cross-entropy of fresh batches, in nats per token, before each update",
            "seed": "batches, which kinds share, and roundings; initial weights are one for all",
            "shift": "mean over a kind's seeds of its loss minus fp32's of the same seed",
            "band": "2 s sqrt(1/n + 1/n_fp32), s the standard deviation over fp32's seeds",
            "within": f"the last {LAST} updates, and of the windows of {WINDOW} updates a share of "
            f"{MIN_SHARE_WITHIN}",
            "cosine": "of w_T - w_0, masters where there are any, with fp32's of the same seed; "
            "error: the norm of their difference over that of fp32's",
            "deterministic": True,
            "compiled_layers": False,
        },
        "best_loss": best_loss(plan.task),
        **conclusions(runs),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
