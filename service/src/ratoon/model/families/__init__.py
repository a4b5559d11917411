"""Families of models that are served, one module for each or for a few that differ in a field."""

from __future__ import annotations

from transformers import PreTrainedConfig

from ratoon.model.families.family import Family
from ratoon.model.families.llama import LLAMA, MISTRAL
from ratoon.model.families.qwen import QWEN2, QWEN3
from ratoon.model.families.qwen3_moe import QWEN3_MOE
from ratoon.model.families.wrapped import MISTRAL3

FAMILIES = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)}
# Models of several inputs whose text model is one of a family.
WRAPPERS = {wrapper.architecture: wrapper for wrapper in (MISTRAL3,)}
_BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES.values()}


def family_of(config: PreTrainedConfig) -> Family:
    """Family of a model that was loaded."""
    return _BY_MODEL_TYPE[config.model_type]
