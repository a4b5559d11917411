"""Folders whose experts are in MXFP4, as gpt-oss is released, against transformers' own reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ratoon.errors import ErrorCode
from ratoon.model.export import export_weights
from ratoon.model.folder import ModelFolder
from ratoon.model.spec import ModelDtype
from ratoon.train.imported import read_weights
from tests.model.builders import error_of, load
from tests.tiny_models import write_folder

EXPERTS, SIZE = 4, 32
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def _write_packed(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A folder of random blocks with all bytes and most scales, and what transformers makes of
    them by name."""
    write_folder(folder, "gpt_oss")
    config = json.loads((folder / "config.json").read_text())
    wider = {"hidden_size": SIZE, "intermediate_size": SIZE, "dtype": "bfloat16"}
    storage = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (folder / "config.json").write_text(json.dumps(config | wider | storage))
    like = cast("Any", AutoModelForCausalLM).from_config(load_config(folder)).bfloat16()
    tensors: dict[str, Tensor] = dict(like.state_dict())
    generator, unpacked = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        features = tensors.pop(name).shape[2]
        shape = (EXPERTS, features, SIZE // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(0, 250, shape[:-1], generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, folder / "model.safetensors")
    return folder, unpacked


def load_config(folder: Path) -> Any:
    from transformers import GptOssConfig

    words = json.loads((folder / "config.json").read_text())
    del words["quantization_config"]
    return GptOssConfig(**words)


def test_experts_have_the_bits_of_transformers(tmp_path: Path) -> None:
    """And so has a version, whose configuration says nothing of MXFP4."""
    folder, unpacked = _write_packed(tmp_path / "base")
    assert len(unpacked) == 4
    model = load(folder, dtype=ModelDtype.BFLOAT16)
    parameters = dict(model.module.named_parameters())
    for name, value in unpacked.items():
        assert value.count_nonzero() > value.numel() // 2
        assert torch.equal(parameters[name], value), name
    again = read_weights(model, ModelFolder.of(folder), "")
    assert again.dtypes == ("BF16",)
    assert all(torch.equal(value, parameters[name]) for name, value in again.values.items())
    (tmp_path / "version").mkdir()
    export_weights(model, tmp_path / "version")
    assert "quantization_config" not in (tmp_path / "version" / "config.json").read_text()
    version = cast("Any", AutoModelForCausalLM).from_pretrained(tmp_path / "version")
    found = dict(version.named_parameters())
    assert found.keys() == parameters.keys()
    for name, value in parameters.items():
        assert torch.equal(found[name], value), name


def _no_scales(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{GATE_UP}_scales"]


def _shorter_scales(tensors: dict[str, Tensor]) -> None:
    tensors[f"{GATE_UP}_scales"] = tensors[f"{GATE_UP}_scales"][:, :-1].contiguous()


def _signed_blocks(tensors: dict[str, Tensor]) -> None:
    tensors[f"{GATE_UP}_blocks"] = tensors[f"{GATE_UP}_blocks"].to(torch.int8)


def _half_blocks(tensors: dict[str, Tensor]) -> None:
    tensors[f"{GATE_UP}_blocks"] = tensors[f"{GATE_UP}_blocks"][..., :8].contiguous()


def _fewer_features(tensors: dict[str, Tensor]) -> None:
    for part in ("blocks", "scales"):
        name = f"{GATE_UP}_{part}"
        tensors[name] = tensors[name][:, :SIZE].contiguous()


def _twice(tensors: dict[str, Tensor]) -> None:
    tensors[GATE_UP] = torch.zeros(EXPERTS, SIZE, 2 * SIZE, dtype=torch.bfloat16)


def _no_number(tensors: dict[str, Tensor]) -> None:
    tensors[f"{GATE_UP}_scales"][1, 2, 0] = 255


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_no_scales, f"{GATE_UP}_scales"),
        (_shorter_scales, f"{GATE_UP}_scales"),
        (_signed_blocks, f"{GATE_UP}_blocks"),
        (_half_blocks, f"{GATE_UP}_blocks"),
        (_fewer_features, GATE_UP),
        (_twice, GATE_UP),
        (_no_number, GATE_UP),
    ],
)
def test_damaged_blocks_are_refused_by_name(
    tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], named: str
) -> None:
    folder, _ = _write_packed(tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    error = error_of(lambda: load(folder))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, f"model_folder['{named}']")


@pytest.mark.parametrize("given", [{"quant_method": "fp8"}, "mxfp4", {}, 4])
def test_other_ways_to_store_tensors_are_refused(tmp_path: Path, given: object) -> None:
    folder, _ = _write_packed(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
    assert error_of(lambda: load(folder)).field == "config.quantization_config"
