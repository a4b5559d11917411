"""Settings of torch that hold for a whole process, left as they were found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch


@contextmanager
def kept_torch_settings() -> Iterator[None]:
    """`configure_torch` is for a worker's own process; the next test file gets this one back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = cast("Any", torch.utils.deterministic)
    fills = fill.fill_uninitialized_memory
    try:
        yield
    finally:
        fill.fill_uninitialized_memory = fills
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
