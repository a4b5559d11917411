"""A model with a sliding window is served up to the window, within which its attention is full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ratoon.model.export import export_weights
from tests.model.builders import hidden_of, load
from tests.model.packing import branching_sequences, pack
from tests.model.stock import load_stock, sequence_outputs
from tests.model.test_policy_model import assert_equal_run, relative
from tests.tiny_models import write_folder

# The longest of the sequences.
WINDOW = 20
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {},
    # In the second of the two layers.
    "qwen2": {"use_sliding_window": True, "layer_types": None, "max_window_layers": 1},
    "qwen3": {
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"use_sliding_window": True},
}


def windowed(tmp_path: Path, architecture: str, window: int) -> Path:
    folder = write_folder(tmp_path / "base", architecture)
    path = folder / "config.json"
    changes = WINDOWS[architecture] | {"sliding_window": window}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


# transformers' own implementations of the window; the softmax of the second is float32's.
TOLERANCES = {"sdpa": 1e-10, "eager": 1e-6}


def stock_of(folder: Path, attention: str) -> nn.Module:
    return load_stock(folder, dtype=torch.float64, attention=attention)


@pytest.mark.parametrize("attention", TOLERANCES)
@pytest.mark.parametrize("architecture", WINDOWS)
def test_a_run_up_to_the_window_is_that_of_the_window(
    tmp_path: Path, architecture: str, attention: str
) -> None:
    folder = windowed(tmp_path, architecture, WINDOW)
    model = load(folder)
    assert model.info().max_sequence_tokens == model.info().sliding_window == WINDOW
    sequences = [*branching_sequences(0), [(7 * n + 3) % 60 for n in range(WINDOW)]]
    assert max(map(len, sequences)) == WINDOW
    stock = stock_of(folder, attention)
    assert_equal_run(model, stock, sequences, tolerance=TOLERANCES[attention])


@pytest.mark.parametrize("attention", TOLERANCES)
@pytest.mark.parametrize("architecture", WINDOWS)
def test_one_token_more_is_another_model(tmp_path: Path, architecture: str, attention: str) -> None:
    """The limit is the window itself, and the stock model has one."""
    folder = windowed(tmp_path, architecture, WINDOW)
    sequence = [(7 * n + 3) % 60 for n in range(WINDOW + 1)]
    hidden, _ = sequence_outputs(stock_of(folder, attention), sequence)
    own = hidden_of(load(folder), pack([sequence]))
    assert relative(own[:WINDOW], hidden[:WINDOW]) <= TOLERANCES[attention]
    assert relative(own[WINDOW:], hidden[WINDOW:]) > 1e-4


@pytest.mark.parametrize("architecture", WINDOWS)
def test_a_version_says_what_the_folder_says_of_the_window(
    tmp_path: Path, architecture: str
) -> None:
    folder = windowed(tmp_path, architecture, WINDOW)
    (tmp_path / "version").mkdir()
    export_weights(load(folder), tmp_path / "version")
    published = json.loads((tmp_path / "version/config.json").read_text())
    assert published["sliding_window"] == WINDOW
    for name, value in WINDOWS[architecture].items():
        assert value is None or published[name] == value
    assert load(tmp_path / "version").info().max_sequence_tokens == WINDOW
