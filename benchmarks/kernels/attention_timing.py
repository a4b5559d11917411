"""Times attention: forward and backward apart, round-robin over the subjects.

Each subject runs once per round, so that changes of clocks or temperature affect all alike.

On a GPU a sample is the time between two CUDA events. Before it the L2 is overwritten and the GPU
kept busy for about a millisecond, while the host launches the timed work: as in a training step,
launch latency up to that is hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks.common.energy import joules_taken
from benchmarks.common.timing import synchronise
from benchmarks.kernels.attention_inputs import Tensors
from benchmarks.kernels.attention_subjects import Subject

FLUSH_BYTES = 256 * 2**20
BUSY_CYCLES = 2_000_000
MIN_SAMPLES = 5
MAX_SAMPLES = 50
# Seconds of a loop without pauses: longer than the clock takes to come down, and long against the
# counter's steps.
SUSTAINED_S = 1.5
GEMM_SAMPLES = 10
GEMM_SIZES = {"cuda": 8192, "cpu": 256}


class Clock(Protocol):
    """Times one piece of work."""

    def milliseconds(self, work: Callable[[], None]) -> float: ...


class HostClock:
    """Clock for CPUs."""

    def milliseconds(self, work: Callable[[], None]) -> float:
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)


class CudaClock:
    """Clock for GPUs; owns the buffer that overwrites the L2."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def milliseconds(self, work: Callable[[], None]) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)


@dataclass(slots=True)
class Samples:
    """Milliseconds per round, summed over a subject's parts."""

    fwd_ms: list[float] = field(default_factory=list)
    bwd_ms: list[float] = field(default_factory=list)
    spent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """GiB of GPU memory beyond the call's inputs, of the part with the most.

    Attributes:
        peak_gib: At any moment of forward and backward: outputs, gradients and workspace.
        forward_workspace_gib: The forward's peak minus its outputs.
        backward_workspace_gib: The backward's peak minus outputs and gradients.
    """

    peak_gib: float
    forward_workspace_gib: float
    backward_workspace_gib: float


def run_once(subject: Subject, tensors: Tensors, clock: Clock) -> tuple[float, float]:
    """Milliseconds of forward and of backward, summed over the parts."""
    fwd_ms = bwd_ms = 0.0
    for part in subject.parts:
        inputs = tensors if subject.is_packed else tensors.gather(part.source_T)
        call = subject.load(inputs, part)
        fwd_ms += clock.milliseconds(call.forward)
        bwd_ms += clock.milliseconds(call.backward)
        del call, inputs
    return fwd_ms, bwd_ms


def sample_rounds(
    subjects: list[Subject], tensors: Tensors, clock: Clock, budget_s: float
) -> dict[str, Samples]:
    """Round-robin until the budget is spent, with at least `MIN_SAMPLES` per subject.

    A subject that has these and has spent its share of the budget skips later rounds.
    """
    samples = {subject.backend: Samples() for subject in subjects}
    stop_at = time.monotonic() + budget_s
    share_s = budget_s / max(len(subjects), 1)
    for round_index in range(MAX_SAMPLES):
        active = [s for s in subjects if _is_active(samples[s.backend], share_s, stop_at)]
        if not active:
            break
        first = round_index % len(active)
        for subject in active[first:] + active[:first]:
            start = time.monotonic()
            fwd_ms, bwd_ms = run_once(subject, tensors, clock)
            mine = samples[subject.backend]
            mine.fwd_ms.append(fwd_ms)
            mine.bwd_ms.append(bwd_ms)
            mine.spent_s += time.monotonic() - start
    return samples


def measure_memory(subject: Subject, tensors: Tensors) -> Memory:
    """Peaks of one forward and backward on the GPU."""
    peak = forward_workspace = backward_workspace = 0
    for part in subject.parts:
        inputs = tensors if subject.is_packed else tensors.gather(part.source_T)
        call = subject.load(inputs, part)
        before = torch.cuda.memory_allocated()
        forward_peak = _peak_bytes(call.forward)
        kept = torch.cuda.memory_allocated()
        backward_peak = _peak_bytes(call.backward)
        after = torch.cuda.memory_allocated()
        peak = max(peak, forward_peak - before, backward_peak - before)
        forward_workspace = max(forward_workspace, forward_peak - kept)
        backward_workspace = max(backward_workspace, backward_peak - after)
        del call, inputs
    return Memory(
        peak_gib=peak / 2**30,
        forward_workspace_gib=forward_workspace / 2**30,
        backward_workspace_gib=backward_workspace / 2**30,
    )


def measure_sustained(subject: Subject, tensors: Tensors) -> dict[str, float]:
    """`sustained_ms` and `joules` of a forward and backward, one after the other without pauses.

    Nothing where the device counts no joules, or inputs are loaded part by part.
    """
    device = tensors.q_TNH.device
    if len(subject.parts) > 1 or joules_taken(device) is None:
        return {}
    (part,) = subject.parts
    call = subject.load(tensors if subject.is_packed else tensors.gather(part.source_T), part)

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call.forward()
            call.backward()
        synchronise(device)
        return time.perf_counter() - start

    run(2)
    count = max(1, round(SUSTAINED_S / run(1)))
    before = joules_taken(device)
    seconds = run(count)
    after = joules_taken(device)
    assert before is not None
    assert after is not None
    return {"sustained_ms": 1e3 * seconds / count, "joules": (after - before) / count}


def measure_gemm(device: torch.device, clock: Clock) -> dict[str, Any]:
    """TFLOP/s of a plain bf16 matrix product here and now: the ceiling for any attention."""
    size = GEMM_SIZES[device.type]
    a, b = torch.randn((2, size, size), device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=out)

    for _ in range(3):
        clock.milliseconds(multiply)
    samples = [clock.milliseconds(multiply) for _ in range(GEMM_SAMPLES)]
    tflops = 2 * size**3 / statistics.median(samples) / 1e9
    return {"size": size, "tflops": tflops, "samples": samples}


def fastest(subjects: list[Subject], tensors: Tensors, clock: Clock) -> Subject:
    """The subject with the fastest forward + backward; each is run twice, the second counts."""

    def seconds(subject: Subject) -> float:
        run_once(subject, tensors, clock)
        return sum(run_once(subject, tensors, clock))

    return subjects[0] if len(subjects) == 1 else min(subjects, key=seconds)


def _is_active(mine: Samples, share_s: float, stop_at: float) -> bool:
    has_enough = len(mine.fwd_ms) >= MIN_SAMPLES
    is_out_of_time = mine.spent_s > share_s or time.monotonic() > stop_at
    return not (has_enough and is_out_of_time)


def _peak_bytes(work: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
