"""Decides which model folders are served: decoders whose attention is plain causal softmax.

In: a folder. Out: its checked configuration. Invariant: transformers receives only fields of the
family, with values that `config_fields` accepts. A field that would change a token's value in a
packed run, or is random, is refused by name.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import MISSING
from typing import Any, cast

import transformers
from transformers import GenerationConfig, PreTrainedConfig

from ratoon.errors import invalid, shown
from ratoon.model.config_fields import (
    FIELD_RULES,
    ROPE_FIELDS,
    check_field,
    check_together,
    read_rope,
    unsupported,
)
from ratoon.model.folder import FIELD, ModelFolder

# Architectures and their model_type. There is no remote code: the classes are those of
# transformers.
SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
CONFIG_NAME = "config.json"
_MAX_CONFIG_BYTES = 2**20

# Fields that must be absent, null, false or 0 in every configuration.
_FIELDS_OFF = (
    "attention_chunk_size",
    "attention_sinks",
    "attn_logit_softcapping",
    "chunk_size_feed_forward",
    "compression_config",
    "distributed_config",
    "dual_chunk_attention_config",
    "final_logit_softcapping",
    "fusion_config",
    "gradient_checkpointing",
    "interleaved_sliding_window",
    "is_encoder_decoder",
    "logit_softcapping",
    "num_attention_sinks",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "per_layer_config",
    "quantization_config",
    "router_jitter_noise",
    "sink_size",
    "use_bidirectional_attention",
    # These fields lead to code, or to other files.
    "auto_map",
    "configuration_files",
    "transformers_weights",
)
_DROPOUT_WORDS = ("dropout", "pdrop")
# Fields that do not affect a causal decoder's weights or log-probs: transformers does not receive
# them, and publishes its own values.
_FIELDS_LEFT_OUT = {
    "attn_implementation",
    "experts_implementation",
    "id2label",
    "label2id",
    "model_type",
    "name_or_path",
    "num_labels",
    "problem_type",
    "return_dict",
    "transformers_version",
    "use_return_dict",
}
# Fields that are checked in every family: other readers of a folder use them even if transformers
# does not declare them.
_LOOKED_AT_ANYWHERE = ("head_dim", "layer_types", "sliding_window")
# A dense family lacks these fields, but our code reads them from any configuration.
_OF_EXPERTS = ("num_experts", "num_experts_per_tok")
# Families whose layers declare the window one by one; in the others all layers have it.
_WINDOW_BY_LAYER = ("qwen2", "qwen3")


def read_config(folder: ModelFolder) -> tuple[PreTrainedConfig, dict[str, object]]:
    """Returns the configuration of a model folder, and everything in its config.json.

    Only the second has fields that the family lacks, for the published files. Raises
    INVALID_ARGUMENT if config.json cannot be read or a field has an impossible value, and
    UNSUPPORTED for features that are not served.
    """
    said = folder.read_object(CONFIG_NAME, _MAX_CONFIG_BYTES)
    architecture = _architecture(said)
    family = cast("type[PreTrainedConfig]", getattr(transformers, architecture).config_class)
    own = _judged(said, family)
    own["architectures"] = [architecture]
    try:
        config = family(**own)
    except Exception as err:
        got = f"a config.json that is wrong ({shown(str(err))})"
        raise invalid(FIELD, got, "a valid one") from err
    _check_window(config)
    return config, said


def add_undeclared(config: PreTrainedConfig, said: Mapping[str, object]) -> None:
    """Add the fields that are checked in every family to the `config` of a loaded model, with the
    folder's values, if the family does not declare them."""
    for name in _LOOKED_AT_ANYWHERE:
        if name in said and not hasattr(config, name):
            setattr(config, name, copy.deepcopy(said[name]))


def attention_window(config: PreTrainedConfig) -> int | None:
    """Tokens that a layer with a sliding window attends to; None if no layer has a window.

    Up to this number of tokens attention is full. A window that transformers ignores counts too,
    because other readers of the folder may use it.
    """
    window = cast("int | None", getattr(config, "sliding_window", None))
    if config.model_type in _WINDOW_BY_LAYER and "sliding_attention" not in (
        cast("Any", config).layer_types or ()
    ):
        return None
    return window


def longest_sequence(config: PreTrainedConfig) -> int:
    """Tokens that the model is made for, and for which its attention is full.

    A folder extended by YaRN keeps its max_position_embeddings, and samplers use its original
    length times the factor, as here. The other kinds of scaling state their reach in
    max_position_embeddings.
    """
    longest = int(cast("int", config.max_position_embeddings))
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type") == "yarn":
        # A null factor means max_position_embeddings over the original length.
        reached = int(rope["original_max_position_embeddings"] * (rope["factor"] or 1))
        longest = max(longest, reached)
    return min(longest, attention_window(config) or longest)


def _architecture(raw: Mapping[str, object]) -> str:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    given = raw.get("architectures")
    named = cast("list[object]", given) if isinstance(given, list) else []
    architecture = named[0] if len(named) == 1 else None
    if not isinstance(architecture, str) or architecture not in SUPPORTED_ARCHITECTURES:
        raise unsupported("config.architectures", shown(given), f"one of {supported}")
    expected = SUPPORTED_ARCHITECTURES[architecture]
    if raw.get("model_type") != expected:
        got = shown(raw.get("model_type"))
        raise unsupported("config.model_type", got, f"{expected} ({architecture})")
    return architecture


def _judged(raw: Mapping[str, object], family: type[PreTrainedConfig]) -> dict[str, Any]:
    """Fields that transformers receives."""
    defaults = {
        field.name: None if field.default is MISSING else field.default
        for field in dataclasses.fields(family)
    }
    looked_at = _looked_at(_renamed(raw), family, defaults)
    effective = {"model_type": family.model_type, **defaults, **looked_at}
    check_together(effective)
    rope = read_rope(raw, effective["max_position_embeddings"])
    own = {
        name: value
        for name, value in looked_at.items()
        # Classes that do not declare it read it all the same.
        if name in defaults or name == "head_dim"
    }
    return {**own, "rope_parameters": rope}


def _looked_at(
    raw: Mapping[str, object], family: type[PreTrainedConfig], declared: Collection[str]
) -> dict[str, Any]:
    """Fields that were checked by their rules."""
    looked_at: dict[str, Any] = {}
    left_out = {*_FIELDS_LEFT_OUT, *ROPE_FIELDS, *vars(GenerationConfig())} - {*declared}
    for name, value in raw.items():
        _check_off(name, value, declared)
        if name in FIELD_RULES and (name in declared or name in _LOOKED_AT_ANYWHERE):
            check_field(name, value)
            looked_at[name] = value
        elif name in left_out or name.startswith("_") or _is_off(name, declared):
            continue
        elif name not in declared and hasattr(family, name):
            expected = "none: transformers has something else by that name"
            raise unsupported(_field(name), shown(value), expected)
    return looked_at


def _is_off(name: str, declared: Collection[str]) -> bool:
    is_of_experts = name in _OF_EXPERTS and name not in declared
    return is_of_experts or name in _FIELDS_OFF or any(word in name for word in _DROPOUT_WORDS)


def _check_off(name: str, value: object, declared: Collection[str]) -> None:
    """Raises UNSUPPORTED for a field that must be off, and is not."""
    if name == "is_causal" and value is not True:
        raise unsupported(_field(name), shown(value), "true")
    if value and _is_off(name, declared):
        is_dropout = any(word in name for word in _DROPOUT_WORDS)
        expected = "0: dropout is not reproducible" if is_dropout else "none"
        raise unsupported(_field(name), shown(value), expected)


def _field(name: str) -> str:
    return f"config.{shown(name)[1:-1]}"


def _renamed(raw: Mapping[str, object]) -> dict[str, object]:
    """Fields, with one name for each that has two."""
    renamed = dict(raw)
    for old, new in (("torch_dtype", "dtype"), ("num_local_experts", "num_experts")):
        value = renamed.pop(old, None)
        if value is None:
            continue
        if renamed.get(new, value) not in (value, None):
            got = f"{shown(renamed[new])}, and {old} {shown(value)}"
            raise invalid(f"config.{new}", got, "one value")
        renamed[new] = value
    return renamed


def _check_window(config: PreTrainedConfig) -> None:
    types = cast("list[str]", getattr(config, "layer_types", None) or [])
    if "sliding_attention" in types and cast("Any", config).sliding_window is None:
        expected = "a sliding_window, and use_sliding_window, for layers of sliding_attention"
        raise unsupported("config.layer_types", "sliding_attention", expected)
