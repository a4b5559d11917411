"""What one family of models is, as everything that serves it reads it.

Loading, export, import, plans of memory, costs, adapters and documentation ask the family; none of
them knows a model by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from ratoon.errors import invalid
from ratoon.model.config_fields import FULL, SLIDING, Rule, partial_rotary, read_rope
from ratoon.planner.layer_kinds import Attention, Layer, Mixer, Mlp

Tensors = Mapping[str, Tensor]
# Linear maps of attention that an adapter reaches, by the last part of their names.
ATTENTION_MAPS = ("q_proj", "k_proj", "v_proj", "o_proj")


def check_heads(config: Mapping[str, Any]) -> None:
    """Raises INVALID_ARGUMENT where heads do not divide into each other or cannot be rotated."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if heads % (config["num_key_value_heads"] or heads):
        got = config["num_key_value_heads"]
        raise invalid("config.num_key_value_heads", got, f"a divisor of the {heads} heads")
    head_dim = config.get("head_dim")
    if hidden % heads and head_dim is None:
        raise invalid("config.num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")
    if (head_dim or hidden // heads) % 2:
        got = head_dim or hidden // heads
        raise invalid("config.head_dim", got, "an even number: pairs are rotated")


def check_divided_heads(config: Mapping[str, Any]) -> None:
    """Raises what `check_heads` does, and for a hidden size that heads do not divide: transformers
    divides it even where `head_dim` is given."""
    check_heads(config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        raise invalid("config.num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")


def read_flat_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embeddings that are those of all layers. Raises UNSUPPORTED."""
    return read_rope(config, config["max_position_embeddings"])


def read_partial_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embeddings of a part of each head. Raises UNSUPPORTED."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rules = partial_rotary(head_dim)
    return read_rope(config, config["max_position_embeddings"], rules=rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One causal decoder of transformers, which has its classes; there is no remote code.

    Attributes:
        architecture: Class of transformers that a folder's config.json names.
        model_type: Its `model_type` there.
        models: Released models, for the documentation.
        layers: Kinds of the decoder's layers from a configuration, first to last. Layers of a kind
            are one object.
        rules: Fields that only this family has, or for which it takes other values than others.
        read_rope: A configuration, in which every field has a value, to its `rope_parameters`.
        check: Raises INVALID_ARGUMENT for a field that contradicts another; every field of the
            configuration has a value, and was checked alone.
        prepare: Replaces modules of a loaded model by those that run packed forests.
        experts: Class of the module that holds the routed experts of a layer; None: dense.
        adapts_experts: Whether an adapter may reach these: not where peft reads no factors of
            experts one by one.
        exported: Parameters by name to the tensors that a released folder has, which are views.
        adapted: Linear maps beside the MLP's that an adapter reaches.
    """

    architecture: str
    model_type: str
    models: str
    layers: Callable[[Any], tuple[Layer, ...]]
    rules: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    read_rope: Callable[[Mapping[str, Any]], dict[str, Any]] = read_flat_rope
    check: Callable[[Mapping[str, Any]], None] = check_heads
    prepare: Callable[[nn.Module], None] = lambda _module: None
    experts: type[nn.Module] | None = None
    adapts_experts: bool = True
    exported: Callable[[Tensors], dict[str, Tensor]] = dict
    adapted: Sequence[str] = ATTENTION_MAPS


def softmax_attention(config: Any, window: int | None = None, **others: Any) -> Attention:
    """Attention with heads as most configurations state them; `others` are its other fields."""
    heads = config.num_attention_heads
    return Attention(
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        window=window,
        **others,
    )


def windowed_by_layer(config: Any, **others: Any) -> list[Mixer]:
    """Attention of each layer, where `layer_types` says which have the sliding window."""
    by_type = {
        FULL: softmax_attention(config, **others),
        SLIDING: softmax_attention(config, config.sliding_window, **others),
    }
    return [by_type[kind] for kind in config.layer_types]


def stack(mixers: Sequence[Mixer], mlps: Sequence[Mlp], **others: Any) -> tuple[Layer, ...]:
    """Layers of these mixers and MLPs, and `others` as further fields; equal layers are one
    object."""
    known: dict[tuple[int, int], Layer] = {}
    pairs = list(zip(mixers, mlps, strict=True))
    for mixer, mlp in pairs:
        known.setdefault((id(mixer), id(mlp)), Layer(mixer=mixer, mlp=mlp, **others))
    return tuple(known[id(mixer), id(mlp)] for mixer, mlp in pairs)


def alike(config: Any, mixer: Mixer) -> tuple[Layer, ...]:
    """Layers that all have this mixer and a dense MLP."""
    return (Layer(mixer=mixer, mlp=Mlp(size=config.intermediate_size)),) * config.num_hidden_layers


def dense_by_layer(config: Any, **others: Any) -> tuple[Layer, ...]:
    """Layers with a dense MLP, of which `layer_types` says which have the sliding window; `others`
    are further fields of all."""
    mlp = Mlp(size=config.intermediate_size)
    return stack(windowed_by_layer(config), [mlp] * config.num_hidden_layers, **others)


def declared(config_class: type[PreTrainedConfig]) -> set[str]:
    """Fields that a configuration class of transformers has."""
    return set(config_class.__dataclass_fields__)
