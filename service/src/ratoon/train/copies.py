"""Tensors copied between the ranks of a policy, by torch.distributed.

Nothing is added on the way: who receives adds, in the order of ranks. So no figure depends on a
backend's algorithm or buckets, and Gloo proves on a CPU what NCCL does on GPUs.
"""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from ratoon.errors import CopyFailedError
from ratoon.train.lines import Lines, accept_all, connect

# Of a word: as long as one rank may be ahead of another. One that dies is noticed at once.
_TOLD_S = 7 * 86_400.0
# In the store: the port at which rank 0 waits for the others' lines.
_LINE = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where ranks find each other: an address of rank 0.

    It has no authentication, so it is loopback's or a private network's. `name` is no other
    meeting's: a late rank of an earlier one does not take part in what it finds at the port.
    `timeout_s`: for all to come, and of one exchange, to which all come at the same moment.
    """

    name: str
    host: str
    port: int
    size: int
    timeout_s: float


def open_meeting(host: str, size: int, timeout_s: float) -> tuple[Meeting, Store]:
    """A meeting at an address of this process, which is to be rank 0 and to join with the store."""
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        # By itself it would listen on every address.
        master_listen_fd=listener.detach(),
    )
    name = secrets.token_hex(8)
    return Meeting(name=name, host=host, port=port, size=size, timeout_s=timeout_s), store


@dataclass(frozen=True, slots=True)
class Copy:
    """A contiguous tensor, and the rank that it goes to or comes from."""

    tensor: Tensor
    peer: int


def _connected(meeting: Meeting, rank: int, store: Store) -> Lines:
    """Raises `OSError`, `RuntimeError`."""
    if rank:
        store.wait([_LINE], timedelta(seconds=meeting.timeout_s))
        port = int(bytes(store.get(_LINE)))
        return connect(meeting.host, port, meeting.name, meeting.timeout_s)
    with socket.create_server((meeting.host, 0)) as listener:
        store.set(_LINE, str(listener.getsockname()[1]))
        return accept_all(listener, meeting.name, meeting.size - 1, meeting.timeout_s)


def _machine() -> str:
    """Of a boot of a machine, and of the processes there that see each other; "" if nothing says so
    (macOS)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


class Copies:
    """A process's place among the ranks, of which one alone exchanges nothing."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        """`group`: of the ranks that exchange; None: all."""
        self.rank, self.size = rank, size
        self._group = group

    # Of the ranks of the last meeting that this process has joined.
    _machines: ClassVar[set[bytes]] = set()
    _lines: ClassVar[Lines] = Lines()

    @classmethod
    def join(
        cls, meeting: Meeting, rank: int, device: torch.device, store: Store | None = None
    ) -> None:
        """Wait for all ranks of the meeting; `store`: rank 0's own. A process is in one at a time.

        Raises `CopyFailedError` where they do not come.
        """
        cls.leave()
        timeout = timedelta(seconds=meeting.timeout_s)
        try:
            if store is None:
                store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
            store = PrefixStore(meeting.name, store)
            store.set(f"here/{rank}", _machine())
            everyone = [f"here/{one}" for one in range(meeting.size)]
            store.wait(everyone, timeout)
            cls._machines = {bytes(store.get(one)) for one in everyone}
            cls._lines = _connected(meeting, rank, store)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=meeting.size,
                timeout=timeout,
                # Now: NCCL's first exchange would need all ranks, and may be one of a few.
                device_id=device if device.type == "cuda" else None,
            )
        except (RuntimeError, OSError) as err:
            raise CopyFailedError(f"rank {rank} could not join the others: {err}") from err

    @classmethod
    def leave(cls) -> None:
        """Be alone again."""
        cls._lines.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    @classmethod
    def joined(cls) -> Copies:
        """Of this process, as it has joined; alone if it has not."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @classmethod
    def are_neighbours(cls) -> bool:
        """Whether all ranks are of one machine, and see each other's processes there."""
        return not dist.is_initialized() or len(cls._machines) == 1

    @classmethod
    def num_on_host(cls) -> int:
        """Ranks of one machine, if machines have about as many each."""
        return math.ceil(dist.get_world_size() / len(cls._machines)) if dist.is_initialized() else 1

    @classmethod
    def is_cut(cls) -> bool:
        """Whether a rank is gone, or its machine silent, as far as rank 0 or this one can tell."""
        return cls._lines.is_cut()

    def tell(self, peers: Iterable[int], word: int) -> dict[int, int]:
        """Tell some ranks a number and hear theirs, of which one that is gone has none.

        Both of a pair call it at the same place among their exchanges. However long the other is
        in coming to it, it is waited for.
        """
        own = torch.tensor([word])
        theirs = {peer: torch.empty_like(own) for peer in peers}
        works: dict[int, list[dist.Work | None]] = {}
        for peer, into in theirs.items():
            with suppress(RuntimeError):
                works[peer] = [dist.isend(own, peer), dist.irecv(into, peer)]
        heard: dict[int, int] = {}
        for peer, both in works.items():
            with suppress(RuntimeError):
                for work in both:
                    cast("dist.Work", work).wait(timedelta(seconds=_TOLD_S))
                heard[peer] = int(theirs[peer])
        return heard

    def among(self, ranks: Sequence[int], timeout: timedelta) -> Copies:
        """The same among these ranks alone, which all call it, with a bound of its own.

        Raises `CopyFailedError` where one does not come.
        """
        try:
            group = dist.new_group([*ranks], timeout=timeout, use_local_synchronization=True)
        except RuntimeError as err:
            raise CopyFailedError(f"ranks {[*ranks]} could not join: {err}") from err
        return Copies(self.rank, self.size, cast("dist.ProcessGroup", group))

    def exchange(self, sends: Sequence[Copy], receives: Sequence[Copy]) -> None:
        """Send tensors and receive others in place; both sides of a pair have them in one order.

        All of them call it at the same time. Raises `CopyFailedError`.
        """
        group = self._group
        operations = [dist.P2POp(dist.isend, copy.tensor, copy.peer, group) for copy in sends]
        operations += [dist.P2POp(dist.irecv, copy.tensor, copy.peer, group) for copy in receives]
        if not operations:
            return
        try:
            for work in dist.batch_isend_irecv(operations):
                cast("dist.Work", work).wait()
        except RuntimeError as err:
            raise CopyFailedError(f"a copy between ranks failed: {err}") from err
