"""Progress of a worker's task, in micro-batches."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ratoon_proto.types import Progress


@dataclass(slots=True)
class Meter:
    """Progress of the running task; written by the compute thread, read by any."""

    done: int = 0
    planned: int = 0
    tokens: int = 0
    started: float = 0.0

    def progress(self) -> Progress:
        seconds = time.perf_counter() - self.started
        rate = self.tokens / seconds if self.tokens and seconds > 0 else 0.0
        remaining = seconds * (self.planned - self.done) / self.done if self.done else None
        return Progress(
            micro_batches_done=self.done,
            micro_batches_planned=self.planned,
            tokens_per_second=rate,
            eta_s=remaining,
        )
