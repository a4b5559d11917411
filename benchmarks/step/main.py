"""Whole steps: ours against replicated and other packed attention, with all else the same.

Enters names of sections, leaves a result file; or enters a result file, leaves its tables, its plot
or its section of a document. Invariant: no file is written where the GPU tests are not green for
these sources; parts that several calls measured are merged, if they are of the same sources, and
else joined where the file can say why.

    python benchmarks/step/main.py --out benchmarks/results/h200/step.json --only paper
    python benchmarks/step/main.py --report benchmarks/results/h200/step.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

# Run as a file, its own folder is on the path in the place of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.command import add_document_options, is_for_gpu, make_parser, write_report
from benchmarks.step import costs as step_costs
from benchmarks.step import crossover as step_crossover
from benchmarks.step import layer as step_layer
from benchmarks.step import memory as step_memory
from benchmarks.step import paper as step_paper
from benchmarks.step import profiles as step_profile
from benchmarks.step import updates as step_updates
from benchmarks.step.plot import plot
from benchmarks.step.report import format_tables, write_markdown
from benchmarks.step.result import (
    add_case,
    empty_payload,
    joined_result,
    measured_cases,
    merged_payload,
    sort_cases,
)
from benchmarks.step.run import FULL, SMALL, Run
from benchmarks.step.timing import release
from harness.gpu_results import describe_gpu, write_result
from ratoon.engine.cluster.gpu_environment import GPU_ENVIRONMENT

MEASURES = {
    "paper": step_paper,
    "profile": step_profile,
    "table2": step_layer,
    "memory": step_memory,
    "crossover": step_crossover,
    "costs": step_costs,
    "updates": step_updates,
}


def main(arguments: list[str] | None = None) -> None:
    args = _parse(arguments)
    if args.report is None:
        _measure(args)
        return
    if args.join is not None:
        _join(args.report, args.join, args.stale)
    write_report(args, format_tables, plot, _write_markdown)


def _join(path: Path, other: Path, stale: str) -> None:
    old, new = (json.loads(file.read_text(encoding="utf-8")) for file in (path, other))
    joined = joined_result(old, new, stale)
    for name, section in MEASURES.items():
        scale = SMALL if joined["gpu"] == "none" else FULL
        sort_cases(joined, name, section.cases(scale))
    path.write_text(json.dumps(joined, indent=1) + "\n", encoding="utf-8")


def _write_markdown(result: dict[str, Any], document: Path, file: str, image: str) -> None:
    write_markdown(result, document, file, image, missing_cases(result))


def missing_cases(result: dict[str, Any]) -> list[str]:
    """Cases of full size that a result does not have, in their order, behind their sections."""
    held = {name: {row["case"] for row in result[name]} for name in MEASURES}
    return [
        f"`{name} {case}`"
        for name, section in MEASURES.items()
        for case in section.cases(FULL)
        if case not in held[name]
    ]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_document_options(parser)
    parser.add_argument("--join", type=Path, help="with --report: first put this result's cases in")
    parser.add_argument("--stale", default="", help="with --join: why cases of other sources stay")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--cases", nargs="+", help="of the one section of --only; all by default")
    parser.add_argument("--new", action="store_true", help="forget what --out's file holds")
    parser.add_argument("--missing", action="store_true", help="leave out cases that it holds")
    parser.add_argument("--samples", type=int, default=5, help="of each figure, at most")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds, set-up included")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.cases is not None:
        if len(args.only) != 1:
            parser.error("--cases needs one section in --only")
        known = MEASURES[args.only[0]].cases(SMALL if args.device == "cpu" else FULL)
        if unknown := [case for case in args.cases if case not in known]:
            parser.error(f"{args.only[0]} has no case {unknown}, only {known}")
    return args


def _measure(args: argparse.Namespace) -> None:
    is_gpu = is_for_gpu(args)
    if is_gpu:
        # As a worker of the service has it.
        for name, value in GPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    start = time.monotonic()
    run = Run(
        device=torch.device(args.device),
        scale=FULL if is_gpu else SMALL,
        num_samples=args.samples,
        stop_at=start + args.budget_s,
        seed=args.seed,
    )
    if args.out is not None and args.out.is_file() and not args.new:
        payload = merged_payload(json.loads(args.out.read_text(encoding="utf-8")), run)
    else:
        payload = empty_payload(run)
    for section in args.only:
        _measure_section(args, run, payload, section, start)
        release(run.device)
    print(format_tables({**describe_gpu(run.seed), **payload}))


def _measure_section(
    args: argparse.Namespace, run: Run, payload: dict[str, Any], section: str, start: float
) -> None:
    """Adds a section's cases to the payload, and to the file after each of them."""
    current = payload["runs"][-1]
    order = MEASURES[section].cases(run.scale)
    held = measured_cases(payload, section) if args.missing else set[str]()
    wanted = [case for case in args.cases or order if case not in held]
    for case, rows in MEASURES[section].measure(run, wanted):
        add_case(payload, section, case, rows)
        sort_cases(payload, section, order)
        current["seconds"] = time.monotonic() - start
        print(f"{section} {case}: {current['seconds']:.0f} s", file=sys.stderr, flush=True)
        if args.out is not None:
            # So that a run that is cut off leaves what it has.
            write_result(args.out, payload, seed=run.seed)
    if left_out := [case for case in wanted if case not in current["cases"][section]]:
        print(f"out of time, {section} left out: {left_out}", file=sys.stderr)


if __name__ == "__main__":
    main()
