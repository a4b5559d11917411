"""Versions into a module of this process, in place. Imports torch; the rest of the client does not.

Every name, shape and dtype is compared before the first value is copied, so a version that is
refused leaves the module as it was.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor, nn

from ratoon_client.errors import EngineError
from ratoon_client.weights.disk import in_thread
from ratoon_proto.types import WeightManifest

_NAMES_SHOWN = 3


class ModuleAdapter:
    """`module` is a transformers model, or peft's of one for a LoRA policy.

    Hold `lock`, a new one where none is given, while the module generates: a version is copied
    under it, from another thread.
    """

    def __init__(self, module: nn.Module, *, lock: AbstractContextManager[Any] | None = None):
        self.lock: AbstractContextManager[Any] = threading.Lock() if lock is None else lock
        self._module = module
        self._tag = uuid.uuid4().hex
        self._num_adapters = 0

    async def tag(self) -> str | None:
        """A tag of this module: another process has to be given the version again."""
        return self._tag

    async def commit(
        self, folder: Path, manifest: WeightManifest, *, previous: Path | None
    ) -> float:
        if manifest.kind == "adapter":
            return await in_thread(self._load_lora, folder, manifest.version)
        return await in_thread(self._copy, folder)

    def _copy(self, folder: Path) -> float:
        values = read_tensors(folder)
        targets = _targets(self._module, values)
        with self.lock, torch.no_grad():
            begun = time.monotonic()
            for name, target in targets.items():
                target.copy_(values[name])
            return time.monotonic() - begun

    def _load_lora(self, folder: Path, version: int) -> float:
        """Under a new name; the adapter before it goes."""
        from peft import PeftModel

        if not isinstance(self._module, PeftModel):
            raise EngineError(
                f"{type(self._module).__name__} takes no LoRA version: give the adapter"
                " PeftModel.from_pretrained(base, the folder of a version)"
            )
        module = cast("Any", self._module)
        self._num_adapters += 1
        name = f"version-{version}-{self._num_adapters}"
        with self.lock:
            begun = time.monotonic()
            old = module.active_adapter
            try:
                loaded = module.load_adapter(str(folder), adapter_name=name)
                _check_lora(loaded)
            except (EngineError, RuntimeError, ValueError, OSError, SafetensorError) as err:
                if name in module.peft_config:
                    module.delete_adapter(name)
                raise EngineError(f"{folder}: {err}") from err
            module.set_adapter(name)
            module.delete_adapter(old)
            return time.monotonic() - begun


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a version by name, mapped: bytes are read as they are copied.

    Raises EngineError.
    """
    values: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            values |= cast("Any", safetensors_torch).load_file(path)
        except (SafetensorError, OSError) as err:
            raise EngineError(f"{path} is no file of tensors: {err}") from err
    return values


def _targets(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's tensor of each name. Raises EngineError where one does not fit.

    Of tied parameters a version has one name; buffers that it has not stay as they are.
    """
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    unknown = sorted(values.keys() - state.keys())
    given = {id(state[name]) for name in values.keys() & state.keys()}
    missing = [
        name
        for name, target in state.items()
        if isinstance(target, nn.Parameter) and id(target) not in given
    ]
    for names, what in ((unknown, "are not the module's"), (missing, "are not in the version")):
        if names:
            shown = ", ".join(names[:_NAMES_SHOWN])
            raise EngineError(f"{len(names)} tensors {what}: {shown}")
    for name, value in values.items():
        target = state[name]
        if target.is_meta:
            raise EngineError(f"{name}: the module's is on no device")
        if (target.shape, target.dtype) != (value.shape, value.dtype):
            raise EngineError(
                f"{name}: the version has {value.dtype} {tuple(value.shape)}, the module"
                f" {target.dtype} {tuple(target.shape)}"
            )
    return {name: state[name] for name in values}


def _check_lora(loaded: Any) -> None:
    """peft passes over tensors that do not fit by name."""
    names = [*loaded.missing_keys, *loaded.unexpected_keys]
    if names:
        raise EngineError(f"{len(names)} tensors are missing or not known: {names[0]}")
