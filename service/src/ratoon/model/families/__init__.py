"""Families of models that are served, one module for each or for a few that differ in a field."""

from __future__ import annotations

from transformers import PreTrainedConfig

from ratoon.model.families.deepseek_v3 import DEEPSEEK_V3
from ratoon.model.families.family import Family
from ratoon.model.families.gemma3 import GEMMA3
from ratoon.model.families.glm4_moe import GLM4_MOE, GLM4_MOE_LITE
from ratoon.model.families.gpt_oss import GPT_OSS
from ratoon.model.families.llama import LLAMA, MISTRAL
from ratoon.model.families.olmo3 import OLMO3
from ratoon.model.families.qwen import QWEN2, QWEN3
from ratoon.model.families.qwen3_5 import QWEN3_5
from ratoon.model.families.qwen3_moe import QWEN3_MOE
from ratoon.model.families.qwen3_next import QWEN3_5_MOE, QWEN3_NEXT
from ratoon.model.families.wrapped import GEMMA3_VL, MISTRAL3, QWEN3_5_MOE_VL, QWEN3_5_VL

FAMILIES = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        GLM4_MOE,
        GLM4_MOE_LITE,
        DEEPSEEK_V3,
        GPT_OSS,
        OLMO3,
        GEMMA3,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_NEXT,
    )
}
# Models of several inputs whose text model is one of a family.
WRAPPERS = {
    wrapper.architecture: wrapper for wrapper in (QWEN3_5_VL, QWEN3_5_MOE_VL, GEMMA3_VL, MISTRAL3)
}
_BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES.values()}


def family_of(config: PreTrainedConfig) -> Family:
    """Family of a model that was loaded."""
    return _BY_MODEL_TYPE[config.model_type]
