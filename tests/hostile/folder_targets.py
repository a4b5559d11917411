"""Targets that read a model folder as CreatePolicy does, but for the values of its tensors.

In: an empty folder. Out: what takes one hostile folder, as `Target` says. Invariant: a folder that
is taken says sizes that its files have.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from ratoon.errors import invalid
from ratoon.model.folder import ModelFolder
from ratoon.model.safetensors_files import open_tensors, weight_files
from ratoon.model.support import longest_sequence, read_config
from tests.hostile.mutate import mutated_bytes, mutated_json
from tests.tiny_models import ARCHITECTURES, write_folder

_INDEX = "model.safetensors.index.json"
_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "../other", "r": 4, "lora_alpha": 8}
_NAMES = (
    *("..", "/etc/passwd", "../other/model.safetensors", "a\0.safetensors", "..\\x.safetensors"),
    *("", "fifo.safetensors", "link.safetensors", "none.safetensors", _SHARDS[0]),
)


def bad_configs(folder: Path) -> Callable[[random.Random], None]:
    """A configuration of any family, an index, an adapter's file or a shard's header."""
    root = folder / "models"
    own = [_sharded(root, architecture) for architecture in ARCHITECTURES]
    (root / "other").mkdir()
    (folder / "secret").write_text("{}")
    whole = {
        path: path.read_bytes()
        for each in own
        for path in (*each.glob("*.json"), each / _SHARDS[0])
    }

    def take(dice: random.Random) -> None:
        each = dice.choice(own)
        name = dice.choice(("config.json",) * 6 + (_INDEX, _INDEX, _SHARDS[0], "adapter"))
        path = each / ("adapter_config.json" if name == "adapter" else name)
        path.write_bytes(_hostile(dice, path, whole))
        try:
            _take(root, each)
        finally:
            path.write_bytes(whole.get(path, b""))
            if path not in whole:
                path.unlink()

    return take


def _sharded(root: Path, architecture: str) -> Path:
    folder = write_folder(root / architecture, architecture)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {_SHARDS[0]: names[:2], _SHARDS[1]: names[2:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map}))
    os.mkfifo(folder / "fifo.safetensors")
    (folder / "link.safetensors").symlink_to("../../secret")
    return folder


def _hostile(dice: random.Random, path: Path, whole: dict[Path, bytes]) -> bytes:
    if path not in whole:
        return mutated_json(dice, [_ADAPTER])
    if path.suffix == ".safetensors":
        return mutated_bytes(dice, [whole[path]])
    document: dict[str, Any] = json.loads(whole[path])
    if path.name == _INDEX and dice.random() < 0.5:
        name = dice.choice(list(document["weight_map"]))
        document["weight_map"][name] = dice.choice(_NAMES)
        return json.dumps(document).encode()
    return mutated_json(dice, [document])


def _take(root: Path, folder: Path) -> None:
    opened = ModelFolder.of(folder, root)
    config, _ = read_config(opened)
    assert longest_sequence(config) > 0
    assert config.num_hidden_layers <= 1024
    files = weight_files(opened)
    assert all((folder / name).parent == folder for name in files)
    found = {tuple(each.get_shape()) for each in open_tensors(opened).values()}
    shape = (config.vocab_size, config.hidden_size)
    if shape not in found:
        raise invalid("model_folder", "no embedding", "one")
