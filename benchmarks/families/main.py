"""Benchmarks the families of models: their operators, whole layers, and their precision.

Measures sections into a result file, a case at a time, or prints a file's figures. A file is
written only if the GPU tests are green for these sources; runs of the same sources, machine
and seed are merged, so that sections can be measured in several calls.

    python -m benchmarks.families.main --out benchmarks/results/h200/families.json --only delta
    python -m benchmarks.families.main --draft --device cpu
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.common.command import is_for_gpu, make_parser, names
from benchmarks.common.document import FIGURE_COLUMNS, aligned
from benchmarks.common.timing import release
from benchmarks.families import kernels, models
from benchmarks.families.recurrences import FLA, FLASH_QLA
from benchmarks.kernels.attention_timing import CudaClock, HostClock, measure_gemm
from benchmarks.step.main import add_case, joined_result, sort_cases
from benchmarks.step.run import FULL, SMALL, Row, Run, Section
from benchmarks.step.subjects import REPLICATED
from benchmarks.step.workload import PEAK_FLOPS
from harness.gpu_results import describe_gpu, write_result

SAME_ON_MERGE = ("source_sha256", "gpu", "seed")
# Seconds that a case may take: of a first one minutes go to how libraries tune their kernels.
CASE_S = 400.0
RATES = ("fwd_tflops", "bwd_tflops")
WANTED: dict[str, str] = {
    "over_replicated qwen3.5": ">= 3.8",
    "over_replicated qwen3.5-moe": ">= 3.8",
    **{f"over_replicated {name}": ">= 3.5" for name in ("gpt-oss", "gemma3", "glm4-moe")},
    "hardware_mfu qwen3.5": ">= 0.50",
    "hardware_mfu qwen3.5-moe": ">= 0.42",
    **{f"hardware_mfu {name}": ">= 0.45" for name in ("gpt-oss", "gemma3", "glm4-moe")},
    "deep_over_flat qwen3.5": "<= 1.25",
    "two_levels_over_library qwen3.5": ">= 1.0",
    "d256 causal 16K": ">= 660/430",
    "d256 group": ">= 600/400",
    "d192_128 causal 16K": ">= 600/450",
    "over_without sinks": "<= 1.03",
    "over_without window of all": "<= 1.03",
    "window_speedup window of 128": ">= 8",
    **{f"bf16_distance {name}": "<= 1.25" for name in models.CASES},
}


def main(arguments: list[str] | None = None) -> None:
    args = _parse(arguments)
    if args.report is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
        if args.join is not None:
            result = _join(args.report, result, args.join, args.stale)
    else:
        result = _measure(args)
    print("\n".join(format_tables(result)))


def _join(path: Path, old: dict[str, Any], other: Path, stale: str) -> dict[str, Any]:
    new = json.loads(other.read_text(encoding="utf-8"))
    joined = joined_result(old, new, stale, sections=SECTIONS, same=SAME_ON_MERGE)
    for section, of in SECTIONS.items():
        sort_cases(joined, section, of.cases(FULL))
    joined |= headline(joined)
    path.write_text(json.dumps(joined, indent=1) + "\n", encoding="utf-8")
    return joined


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--join", type=Path, help="with --report: first put this result's cases in")
    parser.add_argument("--stale", default="", help="with --join: why cases of other sources stay")
    parser.add_argument("--only", type=names, default=tuple(SECTIONS), help="sections: a,b")
    parser.add_argument("--cases", type=names, help="of the sections that have them: a,b")
    parser.add_argument("--samples", type=int, default=5, help="of each figure, at most")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds, set-up included")
    parser.add_argument("--layers", type=int, help="of each model; by default what fits")
    parser.add_argument("--without", type=names, default=(), help="libraries: fla,flash-qla")
    parser.add_argument("--no-levels", action="store_true", help="layers: no library by levels")
    parser.add_argument("--new", action="store_true", help="forget what --out's file holds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if unknown := {*args.only} - SECTIONS.keys():
        parser.error(f"no section {sorted(unknown)}, only {list(SECTIONS)}")
    known = {case for name in args.only for case in SECTIONS[name].cases(FULL)}
    if unknown := {*(args.cases or ())} - known:
        parser.error(f"no case {sorted(unknown)}, only {sorted(known)}")
    return args


SECTIONS: dict[str, Section] = {
    "attention": Section(cases=kernels.attention_cases, measure=kernels.measure_attention),
    "delta": Section(cases=kernels.delta_cases, measure=kernels.measure_delta),
    "layers": Section(cases=models.cases, measure=models.measure_layers),
    "precision": Section(cases=models.cases, measure=models.measure_precision),
}


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    is_gpu = is_for_gpu(args)
    start = time.monotonic()
    run = Run(
        device=torch.device(args.device),
        scale=FULL if is_gpu else SMALL,
        num_samples=args.samples,
        stop_at=start + args.budget_s,
        seed=args.seed,
    )
    payload = new(run)
    if args.out is not None and args.out.is_file() and not args.new:
        payload = merged(json.loads(args.out.read_text(encoding="utf-8")), payload, run.seed)
    for section, measure in _measurements(args):
        order = SECTIONS[section].cases(run.scale)
        for case in (case for case in order if case in (args.cases or order)):
            if run.is_out_of_time:
                print(f"out of time: {section} {case}", file=sys.stderr)
                continue
            own = replace(run, stop_at=min(run.stop_at, time.monotonic() + CASE_S))
            for _, rows in measure(own, [case]):
                add_case(payload, section, case, rows)
            sort_cases(payload, section, order)
            payload["runs"][-1]["seconds"] = time.monotonic() - start
            for row in rows_of(payload, section, case):
                print(section, json.dumps(row), file=sys.stderr, flush=True)
            if args.out is not None:
                # The result is written now, so that an interrupted run keeps its measurements.
                write_result(args.out, {**headline(payload), **payload}, seed=run.seed)
            release(run.device)
    return {**describe_gpu(run.seed), **headline(payload), **payload}


def _measurements(
    args: argparse.Namespace,
) -> Iterator[tuple[str, Callable[[Run, list[str]], Iterable[tuple[str, list[Row]]]]]]:
    """The sections of --only, with the options that each of them takes."""
    libraries = [name for name in (FLA, FLASH_QLA) if name not in args.without]
    options: dict[str, dict[str, Any]] = {
        "attention": {},
        "delta": {"libraries": libraries},
        "layers": {
            "num_layers": args.layers,
            "library": libraries[0] if libraries else FLA,
            "has_levels": not args.no_levels,
        },
        "precision": {"num_layers": args.layers},
    }
    for name, section in SECTIONS.items():
        if name in args.only:
            yield name, partial(section.measure, **options[name])


def new(run: Run) -> dict[str, Any]:
    """The payload of a run that has not measured anything yet."""
    clock = CudaClock() if run.device.type == "cuda" else HostClock()
    return {
        "peak_flops": PEAK_FLOPS,
        "method": {
            "clock": "CUDA events for operators, host between synchronisations for steps",
            "order": "in turns, each warmed up",
            "statistic": "median",
            "weights": "random, of the released configurations",
            "transformers": metadata.version("transformers"),
            "hardware_mfu": "the service's count of a packed forward and backward, without "
            "recomputation, over peak_flops",
            "fla": "its refusal of Triton below 3.7.1 on Hopper is passed over",
        },
        "runs": [
            {
                "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": describe_gpu(run.seed)["commit"],
                "gemm": measure_gemm(run.device, clock),
                "cases": {section: [] for section in SECTIONS},
                "seconds": 0.0,
            }
        ],
        **{section: [] for section in SECTIONS},
    }


def merged(old: Mapping[str, Any], payload: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The old result's payload with a new run added.

    Raises:
        SystemExit: The old result is of another commit, other sources, or another machine or seed.
    """
    now = describe_gpu(seed)
    # No section runs it, so a machine may lack it.
    was, are = ({**of["versions"], "flash-attn-4": ""} for of in (old, cast("Any", now)))
    differing = [name for name in SAME_ON_MERGE if old.get(name) != now[name]]
    if differing := [*differing, *(["versions"] if was != are else [])]:
        raise SystemExit(
            f"cannot merge into a result of another {', '.join(differing)}: --new begins anew"
        )
    kept = {name: old[name] for name in payload}
    kept["runs"] = [*kept["runs"], *payload["runs"]]
    return kept


def rows_of(payload: Mapping[str, Any], section: str, case: str) -> list[Row]:
    return [row for row in payload[section] if row["case"] == case]


def measured(payload: Mapping[str, Any], section: str) -> dict[str, dict[str, Row]]:
    """Rows with figures, by case and by what ran."""
    found: dict[str, dict[str, Row]] = {}
    for row in payload[section]:
        if "samples" in row:
            found.setdefault(row["case"], {})[row["how"]] = row
    return found


def headline(payload: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures that have a target, by kind and then by family or form; absent if a row is."""
    layers, delta = measured(payload, "layers"), measured(payload, "delta")
    attention = measured(payload, "attention")
    found: dict[str, dict[str, Any]] = {name: {} for name in ("over_replicated", "hardware_mfu")}
    for case, rows in layers.items():
        # The first row is ours.
        ours = next(iter(rows.values()))
        if REPLICATED in ours["how"] or "+" in ours["how"]:
            continue
        found["hardware_mfu"][case] = ours["hardware_mfu"]
        replicated = [row["seconds"] for how, row in rows.items() if REPLICATED in how]
        if replicated:
            found["over_replicated"][case] = min(replicated) / ours["seconds"]
    found["deep_over_flat"] = dict(_of_delta(delta, kernels.DEEP, kernels.FLAT))
    found["two_levels_over_library"] = dict(_of_libraries(delta))
    for name, prefix in (("d256", "256 "), ("d192_128", "192/128 ")):
        found[name] = {
            case.removeprefix(prefix): {rate: rows[kernels.OURS][rate] for rate in RATES}
            for case, rows in attention.items()
            if case.startswith(prefix) and "windows" not in case and kernels.OURS in rows
        }
    over, speedup = dict[str, float](), dict[str, float]()
    for case, rows in attention.items():
        size = case.partition(" ")[0]
        plain = rows.get(kernels.OURS)
        for how, row in rows.items():
            if plain is None or "windows" not in case or how == kernels.OURS:
                continue
            ratio = milliseconds(row) / milliseconds(plain)
            is_far = how not in ("sinks", "window of all")
            (speedup if is_far else over)[f"{size} {how}"] = 1 / ratio if is_far else ratio
    found["over_without"], found["window_speedup"] = over, speedup
    found["bf16_distance"] = {
        case: row["ratio"]
        for case, rows in measured(payload, "precision").items()
        for row in rows.values()
    }
    return found


def _of_delta(
    delta: Mapping[str, Mapping[str, Row]], above: str, below: str
) -> Iterator[tuple[str, float]]:
    """Times of one case over another's, of ours and of each library."""
    for how, row in delta.get(above, {}).items():
        other = delta.get(below, {}).get(how)
        if other is not None:
            name = "qwen3.5" if how == kernels.OURS else f"qwen3.5 by {how}"
            yield name, milliseconds(row) / milliseconds(other)


def _of_libraries(delta: Mapping[str, Mapping[str, Row]]) -> Iterator[tuple[str, float]]:
    """Time of the fastest library over ours, of two levels."""
    rows = delta.get(kernels.TWO_LEVELS, {})
    others = [milliseconds(row) for how, row in rows.items() if how != kernels.OURS]
    if others and kernels.OURS in rows:
        yield "qwen3.5", min(others) / milliseconds(rows[kernels.OURS])


def milliseconds(row: Row) -> float:
    """Forward and backward together."""
    return row["fwd_ms"] + row["bwd_ms"]


def format_tables(result: Mapping[str, Any]) -> list[str]:
    """Figures with what is wanted of them, then why others are missing."""
    cells: list[list[str]] = [list(FIGURE_COLUMNS)]
    for kind, figures in headline(result).items():
        for name, value in figures.items():
            shown = f"{value:.3f}" if isinstance(value, float) else _rates(value)
            cells.append([f"{kind} {name}", shown, _wanted(kind, name)])
    errors = [
        f"{section} {row['case']}, {row['how']}: {row['error']}"
        for section in SECTIONS
        for row in result[section]
        if "error" in row
    ]
    return [*aligned(cells), *errors]


def _rates(value: Mapping[str, float]) -> str:
    return "/".join(f"{value[rate]:.0f}" for rate in RATES)


def _wanted(kind: str, name: str) -> str:
    """Windows and sinks have one target for all head sizes."""
    alone = name.partition(" ")[2]
    return WANTED.get(f"{kind} {name}", WANTED.get(f"{kind} {alone}", ""))


if __name__ == "__main__":
    main()
