"""Processes of a policy's ranks from 1 on, which the worker's process starts and calls.

Ray ends them when the worker's process ends, in whichever way it does.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ratoon.cluster.placement import (
    bundles_of_ranks,
    cpus_by_node,
    find_group,
    nodes_of_ranks,
    seen_by_ranks,
)
from ratoon.cluster.ray_calls import START_S
from ratoon.cluster.ray_peer import RayPeer, Watch
from ratoon.config import set_copy_interface, set_visible_gpus, visible_gpus
from ratoon.engine.crash_points import CrashPoint, make_reach
from ratoon.errors import RatoonError
from ratoon.garbage import frozen_imports
from ratoon.log import configure_logging, get_logger
from ratoon.method_call import MethodCall, MethodNames
from ratoon_proto.types import Shard

if TYPE_CHECKING:
    from ray.actor import ActorClass, ActorProxy

    from ratoon.engine.worker.tasks import WorkerLostError
    from ratoon.shards.copies import Meeting
    from ratoon.train.ranks.group import Others
    from ratoon.train.ranks.rank import Rank
    from ratoon.train.spec import TrainerSpec
else:
    # The module of the class imports torch.
    Rank = MethodNames()

_LOG = get_logger("rank")
_GROUPS = {"compute": 1, "control": 2, "files": 1, "versions": 1}
# Where tests kill a rank, by the name of the `Rank` method that is called next or was called last.
_BEFORE = {
    Rank.reduce_sums.__name__: CrashPoint.RANK_BEFORE_COPIES,
    Rank.write_states.__name__: CrashPoint.RANK_BEFORE_CHECKPOINT,
    Rank.write_weights.__name__: CrashPoint.RANK_BEFORE_PUBLISH,
}
_AFTER = {Rank.step.__name__: CrashPoint.RANK_AFTER_STEP}


class RankActor:
    """A process around a `train.ranks.rank.Rank`, whose methods it calls."""

    def __init__(self, log_level: str, crash_points: Path | None, compiled: Path) -> None:
        configure_logging(log_level)
        with frozen_imports():
            from ratoon.train.ranks.layout import load

        self._load_model = load
        self._compiled = compiled
        self._reach = make_reach(crash_points)
        self._rank: Rank | None = None
        # Numbers of the last call that is to end early, and of the call that runs.
        self._stopped, self._running = -1, 0
        self._lock = threading.Lock()

    @ray.method(concurrency_group="compute")
    def load(self, spec: TrainerSpec, meeting: Meeting, number: int) -> None:
        """Join the others and load the model."""
        import torch

        from ratoon.engine.worker.kernels import CompileCache, start_compiler
        from ratoon.shards.copies import Copies
        from ratoon.train.ranks.rank import Rank
        from ratoon.train.spec import PassHooks

        started, device = time.perf_counter(), torch.device(spec.device)
        # While weights are loaded; nothing is compiled before.
        compiler = start_compiler() if device.type == "cuda" else None
        set_copy_interface(meeting.host)
        Copies.join(meeting, number, device, node=_place()[0])
        if device.type == "cuda":
            CompileCache.of_device(self._compiled, spec.device)
        spec, model = self._load_model(spec)
        self._rank = Rank(spec, model, Copies.joined())
        if compiler is not None:
            compiler.join()
        self._rank.hooks = PassHooks(on_progress=self._on_progress, is_cancelled=self._is_stopped)
        seconds = round(time.perf_counter() - started, 3)
        _LOG.info("rank loaded", rank=number, pid=os.getpid(), load_s=seconds)

    @ray.method(concurrency_group="compute")
    def call(self, number: int, call: MethodCall[object]) -> object:
        """Call a method of the rank. `number`: that of the call, for `stop`."""
        with self._lock:
            self._running = number
        return self.call_beside(call)

    def call_beside(self, call: MethodCall[object]) -> object:
        """Call a method that runs beside others, in a concurrency group of its own."""
        if point := _BEFORE.get(call.name):
            self._reach(point)
        answer = call.on(self._rank)
        if point := _AFTER.get(call.name):
            self._reach(point)
        return answer

    @ray.method(concurrency_group="control")
    def stop(self, number: int) -> None:
        with self._lock:
            self._stopped = max(self._stopped, number)

    @ray.method(concurrency_group="control")
    def place(self) -> tuple[str, str]:
        """The node of the process, and the GPU that it has there; "": none."""
        return _place()

    @ray.method(concurrency_group="control")
    def see(self, gpus: str) -> None:
        """Make these GPUs visible to the process. Called before it uses any."""
        set_visible_gpus(gpus)

    @ray.method(concurrency_group="control")
    def ping(self) -> str:
        """The device of the process, in words."""
        return _device_in_words()

    def _is_stopped(self) -> bool:
        with self._lock:
            return self._stopped >= self._running

    def _on_progress(self, done: int, _planned: int, _tokens: int) -> None:
        if done > 0:
            self._reach(CrashPoint.RANK_IN_PASS)


def _place() -> tuple[str, str]:
    return str(ray.get_runtime_context().get_node_id()), visible_gpus()


def _device_in_words() -> str:
    """The GPU of this process as Ray has given it, or the CPU, and the address of its node."""
    gpus, address = visible_gpus(), cast("Any", ray).util.get_node_ip_address()
    return f"GPU {gpus} of {address}" if gpus else f"the CPU of {address}"


class Ranks:
    """Starts the peers of one worker, and joins them. Each load has new ones."""

    def __init__(
        self, log_level: str, crash_points: Path | None, compiled: Path, max_silence_s: float
    ) -> None:
        self._arguments = log_level, crash_points, compiled
        self._max_silence_s = max_silence_s
        self._peers: list[RayPeer] = []
        # The peers of the next load.
        self._started: list[RayPeer] = []
        # The node and GPU that Ray has given to this process.
        self._place = _place()
        self._name = f"rank 0 on {_device_in_words()}"
        self._watch = Watch(self._name, tuple)

    def start(self, num_workers: int, policy_id: str) -> None:
        """Start the peers of the next load, so that they import while this process does."""
        actors = enumerate(self._actors(num_workers, policy_id), 1)
        self._started = [RayPeer(actor, rank, self._max_silence_s) for rank, actor in actors]

    @contextmanager
    def created(self, spec: TrainerSpec, policy_id: str) -> Generator[Others, None, None]:
        """Join the peers, and watch all ranks while the block builds the trainer.

        Raises the error of the first rank that fails, `WorkerLostError` where one is lost. Then no
        peer lives, and `failure` returns the error until the next creation.
        """
        from ratoon.train.ranks.group import ALONE, Others

        self._watch = Watch(self._name, lambda: self._peers)
        if spec.num_workers == 1:
            self.join(spec, policy_id)
            yield ALONE
            return
        with self._watch.watched():
            peers = self.join(spec, policy_id)
            yield Others(peers=peers, name=self._name, watched=self._watched)

    @contextmanager
    def _watched(self) -> Generator[None, None, None]:
        """Watch all ranks while they copy from one another.

        Raises `WorkerLostError` with the error of the first rank that fails; then no peer lives,
        and `failure` returns it, as rank 0 may hang in its copies.
        """
        for peer in self._peers:
            peer.forget()
        self._watch = Watch(self._name, lambda: self._peers, is_creation=False)
        with self._watch.watched():
            yield

    def failure(self) -> RatoonError | WorkerLostError | None:
        """Why the newest creation of several ranks, or what they did together since, has failed,
        even before it ends."""
        return self._watch.failure()

    def join(self, spec: TrainerSpec, policy_id: str) -> list[RayPeer]:
        """Start the peers, unless they are, and join them as rank 0; none for a spec of one rank.

        They load the model meanwhile. Raises `WorkerLostError` and `CopyFailedError` where one
        does not come.
        """
        from ratoon.shards.copies import Copies, open_meeting

        for peer in self._peers:
            peer.end()
        Copies.leave()
        self._peers = []
        if spec.num_workers == 1:
            return []
        import torch

        if not self._started:
            self.start(spec.num_workers, policy_id)
        self._peers, self._started = self._started, []
        deadline = time.monotonic() + START_S
        for peer in self._peers:
            peer.await_start(max(0.0, deadline - time.monotonic()))
        if spec.parallel.shard in (Shard.WEIGHTS, None) and spec.device != "cpu":
            self._see_all()
        address = str(cast("Any", ray).util.get_node_ip_address())
        meeting, store = open_meeting(address, spec.num_workers, self._max_silence_s)
        for peer in self._peers:
            peer.load(spec, meeting)
        set_copy_interface(meeting.host)
        Copies.join(meeting, 0, torch.device(spec.device), store, node=self._place[0])
        self._watch.has_joined = True
        return self._peers

    def _see_all(self) -> None:
        """Make the GPUs of all ranks of a node visible to each of them.

        CUDA maps the memory of visible GPUs only.
        """
        places = [self._place, *(peer.place() for peer in self._peers)]
        own, *others = seen_by_ranks(places)
        for peer, gpus in zip(self._peers, others, strict=True):
            peer.see(gpus)
        set_visible_gpus(own)

    def _actors(self, num_workers: int, policy_id: str) -> list[ActorProxy[RankActor]]:
        """Start all ranks but 0: on the policy's GPUs if it has any, else on CPUs of all nodes."""
        remote = cast(
            "Callable[..., Callable[[type[RankActor]], ActorClass[RankActor]]]", ray.remote
        )
        actor = remote(concurrency_groups=_GROUPS, num_cpus=0)(RankActor)
        group = find_group(policy_id)
        if group is None:
            nodes = nodes_of_ranks(num_workers, cpus_by_node(), self._place[0])
            put = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes[1:]]
            placed = [actor.options(scheduling_strategy=each) for each in put]
            return [one.remote(*self._arguments) for one in placed]
        placed = [
            actor.options(
                num_gpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            )
            for bundle in bundles_of_ranks(group)[1:]
        ]
        return [one.remote(*self._arguments) for one in placed]
