"""Keeps the garbage collector from what a process loads at start, most of which stays anyway."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def frozen_imports() -> Generator[None, None, None]:
    """No collections inside, and none of what was made until its end later.

    A worker's imports make 400,000 objects that stay: each collection would look at all of them.
    The few thousand that are garbage are kept.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
