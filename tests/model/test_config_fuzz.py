"""Any value in any field of any family: a refusal by name, or a model that computes finite numbers.

In: tiny folders. Invariant: every case goes through the path that a policy's folder takes.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.config_fields import FIELD_RULES, ROPE_FIELDS
from ratoon.model.export import export_weights
from ratoon.model.families import FAMILIES, WRAPPERS
from ratoon.model.folder import ModelFolder
from ratoon.model.loader import read_model
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon.model.support import read_config
from ratoon_proto.types import FullTuning
from tests.model.builders import hidden_of
from tests.model.packing import pack
from tests.tiny_models import write_folder
from tests.work_units import rows

DEEP = json.loads("[" * 300 + "]" * 300)
HOSTILE: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 16, 63, 64, 2**31, -(2**31), 2**63, 2**64, 10**400),
    *(0.0, -0.0, 0.5, 1.0, -1.0, 1e-45, 1e-300, 1e300, 3.5e38, 4.0),
    *(float("nan"), float("inf"), float("-inf")),
    *("", "x", "auto", "silu", "default", "yarn", "../x", "x" * 5000, "\0", "\ud800"),
    *(None, True, False, [], {}, [0], [64], ["full_attention"] * 2, [[]], {"a": 1}, DEEP),
    *([2**31], {"0": {"num_attention_heads": 2}}, ["sliding_attention"] * 2, [None]),
)
# No family declares them, and each is an attribute of a configuration, or looked for in one.
ELSEWHERE = (
    *("auto_map", "quantization_config", "fusion_config", "configuration_files", "", "is_causal"),
    *("transformers_weights", "per_layer_config", "num_labels", "id2label", "to_dict", "validate"),
    *(
        "__class__",
        "__dict__",
        "attribute_map",
        "model_type",
        "_attn_implementation",
        "torch_dtype",
    ),
    *("num_local_experts", "num_experts", "num_experts_per_tok", "head_dim", "embed_dim"),
    *("num_heads", "temperature", "max_length", "loss_type", "partial_rotary_factor", "kwargs"),
    *("layer_types", "mlp_layer_types", "sliding_window", "rope_theta", "name_or_path", "a b"),
    *(
        "mean_token_id",
        "attn_implementation",
        "output_attentions",
        "use_return_dict",
        "sub_configs",
    ),
)
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.1,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "truncate": False,
    },
}
# Numbers that a folder has and nothing reads: a sum of others, a size that no layer has.
UNREAD = {
    ("DeepseekV3ForCausalLM", "qk_head_dim"),
    ("Glm4MoeLiteForCausalLM", "qk_head_dim"),
    ("Gemma3ForCausalLM", "_sliding_window_pattern"),
    ("Qwen3_5MoeForCausalLM", "intermediate_size"),
}
FOLDERS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Olmo3ForCausalLM": "olmo3",
    "Gemma3ForCausalLM": "gemma3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_vl",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_vl",
    "Gemma3ForConditionalGeneration": "gemma3_vl",
    "Mistral3ForConditionalGeneration": "mistral3",
}


def changes_of(architecture: str, good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One field each, or one entry of the rotary parameters of one type; beside a tower, of the
    whole or of the decoder."""
    if architecture in WRAPPERS:
        wrapper = WRAPPERS[architecture]
        for name in dict.fromkeys([*good, *dict(wrapper.media_tokens), *ELSEWHERE]):
            yield from ({name: value} for value in HOSTILE)
        text = good["text_config"]
        for changes in changes_of(wrapper.family.architecture, text):
            yield {"text_config": text | changes}
        return
    declared = [
        f.name for f in dataclasses.fields(getattr(transformers, architecture).config_class)
    ]
    for name in dict.fromkeys(
        [*declared, *FIELD_RULES, *FAMILIES[architecture].rules, *ROPE_FIELDS, *ELSEWHERE]
    ):
        yield from ({name: value} for value in HOSTILE)
    for kind, entries in ROPES.items():
        rope = {"rope_type": kind, "rope_theta": 10_000.0, **entries}
        for name in (*rope, "type", "partial_rotary_factor", "unknown"):
            yield from ({"rope_parameters": rope | {name: value}} for value in HOSTILE)
            if name in rope:
                yield {"rope_parameters": {n: v for n, v in rope.items() if n != name}}


def outcome(folder: Path, version: Path) -> bool:
    """Whether the folder is served, and then computes; anything else than a refusal is raised."""
    try:
        read_config(ModelFolder.of(folder))
        spec = ModelSpec(
            base=FolderBase(folder=str(folder)),
            tuning=FullTuning(),
            dtype=ModelDtype.FLOAT32,
            seed=0,
        )
        model = read_model(spec).place(torch.device("cpu"))
    except RatoonError as error:
        assert error.code in {ErrorCode.INVALID_ARGUMENT, ErrorCode.UNSUPPORTED}, error
        assert error.field.startswith(("config.", "model_folder")), error.field
        assert len(error.message) < 1000, error.message
        return False
    info = model.info()
    tokens = [5, 63, 0, 5, 7, 1, 2, 60][: info.max_sequence_tokens]
    hidden_TD = hidden_of(model, pack([tokens]))
    assert torch.log_softmax(hidden_TD @ model.lm_head_VD.T, dim=-1).isfinite().all()
    shutil.rmtree(version, ignore_errors=True)
    version.mkdir()
    export_weights(model, version)
    assert read_config(ModelFolder.of(version))[0].hidden_size == hidden_TD.shape[1]
    return True


@pytest.mark.parametrize("architecture", rows(FOLDERS, tuple(FOLDERS)[::4]))
@pytest.mark.parametrize(
    "share",
    [
        0.01,
        pytest.param(0.05, marks=pytest.mark.more),
        pytest.param(1.0, marks=pytest.mark.slow),
    ],
)
def test_a_hostile_value_is_refused_by_name_or_computes(
    tmp_path: Path, architecture: str, share: float
) -> None:
    """A padding token beyond the vocabulary, a dtype of "auto", a frequency as text, no heads and
    others were errors of the service's own; frequencies of zero were a policy of NaN."""
    folder = write_folder(tmp_path / "base", FOLDERS[architecture])
    path = folder / "config.json"
    good = json.loads(path.read_text())
    assert outcome(folder, tmp_path / "version")
    cases = list(changes_of(architecture, good))
    dice = random.Random(f"config {architecture}")
    # Most fields beside a tower are those of its decoder, which is a case of its own.
    part = share / 4 if architecture in WRAPPERS and share < 1 else share
    served, chosen = 0, dice.sample(cases, int(part * len(cases)))
    for changes in chosen:
        path.write_text(json.dumps(good | changes))
        try:
            served += outcome(folder, tmp_path / "version")
        except Exception as error:
            raise AssertionError(str(changes)[:300]) from error
    assert 0.05 * len(chosen) < served < 0.7 * len(chosen)


def numbers_as_text(said: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each number's name, with what a configuration says where it is a text."""
    for name, value in said.items():
        if isinstance(value, dict):
            yield from ((own, said | {name: part}) for own, part in numbers_as_text(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, said | {name: str(value)}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_number_as_text_is_refused_by_its_name(tmp_path: Path, architecture: str) -> None:
    folder = write_folder(tmp_path, FOLDERS[architecture])
    path = folder / "config.json"
    good = json.loads(path.read_text())
    if "rope_theta" in (rope := good["rope_parameters"]):
        good["rope_parameters"] = rope | {"rope_type": "yarn", **ROPES["yarn"]}
    for name, said in numbers_as_text(good):
        path.write_text(json.dumps(said))
        if (architecture, name) in UNREAD:
            read_config(ModelFolder.of(folder))
            continue
        with pytest.raises(RatoonError) as caught:
            read_config(ModelFolder.of(folder))
        own = name.replace("num_local_experts", "num_experts")
        assert caught.value.field.split(".")[-1] == own, caught.value
