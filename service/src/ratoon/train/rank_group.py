"""All ranks of a policy, as the one that leads them asks them: the same of each, at the same time.

The leader is rank 0, in whose process all decisions are taken; the others are processes of theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ratoon.errors import CopyFailedError, ErrorCode, RatoonError
from ratoon.train.micro_batches import PassHooks, never_cancelled
from ratoon.train.rank import Rank

# In a pass, whether other ranks live.
_ASKED_S = 1.0


class Pending(Protocol):
    """A call under way in another process."""

    def has_failed(self) -> bool:
        """Whether it is known by now to have raised, or its rank to be lost. Does not wait.

        A rank that is found to be lost is ended, so that none waits for it.
        """
        ...

    def result(self) -> Any:
        """Wait for it. Raises what the call raised; any other error if the rank is lost."""
        ...


class Peer(Protocol):
    """A rank in another process. It runs one call after the other; what writes, beside them."""

    def start(self, name: str, args: tuple[object, ...], options: dict[str, object]) -> Pending:
        """Begin a call of `Rank`'s method of this name."""
        ...

    def stop(self) -> None:
        """Have the pass that it runs raise CANCELLED, if it runs one."""
        ...


class RankGroup:
    """One thread calls it, except for `write_states` and `write_weights`, beside other calls."""

    def __init__(self, own: Rank, peers: Sequence[Peer] = ()) -> None:
        self.own = own
        self._peers = tuple(peers)
        # Until then the first error ends all ranks, some of which may wait for the one that has it.
        self.are_created = False

    @property
    def size(self) -> int:
        return 1 + len(self._peers)

    def all(self, name: str, *args: object, **options: object) -> list[Any]:
        """Call a method of every rank; the results by rank.

        Raises the error of the first rank that has one, when none runs any more; at once while the
        ranks are created.
        """
        return self._all(args, name, *args, **options)

    def check_devices(self) -> None:
        """Raise UNSUPPORTED where not all ranks have the same device.

        A plan is of one device's rates, and the fingerprint of numerics has one device: on another,
        a rank would make all others wait, and have other bits.
        """
        models: list[str] = self.all("device_model")
        if other := next((model for model in models if model != models[0]), None):
            raise RatoonError(
                ErrorCode.UNSUPPORTED,
                f"ranks of one policy have different devices: {models}",
                field="parallel.num_workers",
                got=other,
                expected=models[0],
            )

    def lead(self, own: object, name: str, **options: object) -> list[Any]:
        """The same of a method that is given something large on this rank, and None elsewhere."""
        return self._all((own,), name, None, **options)

    def run(self, hooks: PassHooks, name: str, *args: object, **options: object) -> list[Any]:
        """The same of a pass. It ends early on all ranks where it is cancelled or fails on one."""
        pending = [peer.start(name, args, options) for peer in self._peers]
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
        self.own.hooks = PassHooks(on_progress=hooks.on_progress, is_cancelled=stops)
        # This rank asks between micro-batches, but may wait for a silent one within one.
        with _repeated(partial(is_stopped, never_cancelled)) if pending else nullcontext():
            return self._join(pending, name, args, options, is_pass=True)

    def _all(
        self, own: tuple[object, ...], name: str, *args: object, **options: object
    ) -> list[Any]:
        pending = [peer.start(name, args, options) for peer in self._peers]
        return self._join(pending, name, own, options)

    def _join(
        self,
        pending: Sequence[Pending],
        name: str,
        args: tuple[object, ...],
        options: dict[str, object],
        *,
        is_pass: bool = False,
    ) -> list[Any]:
        results: list[Any] = []
        errors: list[Exception] = []
        for ask in (
            partial(getattr(self.own, name), *args, **options),
            *(call.result for call in pending),
        ):
            try:
                results.append(ask())
            except Exception as err:
                if not (pending and self.are_created):
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


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The weights that ranks hold since `hold_weights`, until it is called again."""

    ranks: RankGroup

    def write(self, folder: Path) -> dict[str, str]:
        """Write each rank's files to a folder that all of them see; digests by name.

        For any thread. Raises what a rank raised, once none writes any more.
        """
        digests: dict[str, str] = {}
        for each in self.ranks.all("write_weights", str(folder)):
            digests |= each
        return digests


@contextmanager
def _repeated(is_stopped: Callable[[], bool]) -> Iterator[None]:
    """Inside, another thread asks it every second, until it is so."""
    is_left = threading.Event()

    def ask() -> None:
        while not is_left.wait(_ASKED_S) and not is_stopped():
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
