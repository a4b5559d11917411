"""Fixtures of the model's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.fx import GraphModule

from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.train.numerics import configure_torch
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import AdamWConfig, FullTuning
from tests.model.compiled import eager_graphs

_ON_A_GPU = TrainerSpec(
    model=ModelSpec(
        base=PresetBase(name="small"), tuning=FullTuning(), dtype=ModelDtype.BFLOAT16, seed=0
    ),
    optimizer=AdamWConfig(),
    deterministic=True,
    micro_batch_tokens=None,
    keep_reference=False,
    attention_backend="cuda",
    device="cuda:0",
    num_threads=1,
)


@pytest.fixture
def graphs() -> Iterator[list[GraphModule]]:
    with eager_graphs() as compiled:
        yield compiled


@pytest.fixture
def deterministic_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch as a GPU's worker has it, and nothing compiled; nothing is afterwards either."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    configure_torch(_ON_A_GPU)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
