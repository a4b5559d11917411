"""vLLM's workers, as far as a weight transfer backend knows them, and a server in front of two.

Each worker has half of the rows of every tensor. The layerwise reload counts what a layer was
given, as vLLM's does, and goes on counting after a load that failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from tests.client.fake_engine import FILE, ROOT, FakeEngine

LAYERS, WEIGHTS, SHAPE = ("first", "second"), ("k", "q"), (4, 6)
NAMES = [f"{layer}.{weight}" for layer in LAYERS for weight in WEIGHTS]
NUM_WORKERS = 2


def tensors(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(SHAPE, generator=generator).bfloat16() for name in NAMES}


def model(version: int) -> bytes:
    """A version's file; version 0 is what the engine is started with."""
    return save(tensors(version))


@dataclass
class LayerInfo:
    load_numel: int = 0
    loaded_weights: list[tuple[str, Tensor]] = field(default_factory=list)
    kernel: dict[str, nn.Parameter] | None = None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.info = LayerInfo()
        for name in WEIGHTS:
            rows = torch.zeros(SHAPE[0] // NUM_WORKERS, SHAPE[1], dtype=torch.bfloat16)
            self.register_parameter(name, nn.Parameter(rows, requires_grad=False))

    def give(self, name: str, rows: Tensor) -> None:
        info = self.info
        if info.kernel is not None:
            info.loaded_weights.append((name, rows))
            info.load_numel += rows.numel()
            if info.load_numel >= sum(one.numel() for one in info.kernel.values()):
                self.process()

    def process(self) -> None:
        assert self.info.kernel is not None
        for name, kernel in self.info.kernel.items():
            whole = torch.full_like(kernel, torch.nan)
            for _, rows in (one for one in self.info.loaded_weights if one[0] == name):
                whole.copy_(rows)
            assert not whole.isnan().any(), "half of a layer cannot be processed"
            kernel.data.copy_(whole)
        self.place()

    def place(self) -> None:
        assert self.info.kernel is not None
        for name, kernel in self.info.kernel.items():
            self.register_parameter(name, kernel)
        self.info.__init__()


class Model(nn.Module):
    """`fails_at` names the tensor that it does not take, once."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.fails_at: str | None = None
        for name in LAYERS:
            self.add_module(name, Layer())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = set()
        for name, tensor in weights:
            if name == self.fails_at:
                self.fails_at = None
                raise RuntimeError(f"{name} is not taken")
            of, _, weight = name.partition(".")
            layer = self.get_submodule(of)
            assert isinstance(layer, Layer)
            layer.give(weight, tensor.chunk(NUM_WORKERS)[self.rank])
            loaded.add(name)
        return loaded


def layers(model: nn.Module) -> list[Layer]:
    return [layer for layer in model.modules() if isinstance(layer, Layer)]


def get_layerwise_info(layer: nn.Module) -> LayerInfo:
    return layer.info if isinstance(layer, Layer) else LayerInfo()


def initialize_layerwise_reload(model: nn.Module) -> None:
    for layer in layers(model):
        if layer.info.kernel is None:
            layer.info.kernel = dict(layer.named_parameters())
            for name, kernel in layer.info.kernel.items():
                meta = nn.Parameter(kernel.data.to("meta"), requires_grad=False)
                layer.register_parameter(name, meta)


def finalize_layerwise_reload(model: nn.Module, model_config: Any) -> None:
    del model_config
    for layer in layers(model):
        if layer.info.kernel is not None:
            layer.process() if layer.info.load_numel else layer.place()


class WeightTransferEngine:
    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.config = config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(_parsed(self.update_info_cls, update_info))

    def receive_weights(self, update_info: Any) -> None:
        """Abstract, as in vLLM: each engine of the tests has its own."""
        raise NotImplementedError


class WeightTransferEngineFactory:
    registry: dict[str, tuple[str, str]] = {}  # noqa: RUF012

    @classmethod
    def register_engine(cls, name: str, module: str, class_name: str) -> None:
        if name in cls.registry:
            raise ValueError(f"{name} is already registered")
        cls.registry[name] = (module, class_name)


def _parsed(kind: Any, fields: dict[str, Any]) -> Any:
    try:
        return kind(**fields)
    except TypeError as err:
        raise ValueError(f"invalid: {err}") from err


class Worker:
    def __init__(self, rank: int) -> None:
        self.model = Model(rank)
        self.reload(tensors(0))
        module, name = WeightTransferEngineFactory.registry["ratoon"]
        __import__(module)
        kind = getattr(sys.modules[module], name)
        vllm_config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
        self.weight_transfer_engine = kind(None, vllm_config, torch.device("cpu"), self.model)
        self._is_updating = False

    def reload(self, weights: dict[str, Tensor]) -> None:
        initialize_layerwise_reload(self.model)
        self.model.load_weights(weights.items())
        finalize_layerwise_reload(self.model, None)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        engine = self.weight_transfer_engine
        engine.init_transfer_engine(_parsed(engine.init_info_cls, init_info))

    def start_weight_update(self) -> None:
        if self._is_updating:
            raise RuntimeError("an update is already active")
        self.weight_transfer_engine.start_weight_update()
        self._is_updating = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._is_updating:
            raise RuntimeError("start_weight_update must be called before")
        try:
            self.weight_transfer_engine.update_weights(update_info)
        except BaseException:
            self._is_updating = False
            raise

    def finish_weight_update(self) -> None:
        if not self._is_updating:
            raise RuntimeError("no update is active")
        self.weight_transfer_engine.finish_weight_update()
        self._is_updating = False


class StagingEngine(FakeEngine):
    """A fault of a load is one worker's, after the other took all of it."""

    def start(self) -> None:
        with self.lock:
            super().start()
            self.workers = [Worker(rank) for rank in range(NUM_WORKERS)]
            self.weights = self.cached_with = self._loaded()

    def _apply(self, path: str, body: Any, status: int | None) -> tuple[int, Any]:
        match path:
            case "/collective_rpc" if body["method"] == "weight_transfer_engine":
                results = [worker.weight_transfer_engine() for worker in self.workers]
                return status or 200, {"results": results}
            case (
                "/init_weight_transfer_engine"
                | "/start_weight_update"
                | "/update_weights"
                | "/finish_weight_update"
            ):
                assert self.is_paused or path.startswith("/init")
                if path == "/update_weights" and status is not None:
                    self.workers[1].model.fails_at = NAMES[-1]
                elif status is not None:
                    return status, {"error": "as told"}
                return self._by_workers(path.removeprefix("/"), body or {})
            case _:
                return super()._apply(path, body, status)

    def _by_workers(self, method: str, arguments: dict[str, Any]) -> tuple[int, Any]:
        errors: list[str] = []
        for worker in self.workers:
            try:
                getattr(worker, method)(**arguments)
            except Exception as err:  # noqa: BLE001 - as vLLM, which answers it
                errors.append(repr(err))
        self.weights = self._loaded()
        return (500, {"error": errors}) if errors else (200, {"message": "done"})

    def _load(self, path: str, *, is_whole: bool) -> None:
        weights = tensors(0) if path == ROOT else load((Path(path) / FILE).read_bytes())
        for worker in self.workers if is_whole else self.workers[:1]:
            worker.reload(weights)
        self.weights = self._loaded()

    def _loaded(self) -> bytes:
        states = [worker.model.state_dict() for worker in self.workers]
        return save({name: torch.cat([state[name] for state in states]) for name in NAMES})


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of vLLM that the backend imports, until the test is over."""
    reload = {"initialize_layerwise_reload": initialize_layerwise_reload}
    reload |= {"finalize_layerwise_reload": finalize_layerwise_reload}
    modules: dict[str, dict[str, Any]] = {
        "distributed.weight_transfer.base": {"WeightTransferEngine": WeightTransferEngine},
        "distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": WeightTransferEngineFactory
        },
        "model_executor.model_loader.reload": reload,
        "model_executor.model_loader.reload.layerwise": {"get_layerwise_info": get_layerwise_info},
    }
    for name, members in modules.items():
        module = ModuleType(f"vllm.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(WeightTransferEngineFactory, "registry", {})
    monkeypatch.delitem(sys.modules, "ratoon_client.weights.vllm_engine", raising=False)
