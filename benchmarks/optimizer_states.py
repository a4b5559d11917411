"""Loss curves of optimizer states: narrow ones against float32 masters and moments.

Enters a device, leaves a result file; or enters a result file, leaves its table, its plot or its
section of a document. Invariant: no file is written where the GPU tests are not green for these
sources.

    python benchmarks/optimizer_states.py --out benchmarks/results/h200/optimizer_states.json
    python benchmarks/optimizer_states.py --report benchmarks/results/h200/optimizer_states.json
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

# Run as a file, its own folder is on the path in the place of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command import add_document_options, is_for_gpu, make_parser, write_report
from benchmarks.gpu_results import describe_gpu, write_result
from benchmarks.optimizer_states_judge import LAST, MIN_SHARE_WITHIN, WINDOW, judge, targets
from benchmarks.optimizer_states_report import format_table, plot, write_markdown
from benchmarks.optimizer_states_run import FULL, SMALL, Plan, Run, train
from benchmarks.optimizer_states_task import best_loss


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
    device = torch.device(args.device)
    runs: list[Run] = []
    for kind, seed in plan.runs():
        runs.append(train(plan, kind, seed, device))
        print(f"{kind}, seed {seed}: {runs[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    payload = _payload(plan, runs)
    if args.out is not None:
        write_result(args.out, payload, seed=0)
    print(format_table({**describe_gpu(0), **payload}))


def _payload(plan: Plan, runs: list[Run]) -> dict[str, Any]:
    verdicts = judge(runs)
    return {
        "plan": asdict(plan),
        "method": {
            "loss": "cross-entropy of fresh batches, in nats a token, before each update",
            "seed": "batches, which kinds share, and roundings; initial weights are one for all",
            "shift": "mean over a kind's seeds of its loss minus fp32's of the same seed",
            "band": "2 s sqrt(1/n + 1/n_fp32), s the standard deviation over fp32's seeds",
            "within": f"the last {LAST} updates, and of the windows of {WINDOW} updates a share of "
            f"{MIN_SHARE_WITHIN}",
            "deterministic": False,
            "compiled_layers": False,
        },
        "best_loss": best_loss(plan.task),
        "verdicts": [verdict.as_json() for verdict in verdicts],
        "targets": targets(verdicts),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
