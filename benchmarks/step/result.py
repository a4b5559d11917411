"""The result file of the step benchmark, filled section by section and case by case.

Enters rows of cases, leaves the payload of a file. Invariant: all rows of a case are of one run, so
that ratios between them are, and all runs of a file are of the same machine and seed. They are of
the same sources too, or the file says `stale`, and each run its sources.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from benchmarks.kernels.attention_timing import CudaClock, HostClock, measure_gemm
from benchmarks.step.run import Row, Run, Scale
from benchmarks.step.sizes import PEAK_FLOPS
from harness.gpu_results import describe_gpu
from ratoon.engine.cluster.gpu_environment import GPU_ENVIRONMENT

SECTIONS = ("paper", "profile", "table2", "memory", "crossover", "costs", "updates")
SAME_ON_MERGE = ("source_sha256", "gpu", "versions", "seed", "models", "gradient_dtype")


def empty_payload(run: Run) -> dict[str, Any]:
    """Of a run that has not measured anything yet."""
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
    """The old result's payload with a new run begun in it.

    Raises:
        SystemExit: The old result is of other sources, another machine or seed.
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


def joined_result(old: dict[str, Any], new: dict[str, Any], stale: str) -> dict[str, Any]:
    """The old result with the new one's cases; `stale` says why those of other sources stay.

    Raises:
        SystemExit: They are of another machine or seed, or `stale` is empty and should not be.
    """
    same = [name for name in SAME_ON_MERGE if name != "source_sha256"]
    if differing := [name for name in same if old[name] != new[name]]:
        raise SystemExit(f"cannot join results of another {', '.join(differing)}")
    cases = {name: {row["case"] for row in new[name]} for name in SECTIONS}
    joined = {name: value for name, value in new.items() if name != "stale"}
    runs = [_without(run, cases, old["source_sha256"]) for run in old["runs"]]
    joined["runs"] = [run for run in runs if any(run["cases"].values())]
    joined["runs"] += [_without(run, {}, new["source_sha256"]) for run in new["runs"]]
    for name in SECTIONS:
        others = [row for row in old[name] if row["case"] not in cases[name]]
        joined[name] = [*others, *new[name]]
    if any(run["source_sha256"] != new["source_sha256"] for run in joined["runs"]):
        if not stale:
            raise SystemExit("cases of other sources stay: say why with --stale")
        joined["stale"] = stale
    return joined


def _without(run: dict[str, Any], cases: dict[str, set[str]], source_sha256: str) -> dict[str, Any]:
    """The run, which names its sources, less these cases."""
    kept = {
        section: [name for name in names if name not in cases.get(section, ())]
        for section, names in run["cases"].items()
    }
    return {"source_sha256": source_sha256, **run, "cases": kept}


def add_case(payload: dict[str, Any], section: str, case: str, rows: list[Row]) -> None:
    """Puts a whole case in; its rows from another run go, and so does a run without cases."""
    runs = payload["runs"]
    for run in runs:
        run["cases"][section] = [name for name in run["cases"][section] if name != case]
    runs[-1]["cases"][section].append(case)
    payload["runs"] = [run for run in runs if any(run["cases"].values())]
    others = [row for row in payload[section] if row["case"] != case]
    payload[section] = [*others, *({"case": case, **row} for row in rows)]


def sort_cases(payload: dict[str, Any], section: str, order: list[str]) -> None:
    """Rows by the order of their cases."""
    payload[section].sort(key=lambda row: order.index(row["case"]))


def measured_cases(payload: dict[str, Any], section: str) -> set[str]:
    """Cases that have figures and no way without."""
    failed = {row["case"] for row in payload[section] if "error" in row}
    return {row["case"] for row in payload[section]} - failed


def _models(scale: Scale) -> list[Any]:
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
