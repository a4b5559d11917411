"""`make bench-cpu`: the policy update on a CPU, packed against replicated, and what it leaves.

Enters nothing but the machine, leaves one result file. Invariant: the file is written only where
every part ran; misses of a target stand in it as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.service.soak_cpu import measure_soak
from benchmarks.step.forest_cpu import measure_forest_1m
from benchmarks.step.packed_cpu import Shape, measure_packed
from harness.environment import describe

SHAPE = Shape(prompt_tokens=2048, num_responses=16, response_tokens=128)
BASELINE_BATCHES = (1, 4, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--soak-updates", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    environment = describe(args.seed)
    forest = measure_forest_1m(max(args.repeats, 5))
    step = measure_packed(
        preset="small",
        shape=SHAPE,
        baseline_batches=BASELINE_BATCHES,
        repeats=args.repeats,
        seed=args.seed,
    )
    soak = measure_soak(args.soak_updates, args.seed)
    result = {
        "speedup": step["speedup"],
        "rho": step["rho"],
        "baseline_batch": step["baseline_batch"],
        "forest_seconds_1m_tokens": forest["total_seconds"],
        "soak_pss_growth": soak["pss_growth"],
        "soak_store_growth": soak["store_growth"],
        **environment,
        "step": step,
        "forest_1m": forest,
        "soak": soak,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    headline = {key: value for key, value in result.items() if not isinstance(value, dict)}
    print(json.dumps(headline, indent=1))


if __name__ == "__main__":
    main()
