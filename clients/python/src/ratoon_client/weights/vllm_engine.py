"""vLLM's weight transfer backend `ratoon`, one in each worker. Imports torch and vLLM.

While the engine samples, a thread copies a version's files to host memory and verifies them, or
makes them there of the version before and a delta; the update, in the pause, loads from that
memory. Read against the source of vLLM 0.26.0.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from torch import Tensor

from ratoon_client.errors import IntegrityError
from ratoon_client.weights.deltas import DeltaFile, apply, read_delta
from ratoon_proto.types import WeightFile

if TYPE_CHECKING:
    WeightTransferEngine = cast("Any", object)
    initialize_layerwise_reload = finalize_layerwise_reload = get_layerwise_info = cast("Any", None)
else:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

_LOG = logging.getLogger("ratoon_client")
_READ_BYTES = 8 * 2**20
_THREADS = 8
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NAMES_SHOWN = 3


@dataclass
class StageInfo:
    """`files` of `folder`, safetensors all: objects with the fields of `WeightFile`.

    With the path of a `delta` they need not be there: each is made of the one that was staged
    before.
    """

    staging_id: str
    folder: str
    files: list[Any]
    delta: str = ""

    def __post_init__(self) -> None:
        self.files = [WeightFile(**file) for file in self.files]


@dataclass
class LoadInfo:
    staging_id: str


class HostMemory:
    """Buffers by file name, kept from version to version: to touch and to pin new memory takes
    longer than to copy into it.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers: dict[str, Tensor] = {}
        # Digests of the files that the buffers have whole, by name.
        self.digests: dict[str, str] = {}

    def buffers(self, files: Sequence[WeightFile]) -> list[Tensor]:
        """Bytes for each file, pinned where CUDA takes them; what other files had goes."""
        for name in self._buffers.keys() - {file.name for file in files}:
            self._drop(name)
        return [self._buffer(file.name, file.size_bytes) for file in files]

    def close(self) -> None:
        for name in list(self._buffers):
            self._drop(name)

    def _buffer(self, name: str, num_bytes: int) -> Tensor:
        if name in self._buffers and self._buffers[name].numel() < num_bytes:
            self._drop(name)
        if name not in self._buffers:
            # Whole pages of its own, which can be pinned as they are; torch's pinned memory comes
            # in powers of two.
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            buffer = torch.frombuffer(pages, dtype=torch.uint8)
            if self._is_cuda and int(_cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0)):
                _LOG.warning("%d bytes of host memory could not be pinned", num_bytes)
            self._buffers[name] = buffer
        return self._buffers[name][:num_bytes]

    def _drop(self, name: str) -> None:
        buffer = self._buffers.pop(name)
        self.digests.pop(name, None)
        if self._is_cuda:
            _cudart().cudaHostUnregister(buffer.data_ptr())


class Staging:
    """One version on its way to host memory, once the one `before` has let go of it."""

    def __init__(
        self, info: StageInfo, memory: HostMemory, device: torch.device, before: Staging | None
    ) -> None:
        self.id = info.staging_id
        self.error: str | None = None
        self._folder = Path(info.folder)
        self._delta = Path(info.delta) if info.delta else None
        self._made: dict[str, DeltaFile] = {}
        self._digests = memory.digests
        self._tensors: dict[str, Tensor] = {}
        self._is_cancelled = threading.Event()
        if before is not None:
            before.cancel()
        self._thread = threading.Thread(
            target=self._run, args=(info.files, memory, device, before), daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def cancel(self) -> None:
        self._is_cancelled.set()

    def wait(self) -> dict[str, Tensor]:
        """The tensors by name, views of host memory. Raises RuntimeError where it failed."""
        self._thread.join()
        if self.error is not None:
            raise RuntimeError(f"{self._delta or self._folder} is not staged: {self.error}")
        return self._tensors

    def end(self) -> None:
        """Once cancelled: no thread and no tensor uses the memory any more."""
        self._thread.join()
        self._tensors.clear()

    def _run(
        self,
        files: Sequence[WeightFile],
        memory: HostMemory,
        device: torch.device,
        before: Staging | None,
    ) -> None:
        try:
            if before is not None:
                before.end()
            if device.type == "cuda":
                torch.cuda.set_device(device)
            buffers = memory.buffers(files)
            if self._delta is not None:
                self._made = {file.name: file for file in read_delta(self._delta)}
            with ThreadPoolExecutor(_THREADS) as pool:
                for tensors in pool.map(self._stage, files, buffers):
                    self._tensors |= tensors
        except Exception as err:  # noqa: BLE001 - whoever asks for the state is told
            self.error = f"{type(err).__name__}: {err}"

    def _stage(self, file: WeightFile, data: Tensor) -> dict[str, Tensor]:
        held = self._digests.pop(file.name, None)
        if self._delta is None:
            self._read(file, data)
        elif held != file.digest:
            made = self._made.get(file.name)
            if made is None or (made.parent_digest, made.digest) != (held, file.digest):
                raise IntegrityError(f"no delta makes {file.name} of what is here")
            if self._is_cancelled.is_set():
                raise RuntimeError("another version came")
            apply(made, data.numpy())
        self._digests[file.name] = file.digest
        return _tensors(data)

    def _read(self, file: WeightFile, data: Tensor) -> None:
        target = memoryview(cast("Any", data.numpy()))
        digest = xxhash.xxh3_128()
        read = 0
        with (self._folder / file.name).open("rb", buffering=0) as source:
            size_bytes = os.fstat(source.fileno()).st_size
            if size_bytes != file.size_bytes:
                raise IntegrityError(f"{file.name} has {size_bytes} bytes, not {file.size_bytes}")
            while count := source.readinto(target[read : read + _READ_BYTES]):
                if self._is_cancelled.is_set():
                    raise RuntimeError("another version came")
                digest.update(target[read : read + count])
                read += count
        if digest.hexdigest() != file.digest:
            raise IntegrityError(f"{file.name} does not have the digest {file.digest}")


class RatoonTransferEngine(WeightTransferEngine):
    """`--weight-transfer-config '{"backend": "ratoon"}'`.

    `init_transfer_engine` begins to stage a version, and an update loads it. In between vLLM's
    `collective_rpc` of `weight_transfer_engine`, the worker's attribute, calls this object.
    """

    init_info_cls = StageInfo
    update_info_cls = LoadInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)  # pyright: ignore[reportUnknownMemberType]
        self._memory = HostMemory(device)
        self._staging: Staging | None = None

    def __call__(self) -> dict[str, Any]:
        """The `staging_id` given last, whether its thread `is_running`, and the `error` it met."""
        staging = self._staging
        if staging is None:
            return {"staging_id": None, "is_running": False, "error": None}
        return {
            "staging_id": staging.id,
            "is_running": staging.is_running,
            "error": staging.error,
        }

    def init_transfer_engine(self, init_info: StageInfo) -> None:
        """Begins, and returns at once: the worker's next step waits for this."""
        self._staging = Staging(init_info, self._memory, self.device, self._staging)

    def start_weight_update(self) -> None:
        """Nothing: vLLM ends an update that failed only where `receive_weights` fails."""

    def receive_weights(self, update_info: LoadInfo) -> None:
        """Load what is staged under this id. Raises RuntimeError, before a weight has changed,
        where nothing is.
        """
        if self._staging is None or self._staging.id != update_info.staging_id:
            raise RuntimeError(f"nothing was staged as {update_info.staging_id}")
        _load(self.model, self.model_config, self._staging.wait().items())

    def finish_weight_update(self) -> None:
        """Nothing, as at the start."""

    def shutdown(self) -> None:
        if self._staging is not None:
            self._staging.cancel()
            self._staging.end()
        self._memory.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM, which calls it in the trainer's process: ours has no vLLM, and versions
        are fetched. A script of vLLM's that calls it is told so."""
        raise NotImplementedError("versions come by `ratoonctl weights follow`")


def _load(model: Any, model_config: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """In place, layer by layer, as vLLM's `reload_weights` does it from a folder.

    Where it fails some layers are new, others old, and all of them can be loaded again.
    """
    try:
        initialize_layerwise_reload(model)
        wanted = {name for name, _ in model.named_parameters()}
        loaded = model.load_weights(tensors)
        if loaded is not None and model_config.quantization is None:
            _check_all(wanted - loaded)
        finalize_layerwise_reload(model, model_config)
    except BaseException:
        # Half of a layer is not processed, nor counted as a part of the next version's: those
        # layers are as they were.
        for layer in model.modules():
            info = get_layerwise_info(layer)
            info.load_numel = 0
            info.loaded_weights.clear()
        finalize_layerwise_reload(model, model_config)
        raise


def _check_all(missing: set[str]) -> None:
    if missing:
        shown = ", ".join(sorted(missing)[:_NAMES_SHOWN])
        raise RuntimeError(f"{len(missing)} parameters are not in the version: {shown}")


def _tensors(data: Tensor) -> dict[str, Tensor]:
    """Tensors of a safetensors file by name, as views of its bytes."""
    begin = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
    header: dict[str, Any] = json.loads(data[8:begin].numpy().tobytes())
    tensors: dict[str, Tensor] = {}
    for name, about in header.items():
        if name != "__metadata__":
            if about["dtype"] not in _DTYPES:
                raise ValueError(f"{name}: {about['dtype']} is not among {', '.join(_DTYPES)}")
            first, last = about["data_offsets"]
            values = data[begin + first : begin + last].view(_DTYPES[about["dtype"]])
            tensors[name] = values.view(about["shape"])
    return tensors


def _cudart() -> Any:
    return cast("Any", torch.cuda).cudart()
