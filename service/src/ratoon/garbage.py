"""Keeps what a process imports or compiles from the garbage collector, as most of it stays anyway,
and libraries that nobody needs from being imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import cast

# What transformers imports where it is installed, for what no process of the service does: seconds,
# threads (pandas' Arrow has one) and a GPU's context (flash-linear-attention), with which a process
# has no forks.
UNUSED_LIBRARIES = ("scipy", "sklearn", "fla", "causal_conv1d")


@contextmanager
def frozen_imports() -> Generator[None, None, None]:
    """Disables collections within the context, and exempts objects made before its end from later
    ones. Libraries that are installed and not used cannot be imported within it.

    A worker's imports make 400,000 permanent objects, which each collection would traverse. The few
    thousand that are garbage are kept, too.
    """
    gc.disable()
    # With None in its place a module counts as not installed.
    modules = cast("dict[str, ModuleType | None]", sys.modules)
    hidden = [name for name in UNUSED_LIBRARIES if name not in modules]
    modules |= dict.fromkeys(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
        gc.freeze()
        gc.enable()


@contextmanager
def frozen_graphs() -> Generator[None, None, None]:
    """Keep what torch compiles inside from later collections, also if the pass inside fails.

    The layers of one model make 300,000 objects: collecting all of them delays the thread that
    launches kernels by 0.1 to 0.3 s.
    """
    before = _num_graphs()
    try:
        yield
    finally:
        if _num_graphs() > before:
            gc.collect()
            gc.freeze()


def collect_all() -> None:
    """Collect objects frozen with graphs, too, such as the layers of a dropped model."""
    if not _num_graphs():
        gc.collect()
        return
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _num_graphs() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["stats"]["unique_graphs"]
