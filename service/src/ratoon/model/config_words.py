"""The config.json of a version, in the words of transformers 4 and of transformers 5.

transformers 5 renamed the settings of rotary embeddings, experts and dtype. A reader that knows
only the earlier words passes over the new ones in silence and takes its defaults, so that it has
another model: a version says both. Everything else stays as the base folder said it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ratoon.errors import invalid

# For these kinds an original length that is left out is max_position_embeddings.
_LENGTHENED = ("llama3", "yarn")


def check_words(said: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Check that a config.json, which was read as `config`, says nothing twice and differently.

    transformers 5 reads `rope_scaling` in place of all of `rope_parameters`, its `rope_theta` too;
    transformers 4 does not know `rope_parameters`. Raises INVALID_ARGUMENT for the first field on
    which readers would differ.
    """
    earlier, new = said.get("rope_scaling") or {}, said.get("rope_parameters") or {}
    if earlier and new:
        _check_equal("config.rope_scaling", _filled(earlier, config), _filled(new, config))
    read = config.rope_parameters["rope_theta"]
    for name, words in (("", said), ("rope_scaling.", earlier), ("rope_parameters.", new)):
        theta, kind, first_kind = (words.get(word) for word in ("rope_theta", "rope_type", "type"))
        if theta not in (None, read):
            raise invalid(f"config.{name}rope_theta", theta, f"{read}, which transformers reads")
        if None not in (kind, first_kind) and kind != first_kind:
            raise invalid(f"config.{name}rope_type", kind, f"{first_kind}, as its type says")
    experts, num_experts = said.get("num_local_experts"), said.get("num_experts")
    if None not in (experts, num_experts) and experts != num_experts:
        raise invalid("config.num_local_experts", experts, f"{num_experts}, as num_experts says")


def write_both_words(path: Path, base: Path | None, config: PreTrainedConfig) -> None:
    """Rewrite the config.json of `config` that transformers 5 saved at `path` in both words.

    What the folder `base` says of other things stays as it is there, but for names that begin with
    an underscore: they are about the machine that saved it, such as the path that it had there.
    """
    said: dict[str, Any] = {}
    if base is not None:
        said = json.loads((base / "config.json").read_text(encoding="utf-8"))
    saved = json.loads(path.read_text(encoding="utf-8"))
    words = {**saved, **said, **_in_both_words(saved, said, config)}
    public = {name: value for name, value in words.items() if not name.startswith("_")}
    path.write_text(json.dumps(public, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _in_both_words(
    saved: Mapping[str, Any], said: Mapping[str, Any], config: PreTrainedConfig
) -> dict[str, Any]:
    rope = dict(saved["rope_parameters"])
    if rope["rope_type"] == "yarn" and rope["factor"] is None:
        # transformers 4 fails on null, which stands for the ratio of the lengths.
        original = rope["original_max_position_embeddings"]
        rope["factor"] = config.max_position_embeddings / original
    words = {
        "dtype": saved["dtype"],
        "torch_dtype": saved["dtype"],
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": _earlier_scaling(rope, said, config),
    }
    if "num_local_experts" in saved:
        words["num_experts"] = words["num_local_experts"] = saved["num_local_experts"]
    return words


def _earlier_scaling(
    rope: Mapping[str, Any], said: Mapping[str, Any], config: PreTrainedConfig
) -> Mapping[str, Any] | None:
    """The `rope_scaling` that means `rope`: the base's own words where they do."""
    if rope["rope_type"] == "default":
        return None
    scaling = said.get("rope_scaling")
    if scaling and _filled(scaling, config) == _filled(rope, config):
        return scaling
    return {name: value for name, value in rope.items() if name != "rope_theta"}


def _filled(words: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """A scaling with what it may leave out, by the names of today, and without a `rope_theta`."""
    kind = words.get("rope_type", words.get("type", "default"))
    filled = {name: value for name, value in words.items() if name not in ("type", "rope_theta")}
    if kind in _LENGTHENED:
        filled.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    return filled | {"rope_type": kind}


def _check_equal(field: str, got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name in sorted(got.keys() | expected.keys()):
        if got.get(name) != expected.get(name):
            wanted = f"{expected.get(name)}, as rope_parameters says"
            raise invalid(f"{field}.{name}", got.get(name), wanted)
