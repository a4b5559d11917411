"""Section `profile`: where a step's time goes, by kernel, and how long the device is idle.

It profiles the recorded group, packed and streamed, and a whole update. Shares are of the profiled
steps, whose seconds are recorded beside those of unprofiled ones.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.timing import measure as measure_samples
from benchmarks.common.timing import release, require_time, timed
from benchmarks.step.run import Row, Run, Scale, Section, figures_or_refusal
from benchmarks.step.subjects import Way, run_step
from benchmarks.step.updates import clip_fraction, open_update
from benchmarks.step.ways import Plan, Ways, load_packed
from benchmarks.step.workload import make_batch
from ratoon.rollout.batch import RolloutBatch

PROFILED_STEPS = 2
# Kernels that a row lists by name; the rest of a step is many small ones.
LONGEST_KERNELS = 24
UPDATE = "update "
ALGORITHM = "grpo"


class Kind(StrEnum):
    """Part that a kernel belongs to, as named in tables."""

    ATTENTION_FORWARD = "attention, forward"
    ATTENTION_BACKWARD = "attention, backward"
    PRODUCTS = "products of weights"
    HEAD = "LM head"
    COMPILED = "compiled elementwise"
    EAGER = "other kernels of torch"
    COPIES = "copies and fills"
    OPTIMIZER = "optimizer"


# The first match decides; the LM head's products are found by the kernels around them.
_NAMES = (
    (Kind.ATTENTION_FORWARD, r"tree_attention_forward"),
    (Kind.ATTENTION_BACKWARD, r"tree_attention_backward"),
    (Kind.HEAD, r"_reduce_rows|_differentiate_logits"),
    (Kind.COPIES, r"^Mem(cpy|set)"),
    (Kind.PRODUCTS, r"nvjet|[Gg]emm|gemv|cutlass|splitKreduce"),
    (Kind.COMPILED, r"^triton_"),
)
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _NAMES)
_HEAD_BACKWARD = "_differentiate_logits"
# Products after the head's logit gradients: with its weight, and with the hidden states.
_PRODUCTS_AFTER = 2
# Reduces the parts of the product before it.
_END_OF_PRODUCT = "splitKreduce"
_MAX_NAME = 80


def cases(scale: Scale) -> list[str]:
    group = f"{scale.paper.prompt}x{len(scale.paper.responses)}"
    return [group, f"{UPDATE}{group}"]


def measure(run: Run, wanted: list[str]) -> Iterator[tuple[str, list[Row]]]:
    """Yields the step's case with a row per way of ours, then the update's with one row."""
    scale = run.scale
    step, update = cases(scale)
    batch = make_batch((scale.paper,), scale.model.vocab_size, run.seed)
    if step in wanted:
        yield step, _profile_ways(Ways(run, scale.model), batch)
    release(run.device)
    if update in wanted:
        row: Row = {"how": scale.ours.how, "model": scale.model.name}
        yield update, [row | figures_or_refusal(partial(_profile_update, run, batch))]


def _profile_ways(ways: Ways, batch: RolloutBatch) -> list[Row]:
    rows: list[Row] = []
    for way in (ways.run.scale.ours, *ways.run.scale.streamed):
        row: Row = {"how": way.how, "model": ways.size.name}
        rows.append(row | figures_or_refusal(partial(_profile_way, ways, way, batch)))
        ways.clear()
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
    require_time(run.stop_at, 0.0)
    update = open_update(Ways(run, run.scale.model), ALGORITHM, batch)
    clipped: list[float] = []

    def step() -> None:
        report = update.step(None)
        clipped.append(clip_fraction(report))

    return {**_profile(run, step, has_optimizer=True), "clip_fraction": max(clipped)}


def _profile(run: Run, work: Callable[[], object], *, has_optimizer: bool) -> Row:
    """Figures of a piece of work, which runs several times, first as a warm-up."""
    warm_up_s = timed(work, run.device)
    measured = measure_samples(work, run.device, num_samples=run.num_samples, stop_at=run.stop_at)
    # Makes the profiler load its libraries.
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
    """Seconds between two synchronisations of host and device, and the kernels in between.

    On a CPU, leaf operations take the place of kernels.
    """

    seconds: float
    kernels: list[Kernel]


def profiled_step(work: Callable[[], object], device: torch.device) -> ProfiledStep:
    """Runs the work once under the profiler, which on a GPU traces only the device."""
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
    """Share of the step's seconds in which the device was idle, its beginning included."""
    return 1 - busy_us(step.kernels) / 1e6 / step.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel, copy or fill; microseconds on the profiler's clock."""

    name: str
    start_us: float
    stop_us: float

    @property
    def milliseconds(self) -> float:
        return (self.stop_us - self.start_us) / 1e3


def kinds_of(names: Sequence[str], *, has_optimizer: bool) -> list[Kind]:
    """The kind of each kernel of a step, given in execution order.

    The product right before each of the head's own kernels computes its logits. With an optimizer,
    everything after the last product or attention kernel belongs to it.
    """
    kinds = [_kind(name) for name in names]
    last, still_to_come = -1, 0
    for i, name in enumerate(names):
        if kinds[i] is Kind.HEAD:
            if last >= 0:
                kinds[last] = Kind.HEAD
            still_to_come = _PRODUCTS_AFTER if _HEAD_BACKWARD in name else 0
        elif kinds[i] is Kind.PRODUCTS and _END_OF_PRODUCT not in name:
            last = i
            if still_to_come:
                kinds[i] = Kind.HEAD
                still_to_come -= 1
    product = Kind.PRODUCTS
    for i, name in enumerate(names):
        if _END_OF_PRODUCT in name:
            kinds[i] = product
        elif _kind(name) is Kind.PRODUCTS:
            product = kinds[i]
    if has_optimizer:
        step = (Kind.PRODUCTS, Kind.HEAD, Kind.ATTENTION_FORWARD, Kind.ATTENTION_BACKWARD)
        stop = max((i + 1 for i, kind in enumerate(kinds) if kind in step), default=0)
        kinds[stop:] = [Kind.OPTIMIZER] * (len(kinds) - stop)
    return kinds


def busy_us(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one kernel ran; overlaps count once."""
    busy, end = 0.0, float("-inf")
    for kernel in in_order(kernels):
        busy += max(0.0, kernel.stop_us - max(kernel.start_us, end))
        end = max(end, kernel.stop_us)
    return busy


def longest_gap_us(kernels: Sequence[Kernel]) -> float:
    """Longest idle time between two kernels, in microseconds."""
    longest, end = 0.0, float("inf")
    for kernel in in_order(kernels):
        longest = max(longest, kernel.start_us - end)
        end = kernel.stop_us if end == float("inf") else max(end, kernel.stop_us)
    return longest


def milliseconds_by_kind(
    steps: Sequence[Sequence[Kernel]], *, has_optimizer: bool
) -> dict[str, float]:
    """Mean milliseconds per step, by kind; kinds that did not run are 0."""
    found = dict.fromkeys(map(str, Kind), 0.0)
    for kernel, kind in _with_kinds(steps, has_optimizer=has_optimizer):
        found[str(kind)] += kernel.milliseconds / len(steps)
    return found


def longest_kernels(
    steps: Sequence[Sequence[Kernel]], count: int, *, has_optimizer: bool
) -> list[dict[str, object]]:
    """The `count` longest kernels by name and kind, with calls and milliseconds per step."""
    found: dict[tuple[str, Kind], list[float]] = defaultdict(list)
    for kernel, kind in _with_kinds(steps, has_optimizer=has_optimizer):
        found[kernel.name[:_MAX_NAME], kind].append(kernel.milliseconds)
    order = sorted(found, key=lambda key: -sum(found[key]))[:count]
    return [
        {
            "name": name,
            "kind": str(kind),
            "calls": len(found[name, kind]) / len(steps),
            "ms": sum(found[name, kind]) / len(steps),
        }
        for name, kind in order
    ]


def in_order(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels sorted by start."""
    return sorted(kernels, key=lambda kernel: kernel.start_us)


def _with_kinds(
    steps: Sequence[Sequence[Kernel]], *, has_optimizer: bool
) -> Iterator[tuple[Kernel, Kind]]:
    for step in steps:
        order = in_order(step)
        kinds = kinds_of([kernel.name for kernel in order], has_optimizer=has_optimizer)
        yield from zip(order, kinds, strict=True)


def _kind(name: str) -> Kind:
    found = (kind for kind, pattern in _PATTERNS if pattern.search(name))
    return next(found, Kind.EAGER)


PROFILE = Section(cases=cases, measure=measure)
