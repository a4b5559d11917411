"""Tensors copied between the ranks of a policy, by torch.distributed.

Nothing is added on the way: who receives adds, in the order of ranks. So no figure depends on a
backend's algorithm or buckets, and Gloo proves on a CPU what NCCL does on GPUs.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

# Of one exchange, whose ranks all come to it at the same moment.
_EXCHANGE_S = 60.0
# For the processes of all ranks to come up, on a machine that is busy with others.
_JOIN_S = 300.0


class CopyFailedError(Exception):
    """A rank is gone or unreachable, so that ranks may hold different states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where ranks find each other: an address of rank 0.

    It has no authentication, so it is loopback's or a private network's.
    """

    host: str
    port: int
    size: int


def open_meeting(host: str, size: int) -> tuple[Meeting, Store]:
    """A meeting at an address of this process, which is to be rank 0 and to join with the store."""
    listener = socket.create_server((host, 0))
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_JOIN_S),
        # By itself it would listen on every address.
        master_listen_fd=listener.detach(),
    )
    return Meeting(host=host, port=port, size=size), store


@dataclass(frozen=True, slots=True)
class Copy:
    """A contiguous tensor, and the rank that it goes to or comes from."""

    tensor: Tensor
    peer: int


class Copies:
    """A process's place among the ranks, of which one alone exchanges nothing."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        """`group`: of the ranks that exchange; None: all."""
        self.rank, self.size = rank, size
        self._group = group

    @classmethod
    def join(
        cls, meeting: Meeting, rank: int, device: torch.device, store: Store | None = None
    ) -> None:
        """Wait for all ranks of the meeting; `store`: rank 0's own. A process is in one at a time.

        Raises `CopyFailedError` where they do not come.
        """
        cls.leave()
        try:
            store = store or _store(meeting)
            store.set(f"here/{rank}", "")
            everyone = [f"here/{one}" for one in range(meeting.size)]
            store.wait(everyone, timedelta(seconds=_JOIN_S))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=meeting.size,
                timeout=timedelta(seconds=_EXCHANGE_S),
            )
        except RuntimeError as err:
            raise CopyFailedError(f"rank {rank} could not join the others: {err}") from err

    @classmethod
    def leave(cls) -> None:
        """Be alone again."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @classmethod
    def joined(cls) -> Copies:
        """Of this process, as it has joined; alone if it has not."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

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

        All ranks call it at the same time. Raises `CopyFailedError`.
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


def _store(meeting: Meeting) -> Store:
    timeout = timedelta(seconds=_JOIN_S)
    return TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
