"""Copies tensors between the ranks of a policy, by torch.distributed.

Nothing is summed on the way: the receiver adds, in the order of ranks. So no figure depends on a
backend's algorithm or buckets, and tests with Gloo on a CPU hold for NCCL on GPUs.

Each rank has a TCP connection to rank 0, on which nothing is ever sent. The kernels of both
machines probe it (keepalive) and close it when no answer comes. A copy between ranks waits for as
long as the other rank may compute, so without these connections a rank would wait for hours for a
machine behind a network that drops its packets.
"""

from __future__ import annotations

import secrets
import socket
import time
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

# Keepalive: seconds before the first probe, seconds between probes, and probes without an answer
# after which the connection is closed.
IDLE_S, EVERY_S, TIMES = 10, 5, 4
# Seconds that `tell` waits: a rank may be that far ahead of another. A dead one is noticed at once.
_TOLD_S = 7 * 86_400.0
# Key in the store of the port at which rank 0 waits for the others' lines.
_LINE = "line"


class Lines:
    """This process's end of the connections: one to rank 0, or rank 0's to all others."""

    def __init__(self, connections: Iterable[socket.socket] = ()) -> None:
        self._connections = [*connections]
        for each in self._connections:
            _keep_alive(each)
            each.setblocking(False)

    def is_cut(self) -> bool:
        """Whether the process at one of the other ends is gone, or its machine silent."""
        return any(map(_is_cut, self._connections))

    def close(self) -> None:
        while self._connections:
            self._connections.pop().close()


def accept_all(listener: socket.socket, name: str, count: int, timeout_s: float) -> Lines:
    """Rank 0's end. A caller that does not send the meeting's name is refused. Raises `OSError`."""
    connections: list[socket.socket] = []
    deadline = time.monotonic() + timeout_s
    while len(connections) < count:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        with suppress(OSError):
            if connection.recv(len(name), socket.MSG_WAITALL) == name.encode("ascii"):
                connections.append(connection)
                continue
        connection.close()
    return Lines(connections)


def connect(host: str, port: int, name: str, timeout_s: float) -> Lines:
    """Another rank's end. Raises `OSError`."""
    connection = socket.create_connection((host, port), timeout_s)
    connection.sendall(name.encode("ascii"))
    return Lines([connection])


def _is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", EVERY_S),
        ("TCP_KEEPCNT", TIMES),
    ):
        # macOS has not all of them, and defaults of its own.
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where ranks find each other: an address of rank 0.

    The address has no authentication, so it is on loopback or a private network. `name` is unique,
    so a late rank of an earlier meeting does not join another one at the same port. `timeout_s`:
    for all ranks to come, and for one exchange, to which all ranks come at the same moment.
    """

    name: str
    host: str
    port: int
    size: int
    timeout_s: float


def open_meeting(host: str, size: int, timeout_s: float) -> tuple[Meeting, Store]:
    """Open a meeting at an address of this process, which will be rank 0; returns its store too."""
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


def by_name(names: Sequence[bytes]) -> list[list[int]]:
    """Indices of equal names together, in the order of their first ones. Pure."""
    found: dict[bytes, list[int]] = {}
    for index, name in enumerate(names):
        found.setdefault(name, []).append(index)
    return [*found.values()]


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
    """This boot of the machine and its process namespace, as text; "" if unknown (macOS)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


class Copies:
    """A process's place among the ranks. A single rank exchanges nothing."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        """`group`: the ranks that exchange tensors; None: all."""
        self.rank, self.size = rank, size
        self._group = group

    # This process's device, the ranks of each node, and lines to them, in the last meeting that it
    # has joined.
    _device: ClassVar[torch.device] = torch.device("cpu")
    _nodes: ClassVar[list[list[int]]] = []
    _lines: ClassVar[Lines] = Lines()

    @classmethod
    def join(
        cls,
        meeting: Meeting,
        rank: int,
        device: torch.device,
        store: Store | None = None,
        *,
        node: str = "",
    ) -> None:
        """Join a meeting and wait for all its ranks; a process is in one meeting at a time.

        `store`: rank 0's own; None for the others. `node`: the name of this process's node; ranks
        are on one node if they name it alike and see each other's processes.

        Raises `CopyFailedError` where they do not come.
        """
        cls.leave()
        timeout = timedelta(seconds=meeting.timeout_s)
        try:
            if store is None:
                store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
            store = PrefixStore(meeting.name, store)
            store.set(f"here/{rank}", f"{_machine()} {node}")
            everyone = [f"here/{one}" for one in range(meeting.size)]
            store.wait(everyone, timeout)
            cls._nodes = by_name([bytes(store.get(one)) for one in everyone])
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
            cls._device = device
            cls(rank, meeting.size)._connect(range(meeting.size))
        except (CopyFailedError, RuntimeError, OSError) as err:
            raise CopyFailedError(f"rank {rank} could not join the others: {err}") from err

    @classmethod
    def leave(cls) -> None:
        """Leave the meeting: the process is a single rank again."""
        cls._lines.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    @classmethod
    def joined(cls) -> Copies:
        """This process's place in the meeting that it has joined; a single rank if in none."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @classmethod
    def nodes(cls) -> list[list[int]]:
        """The ranks of each node, ascending, in the order of the nodes' first ranks."""
        return cls._nodes if dist.is_initialized() else [[0]]

    def neighbours(self) -> list[int]:
        """The ranks of this rank's node, ascending."""
        return next(ranks for ranks in self.nodes() if self.rank in ranks)

    def counterparts(self) -> list[int]:
        """The ranks with this one's place among those of their nodes, each of which has as many."""
        place = self.neighbours().index(self.rank)
        return [ranks[place] for ranks in self.nodes()]

    @classmethod
    def is_cut(cls) -> bool:
        """Whether a rank is gone, or its machine silent, as far as rank 0 or this one can tell."""
        return cls._lines.is_cut()

    def tell(self, peers: Iterable[int], word: int) -> dict[int, int]:
        """Send a number to some ranks; returns theirs. A rank that is gone has no entry.

        Both ranks of a pair call it at the same place among their exchanges. Each waits for the
        other, however long it takes to get there.
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
        """A `Copies` of these ranks only, with a time limit of its own. All of them call it.

        Raises `CopyFailedError` where one does not come.
        """
        try:
            group = dist.new_group([*ranks], timeout=timeout, use_local_synchronization=True)
            copies = Copies(self.rank, self.size, cast("dist.ProcessGroup", group))
            copies._connect(ranks)
        except (CopyFailedError, RuntimeError) as err:
            raise CopyFailedError(f"ranks {[*ranks]} could not join: {err}") from err
        return copies

    def _connect(self, ranks: Sequence[int]) -> None:
        """Copy an element between all pairs of `ranks`, which call it at the same time.

        NCCL connects two ranks, and takes memory for that, in their first copy. If one of them has
        none, the other waits in there without a bound, which only a creation is watched for.
        """
        if self._device.type != "cuda":
            return
        peers = [peer for peer in ranks if peer != self.rank]
        own, *theirs = (torch.zeros(1, device=self._device) for _ in (self.rank, *peers))
        receives = [Copy(each, peer) for each, peer in zip(theirs, peers, strict=True)]
        self.exchange([Copy(own, peer) for peer in peers], receives)
        torch.cuda.synchronize(self._device)

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
