"""Policies of several ranks on one machine: processes of theirs, and Gloo between them, or NCCL
where a spec's device is "cuda:0": rank r has cuda:r then.

Rank 0 is the caller's own process, as a worker's is; a call to a peer and its answer go through a
pipe. A peer that is killed is told by the pipe's end. They are forked by a server of one thread: a
child of this process might find a lock taken by a thread that it does not have.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.method_call import MethodCall
from ratoon.model.spec import FolderBase, PresetBase
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import SortedPrefixes, sort_sequences
from ratoon.shards.copies import Copies, Meeting, open_meeting
from ratoon.shards.parts import PART, parts_of
from ratoon.train import prepare
from ratoon.train.ranks.group import Others
from ratoon.train.ranks.layout import load
from ratoon.train.ranks.rank import Rank
from ratoon.train.spec import PassHooks, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import Shard, StepReport
from tests.train.trainer_runs import make_batch, make_loss, make_step, make_trainer

# Size of a version's files: small models have several, so that peers write some.
FILE_BYTES = 10_000
# Value of CUBLAS_WORKSPACE_CONFIG: cuBLAS repeats its bits only with a fixed workspace.
REPEATABLE = ":4096:8"
# Modules that cut parameters into parts.
_CUTTERS = ("ratoon.train.ranks.rank", "ratoon.model.loader")
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["ratoon.train.trainer", "tests.train.rank_runs"])


class PipePeer:
    """`ranks.group.Peer` of another process."""

    def __init__(
        self, spec: TrainerSpec, meeting: Meeting, number: int, part_elements: int, node: str
    ) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self._stop = _FORK.Event()
        args = theirs, self._stop, spec, meeting, number, part_elements, node
        self.process = _FORK.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        theirs.close()
        self._is_loaded = False

    def start(self, call: MethodCall[Any]) -> PipePeer:
        if not self._is_loaded:
            # Ranks of several nodes ask each other while they load.
            assert self.result() == "loaded"
            self._is_loaded = True
        self._stop.clear()
        self._pipe.send(call)
        return self

    def has_failed(self) -> bool:
        return not self.process.is_alive()

    def result(self) -> Any:
        try:
            is_done, answer = self._pipe.recv()
        except (EOFError, ConnectionError) as err:
            raise RuntimeError("the rank is gone") from err
        if not is_done:
            raise answer
        return answer

    def stop(self) -> None:
        self._stop.set()

    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(
    pipe: Connection,
    stop: Any,
    spec: TrainerSpec,
    meeting: Meeting,
    number: int,
    part_elements: int,
    node: str,
) -> None:
    """What a peer's process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own_parts = partial(parts_of, part_elements=part_elements)
    patch = pytest.MonkeyPatch()
    for user in _CUTTERS:
        patch.setattr(f"{user}.parts_of", own_parts)
    patch.setattr("ratoon.model.safetensors_files._MIN_FILE_BYTES", FILE_BYTES)
    if spec.device != "cpu":
        torch.cuda.set_device(number)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = REPEATABLE
        spec = replace(spec, device=f"cuda:{number}")
    Copies.join(meeting, number, torch.device(spec.device), node=node)
    spec, model = load(spec)
    own = Rank(spec, model, Copies.joined())
    own.hooks = PassHooks(is_cancelled=stop.is_set)
    pipe.send((True, "loaded"))
    while True:
        try:
            call: MethodCall[object] = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = True, call.on(own)
        except Exception as err:  # noqa: BLE001 - the leader's to hear of
            answer = False, err
        pipe.send(answer)


@contextmanager
def ranked(
    spec: TrainerSpec,
    num_ranks: int,
    part_elements: int = PART,
    shard: Shard = Shard.STATES,
    timeout_s: float = 60.0,
    num_nodes: int = 1,
) -> Iterator[tuple[Trainer, list[PipePeer]]]:
    """A trainer of so many ranks, and the peers among them; parts of so many elements. Nodes have
    as many ranks each, in a row."""
    parallel = replace(spec.parallel, num_workers=num_ranks, shard=shard)
    spec = replace(spec, parallel=parallel)
    meeting, store = open_meeting("127.0.0.1", num_ranks, timeout_s)
    nodes = [str(one * num_nodes // num_ranks) for one in range(num_ranks)]
    peers = [PipePeer(spec, meeting, one, part_elements, nodes[one]) for one in range(1, num_ranks)]
    try:
        if peers:
            Copies.join(meeting, 0, torch.device(spec.device), store, node=nodes[0])
        with pytest.MonkeyPatch.context() as patch:
            for user in _CUTTERS:
                own_parts = partial(parts_of, part_elements=part_elements)
                patch.setattr(f"{user}.parts_of", own_parts)
            trainer = Trainer.create(spec, Others(peers=peers))
        yield trainer, peers
    finally:
        for peer in peers:
            peer.kill()
        Copies.leave()


def spread_over(plan: UpdatePlan, ranks: tuple[int, ...]) -> UpdatePlan:
    """`plan`'s cuts, in turn on these ranks, to compare with a plan of one rank."""
    parts = enumerate(plan.micro_batches)
    return replace(
        plan,
        micro_batches=tuple(replace(part, rank=ranks[index % len(ranks)]) for index, part in parts),
    )


def together(plan: UpdatePlan, size: int, num_groups: int = 1) -> UpdatePlan:
    """`plan`'s cuts, in turn on groups of `size` ranks."""
    parts = enumerate(plan.micro_batches)
    return replace(
        plan,
        sequence_ranks=size,
        micro_batches=tuple(replace(part, rank=index % num_groups * size) for index, part in parts),
    )


def update_over(
    trainer: Trainer, seed: int, ranks: tuple[int, ...] = (0,), **changes: Any
) -> StepReport:
    batch = make_batch(seed)
    loss = make_loss(batch)
    cuts = prepare.prepare(batch, loss, version=trainer.version, plan=cpu_planner(32)).plan
    plan = spread_over(cuts, ranks)
    assert len(plan.micro_batches) >= len(ranks)
    return trainer.update(trainer.prepare(batch, loss, plan), make_step(trainer, loss, **changes))


def sequences_of(batch: RolloutBatch) -> tuple[RolloutBatch, SortedPrefixes, NDArray[np.bool_]]:
    return batch, sort_sequences(batch), prepare.has_trained_tokens(batch)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies, whole on this rank."""
    model, found = trainer.model, dict[str, Tensor]()
    for name, parameter in model.named_trainable().items():
        found[name] = torch.empty_like(parameter)
        if model.shards is not None and name in model.shards:
            model.shards.read(name, found[name])
        else:
            found[name].copy_(parameter.detach())
    return found


def alone_of(base: FolderBase | PresetBase, **options: object) -> Trainer:
    return make_trainer(base, tokens=32, **options)  # pyright: ignore[reportArgumentType]
