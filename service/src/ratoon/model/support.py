"""Decides which model folders are served: those of the families in `model.families`.

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

from ratoon.errors import RatoonError, invalid, shown, unsupported
from ratoon.model.config_fields import (
    FIELD_RULES,
    FULL,
    ROPE_FIELDS,
    SLIDING,
    TOKEN,
    check_field,
    check_together,
    or_null,
)
from ratoon.model.families import FAMILIES, WRAPPERS, family_of
from ratoon.model.families.family import Family, declared
from ratoon.model.families.wrapped import Wrapper
from ratoon.model.folder import FIELD, ModelFolder
from ratoon.planner.layer_kinds import Attention

CONFIG_NAME = "config.json"
# What describes the decoder in a wrapper's configuration.
_TEXT = "text_config"
_MAX_CONFIG_BYTES = 2**20
# How a folder stores tensors that versions have in the model's own dtype.
_STORAGE = "quantization_config"

# Fields that must be absent, null, false or 0 in every configuration.
FIELDS_OFF = (
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
    "num_experts",
    "num_experts_per_tok",
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
# Endings of transformers' classifiers, which have a family's decoder and a head for labels.
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
# Fields that are checked in every family: other readers of a folder use them even if transformers
# does not declare them.
_LOOKED_AT_ANYWHERE = ("head_dim", "layer_types", "sliding_window")


def read_config(
    folder: ModelFolder, *, has_value_head: bool = False
) -> tuple[PreTrainedConfig, dict[str, object]]:
    """Returns the configuration of a model folder, and everything in its config.json that is true
    of versions, too.

    `has_value_head`: the folder may be a classifier's, whose head is no LM head. Only the second
    returned value has fields that the family lacks, for the published files. Raises
    INVALID_ARGUMENT if config.json cannot be read or a field has an impossible value, and
    UNSUPPORTED for features that are not served.
    """
    said = folder.read_object(CONFIG_NAME, _MAX_CONFIG_BYTES)
    if has_value_head:
        said = _of_decoder(said)
    wrapper = wrapper_of(said)
    if wrapper is None:
        config = _config(said, _family(said))
        return config, {name: value for name, value in said.items() if name != _STORAGE}
    _check_wrapper(said, wrapper)
    try:
        return _config(text_words(said), wrapper.family), said
    except RatoonError as err:
        raise _within_text(err) from err


def _of_decoder(said: dict[str, object]) -> dict[str, object]:
    """What a classifier's config.json says as that of its family's class, whose LM head is then
    the embedding."""
    architecture = _architecture(said) or ""
    for ending in _CLASSIFIERS:
        if architecture.endswith(ending):
            own = architecture.removesuffix(ending) + "ForCausalLM"
            return {**said, "architectures": [own], "tie_word_embeddings": True}
    return said


def wrapper_of(said: Mapping[str, object]) -> Wrapper | None:
    """Wrapper whose folder says this in its config.json; None: a family's own."""
    return WRAPPERS.get(_architecture(said) or "")


def text_words(said: Mapping[str, object]) -> Mapping[str, object]:
    """What a config.json says of the decoder; it was checked before."""
    return said if wrapper_of(said) is None else cast("Any", said[_TEXT])


def media_tokens(said: Mapping[str, object]) -> dict[str, int]:
    """Tokens that stand for an image or a video, by the fields of a checked config.json."""
    wrapper = wrapper_of(said)
    fields = () if wrapper is None else wrapper.media_tokens
    given = {name: said.get(name, default) for name, default in fields}
    return {name: token for name, token in given.items() if isinstance(token, int)}


def _config(words: Mapping[str, object], family: Family) -> PreTrainedConfig:
    own = _judged(words, family)
    own["architectures"] = [family.architecture]
    try:
        config = config_class(family)(**own)
    except Exception as err:
        got = f"a config.json that is wrong ({shown(str(err))})"
        raise invalid(FIELD, got, "a valid one") from err
    _check_windows(config, words)
    return config


def _check_wrapper(said: Mapping[str, object], wrapper: Wrapper) -> None:
    """Checks what a wrapper's config.json says beside the decoder's words."""
    if said.get("model_type") != wrapper.model_type:
        got, expected = (
            shown(said.get("model_type")),
            f"{wrapper.model_type} ({wrapper.architecture})",
        )
        raise unsupported("config.model_type", got, expected)
    rules = dict.fromkeys((name for name, _ in wrapper.media_tokens), or_null(TOKEN))
    for name, value in _renamed(said).items():
        _check_off(name, value, ())
        if name in ("dtype", "tie_word_embeddings"):
            check_field(name, value, or_null(FIELD_RULES[name]))
        elif name in rules:
            check_field(name, value, rules[name])
    for name in (_TEXT, "vision_config"):
        if not isinstance(said.get(name), dict):
            raise invalid(_field(name), shown(said.get(name)), "an object")
    given, expected = text_words(said).get("model_type"), wrapper.family.model_type
    if given not in (None, expected):
        field = f"config.{_TEXT}.model_type"
        raise unsupported(field, shown(given), f"{expected} ({wrapper.architecture})")


def _within_text(error: RatoonError) -> RatoonError:
    """The error, of a field that `text_config` has."""
    own = "config."
    if not error.field.startswith(own):
        return error
    there = f"{own}{_TEXT}.{error.field.removeprefix(own)}"
    message = error.message.replace(error.field, there, 1)
    return RatoonError.from_dict({**error.to_dict(), "field": there, "message": message})


def add_undeclared(config: PreTrainedConfig, said: Mapping[str, object]) -> None:
    """Add the fields that are checked in every family to the `config` of a loaded model, with the
    folder's values, if the family does not declare them."""
    said = text_words(said)
    for name in _LOOKED_AT_ANYWHERE:
        if name in said and not hasattr(config, name):
            setattr(config, name, copy.deepcopy(said[name]))


def config_class(family: Family) -> type[PreTrainedConfig]:
    """Class of the family's configurations in transformers."""
    return cast("Any", getattr(transformers, family.architecture)).config_class


def foreign_window(config: PreTrainedConfig) -> int | None:
    """Sliding window that the folder states and transformers ignores; None: there is none.

    Other readers of the folder may use it, and compute the same only up to that many tokens.
    """
    if "sliding_window" in declared(type(config)):
        return None
    return cast("int | None", getattr(config, "sliding_window", None))


def longest_sequence(config: PreTrainedConfig) -> int:
    """Tokens that the model is made for, and for which all readers of the folder compute the same.

    A folder extended by YaRN keeps its max_position_embeddings, and samplers use its original
    length times the factor, as here. The other kinds of scaling state their reach in
    max_position_embeddings.
    """
    longest = int(cast("int", config.max_position_embeddings))
    rope = cast("dict[str, Any]", getattr(config, "rope_parameters", None) or {})
    rope = rope.get(FULL, rope)
    if rope.get("rope_type") == "yarn":
        # A null factor means max_position_embeddings over the original length.
        reached = int(rope["original_max_position_embeddings"] * (rope["factor"] or 1))
        longest = max(longest, reached)
    return min(longest, foreign_window(config) or longest)


def _architecture(raw: Mapping[str, object]) -> str | None:
    given = raw.get("architectures")
    named = cast("list[object]", given) if isinstance(given, list) else []
    architecture = named[0] if len(named) == 1 else None
    return architecture if isinstance(architecture, str) else None


def _family(raw: Mapping[str, object]) -> Family:
    architecture = _architecture(raw)
    if architecture is None or architecture not in FAMILIES:
        expected = f"one of {', '.join((*FAMILIES, *WRAPPERS))}"
        raise unsupported("config.architectures", shown(raw.get("architectures")), expected)
    family = FAMILIES[architecture]
    if raw.get("model_type") != family.model_type:
        got = shown(raw.get("model_type"))
        raise unsupported("config.model_type", got, f"{family.model_type} ({architecture})")
    return family


def _judged(raw: Mapping[str, object], family: Family) -> dict[str, Any]:
    """Fields that transformers receives."""
    fields = dataclasses.fields(config_class(family))
    defaults = {field.name: None if field.default is MISSING else field.default for field in fields}
    defaults = _renamed(defaults)
    looked_at = _looked_at(_renamed(raw), family, defaults)
    effective = {"model_type": family.model_type, **defaults, **looked_at}
    check_together(effective)
    family.check(effective)
    rope = family.read_rope({**effective, **{n: raw[n] for n in ROPE_FIELDS if n in raw}})
    looked_at.pop(_STORAGE, None)
    own = {
        name: value
        for name, value in looked_at.items()
        # Classes that do not declare them read these all the same.
        if name in defaults or name in family.rules or (name == "head_dim" and value)
    }
    # Nothing is padded, and the dtype is the policy's own.
    if (own.get("pad_token_id") or 0) >= effective["vocab_size"]:
        own["pad_token_id"] = None
    if own.get("dtype") == "auto":
        del own["dtype"]
    return {**own, "rope_parameters": rope}


def _looked_at(
    raw: Mapping[str, object], family: Family, declared: Collection[str]
) -> dict[str, Any]:
    """Fields that were checked by their rules."""
    looked_at: dict[str, Any] = {}
    left_out = {*_FIELDS_LEFT_OUT, *ROPE_FIELDS, *vars(GenerationConfig())} - {*declared}
    rules = {name: rule for name, rule in FIELD_RULES.items() if name in declared}
    rules |= {name: FIELD_RULES[name] for name in _LOOKED_AT_ANYWHERE} | dict(family.rules)
    for name, value in raw.items():
        _check_off(name, value, rules)
        if name in rules:
            check_field(name, value, rules[name])
            looked_at[name] = value
        elif name in left_out or name.startswith("_") or _is_off(name, rules):
            continue
        elif name not in declared and hasattr(config_class(family), name):
            expected = "none: transformers has something else by that name"
            raise unsupported(_field(name), shown(value), expected)
    return looked_at


def _is_off(name: str, rules: Collection[str]) -> bool:
    is_off = name in FIELDS_OFF or any(word in name for word in _DROPOUT_WORDS)
    return is_off and name not in rules


def _check_off(name: str, value: object, rules: Collection[str]) -> None:
    """Raises UNSUPPORTED for a field that must be off, and is not."""
    if name == "is_causal" and value is not True:
        raise unsupported(_field(name), shown(value), "true")
    if value and _is_off(name, rules):
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


def _check_windows(config: PreTrainedConfig, said: Mapping[str, object]) -> None:
    """Refuses kinds of layers that are not those that transformers makes of the configuration."""
    types = cast("list[str] | None", said.get("layer_types"))
    mixers = [layer.mixer for layer in family_of(config).layers(config)]
    for index, (kind, mixer) in enumerate(zip(types or (), mixers, strict=bool(types))):
        has_window = isinstance(mixer, Attention) and mixer.window is not None
        if kind in (FULL, SLIDING) and has_window != (kind == SLIDING):
            expected = (
                f"{SLIDING}, as sliding_window says"
                if has_window
                else "a sliding_window (and use_sliding_window) for layers that have one"
            )
            raise unsupported("config.layer_types", f"{kind} of layer {index}", expected)
