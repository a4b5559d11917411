"""Model folders whose config.json is written in the words of transformers 4, of 5, or in both.

In: a folder that transformers 5 saved, and the name of a rotary scaling. Out: the same folder with
another config.json. Invariant: whatever the words are, the model that they describe is the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ("old", "new", "both")
THETA = 500_000.0
# Rotary scalings as transformers 4 says them; none for the default. The last two leave the original
# length out, which is then max_position_embeddings, and name the kind as transformers did at first.
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 4.0,
    },
    "early linear": {"type": "linear", "factor": 4.0},
    "early yarn": {"type": "yarn", "factor": 4.0},
}


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def say(folder: Path, words: str, scaling: str) -> Path:
    """Rewrite the folder's config.json in these words; returns the folder."""
    config = read_config(folder)
    is_by_kind = "full_attention" in config.pop("rope_parameters")
    dtype, num_experts = config.pop("dtype"), config.pop("num_local_experts", None)
    rope = SCALINGS[scaling]
    if words in ("old", "both"):
        config |= {"rope_theta": THETA, "rope_scaling": rope or None, "torch_dtype": dtype}
        config |= {} if num_experts is None else {"num_experts": num_experts}
    if words in ("new", "both"):
        of_full = {"rope_theta": THETA} | (rope or {"rope_type": "default"})
        by_kind = {"full_attention": of_full, "sliding_attention": {"rope_theta": THETA}}
        config |= {"rope_parameters": by_kind if is_by_kind else of_full}
        config |= {"dtype": dtype}
        config |= {} if num_experts is None else {"num_local_experts": num_experts}
    write_config(folder, config)
    return folder
