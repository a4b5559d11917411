"""Keeps the garbage collector from what a process loads or compiles, most of which stays anyway."""

from __future__ import annotations

import gc
import sys
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


@contextmanager
def frozen_graphs() -> Generator[None, None, None]:
    """Keep what torch compiles inside from later collections, also if the pass inside fails.

    The layers of one model make 300,000 objects: a collection of all of them holds up whoever
    launches kernels for 0.1 to 0.3 s.
    """
    before = _num_graphs()
    try:
        yield
    finally:
        if _num_graphs() > before:
            gc.collect()
            gc.freeze()


def collect_all() -> None:
    """Collect what was frozen with graphs, too, such as the layers of a model that is let go of."""
    if not _num_graphs():
        gc.collect()
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _num_graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["stats"]["unique_graphs"]
