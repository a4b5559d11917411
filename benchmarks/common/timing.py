"""Times a piece of work as a whole, between two synchronisations of host and device.

The caller has warmed the work up: compilation, tuning and first allocations are not in a sample.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.common.energy import joules_taken

# (seconds, samples): work slower than this gets at most that many samples.
_FEWER_SAMPLES = ((30.0, 1), (10.0, 2), (4.5, 3))


class OutOfTimeError(RuntimeError):
    """The time budget does not allow another piece of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of each sample, and their peak of device memory in GiB; 0 on a CPU.

    `joules`: of a sample in the mean; None where the device does not count them.
    """

    samples: list[float]
    peak_gib: float
    joules: float | None = None

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, until the device has finished."""
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def measure(
    work: Callable[[], object], device: torch.device, *, num_samples: int, stop_at: float
) -> Measured:
    """Takes at least one sample, and up to `num_samples`; fewer if one is slow or `stop_at` has
    come.

    The caller must have run the work before. `stop_at` is a time of `time.monotonic()`.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = joules_taken(device)
    samples = [timed(work, device)]
    enough = [most for seconds, most in _FEWER_SAMPLES if samples[0] > seconds]
    num_samples = min([num_samples, *enough])
    while len(samples) < num_samples and time.monotonic() + samples[-1] < stop_at:
        samples.append(timed(work, device))
    after = joules_taken(device)
    taken = None if before is None or after is None else (after - before) / len(samples)
    return Measured(samples=samples, peak_gib=peak_gib(device), joules=taken)


def peak_gib(device: torch.device) -> float:
    """Peak GiB allocated by tensors since the last reset; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def held_gib(device: torch.device) -> float:
    """GiB allocated by tensors now; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Frees unreferenced memory, so that whatever is measured next starts with as much of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def require_time(stop_at: float, seconds: float) -> None:
    """Raises OutOfTimeError if another `seconds` would go past `stop_at`."""
    left_s = stop_at - time.monotonic()
    if left_s < seconds:
        raise OutOfTimeError(f"not run: needs about {seconds:.0f} s, {left_s:.0f} s are left")
