"""Calls one method on every rank of a policy and collects the results.

Rank 0 leads: it lives in this process, where all decisions are taken. Every other rank is a process
of its own, a `Peer`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ratoon.errors import CopyFailedError, ErrorCode, RatoonError
from ratoon.method_call import MethodCall
from ratoon.model.delta_runs import DeltaPart
from ratoon.train.ranks.rank import Rank
from ratoon.train.spec import PassHooks, never_cancelled

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")
# During a pass: seconds between two checks whether the other ranks live.
_POLL_S = 1.0


class Pending(Protocol):
    """A call under way in another process."""

    def has_failed(self) -> bool:
        """Whether the call is known to have raised, or its rank to be lost. Does not wait.

        A rank that is found to be lost is ended, so that no other rank waits for it.
        """
        ...

    def result(self) -> Any:
        """Wait for the result. Raises what the call raised; any other error if the rank is lost."""
        ...


class Peer(Protocol):
    """A rank in another process. It runs one call after the other; writes run beside them."""

    def start(self, call: MethodCall[Any]) -> Pending:
        """Begin a call of a method of the peer's `Rank`."""
        ...

    def stop(self) -> None:
        """Make the pass that the peer runs raise CANCELLED, if it runs one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """The ranks from 1 on.

    `name`: rank 0's, in messages. `watched`: a context for methods in which ranks wait for one
    another. If a rank fails inside, all others are ended, and the context raises why, as an error
    that loses the worker.
    """

    peers: Sequence[Peer] = ()
    name: str = "rank 0"
    watched: Callable[[], AbstractContextManager[None]] = nullcontext


ALONE = Others()


class RankGroup:
    """One thread calls it, except for what writes held states and weights, which runs beside it."""

    def __init__(self, own: Rank, others: Others = ALONE) -> None:
        self.own = own
        self._others = others
        self._peers = tuple(others.peers)
        # While False, the first error is raised at once: other ranks may wait for the failed one.
        self.are_created = False

    @property
    def size(self) -> int:
        return 1 + len(self._peers)

    def all(
        self, method: Callable[Concatenate[Rank, P], T], *args: P.args, **options: P.kwargs
    ) -> list[T]:
        """Call a method of every rank with the same arguments; the results are ordered by rank.

        Raises the error of the first rank that has one, once no rank runs the method any more;
        while the ranks are created it raises at once.
        """
        call = MethodCall.of(method, *args, **options)
        return self._join(self._start(call), call)

    def exchange(
        self, method: Callable[Concatenate[Rank, P], T], *args: P.args, **options: P.kwargs
    ) -> list[T]:
        """Like `all`, for a method in which ranks copy from one another.

        The first rank that fails ends the group, as others wait for it and may have changed what
        they hold: see `Others.watched` for what is raised then.
        """
        call = MethodCall.of(method, *args, **options)
        return self._exchange(call, call)

    def exchange_leader_value(
        self,
        method: Callable[Concatenate[Rank, V | None, P], T],
        value: V,
        *args: P.args,
        **options: P.kwargs,
    ) -> list[T]:
        """Like `exchange`, for a large first argument: rank 0 gets `value`, the others get None."""
        own = MethodCall.of(method, value, *args, **options)
        return self._exchange(MethodCall.of(method, None, *args, **options), own)

    def run_pass(
        self,
        hooks: PassHooks,
        method: Callable[Concatenate[Rank, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> list[T]:
        """Like `all`, for a pass: if it is cancelled or fails on one rank, it ends early on all."""
        call = MethodCall.of(method, *args, **options)
        pending = self._start(call)
        is_over, asking = False, threading.Lock()

        def is_stopped(is_cancelled: Callable[[], bool]) -> bool:
            nonlocal is_over
            with asking:
                if not is_over and (any(c.has_failed() for c in pending) or is_cancelled()):
                    is_over = True
                    # Now: this rank's own pass may wait for theirs before it ends.
                    for peer in self._peers:
                        peer.stop()
                return is_over

        stops = partial(is_stopped, hooks.is_cancelled)
        self.own.hooks = replace(hooks, is_cancelled=stops)
        # This rank asks between micro-batches, but may wait for a silent one within one.
        with _polled(partial(is_stopped, never_cancelled)) if pending else nullcontext():
            return self._join(pending, call, is_pass=True)

    def check_devices(self) -> None:
        """Raise UNSUPPORTED where not all ranks have the same device.

        A plan uses the rates of one device, and the fingerprint of numerics names one device. A
        rank on another device would make all others wait, and would compute other bits.
        """
        models = self.all(Rank.device_model)
        if other := next((model for model in models if model != models[0]), None):
            raise RatoonError(
                ErrorCode.UNSUPPORTED,
                f"ranks of one policy have different devices: {models}",
                field="parallel.num_workers",
                got=other,
                expected=models[0],
            )

    def _exchange(self, theirs: MethodCall[T], own: MethodCall[T]) -> list[T]:
        with self._others.watched() if self._peers else nullcontext():
            return self._join(self._start(theirs), own, ends_group=True)

    def _start(self, call: MethodCall[Any]) -> list[Pending]:
        return [peer.start(call) for peer in self._peers]

    def _join(
        self,
        pending: Sequence[Pending],
        own: MethodCall[T],
        *,
        is_pass: bool = False,
        ends_group: bool = False,
    ) -> list[T]:
        """Run this rank's own call, and wait for those of the peers."""
        results: list[T] = []
        errors: list[Exception] = []
        for ask in (partial(self._run_own, own), *(call.result for call in pending)):
            try:
                results.append(ask())
            except Exception as err:
                if ends_group or not (pending and self.are_created):
                    raise
                errors.append(err)
                # A write that fails must not stop the pass that runs beside it.
                for peer in self._peers if is_pass else ():
                    peer.stop()
                if is_pass and isinstance(err, CopyFailedError):
                    # Others may wait for the one that is gone: what is left of the group ends.
                    raise
        if errors:
            raise next((err for err in errors if not _is_cancelled(err)), errors[0])
        return results

    def _run_own(self, call: MethodCall[T]) -> T:
        try:
            return call.on(self.own)
        except Exception as err:
            if self._peers:
                err.add_note(self._others.name)
            raise


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The weights that ranks hold since `hold_weights`, until it is called again."""

    ranks: RankGroup

    def write(self, folder: Path) -> dict[str, str]:
        """Write each rank's files to a folder that all of them see; returns digests by name.

        Any thread may call it. Raises what a rank raised, once no rank writes any more.
        """
        digests: dict[str, str] = {}
        for each in self.ranks.all(Rank.write_weights, str(folder)):
            digests |= each
        return digests

    def write_rest(self, folder: Path) -> dict[str, str]:
        """Write the files of a version that have no trained weights; returns the digests of weight
        files among them."""
        return self.ranks.own.write_rest(str(folder))

    def write_delta(
        self, path: Path, parents: Mapping[str, str]
    ) -> tuple[list[DeltaPart], dict[str, str]] | None:
        """Write the parts of a delta, beside `path`, in the order of the files, and return them
        with the digests by name of the files with trained weights.

        `parents`: the digests of the parent's files. Returns None if a rank has not compared its
        weights with exactly those. Raises as `write`.
        """
        found = self.ranks.all(Rank.write_delta, str(path), dict(parents))
        made = [each for each in found if each is not None]
        if len(made) < len(found):
            for part, _ in made:
                part.path.unlink()
            return None
        digests = {name: digest for _, own in made for name, digest in own.items()}
        return [part for part, _ in made], digests


@contextmanager
def _polled(is_stopped: Callable[[], bool]) -> Iterator[None]:
    """While the block runs, a thread calls `is_stopped` every second until it returns True."""
    is_left = threading.Event()

    def ask() -> None:
        while not is_left.wait(_POLL_S) and not is_stopped():
            pass

    thread = threading.Thread(target=ask, name="ratoon-ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_left.set()
        thread.join()


def _is_cancelled(error: Exception) -> bool:
    return isinstance(error, RatoonError) and error.code is ErrorCode.CANCELLED
