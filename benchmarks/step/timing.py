"""How a step is timed: whole, between two synchronisations of host and device.

Enters a piece of work, leaves its seconds, each of them, and the peak of memory while it ran.
Invariant: what is compiled, tuned or allocated at first happens before the first sample.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Seconds beyond which there are no more than so many samples.
_FEWER_SAMPLES = ((30.0, 1), (10.0, 2), (4.5, 3))


class OutOfTimeError(RuntimeError):
    """The budget does not reach for another piece of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of each sample; GiB of the device at the peak of all of them, 0 on a CPU."""

    samples: list[float]
    peak_gib: float

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, until the device is done."""
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def measure(
    work: Callable[[], object], device: torch.device, *, num_samples: int, stop_at: float
) -> Measured:
    """Up to `num_samples` samples, fewer where one takes long or `stop_at` (`time.monotonic()`)
    comes; at least one.

    The caller has run the work before.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    samples = [timed(work, device)]
    enough = [most for seconds, most in _FEWER_SAMPLES if samples[0] > seconds]
    num_samples = min([num_samples, *enough])
    while len(samples) < num_samples and time.monotonic() + samples[-1] < stop_at:
        samples.append(timed(work, device))
    return Measured(samples=samples, peak_gib=peak_gib(device))


def peak_gib(device: torch.device) -> float:
    """Most memory held by tensors since the last reset; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def held_gib(device: torch.device) -> float:
    """Memory held by tensors now; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Gives back what nothing holds, so that the next way finds the same room."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def require_time(stop_at: float, seconds: float) -> None:
    """Raises OutOfTimeError where `seconds` more would be past `stop_at`."""
    left_s = stop_at - time.monotonic()
    if left_s < seconds:
        raise OutOfTimeError(f"not run: needs about {seconds:.0f} s, {left_s:.0f} s are left")
