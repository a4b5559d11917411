"""Writes a version's config.json with the fields of transformers 4 and of transformers 5.

transformers 5 renamed the settings of rotary embeddings, experts and dtype, and has rotary
embeddings by the kind of a layer. A reader that knows
only the earlier names silently ignores the new ones and uses its defaults, and so loads another
model. A version therefore has both. Everything else stays as in the base folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ratoon.model.config_fields import FULL, SLIDING

# For these kinds a missing original length means max_position_embeddings.
_LENGTHENED = ("llama3", "yarn")


def write_both_words(path: Path, said: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Rewrite the config.json of `config` that transformers 5 saved at `path`, with both names.

    Other fields that the base's config.json has `said` stay unchanged, except names that begin with
    an underscore: they describe the machine that saved it, such as its path there.
    """
    saved = json.loads(path.read_text(encoding="utf-8"))
    words = {**saved, **said, **_in_both_words(saved, said, config)}
    public = {name: value for name, value in words.items() if not name.startswith("_")}
    path.write_text(json.dumps(public, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_wrapper(path: Path, said: Mapping[str, Any]) -> None:
    """Rewrite the decoder's config.json that transformers saved at `path` as what its wrapper's
    folder has `said`, with the dtype of the decoder's weights, wherever it is stated."""
    dtype = json.loads(path.read_text(encoding="utf-8"))["dtype"]
    words = {"dtype": dtype, **said}
    for stated in (words, words["text_config"]):
        stated |= {name: dtype for name in ("dtype", "torch_dtype") if name in stated}
        stated.pop("_name_or_path", None)
    path.write_text(json.dumps(words, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _in_both_words(
    saved: Mapping[str, Any], said: Mapping[str, Any], config: PreTrainedConfig
) -> dict[str, Any]:
    rope = saved["rope_parameters"]
    words = {"dtype": saved["dtype"], "torch_dtype": saved["dtype"]}
    if FULL in rope:
        rope = {kind: _with_factor(of_kind, config) for kind, of_kind in rope.items()}
        # A reader whose layers have one base passes over the field.
        words["rope_local_base_freq"] = rope[SLIDING]["rope_theta"]
        of_full = rope[FULL]
    else:
        rope = of_full = _with_factor(rope, config)
    words |= {
        "rope_parameters": rope,
        "rope_theta": of_full["rope_theta"],
        "rope_scaling": _earlier_scaling(of_full, said, config),
    }
    if "partial_rotary_factor" in rope:
        words["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if "num_local_experts" in saved:
        words["num_experts"] = words["num_local_experts"] = saved["num_local_experts"]
    return words


def _with_factor(rope: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Returns a scaling whose factor is a number.

    transformers 4 fails on null, which means the ratio of the lengths.
    """
    if rope["rope_type"] != "yarn" or rope["factor"] is not None:
        return dict(rope)
    original = rope["original_max_position_embeddings"]
    return {**rope, "factor": config.max_position_embeddings / original}


def _earlier_scaling(
    rope: Mapping[str, Any], said: Mapping[str, Any], config: PreTrainedConfig
) -> Mapping[str, Any] | None:
    """Returns the `rope_scaling` equivalent to `rope`: the base's own, if it is."""
    if rope["rope_type"] == "default":
        return None
    scaling = said.get("rope_scaling")
    if scaling and _filled(scaling, config) == _filled(rope, config):
        return scaling
    return {name: value for name, value in rope.items() if name != "rope_theta"}


def _filled(words: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Returns a scaling with its optional entries filled in, under today's names, and without a
    `rope_theta`."""
    kind = words.get("rope_type", words.get("type", "default"))
    filled = {name: value for name, value in words.items() if name not in ("type", "rope_theta")}
    if kind in _LENGTHENED:
        filled.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return filled | {"rope_type": kind}
