"""Rank 0 of the group by which a vLLM server takes versions: a process that may be killed.

`python -m ratoon_client.weights.nccl_push FD DEVICE` answers calls of `Sender`'s methods on the
connection FD, one at a time, and ends with it. Whoever waits in NCCL waits without end, so the
other side of the connection has the deadlines. On the device `cpu` gloo takes NCCL's place.

vLLM's half is its `StatelessProcessGroup` and `PyNcclCommunicator` (read at 0.26.0).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, cast

import torch
from torch import Tensor, distributed

from ratoon_client.errors import EngineError
from ratoon_client.weights.hf_module import read_tensors

# Where vLLM's ranks find the first object that rank 0 broadcasts, and of what class it is.
UNIQUE_ID_KEY = "broadcast_from/0/0"
UNIQUE_ID_BYTES = 128
UNIQUE_ID_CLASS = ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId")
_UINT8, _FLOAT32, _SUM = 1, 7, 0
_c10d = cast("Any", distributed)


class Group(Protocol):
    def broadcast(self, chunks: list[Tensor]) -> None:
        """Bytes of this rank to all others; ends when they have left."""
        ...


class Sender:
    """Stages versions on `device`, and broadcasts what it staged last."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._store: Any = None
        self._num_ranks = 0
        self._group: Group | None = None
        self._chunks: list[Tensor] = []

    def listen(self, address: str, num_ranks: int) -> int:
        """The port at which the other ranks meet this one, at `address` alone."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
        port = int(listening.getsockname()[1])
        self._num_ranks = num_ranks
        self._store = _c10d.TCPStore(
            address,
            port,
            world_size=num_ranks,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            use_libuv=False,
        )
        return port

    def join(self) -> None:
        """Until all ranks are there. Who reaches the port could run code in them: it is closed."""
        assert self._store is not None
        kind = _Nccl if self._device.type == "cuda" else _Gloo
        self._group = kind(self._store, self._num_ranks, self._device)
        self._store = None

    def stage(self, folder: str, chunk_bytes: int) -> dict[str, Any]:
        """Bring a version to the device; gives what `/update_weights` is told of it."""
        values = read_tensors(Path(folder))
        scalars = [name for name, value in values.items() if not value.shape]
        if scalars:
            raise EngineError(f"{scalars[0]}: vLLM unpacks no tensor without dimensions")
        # vLLM views each as its dtype, at an offset that has to be a multiple of its size.
        names = sorted(values, key=lambda name: -values[name].element_size())
        self._chunks = []
        for part in _parts(names, values, chunk_bytes):
            self._chunks.append(self._packed([values[name] for name in part]))
        return {
            "names": names,
            "dtype_names": [str(values[name].dtype).removeprefix("torch.") for name in names],
            "shapes": [list(values[name].shape) for name in names],
            "packed": True,
            "packed_buffer_size_bytes": chunk_bytes,
            # With two, vLLM reads a chunk on one stream while it takes its memory on another.
            "packed_num_buffers": 1,
        }

    def push(self) -> None:
        assert self._group is not None
        self._group.broadcast(self._chunks)

    def _packed(self, values: list[Tensor]) -> Tensor:
        sizes = [value.nbytes for value in values]
        chunk = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        places = cast("Any", chunk).split(sizes)
        for place, value in zip(places, values, strict=True):
            place.copy_(value.reshape(-1).view(torch.uint8))
        return chunk


class _Gloo:
    def __init__(self, store: Any, num_ranks: int, device: torch.device) -> None:
        store.set(UNIQUE_ID_KEY, _pickled(bytes(UNIQUE_ID_BYTES)))
        prefixed = _c10d.PrefixStore("gloo", store)
        distributed.init_process_group("gloo", store=prefixed, rank=0, world_size=num_ranks)

    def broadcast(self, chunks: list[Tensor]) -> None:
        for chunk in chunks:
            distributed.broadcast(chunk, src=0)


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Nccl:
    """One communicator of the NCCL that torch has loaded.

    torch's own bindings refuse 2 GiB and more, which a chunk may have.
    """

    def __init__(self, store: Any, num_ranks: int, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self._library = ctypes.CDLL("libnccl.so.2")
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._comm = ctypes.c_void_p()
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        store.set(UNIQUE_ID_KEY, _pickled(bytes(unique_id)))
        self._call("ncclCommInitRank", ctypes.byref(self._comm), num_ranks, unique_id, 0)
        # With this vLLM's ranks end their part.
        one = torch.zeros(1, device=device)
        self._collective("ncclAllReduce", one, _FLOAT32, _SUM)
        torch.cuda.synchronize()

    def broadcast(self, chunks: list[Tensor]) -> None:
        for chunk in chunks:
            self._collective("ncclBroadcast", chunk, _UINT8, 0)
        torch.cuda.synchronize()

    def _collective(self, name: str, tensor: Tensor, dtype: int, root_or_operation: int) -> None:
        place = ctypes.c_void_p(tensor.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        count = ctypes.c_size_t(tensor.numel())
        self._call(name, place, place, count, dtype, root_or_operation, self._comm, stream)

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._library[name](*arguments)
        if status != 0:
            text = self._library.ncclGetErrorString(status).decode()
            raise EngineError(f"{name}: {text} (NCCL_DEBUG=WARN says more)")


def _pickled(unique_id: bytes) -> bytes:
    """`_ctypes._unpickle(class, ({}, unique_id))`: what vLLM's ranks make their structure of.

    Its class, by which a pickler would name it, is not here.
    """
    module, name = UNIQUE_ID_CLASS
    head = f"c_ctypes\n_unpickle\nc{module}\n{name}\n".encode()
    return b"\x80\x03" + head + b"}C" + bytes([len(unique_id)]) + unique_id + b"\x86\x86R."


def _parts(names: list[str], values: Mapping[str, Tensor], chunk_bytes: int) -> Iterator[list[str]]:
    """As vLLM cuts them: a chunk ends with the tensor that makes it larger than `chunk_bytes`."""
    part: list[str] = []
    num_bytes = 0
    for name in names:
        part.append(name)
        num_bytes += values[name].nbytes
        if num_bytes > chunk_bytes:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def _read_calls(link: Connection[Any, Any], calls: SimpleQueue[Any]) -> None:
    try:
        while True:
            calls.put(json.loads(link.recv_bytes()))
    except (EOFError, OSError):
        # Whoever would kill this process is gone; what it waits in need not end.
        os._exit(0)


def main() -> None:
    # A load that has begun ends: the receiver ends this process after it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link: Connection[Any, Any] = Connection(int(sys.argv[1]))
    calls: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read_calls, args=(link, calls), daemon=True).start()
    sender = Sender(sys.argv[2])
    while True:
        name, arguments = calls.get()
        try:
            answer = getattr(sender, name)(*arguments)
        except EngineError as err:
            answer, error = None, str(err)
        except Exception as err:  # noqa: BLE001 - told to who asked
            answer, error = None, f"{name}: {err!r}"
        else:
            error = None
        link.send_bytes(json.dumps((answer, error)).encode())


if __name__ == "__main__":
    main()
