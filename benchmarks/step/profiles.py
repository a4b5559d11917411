"""Section `profile`: where the time of a step goes, kernel by kernel, and where nothing runs.

Enters a run, leaves rows of the recorded group: packed, streamed, and a whole update. Invariant:
what is profiled is what the other sections time; shares are of one profiled step, whose seconds
stand beside those of steps that nobody watched.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.step.kernels import (
    Kernel,
    busy_us,
    longest_gap_us,
    longest_kernels,
    milliseconds_by_kind,
)
from benchmarks.step.rollouts import make_batch
from benchmarks.step.run import Row, Run, Scale, refusal
from benchmarks.step.subjects import Way, run_step
from benchmarks.step.timing import measure as measure_samples
from benchmarks.step.timing import release, require_time, timed
from benchmarks.step.updates import open_update
from benchmarks.step.ways import Plan, Ways, load_packed
from ratoon.rollout.batch import RolloutBatch

PROFILED_STEPS = 2
# Names of a row that stand for themselves; the rest of a step is many small ones.
LONGEST_KERNELS = 24
UPDATE = "update "
ALGORITHM = "grpo"


def cases(scale: Scale) -> list[str]:
    group = f"{scale.paper.prompt}x{len(scale.paper.responses)}"
    return [group, f"{UPDATE}{group}"]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields the step's case with a row for each of our ways, then the update's with one."""
    scale = run.scale
    step, update = cases(scale)
    batch = make_batch((scale.paper,), scale.model.vocab_size, run.seed)
    if step in wanted:
        yield step, _profile_ways(Ways(run, scale.model), batch)
    release(run.device)
    if update in wanted:
        yield update, [_profile_update(run, batch)]


def _profile_ways(ways: Ways, batch: RolloutBatch) -> list[Row]:
    rows: list[Row] = []
    for way in (ways.run.scale.ours, *ways.run.scale.streamed):
        row: Row = {"how": way.how, "model": ways.size.name}
        try:
            row |= _profile_way(ways, way, batch)
        except Exception as error:  # noqa: BLE001  what the device says is the row's content
            row |= refusal(error)
        ways.clear()
        rows.append(row)
    return rows


def _profile_way(ways: Ways, way: Way, batch: RolloutBatch) -> Row:
    require_time(ways.run.stop_at, 0.0)
    policy = ways.policy(way)
    batches = load_packed(ways, way, batch)
    memory = Plan(cuts=()).limit(policy, batches)
    kept = {} if memory is None else {"layers_kept": memory.layers}
    figures = _profile(ways.run, partial(run_step, policy, batches), has_optimizer=False)
    return {**figures, **kept}


def _profile_update(run: Run, batch: RolloutBatch) -> Row:
    row: Row = {"how": run.scale.ours.how, "model": run.scale.model.name}
    try:
        require_time(run.stop_at, 0.0)
        update = open_update(Ways(run, run.scale.model), ALGORITHM, batch)
        old = update.old_logprobs()
        return row | _profile(run, lambda: update.step(old), has_optimizer=True)
    except Exception as error:  # noqa: BLE001  what the device says is the row's content
        return row | refusal(error)


def _profile(run: Run, work: Callable[[], object], *, has_optimizer: bool) -> Row:
    """Figures of a piece of work, which is run several times, first to compile it."""
    warm_up_s = timed(work, run.device)
    measured = measure_samples(work, run.device, num_samples=run.num_samples, stop_at=run.stop_at)
    # Has the profiler load its libraries.
    profiled_step(lambda: torch.zeros(1, device=run.device), run.device)
    profiled = [profiled_step(work, run.device) for _ in range(PROFILED_STEPS)]
    steps = [step.kernels for step in profiled]
    is_gpu = run.device.type == "cuda"
    return {
        "warm_up_s": warm_up_s,
        "seconds": measured.seconds,
        "profiled_s": statistics.mean(step.seconds for step in profiled),
        "busy_s": statistics.mean(busy_us(step) for step in steps) / 1e6,
        "gap_share": statistics.mean(map(gap_share, profiled)) if is_gpu else None,
        "longest_gap_ms": max(map(longest_gap_us, steps)) / 1e3,
        "num_kernels": statistics.mean(map(len, steps)),
        "kinds_ms": milliseconds_by_kind(steps, has_optimizer=has_optimizer),
        "kernels": longest_kernels(steps, LONGEST_KERNELS, has_optimizer=has_optimizer),
        "samples": measured.samples,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledStep:
    """Seconds between two synchronisations of host and device, and what ran in between.

    On a CPU, which has no kernels, the operations that call no others stand for them.
    """

    seconds: float
    kernels: list[Kernel]


def profiled_step(work: Callable[[], object], device: torch.device) -> ProfiledStep:
    """One run of it under the profiler, which watches the device alone, where it is a GPU."""
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as watch:
        seconds = timed(work, device)
    events = cast("list[Any]", watch.events())
    kernels = [
        Kernel(name=event.name, start_us=event.time_range.start, stop_us=event.time_range.end)
        for event in events
        if not event.is_user_annotation
        and (event.device_type.name == "CUDA" if is_gpu else not event.cpu_children)
    ]
    return ProfiledStep(seconds=seconds, kernels=kernels)


def gap_share(step: ProfiledStep) -> float:
    """Share of the step's seconds in which the device had nothing to do, its beginning included."""
    return 1 - busy_us(step.kernels) / 1e6 / step.seconds
