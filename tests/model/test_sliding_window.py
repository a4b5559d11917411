"""A layer with a sliding window sees that much of its path, however the path lies in a forest.

The families whose every folder has windows are in `test_policy_model`; here others have them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ratoon.model.export import export_weights
from tests.model.builders import hidden_of, load
from tests.model.packing import branching_sequences, pack
from tests.model.stock import load_stock, sequence_outputs
from tests.model.test_policy_model import assert_equal_run, relative
from tests.tiny_models import write_folder

# Sequences have up to 20 tokens, and prefixes 4 to 8.
WINDOW = 5
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
    folder = write_folder(tmp_path / f"window-{window}", architecture)
    path = folder / "config.json"
    changes = WINDOWS[architecture] | {"sliding_window": window}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("architecture", "window", "attention"),
    [
        *((architecture, WINDOW, "sdpa") for architecture in WINDOWS),
        # Each token alone; and the longest sequence, less one token.
        *(("mistral", window, "sdpa") for window in (1, 19)),
        # The softmax of transformers' other implementation is float32's.
        ("qwen3", WINDOW, "eager"),
    ],
)
def test_packed_run_with_windows_equals_each_sequence_alone(
    tmp_path: Path, architecture: str, window: int, attention: str
) -> None:
    folder = windowed(tmp_path, architecture, window)
    model = load(folder)
    assert model.info().max_sequence_tokens == 32_768
    sequences = [*branching_sequences(0), [(7 * n + 3) % 60 for n in range(20)]]
    stock = load_stock(folder, dtype=torch.float64, attention=attention)
    tolerance = 1e-10 if attention == "sdpa" else 1e-6
    # A token that sees itself alone has no gradient by its key: what is there is rounding.
    floor = 1e-3 if window == 1 else 1e-6
    assert_equal_run(model, stock, sequences, tolerance=tolerance, floor=floor)


@pytest.mark.parametrize("other", [WINDOW - 1, WINDOW + 1])
@pytest.mark.parametrize("architecture", WINDOWS)
def test_another_window_is_another_model(tmp_path: Path, architecture: str, other: int) -> None:
    """Control: one token more or less is seen, from the first sequence that is longer on."""
    sequence = [(7 * n + 3) % 60 for n in range(WINDOW + 2)]
    stock = load_stock(windowed(tmp_path, architecture, WINDOW), dtype=torch.float64)
    hidden, _ = sequence_outputs(stock, sequence)
    own = hidden_of(load(windowed(tmp_path, architecture, other)), pack([sequence]))
    alike = min(WINDOW, other)
    assert relative(own[:alike], hidden[:alike]) <= 1e-10
    assert relative(own[alike:], hidden[alike:]) > 1e-4


@pytest.mark.parametrize("architecture", WINDOWS)
def test_a_version_says_what_the_folder_says_of_the_window(
    tmp_path: Path, architecture: str
) -> None:
    folder = windowed(tmp_path, architecture, WINDOW)
    (tmp_path / "version").mkdir()
    model = load(folder)
    export_weights(model, tmp_path / "version")
    published = json.loads((tmp_path / "version/config.json").read_text())
    assert published["sliding_window"] == WINDOW
    for name, value in WINDOWS[architecture].items():
        assert value is None or published[name] == value
    packed = pack(branching_sequences(0))
    again = hidden_of(load(tmp_path / "version"), packed)
    assert relative(again, hidden_of(model, packed)) <= 1e-12
