"""Gemma 3 (text): dense decoders with five layers with a window for each with full attention.

Embeddings are scaled, norms multiply by one more than their weight, and the two kinds of layers
rotate by bases of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ratoon.errors import invalid
from ratoon.model.config_fields import (
    FIELD_RULES,
    FULL,
    MAX_LAYERS,
    SLIDING,
    integer,
    number,
    read_rope_by_layer,
)
from ratoon.model.families.family import Family, check_divided_heads, dense_by_layer

# Early folders have it in place of `layer_types`: every layer of that number has full attention.
_PATTERN = "sliding_window_pattern"
# And this for the base of layers with a window.
_LOCAL_BASE = "rope_local_base_freq"


def _check(config: Mapping[str, Any]) -> None:
    check_divided_heads(config)
    types, every = config["layer_types"], config.get(_PATTERN)
    if types is None or every is None:
        return
    if types != [SLIDING if number % every else FULL for number in range(1, len(types) + 1)]:
        raise invalid(f"config.{_PATTERN}", every, "the one of layer_types")


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return read_rope_by_layer(
        config,
        config["max_position_embeddings"],
        theta=1_000_000.0,
        local=(_LOCAL_BASE, 10_000.0),
    )


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    models="Gemma 3 270M, 1B (text)",
    layers=partial(dense_by_layer, has_post_norms=True),
    rules={
        "hidden_activation": FIELD_RULES["hidden_act"],
        # Attention's logits are divided by its root.
        "query_pre_attn_scalar": number(1e-6, 1e6),
        _PATTERN: integer(1, MAX_LAYERS),
        _LOCAL_BASE: number(2, 1e12),
    },
    check=_check,
    read_rope=_read_rope,
)
