"""`make bench-scale`: an Update from 8 to 4,096 H200, simulated from measured constants.

Nothing but the service's planning code runs; the rest is arithmetic (`simulate.py`) over the
constants of `constants.py`, which the result holds, so that it can be computed again from itself.

    python -m benchmarks.scale.main --out benchmarks/results/cpu/scale.json
    python -m benchmarks.scale.main --report FILE --markdown docs/scale.md
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.command import make_parser
from benchmarks.common.document import link, write_json
from benchmarks.scale.constants import GPU_BYTES, MODELS, Model, Values, constants
from benchmarks.scale.groups import deal, draw, num_calls
from benchmarks.scale.report import write_markdown
from benchmarks.scale.simulate import (
    Layout,
    Options,
    first_layout,
    simulate,
    state_bytes,
)
from benchmarks.step.run import FULL
from benchmarks.step.workload import QWEN3_8B, make_batch
from harness.environment import describe
from ratoon.planner.device_costs import H200_RATES
from ratoon.planner.planning import Planner, device_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.serial import batch_from_bytes, batch_to_bytes

COUNTS = (8, 32, 128, 512, 1024, 4096)
GROUPS_PER_GPU = 4
FIXED_GROUPS = 512
REMEDIES = {
    "by node": Options(by_node=True),
    "Z2": Options(bf16_sums=True),
    "own plans": Options(plan_on_ranks=True),
    "overlap": Options(overlap=True),
    "split": Options(split=True),
    "all but Z2": Options(by_node=True, plan_on_ranks=True, overlap=True, split=True),
    "all": Options(by_node=True, bf16_sums=True, plan_on_ranks=True, overlap=True, split=True),
}
# Group counts of the planned batches, ascending.
_TIMED_GROUPS = (1, 64)
_REPEATS = 9
# Free bytes for the planned group, if weights and states take half of the GPU.
_FREE_BYTES = GPU_BYTES["H200"] // 2
_DIGITS = 4


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__, has_device=False)
    parser.add_argument("--markdown", type=Path, help="with --report: fill in this document")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.report is None:
        result = measure(args.seed)
        if args.out is not None:
            write_json(args.out, result)
    else:
        result = json.loads(args.report.read_text(encoding="utf-8"))
        if args.markdown is not None:
            write_markdown(result, args.markdown, link(args.report, args.markdown))
    for row in result["rows"]:
        print(f"{row['model']:16} {row['scaling']:6} {row['gpus']:5}", row.get("efficiency", "-"))


def measure(seed: int) -> dict[str, Any]:
    """The result: what planning takes on this machine, constants, and every simulated Update."""
    environment = describe(seed)
    planning = time_planning(seed)
    found = [{**asdict(c), "value": _rounded(c.value)} for c in constants(planning)]
    values = {one["name"]: one["value"] for one in found}
    return {
        "is_modelled": True,
        **environment,
        "planning": planning,
        "constants": found,
        **simulated(values, seed),
    }


def simulated(values: Values, seed: int) -> dict[str, Any]:
    """Figures that follow only from constants and seed."""
    return {
        "memory": [_memory_row(model, n, values) for model in MODELS for n in COUNTS],
        "rows": [
            row(model, scaling, n, values, seed)
            for model in MODELS
            for scaling in ("weak", "strong")
            for n in COUNTS
        ],
    }


def row(model: Model, scaling: str, n: int, c: Values, seed: int) -> dict[str, Any]:
    """One Update as designed, and its seconds under each remedy."""
    num_groups = GROUPS_PER_GPU * n if scaling == "weak" else FIXED_GROUPS
    named = {"model": model.size.name, "scaling": scaling, "gpus": n, "groups": num_groups}
    layout = first_layout(model, n, "H200", c)
    if layout is None:
        return named
    batch = draw(num_groups, c, seed)
    update = simulate(model, batch, n, layout, c)
    alone = simulate(model, batch, 1, Layout.Z1, c)
    lost = {name: s - alone.phases[name] / n for name, s in update.phases.items()}
    return {
        **named,
        "calls": num_calls(batch, c),
        "body_gb": _rounded(1e-3 * c["body_mb"] * num_groups),
        "layout": layout.value,
        "gb": _rounded(state_bytes(model, layout, n) / 1e9),
        "seconds": _rounded(update.seconds),
        "efficiency": _rounded(alone.seconds / (n * update.seconds)),
        "loses_most": max(lost, key=lambda name: lost[name]),
        "publish_s": _rounded(update.publish_s),
        "phases": {name: _rounded(seconds) for name, seconds in update.phases.items()},
        "remedies": {
            name: _rounded(
                alone.seconds / (n * simulate(model, batch, n, layout, c, options).seconds)
            )
            for name, options in REMEDIES.items()
        },
    }


def _memory_row(model: Model, n: int, c: Values) -> dict[str, Any]:
    """GB of one GPU by layout, and the first layout that fits each GPU."""
    return {
        "model": model.size.name,
        "gpus": n,
        **{layout.value: _rounded(state_bytes(model, layout, n) / 1e9) for layout in Layout},
        **{gpu: first_layout(model, n, gpu, c) for gpu in GPU_BYTES},
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def time_planning(seed: int) -> dict[str, Any]:
    """CPU ms per group of the service's own code on one thread, and its bytes per group.

    The process's own time: what else runs on the machine is not in it. `plan_ms` is by the groups
    of a batch.
    """
    planner = device_planner(
        None, MODELS[0].sizes, _FREE_BYTES, 0, rates=H200_RATES, layers_are_trained=True
    )
    batches = {
        count: make_batch((FULL.paper,) * count, QWEN3_8B.vocab_size, seed)
        for count in _TIMED_GROUPS
    }
    most = batches[_TIMED_GROUPS[-1]]
    body = batch_to_bytes(most)
    seconds_G = np.random.default_rng(seed).lognormal(size=GROUPS_PER_GPU * COUNTS[-1])
    plans_ms = {
        count: _times_ms(
            partial(_plan, planner, batch, np.ones(batch.num_sequences, np.bool_)), count
        )
        for count, batch in batches.items()
    }
    decodes_ms = _times_ms(partial(batch_from_bytes, body), most.num_groups)
    deals_ms = _times_ms(partial(deal, seconds_G, COUNTS[-1]), len(seconds_G))
    return {
        "body_bytes": len(body) / most.num_groups,
        "plan_ms": {count: statistics.median(values) for count, values in plans_ms.items()},
        "decode_ms": statistics.median(decodes_ms),
        "deal_ms": statistics.median(deals_ms),
        "samples": {"plan_ms": plans_ms, "decode_ms": decodes_ms, "deal_ms": deals_ms},
    }


def _plan(planner: Planner, batch: RolloutBatch, is_run_S: NDArray[np.bool_]) -> None:
    planner.plan(batch, sort_sequences(batch), is_run_S)


def _times_ms(work: Callable[[], object], count: int) -> list[float]:
    work()
    times_ms: list[float] = []
    for _ in range(_REPEATS):
        start = time.process_time()
        work()
        times_ms.append(round(1e3 * (time.process_time() - start) / count, 5))
    return times_ms


if __name__ == "__main__":
    main()
