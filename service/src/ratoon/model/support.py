"""Which model folders are served: decoders whose attention is plain causal softmax.

What would change a token's value in a packed run, or is random, is refused by its configuration
field.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.model.config_words import check_words

# Architecture and its model_type. No remote code: the classes are those of transformers.
SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
# Their frequencies are functions of the position alone. "dynamic" and "longrope" depend on the
# length of the sequence, which a packed run does not have.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Fields that must be absent, null, false or 0, wherever a configuration has them.
_FIELDS_OFF = (
    "quantization_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_softcapping",
    "attention_sinks",
    "num_attention_sinks",
    "sink_size",
    "attention_chunk_size",
    "use_bidirectional_attention",
    "output_router_logits",
    "router_jitter_noise",
    "output_attentions",
    "output_hidden_states",
)
_DROPOUT_WORDS = ("dropout", "pdrop")


def unsupported(field: str, got: object, expected: str) -> RatoonError:
    """A model feature that is refused: `config.sliding_window: got 4096, expected null`."""
    return RatoonError(
        ErrorCode.UNSUPPORTED,
        f"{field}: got {got}, expected {expected}",
        field=field,
        got=str(got),
        expected=expected,
    )


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a model folder that is supported and has safetensors weights.

    Raises INVALID_ARGUMENT where the folder or its config.json cannot be read, UNSUPPORTED for what
    it asks for and is not served.
    """
    raw = _read_raw_config(folder)
    architectures = raw.get("architectures")
    _check_architecture(architectures, raw.get("model_type"))
    if raw.get("auto_map"):
        raise unsupported("config.auto_map", raw["auto_map"], "none: no remote code is run")
    _check_weights(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as err:
        raise invalid(
            "model_folder", f"a config.json that is wrong ({err})", "a valid one"
        ) from err
    check_config(config)
    check_words(raw, config)
    return config


def check_config(config: PreTrainedConfig) -> None:
    """Raise UNSUPPORTED for the first field of `config` that is not served."""
    for field in _FIELDS_OFF:
        if value := getattr(config, field, None):
            raise unsupported(f"config.{field}", value, "none")
    for field, value in sorted(vars(config).items()):
        if any(word in field for word in _DROPOUT_WORDS) and value:
            raise unsupported(f"config.{field}", value, "0: dropout is not reproducible")
    if getattr(config, "is_causal", True) is not True:
        raise unsupported("config.is_causal", config.is_causal, "true")
    vocab, pad = cast("int", config.vocab_size), cast("int | None", config.pad_token_id)
    if pad is not None and not -vocab <= pad < vocab:
        raise unsupported("config.pad_token_id", pad, f"a token below {vocab}, or null")
    _check_window(config)
    _check_rope(config)


def longest_sequence(config: PreTrainedConfig) -> int:
    """Tokens that the model is made for: with YaRN its original length times the factor.

    A folder that is lengthened by YaRN keeps its max_position_embeddings, and samplers go by the
    product, as here. The other kinds of scaling say in max_position_embeddings what they reach.
    """
    stated = int(cast("int", config.max_position_embeddings))
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type") != "yarn":
        return stated
    # A factor of null stands for max_position_embeddings over the original length.
    return max(stated, int(rope["original_max_position_embeddings"] * (rope["factor"] or 1)))


def _read_raw_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise invalid("model_folder", folder.name, "a folder that exists")
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise invalid("model_folder", f"no readable config.json ({err})", "one") from err
    if not isinstance(raw, dict):
        raise invalid("model_folder", "a config.json that is no object", "an object")
    return cast("dict[str, Any]", raw)


def _check_architecture(architectures: object, model_type: object) -> None:
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if not isinstance(architectures, list) or len(cast("list[object]", architectures)) != 1:
        raise unsupported("config.architectures", architectures, f"one of {supported}")
    architecture = cast("list[object]", architectures)[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise unsupported("config.architectures", architecture, f"one of {supported}")
    expected = SUPPORTED_ARCHITECTURES[cast("str", architecture)]
    if model_type != expected:
        raise unsupported("config.model_type", model_type, f"{expected} ({architecture})")


def _check_weights(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(
        path.name for path in folder.glob("*") if path.suffix in {".bin", ".pt", ".pth"}
    )
    if pickles:
        raise unsupported("model_folder", ", ".join(pickles), "safetensors: no pickle is loaded")
    raise invalid("model_folder", "no weights", "*.safetensors files")


def _check_window(config: PreTrainedConfig) -> None:
    window = getattr(config, "sliding_window", None)
    if window is not None:
        raise unsupported("config.sliding_window", window, "null: full attention in every layer")
    layer_types = getattr(config, "layer_types", None) or []
    if others := sorted(set(layer_types) - {"full_attention"}):
        raise unsupported("config.layer_types", ", ".join(others), "full_attention in every layer")


def _check_rope(config: PreTrainedConfig) -> None:
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    rope_type = rope.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        expected = f"one of {', '.join(SUPPORTED_ROPE_TYPES)}"
        raise unsupported("config.rope_parameters.rope_type", rope_type, expected)
    if any(isinstance(value, dict) for value in rope.values()):
        raise unsupported("config.rope_parameters", "one a layer type", "one for all layers")
    for name in ("factor", "original_max_position_embeddings"):
        value = rope.get(name)
        if value is not None and not _is_length(value):
            raise unsupported(f"config.rope_parameters.{name}", value, "a finite number >= 1")
    theta, share = rope.get("rope_theta"), rope.get("partial_rotary_factor")
    if not (isinstance(theta, int | float) and math.isfinite(theta) and theta > 0):
        raise unsupported("config.rope_parameters.rope_theta", theta, "a finite number > 0")
    if share not in (None, 1):
        # transformers 5 would rotate all of a head without a word, other engines a part.
        raise unsupported("config.rope_parameters.partial_rotary_factor", share, "1, or none")


def _is_length(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 1
