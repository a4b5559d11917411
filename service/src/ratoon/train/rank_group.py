"""All ranks of a policy, as the one that leads them asks them: the same of each, at the same time.

The leader is rank 0, in whose process all decisions are taken; the others are processes of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from ratoon.errors import ErrorCode, RatoonError
from ratoon.train.micro_batches import PassHooks
from ratoon.train.rank import Rank


class Pending(Protocol):
    """A call under way in another process."""

    def has_failed(self) -> bool:
        """Whether it is known by now to have raised. Does not wait."""
        ...

    def result(self) -> Any:
        """Wait for it. Raises what the call raised; any other error if the rank is lost."""
        ...


class Peer(Protocol):
    """A rank in another process. It runs one call after the other; `write_states` beside them."""

    def start(self, name: str, args: tuple[object, ...], options: dict[str, object]) -> Pending:
        """Begin a call of `Rank`'s method of this name."""
        ...

    def stop(self) -> None:
        """Have the pass that it runs raise CANCELLED, if it runs one."""
        ...


class RankGroup:
    """One thread calls it, except for `write_states`, which may run beside another call."""

    def __init__(self, own: Rank, peers: Sequence[Peer] = ()) -> None:
        self.own = own
        self._peers = tuple(peers)

    @property
    def size(self) -> int:
        return 1 + len(self._peers)

    def all(self, name: str, *args: object, **options: object) -> list[Any]:
        """Call a method of every rank; the results by rank.

        Raises the error of the first rank that has one, when none runs any more.
        """
        return self._all(args, name, *args, **options)

    def lead(self, own: object, name: str, **options: object) -> list[Any]:
        """The same of a method that is given something large on this rank, and None elsewhere."""
        return self._all((own,), name, None, **options)

    def run(self, hooks: PassHooks, name: str, *args: object, **options: object) -> list[Any]:
        """The same of a pass. It ends early on all ranks where it is cancelled or fails on one."""
        pending = [peer.start(name, args, options) for peer in self._peers]
        is_over = False

        def is_cancelled() -> bool:
            nonlocal is_over
            if not is_over and (any(c.has_failed() for c in pending) or hooks.is_cancelled()):
                is_over = True
                # Now: this rank's own pass may wait for theirs before it ends.
                for peer in self._peers:
                    peer.stop()
            return is_over

        self.own.hooks = PassHooks(on_progress=hooks.on_progress, is_cancelled=is_cancelled)
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
                if not pending:
                    raise
                errors.append(err)
                # A checkpoint that fails must not stop the pass that runs beside it.
                for peer in self._peers if is_pass else ():
                    peer.stop()
        if errors:
            raise next((err for err in errors if not _is_cancelled(err)), errors[0])
        return results


def _is_cancelled(error: Exception) -> bool:
    return isinstance(error, RatoonError) and error.code is ErrorCode.CANCELLED
