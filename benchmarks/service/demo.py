"""Times `ratoon demo` on two CPU cores and on a GPU of the same machine, as whole commands.

python -m benchmarks.service.demo --out benchmarks/results/h200/demo.json
python -m benchmarks.service.demo --draft --device cpu
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.common.command import is_for_gpu, make_parser
from benchmarks.common.document import aligned
from harness.gpu_results import write_result

NUM_CORES = 2
PATIENCE_S = 600.0
_DEMO = [sys.executable, "-c", "from ratoon.cli import main; main()", "demo"]


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=2, help="of each; the first one compiles")
    args = parser.parse_args(arguments)
    if args.report is not None:
        result = json.loads(args.report.read_text(encoding="utf-8"))
    else:
        result = measure(args.runs, has_gpu=is_for_gpu(args))
        if args.out is not None:
            write_result(args.out, result, seed=0)
    print("\n".join(format_table(result)))


def measure(num_runs: int, *, has_gpu: bool) -> dict[str, Any]:
    """Seconds of each run on two cores, then on the GPU. Raises `CalledProcessError`."""
    cores = sorted(os.sched_getaffinity(0))[:NUM_CORES]
    result: dict[str, Any] = {
        "cpu_s": [
            _run({"CUDA_VISIBLE_DEVICES": ""}, partial(os.sched_setaffinity, 0, cores))
            for _ in range(num_runs)
        ]
    }
    if has_gpu:
        result["gpu_s"] = [_run({}, None) for _ in range(num_runs)]
        result["gpu_over_cpu"] = min(result["gpu_s"]) / min(result["cpu_s"])
    return result


def _run(variables: dict[str, str], begin: Callable[[], None] | None) -> float:
    start = time.perf_counter()
    subprocess.run(
        _DEMO,
        env=os.environ | variables,
        preexec_fn=begin,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=PATIENCE_S,
    )
    return time.perf_counter() - start


def format_table(result: dict[str, Any]) -> list[str]:
    """The table for a terminal."""
    rows = [["", "seconds of each run"]]
    for name, where in (("cpu_s", f"{NUM_CORES} CPU cores"), ("gpu_s", "a GPU")):
        if name in result:
            rows.append([where, ", ".join(f"{seconds:.1f}" for seconds in result[name])])
    return aligned(rows)


if __name__ == "__main__":
    main()
