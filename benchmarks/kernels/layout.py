"""Times a layout with its work lists, on one thread.

The time is what a micro-batch costs the host, from node arrays to the buffer to upload, without the
upload.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.document import write_json
from benchmarks.common.forests import SHAPES, Nodes, build
from harness.environment import describe
from ratoon_kernels import Span, build_layout
from ratoon_kernels.schedule import build_schedule

TARGET_MS = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    rows = [_measure(name, build(name, args.seed), args.repeats) for name in SHAPES]
    result = {
        "target_ms": TARGET_MS,
        "longest_ms": max(row["median_ms"]["build_layout"] for row in rows),
        **describe(args.seed),
        "threads": 1,
        "repeats": args.repeats,
        "rows": rows,
    }
    write_json(args.out, result)
    for row in rows:
        times = "  ".join(f"{name} {value:.2f}" for name, value in row["median_ms"].items())
        print(f"{row['shape']:16} {row['tokens']:7} tokens  ms: {times}")


def _measure(name: str, nodes: Nodes, repeats: int) -> dict[str, Any]:
    """Times the whole layout, its schedule, and the schedule of one half against the other."""
    layout = build_layout(**nodes.arrays(), device="cpu")
    end_T = layout.end_T.numpy()
    whole = Span(0, nodes.num_tokens)
    first, second = Span(0, nodes.num_tokens // 2), Span(nodes.num_tokens // 2, nodes.num_tokens)
    raw_ms = {
        "build_layout": _time_ms(lambda: build_layout(**nodes.arrays(), device="cpu"), repeats),
        "schedule": _time_ms(lambda: build_schedule(end_T, whole, whole).pack(), repeats),
        "partial_schedule": _time_ms(lambda: build_schedule(end_T, second, first).pack(), repeats),
    }
    schedule = layout.schedule
    return {
        "shape": name,
        "tokens": nodes.num_tokens,
        "nodes": len(nodes.start),
        "pairs": nodes.num_pairs,
        "query_tiles": len(schedule.forward_items),
        "runs": len(schedule.runs),
        "pieces": [len(level.pieces) for level in schedule.levels],
        "slots": [level.num_slots for level in schedule.levels],
        "table_bytes": layout.schedule_table.nbytes,
        "median_ms": {name: statistics.median(values) for name, values in raw_ms.items()},
        "raw_ms": {name: [round(value, 4) for value in values] for name, values in raw_ms.items()},
    }


def _time_ms(work: Callable[[], object], repeats: int) -> list[float]:
    work()
    times_ms: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times_ms.append(1e3 * (time.perf_counter() - start))
    return times_ms


if __name__ == "__main__":
    main()
