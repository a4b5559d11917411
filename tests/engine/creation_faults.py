"""Faults of a rank at each step of a policy's creation, and actors whose processes have them.

The actors are made by a cluster of real processes. A class carries its fault with it, so that the
process that Ray starts for it patches itself.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from ratoon.cluster import ranks, ray_peer, worker_process

# What a rank comes through as it is created, in order, by where it is called.
STEPS = {
    "join": "ratoon.shards.copies.Copies.join",
    "connect": "torch.distributed.init_process_group",
    "read": "ratoon.train.ranks.layout.read_model",
    "place": "ratoon.model.loader.HostModel.place",
    "share": "ratoon.shards.layer_shards.LayerShards.__init__",
    "states": "ratoon.train.ranks.rank.Rank.__init__",
    "connect_groups": "ratoon.train.ranks.rank.Rank.connect_groups",
    "group": "ratoon.shards.copies.Copies.among",
    "handles": "ratoon.train.ranks.rank.Rank.handles",
    "open_memory": "ratoon.train.ranks.rank.Rank.open_memory",
    "device_model": "ratoon.train.ranks.rank.Rank.device_model",
    "activation_bytes": "ratoon.train.ranks.rank.Rank.activation_bytes",
    "limit_activations": "ratoon.train.ranks.rank.Rank.limit_activations",
}
START = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`harm`: memory, error, exit, stop (the process answers nothing) or hang (it answers).

    `behind_s`: how far the product lets a rank be behind the others. `begun`: a file that gets the
    moment of the harm, by the clock that all processes have.
    """

    rank: int
    step: str
    harm: str
    behind_s: float
    begun: Path


def put_in(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    """Have the workers that this process starts from now on, and their ranks, suffer it."""
    patch.setattr(worker_process, "WorkerActor", _worker(fault))


def _worker(fault: Fault) -> type[worker_process.WorkerActor]:
    class WorkerActor(worker_process.WorkerActor):
        def __init__(self, *args: Any) -> None:
            ray_peer.BEHIND_S = fault.behind_s
            if fault.rank:
                ranks.RankActor = _rank(fault)
            elif fault.step == START:
                _suffer(fault)
            super().__init__(*args)
            if not fault.rank:
                _patch_step(fault)

    return WorkerActor


def _rank(fault: Fault) -> type[ranks.RankActor]:
    class RankActor(ranks.RankActor):
        def __init__(self, *args: Any) -> None:
            if fault.step == START:
                _suffer(fault)
            super().__init__(*args)
            _patch_step(fault)

    return RankActor


def _patch_step(fault: Fault) -> None:
    if fault.step == START:
        return
    path, _, name = STEPS[fault.step].rpartition(".")
    owner: Any
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, of_class = path.rpartition(".")
        owner = getattr(importlib.import_module(module), of_class)
    original = getattr(owner, name)

    @wraps(original)
    def faulty(*args: Any, **options: Any) -> Any:
        _suffer(fault)
        return original(*args, **options)

    # A class method is bound by now.
    setattr(owner, name, staticmethod(faulty) if hasattr(original, "__self__") else faulty)


def _suffer(fault: Fault) -> None:
    import torch

    fault.begun.write_text(str(time.monotonic()))
    match fault.harm:
        case "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB.")
        case "error":
            raise LookupError("a fault of this rank")
        case "exit":
            os._exit(1)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            threading.Event().wait()
