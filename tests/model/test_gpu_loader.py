"""Model folders on a GPU, as the service loads and writes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ratoon.model.export import WeightsCopy, export_weights
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype
from ratoon.planner.activation_plan import Kept
from ratoon_proto.types import FullTuning, LoraTuning
from tests.model.builders import FULL, LORA, LORA_HEADS, hidden_of, load, randomize
from tests.model.packing import branching_sequences, pack
from tests.tiny_models import write_folder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic_compiler")]

# Clocks, some tenths of a second.
_LONG = 500_000_000


def _gradients(model: PolicyModel) -> dict[str, Tensor]:
    """Gradients with the least that a layer can keep, in float32 on the host."""
    vars(model)["_plan_activations"] = lambda _: (Kept.ATTENTION,) * model.sizes.num_layers
    hidden_TD = hidden_of(model, pack(branching_sequences(0), str(model.device)))
    generator = torch.Generator().manual_seed(5)
    weight_TD = torch.randn(hidden_TD.shape, generator=generator).to(hidden_TD)
    hidden_TD.backward(weight_TD)
    grads = {
        n: p.grad.float().cpu() for n, p in model.named_trainable().items() if p.grad is not None
    }
    cast("Any", model.module).zero_grad()
    return grads


@pytest.mark.parametrize(
    ("architecture", "tuning", "is_merged"),
    [("qwen3", FULL, False), ("qwen3", LORA, True), ("llama", LORA_HEADS, True)],
)
def test_a_copy_on_the_host_is_of_when_it_was_taken(
    tmp_path: Path, architecture: str, tuning: FullTuning | LoraTuning, is_merged: bool
) -> None:
    """In pinned memory, which is used again. Weights that change behind `settle` wait for it, and
    the host for nothing."""
    folder = write_folder(tmp_path / "base", architecture)
    model = load(folder, tuning=tuning, dtype=ModelDtype.BFLOAT16, device="cuda")
    copy = WeightsCopy(model, is_merged=is_merged)
    for number in range(3):
        randomize(model, number)
        written, copied = tmp_path / f"written-{number}", tmp_path / f"copied-{number}"
        for each in (written, copied):
            each.mkdir()
        export_weights(model, written, is_merged=is_merged)
        assert copy._stream is not None
        with torch.cuda.stream(copy._stream):
            torch.cuda._sleep(_LONG)
        copy.take()
        # The first one has its memory registered, which may take longer.
        assert number == 0 or not any(event.query() for event in copy._arrivals.values())
        assert all(value.is_pinned() for value in copy._values.values())
        copy.settle()
        randomize(model, 10 + number)
        copy.write(copied)
        for path in written.iterdir():
            assert (copied / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("architecture", "dtype", "tuning", "bound"),
    [
        ("qwen3", ModelDtype.BFLOAT16, FULL, 0.1),
        ("llama", ModelDtype.BFLOAT16, LORA, 0.1),
        ("llama", ModelDtype.BFLOAT16, LORA_HEADS, 0.1),
        # In bfloat16 a token may go to other experts: no bound.
        ("qwen3_moe", ModelDtype.BFLOAT16, FULL, math.inf),
        ("qwen3_moe", ModelDtype.FLOAT32, FULL, 1e-4),
    ],
)
def test_a_folder_is_trained_as_the_service_loads_it(
    tmp_path: Path,
    architecture: str,
    dtype: ModelDtype,
    tuning: FullTuning | LoraTuning,
    bound: float,
) -> None:
    """Gradients are those of float32 on a CPU to rounding, and the same bits each time."""
    folder = write_folder(tmp_path / "base", architecture)
    model = load(folder, dtype=dtype, tuning=tuning, compile_layers=True, device="cuda")
    truth = load(folder, dtype=ModelDtype.FLOAT32, tuning=tuning)
    if isinstance(tuning, LoraTuning):
        # Larger ones make attention so sharp that rounding the weights alone changes a third of it.
        for each in (model, truth):
            randomize(each, seed=3, scale=0.1)
    found, expected = _gradients(model), _gradients(truth)
    assert found.keys() == expected.keys()
    assert all(torch.equal(grad, found[name]) for name, grad in _gradients(model).items())
    norm = sum(float(grad.square().sum()) for grad in expected.values()) ** 0.5
    errors = [float((found[name] - grad).square().sum()) for name, grad in expected.items()]
    assert norm > 0
    assert any(grad.count_nonzero() for grad in found.values())
    assert sum(errors) ** 0.5 <= norm * bound
