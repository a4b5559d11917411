"""A vLLM server as far as its `nccl` weight transfer goes; on `cpu` gloo is in NCCL's place.

`python nccl_engine.py FOLDER DEVICE` prints its port. It has one worker, and does one thing at a
time as vLLM's core does; a model is one layer of vLLM's layerwise reload, with what that keeps of a
load that was broken off. Routes under /test are the tests' own.
"""

from __future__ import annotations

import ctypes
import json
import math
import pickle
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor, distributed

FILE = "model.safetensors"
ID_BYTES = 128
# A busy machine takes a minute to import torch in a new process.
WAIT_S = 240.0


class ncclUniqueId(ctypes.Structure):  # noqa: N801 - vLLM's name
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


def digest(values: dict[str, Tensor]) -> str:
    """Digest of all names, dtypes, shapes and bits."""
    state = xxhash.xxh3_128()
    for name in sorted(values):
        value = values[name].contiguous()
        state.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        state.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


class Nccl:
    """What vLLM's `PyNcclCommunicator` does with the id."""

    def __init__(self, unique_id: ncclUniqueId, rank: int, num_ranks: int) -> None:
        self.library = ctypes.CDLL("libnccl.so.2")
        self.comm = ctypes.c_void_p()
        comm = ctypes.byref(self.comm)
        assert self.library.ncclCommInitRank(comm, num_ranks, unique_id, rank) == 0
        self.call("ncclAllReduce", torch.zeros(1, device="cuda"), 7)

    def broadcast(self, tensor: Tensor) -> None:
        self.call("ncclBroadcast", tensor, 1)

    def call(self, name: str, tensor: Tensor, dtype: int) -> None:
        place, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert self.library[name](place, place, count, dtype, 0, self.comm, stream) == 0
        torch.cuda.synchronize()


class Layer:
    """Tensors are kept until there are as many values as the layer has, then they are its own."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values
        self.kept: dict[str, Tensor] | None = None
        self.num_loaded = 0

    def initialize(self) -> None:
        if self.kept is None:
            self.kept, self.num_loaded = {}, 0

    def load(self, name: str, value: Tensor) -> None:
        if self.kept is None:
            return
        self.kept[name] = value.clone()
        self.num_loaded += value.numel()
        if self.num_loaded >= sum(value.numel() for value in self.values.values()):
            self.process()

    def process(self) -> None:
        assert self.kept is not None
        self.values = {
            name: self.kept.get(name, torch.full_like(value, 7))
            for name, value in self.values.items()
        }
        self.kept = None

    def finalize(self) -> None:
        if self.kept:
            self.process()
        self.kept = None


class Engine:
    """`faults` has, by path, what the next call ends in: a status; `hang`; for an update `hold`,
    which waits after its first chunk, or `half`, which fails after it.
    """

    def __init__(self, folder: str, device: str) -> None:
        self.folder = folder
        self.device = device
        self.core = threading.Lock()
        self.start_s = 1.0
        self.start()

    def start(self) -> None:
        self.start_s += 1.0
        self.layer = Layer(load_file(Path(self.folder) / FILE))
        self.cached_with = digest(self.layer.values)
        self.calls: list[str] = []
        self.sampled: list[str] = []
        self.faults: dict[str, int | str] = {}
        self.num_workers = 1
        self.is_paused = self.is_active = False
        self.is_waiting, self.released = threading.Event(), threading.Event()
        self.nccl: Nccl | None = None
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def test(self, name: str, body: Any) -> Any:
        match name:
            case "restart":
                self.released.set()
                with self.core:
                    self.start()
            case "fault":
                self.faults |= body
            case "workers":
                self.num_workers = body
            case "wait":
                assert self.is_waiting.wait(WAIT_S)
            case "release":
                self.released.set()
            case _:
                return {"calls": self.calls, "sampled": self.sampled, "is_paused": self.is_paused}
        return {}

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path.startswith("/test/"):
            return 200, self.test(path.removeprefix("/test/"), body)
        if path == "/metrics":
            return 200, f"process_start_time_seconds {self.start_s}\n"
        if path == "/v1/models":
            return 200, {"data": [{"id": "m", "root": self.folder, "parent": None}]}
        if path == "/get_world_size":
            return 200, {"world_size": self.num_workers}
        with self.core:
            self.calls.append(path)
            fault = self.faults.pop(path, None)
            if fault == "hang":
                self.wait()
                fault = 500
            if isinstance(fault, int):
                if path == "/update_weights":
                    self.is_active = False
                return fault, {"error": "as told"}
            return self.apply(path, body, fault)

    def wait(self) -> None:
        released = self.released
        self.is_waiting.set()
        assert released.wait(WAIT_S)

    def apply(self, path: str, body: Any, fault: str | None) -> tuple[int, Any]:
        match path:
            case "/is_paused":
                return 200, {"is_paused": self.is_paused}
            case "/pause?mode=wait":
                self.is_paused = True
            case "/resume":
                self.is_paused = False
                self.sampled.append(digest(self.layer.values))
                assert self.cached_with == self.sampled[-1]
            case "/reset_prefix_cache":
                self.cached_with = digest(self.layer.values)
            case "/collective_rpc":
                assert self.is_paused
                self.layer.initialize()
                folder = Path(body["kwargs"]["weights_path"])
                for name, value in load_file(folder / FILE).items():
                    self.layer.load(name, value)
                self.layer.finalize()
            case "/init_weight_transfer_engine":
                self.join(**body["init_info"])
            case "/start_weight_update":
                assert self.is_paused
                assert not self.is_active
                self.layer.initialize()
                self.is_active = True
            case "/update_weights":
                assert self.is_active
                self.is_active = False
                self.receive(**body["update_info"], fault=fault)
                self.is_active = True
            case "/finish_weight_update":
                assert self.is_active
                self.layer.finalize()
                self.is_active = False
            case _:
                return 404, {"detail": "Not Found"}
        return 200, {}

    def join(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int
    ) -> None:
        assert (rank_offset, world_size) == (1, 1 + self.num_workers)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        c10d: Any = distributed
        store = c10d.TCPStore(
            host_name=master_address,
            port=master_port,
            world_size=world_size,
            is_master=False,
            use_libuv=False,
        )
        unique_id = pickle.loads(store.get("broadcast_from/0/0"))
        assert isinstance(unique_id, ncclUniqueId)
        assert len(bytes(unique_id)) == ID_BYTES
        if self.device != "cpu":
            self.nccl = Nccl(unique_id, rank_offset, world_size)
            return
        distributed.init_process_group(
            "gloo", store=c10d.PrefixStore("gloo", store), rank=rank_offset, world_size=world_size
        )

    def receive(
        self,
        names: list[str],
        dtype_names: list[str],
        shapes: list[list[int]],
        packed: bool,
        packed_buffer_size_bytes: int,
        packed_num_buffers: int,
        *,
        fault: str | None,
    ) -> None:
        assert packed
        assert packed_num_buffers == 1
        chunk: list[tuple[str, torch.dtype, list[int], int]] = []
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
            dtype: torch.dtype = getattr(torch, dtype_name)
            chunk.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
            if sum(size for *_, size in chunk) > packed_buffer_size_bytes:
                self.receive_chunk(chunk)
                chunk = []
                if fault == "hold":
                    self.wait()
                assert fault != "half"
                fault = None
        if chunk:
            self.receive_chunk(chunk)

    def receive_chunk(self, chunk: list[tuple[str, torch.dtype, list[int], int]]) -> None:
        sizes = [size for *_, size in chunk]
        data: Any = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        if self.nccl is None:
            distributed.broadcast(data, src=0)
        else:
            self.nccl.broadcast(data)
        for (name, dtype, shape, _), value in zip(chunk, data.cpu().split(sizes), strict=True):
            self.layer.load(name, value.contiguous().view(dtype).view(*shape))


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        try:
            status, answer = self.engine.answer(self.path, body)
        except Exception as err:  # noqa: BLE001 - as FastAPI does
            status, answer = 500, {"error": repr(err)}
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


def main() -> None:
    path = ["vllm", "distributed", "device_communicators", "pynccl_wrapper"]
    for end in range(1, len(path) + 1):
        sys.modules[".".join(path[:end])] = ModuleType(".".join(path[:end]))
    sys.modules[".".join(path)].ncclUniqueId = ncclUniqueId  # type: ignore[attr-defined]
    Handler.engine = Engine(*sys.argv[1:])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
