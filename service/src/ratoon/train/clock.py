"""Seconds of what a device was asked to do, lap by lap, without waiting for it meanwhile."""

from __future__ import annotations

import time
from collections import defaultdict

import torch


class DeviceClock:
    """Times work as a device gets through it: an event of a GPU's stream, else the host's clock.

    States: running; `seconds` waits for the device and may be asked at any time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moments: list[tuple[str, Moment]] = [("", Moment(device))]

    def lap(self, name: str) -> Moment:
        """End a lap of `name` here, behind all that the device has been asked to do so far."""
        moment = Moment(self._device)
        self._moments.append((name, moment))
        return moment

    def seconds(self) -> defaultdict[str, float]:
        """Seconds of the laps by name, 0 for any other; waits until the device is through."""
        self._moments[-1][1].wait()
        total: defaultdict[str, float] = defaultdict(float)
        for (_, start), (name, stop) in zip(self._moments, self._moments[1:], strict=False):
            total[name] += stop.since(start)
        return total


class Moment:
    """A point in the order of what a device is asked to do."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._host_s = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._host_s = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device is through with what came before; what came after goes on."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Seconds from `earlier`, of the same device; both have passed."""
        if self._event is None or earlier._event is None:
            return self._host_s - earlier._host_s
        # In milliseconds.
        return earlier._event.elapsed_time(self._event) / 1e3
