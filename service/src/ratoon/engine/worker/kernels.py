"""Kernels of the workers' device: its backends, and compiled ones that outlive their process.

Compiled kernels are in one folder per kind of device and versions: compilers name each by all that
it is made of, so policies of any model and layout share what they have in common. A worker holds a
shared lock on its folder for as long as it lives, so the folder is never removed under it.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ratoon.config import set_compile_cache
from ratoon.engine.worker.tasks import Numerics
from ratoon.log import get_logger
from ratoon.stream.files import (
    DamagedFileError,
    make_folder,
    remove_folder,
    seal_document,
    unseal_document,
    write_atomic,
)
from ratoon_proto.types import BackendInfo, Shard

if TYPE_CHECKING:
    from ratoon.train.trainer import Trainer

MAX_BYTES = 8 * 2**30
_LOCK = ".lock"
_TOKENS = "tokens"
# Packed tokens of a micro-batch, where nothing is known.
USUAL_TOKENS = 32_768
_LOG = get_logger("kernels")


class CompileCache:
    """This process's folder of compiled kernels, kept for later processes.

    Before use it evicts the least recently used folders, until all have at most `max_bytes`.
    """

    def __init__(self, root: Path, kind: Mapping[str, str], max_bytes: int = MAX_BYTES) -> None:
        """`kind`: as of `numerics.compiler_kind`; processes of one kind share a folder."""
        self.folder = root / Numerics.of(kind).digest
        os.close(_locked(self.folder))  # Marks it as the most recently used.
        _evict(root, max_bytes)
        self._lock = _locked(self.folder)
        self._num_graphs = 0
        set_compile_cache(self.folder)

    @classmethod
    def of_device(cls, root: Path, device: str) -> CompileCache:
        """The cache for a device by torch's name of it; may begin CUDA."""
        import torch

        from ratoon.train.numerics import compiler_kind

        return cls(root, compiler_kind(torch.device(device)))

    def compile_ahead(self, trainer: Trainer) -> None:
        """Begin to compile for a new trainer: for the numbers of tokens that earlier ones of its
        graphs have run, the last first, or else for the usual number.

        Several ranks may run none whole, so they compile for known numbers alone. Tenants, and
        ranks that share out weights, compile when they run: others may use the model meanwhile.
        """
        spec, known = trainer.spec, self._known(trainer)[::-1]
        if spec.host_key or spec.shard is Shard.WEIGHTS:
            return
        if not known and spec.num_workers == 1:
            usual = spec.micro_batch_tokens or USUAL_TOKENS
            known = [min(usual, trainer.model.max_tokens() or usual)]
        if known:
            trainer.compile_ahead(known)

    def note(self, trainer: Trainer | None) -> None:
        """Log what this process has compiled, if it is more than before, and write down for which
        numbers of tokens, for `compile_ahead` of later processes. While something is being
        compiled, that is left to the next call.

        `graphs` and `compile_s` are of the whole process, `found` those graphs that earlier
        processes had compiled.
        """
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None or trainer is None or trainer.is_compiling:
            return
        num_graphs = utils.counters["stats"]["unique_graphs"]
        if num_graphs <= self._num_graphs:
            return
        self._num_graphs = num_graphs
        found = utils.counters["aot_autograd"]["autograd_cache_hit"]
        seconds = round(utils.calculate_time_spent()["total_wall_time"], 3)
        _LOG.info("layers compiled", graphs=num_graphs, found=found, compile_s=seconds)
        if trainer.run_tokens:
            self.keep(trainer, trainer.run_tokens)

    def keep(self, trainer: Trainer, tokens: Mapping[int, int]) -> None:
        """Write down numbers of tokens, by their range, beside the known ones of other ranges."""
        from ratoon.model.layers import most_tokens

        known = {most_tokens(each): each for each in self._known(trainer)}
        kept = {most: each for most, each in known.items() if most not in tokens} | {**tokens}
        try:
            make_folder(self.folder / _TOKENS)
            document = seal_document({"tokens": [*kept.values()]})
            write_atomic(self._tokens_file(trainer), document)
        except OSError:
            _LOG.exception("numbers of tokens not written")

    def _known(self, trainer: Trainer) -> list[int]:
        try:
            document = unseal_document(self._tokens_file(trainer).read_bytes())
        except (OSError, DamagedFileError):
            return []
        return document["tokens"]

    def _tokens_file(self, trainer: Trainer) -> Path:
        return self.folder / _TOKENS / f"{Numerics.of(trainer.graphs()).digest}.json"

    def close(self) -> None:
        """Allow others to remove the folder."""
        os.close(self._lock)


def start_compiler() -> threading.Thread:
    """Begin what torch does at a first compilation: imports of a second, processes, and a digest of
    its own sources, by which it names what it compiles."""
    thread = threading.Thread(target=_import_compiler, name="compiler", daemon=True)
    thread.start()
    return thread


def _import_compiler() -> None:
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()
    import_module("torch._inductor.compile_fx")
    import_module("torch._inductor.codecache").torch_key()


def _locked(folder: Path) -> int:
    """A descriptor that holds the shared lock of the folder, which is made where it is missing."""
    while True:
        make_folder(folder)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            os.utime(folder / _LOCK)
            if os.path.samestat((folder / _LOCK).stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # Another process removed it in between.


def _evict(root: Path, max_bytes: int) -> None:
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=_used_at)
    sizes = {folder: _size_bytes(folder) for folder in folders}
    total = sum(sizes.values())
    for folder in folders:
        if total <= max_bytes:
            return
        if _remove(folder):
            total -= sizes[folder]
            _LOG.info("compiled kernels removed", folder=folder.name, size_bytes=sizes[folder])


def _remove(folder: Path) -> bool:
    """Whether it was removed; a folder in use is not."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_folder(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _used_at(folder: Path) -> float:
    try:
        return (folder / _LOCK).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # Compilers rename their output.
            total += path.lstat().st_size
    return total


def list_backends() -> tuple[BackendInfo, ...]:
    """All backends of all ops, as seen by this process."""
    from ratoon_kernels import registry

    return tuple(
        BackendInfo(
            op=backend.op,
            name=backend.name,
            available=backend.is_available,
            unavailable_reason=backend.reason,
        )
        for backend in registry.list_backends()
    )
