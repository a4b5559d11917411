"""Faults of a rank at each step of a policy's creation and of what it does later, and actors whose
processes have them.

The actors are made by a cluster of real processes. A class carries its fault with it, so that the
process that Ray starts for it patches itself.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from ratoon.cluster import ranks, ray_peer, worker_process

NO_MEMORY = "CUDA out of memory. Tried to allocate 16.00 GiB."
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
# What a created rank comes through, by where it is called.
LATER = {
    "enter a pass": "ratoon.train.ranks.rank.Rank._planned",
    "run a pass": "ratoon.train.ranks.rank.forward_backward_pass",
    "receive gradients": "ratoon.train.ranks.exchange.LayerExchange._room",
    "add gradients": "ratoon.train.ranks.exchange.LayerExchange._add",
    "exchange tokens": "ratoon.shards.sequence_group.SequenceLink.exchange",
    "add up sums": "ratoon.train.ranks.rank.Rank.reduce_sums",
    "measure the norm": "ratoon.train.ranks.rank.Rank.norms",
    "step": "ratoon.train.ranks.rank.Rank.step",
    "take the digest": "ratoon.train.ranks.rank.Rank.digest_sums",
    "copy a version": "ratoon.train.ranks.rank.Rank.hold_weights",
    "write a version": "ratoon.train.ranks.rank.Rank.write_weights",
    "copy states": "ratoon.train.ranks.rank.Rank.hold_states",
    "write states": "ratoon.train.ranks.rank.Rank.write_states",
    "receive an import": "ratoon.train.ranks.rank.Rank.take_values",
    "import": "ratoon.train.ranks.rank.Rank.set_values",
    "read states": "ratoon.train.ranks.rank.Rank.read_states",
    "take states": "ratoon.train.ranks.rank.Rank.take_states",
}


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


def put_traps(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Have the processes that this one starts from now on, and their ranks, look for traps.

    A file in the folder that is named after a step of `LATER` and a rank, such as "step 1", has a
    count of times that the rank has no memory there.
    """

    class RankActor(ranks.RankActor):
        @ray.method(concurrency_group="compute")
        def load(self, spec: Any, meeting: Any, number: int) -> None:
            _trap_steps(folder, number)
            cast("Any", super()).load(spec, meeting, number)

    class WorkerActor(worker_process.WorkerActor):
        def __init__(self, *args: Any) -> None:
            ranks.RankActor = RankActor
            super().__init__(*args)
            _trap_steps(folder, 0)

    patch.setattr(worker_process, "WorkerActor", WorkerActor)


def _trap_steps(folder: Path, rank: int) -> None:
    for step, path in LATER.items():
        _patch(path, partial(_trip, folder / f"{step} {rank}"))


def _trip(trap: Path) -> None:
    import torch

    try:
        count = int(trap.read_text())
    except FileNotFoundError:
        return
    if count > 1:
        trap.write_text(str(count - 1))
    else:
        trap.unlink()
    raise torch.OutOfMemoryError(NO_MEMORY)


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
    if fault.step != START:
        _patch(STEPS[fault.step], partial(_suffer, fault))


def _patch(place: str, before: Callable[[], None]) -> None:
    """Have what is called there call `before` first."""
    path, _, name = place.rpartition(".")
    owner: Any
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, of_class = path.rpartition(".")
        owner = getattr(importlib.import_module(module), of_class)
    original = getattr(owner, name)

    @wraps(original)
    def faulty(*args: Any, **options: Any) -> Any:
        before()
        return original(*args, **options)

    # A class method is bound by now.
    setattr(owner, name, staticmethod(faulty) if hasattr(original, "__self__") else faulty)


def _suffer(fault: Fault) -> None:
    import torch

    fault.begun.write_text(str(time.monotonic()))
    match fault.harm:
        case "memory":
            raise torch.OutOfMemoryError(NO_MEMORY)
        case "error":
            raise LookupError("a fault of this rank")
        case "exit":
            os._exit(1)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            threading.Event().wait()
