"""Benchmarks whole steps: ours against replicated rollouts and other packed attention.

Measures sections into a result file, or prints a file's tables, plot and section of a document. A
file is written only if the GPU tests are green for these sources. All rows of a case are of one
run. Runs are merged if their sources, machine and seed are the same; --join combines results of
different sources, if --stale says why.

    python benchmarks/step/main.py --out benchmarks/results/h200/step.json --only paper
    python benchmarks/step/main.py --report benchmarks/results/h200/step.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Collection
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# Run as a script, its own folder is on the path instead of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.command import add_document_options, is_for_gpu, make_parser, write_report
from benchmarks.common.timing import release
from benchmarks.kernels.attention_timing import CudaClock, HostClock, measure_gemm
from benchmarks.step.comparisons import CROSSOVER, PAPER, TABLE2
from benchmarks.step.costs import COSTS
from benchmarks.step.memory import MEMORY
from benchmarks.step.profiles import PROFILE
from benchmarks.step.report import format_tables, plot, write_markdown
from benchmarks.step.run import FULL, SMALL, Row, Run, Scale, Section
from benchmarks.step.updates import UPDATES
from benchmarks.step.workload import PEAK_FLOPS, ModelSize
from harness.gpu_results import describe_gpu, write_result
from ratoon.cluster.worker_start import GPU_ENVIRONMENT

SECTIONS: dict[str, Section] = {
    "paper": PAPER,
    "profile": PROFILE,
    "table2": TABLE2,
    "memory": MEMORY,
    "crossover": CROSSOVER,
    "costs": COSTS,
    "updates": UPDATES,
}
SAME_ON_MERGE = ("source_sha256", "gpu", "versions", "seed", "models", "gradient_dtype")


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
    joined = joined_result(old, new, stale, sections=SECTIONS, same=SAME_ON_MERGE)
    for name, section in SECTIONS.items():
        scale = SMALL if joined["gpu"] == "none" else FULL
        sort_cases(joined, name, section.cases(scale))
    path.write_text(json.dumps(joined, indent=1) + "\n", encoding="utf-8")


def _write_markdown(result: dict[str, Any], document: Path, file: str, image: str) -> None:
    write_markdown(result, document, file, image, missing_cases(result))


def missing_cases(result: dict[str, Any]) -> list[str]:
    """Full-size cases that a result lacks, as `section case`, in their order."""
    held = {name: {row["case"] for row in result[name]} for name in SECTIONS}
    return [
        f"`{name} {case}`"
        for name, section in SECTIONS.items()
        for case in section.cases(FULL)
        if case not in held[name]
    ]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_document_options(parser)
    parser.add_argument("--join", type=Path, help="with --report: first put this result's cases in")
    parser.add_argument("--stale", default="", help="with --join: why cases of other sources stay")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--cases", nargs="+", help="of the one section of --only; all by default")
    parser.add_argument("--new", action="store_true", help="forget what --out's file holds")
    parser.add_argument("--missing", action="store_true", help="leave out cases that it holds")
    parser.add_argument("--samples", type=int, default=5, help="of each figure, at most")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds, set-up included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--host-gib", type=int, default=64, help="lent to activations in section updates"
    )
    args = parser.parse_args(arguments)
    if args.cases is not None:
        if len(args.only) != 1:
            parser.error("--cases needs one section in --only")
        known = SECTIONS[args.only[0]].cases(SMALL if args.device == "cpu" else FULL)
        if unknown := [case for case in args.cases if case not in known]:
            parser.error(f"{args.only[0]} has no case {unknown}, only {known}")
    return args


def _measure(args: argparse.Namespace) -> None:
    is_gpu = is_for_gpu(args)
    start = time.monotonic()
    run = Run(
        device=torch.device(args.device),
        scale=FULL if is_gpu else SMALL,
        num_samples=args.samples,
        stop_at=start + args.budget_s,
        seed=args.seed,
        host_bytes=args.host_gib * 2**30,
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
    """Adds a section's cases to the payload, writing the file after each."""
    current = payload["runs"][-1]
    order = SECTIONS[section].cases(run.scale)
    held = measured_cases(payload, section) if args.missing else set[str]()
    wanted = [case for case in args.cases or order if case not in held]
    for case, rows in SECTIONS[section].measure(run, wanted):
        add_case(payload, section, case, rows)
        sort_cases(payload, section, order)
        current["seconds"] = time.monotonic() - start
        print(f"{section} {case}: {current['seconds']:.0f} s", file=sys.stderr, flush=True)
        if args.out is not None:
            # The result is written now, so that an interrupted run keeps its measurements.
            write_result(args.out, payload, seed=run.seed)
    if left_out := [case for case in wanted if case not in current["cases"][section]]:
        print(f"out of time, {section} left out: {left_out}", file=sys.stderr)


def empty_payload(run: Run) -> dict[str, Any]:
    """The payload of a run that has not measured anything yet."""
    dtype = str(run.scale.dtype).removeprefix("torch.")
    return {
        "models": [asdict(size) for size in _models(run.scale)],
        "gradient_dtype": dtype,
        "peak_flops": PEAK_FLOPS,
        "method": {
            "clock": "host, between two synchronisations with the device",
            "order": "one way after the other, each warmed up",
            "statistic": "median",
            "weights": "random",
            "deterministic": False,
            "transformers": metadata.version("transformers"),
            "loss": "GRPO at ratio 1, random advantages",
            "hardware_mfu": "6 a layer weight and packed token, 6 V D a predicting row, 14 a head "
            "dimension and attended pair, over peak_flops; recomputation is not counted",
            "logical_mfu": "the same of replicated rollouts: their tokens, rows and causal pairs",
        },
        "runs": [_new_run(run)],
        **{section: [] for section in SECTIONS},
    }


def merged_payload(old: dict[str, Any], run: Run) -> dict[str, Any]:
    """The old result's payload with a new run added.

    Raises:
        SystemExit: The old result is of other sources, or another machine or seed.
    """
    new = empty_payload(run)
    now = {**describe_gpu(run.seed), **new}
    if differing := [name for name in SAME_ON_MERGE if old.get(name) != now[name]]:
        raise SystemExit(
            f"cannot merge into a result of another {', '.join(differing)}: --new begins anew"
        )
    kept = {name: old[name] for name in new}
    kept["runs"] = [*kept["runs"], *new["runs"]]
    return kept


def joined_result(
    old: dict[str, Any],
    new: dict[str, Any],
    stale: str,
    *,
    sections: Collection[str],
    same: Collection[str],
) -> dict[str, Any]:
    """The old result with the new one's cases; `stale` says why cases of other sources stay.

    Raises:
        SystemExit: The results differ in a field of `same` other than their sources, or `stale` is
            needed and empty.
    """
    if differing := [x for x in same if x != "source_sha256" and old[x] != new[x]]:
        raise SystemExit(f"cannot join results of another {', '.join(differing)}")
    cases = {name: {row["case"] for row in new[name]} for name in sections}
    joined = {name: value for name, value in new.items() if name != "stale"}
    runs = [_without(run, cases, old["source_sha256"]) for run in old["runs"]]
    joined["runs"] = [run for run in runs if any(run["cases"].values())]
    joined["runs"] += [_without(run, {}, new["source_sha256"]) for run in new["runs"]]
    for name in sections:
        others = [row for row in old[name] if row["case"] not in cases[name]]
        joined[name] = [*others, *new[name]]
    if any(run["source_sha256"] != new["source_sha256"] for run in joined["runs"]):
        if not stale:
            raise SystemExit("cases of other sources stay: say why with --stale")
        joined["stale"] = stale
    return joined


def _without(run: dict[str, Any], cases: dict[str, set[str]], source_sha256: str) -> dict[str, Any]:
    """The run without these cases, and with its sources."""
    kept = {
        section: [name for name in names if name not in cases.get(section, ())]
        for section, names in run["cases"].items()
    }
    return {"source_sha256": source_sha256, **run, "cases": kept}


def add_case(payload: dict[str, Any], section: str, case: str, rows: list[Row]) -> None:
    """Replaces a case's rows; runs that are left without cases are dropped."""
    runs = payload["runs"]
    for run in runs:
        run["cases"][section] = [name for name in run["cases"][section] if name != case]
    runs[-1]["cases"][section].append(case)
    payload["runs"] = [run for run in runs if any(run["cases"].values())]
    others = [row for row in payload[section] if row["case"] != case]
    payload[section] = [*others, *({"case": case, **row} for row in rows)]


def sort_cases(payload: dict[str, Any], section: str, order: list[str]) -> None:
    """Sorts rows by the order of their cases, in place."""
    payload[section].sort(key=lambda row: order.index(row["case"]))


def measured_cases(payload: dict[str, Any], section: str) -> set[str]:
    """Cases in which every variant has figures."""
    failed = {row["case"] for row in payload[section] if "error" in row}
    return {row["case"] for row in payload[section]} - failed


def _models(scale: Scale) -> list[ModelSize]:
    sizes = (scale.model, scale.crossover_model, scale.cost_model, *scale.update_models)
    return list(dict.fromkeys(sizes))


def _new_run(run: Run) -> dict[str, Any]:
    clock = CudaClock() if run.device.type == "cuda" else HostClock()
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": describe_gpu(run.seed)["commit"],
        "environment": {name: os.environ.get(name, "") for name in GPU_ENVIRONMENT},
        "gemm": measure_gemm(run.device, clock),
        "cases": {section: [] for section in SECTIONS},
        "seconds": 0.0,
    }


if __name__ == "__main__":
    main()
