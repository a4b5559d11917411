"""Olmo 3: dense decoders with norms behind attention and MLP, three of four layers with a window.

Rotary embeddings may be scaled in layers with full attention only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ratoon.model.config_fields import read_rope_by_layer
from ratoon.model.families.family import Family, dense_by_layer


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return read_rope_by_layer(config, config["max_position_embeddings"], theta=500_000.0)


OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    models="Olmo 3 7B, 32B; Olmo 3.1",
    layers=partial(dense_by_layer, has_post_norms=True),
    read_rope=_read_rope,
)
