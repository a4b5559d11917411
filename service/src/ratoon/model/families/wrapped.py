"""Models of several inputs around a family's decoder, of which only the decoder is trained.

A folder of such a model has the decoder's tensors beside a tower's, and the decoder's configuration
as `text_config` in its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ratoon.errors import invalid
from ratoon.model.families.family import Family
from ratoon.model.families.gemma3 import GEMMA3
from ratoon.model.families.llama import MISTRAL
from ratoon.model.families.qwen3_5 import QWEN3_5
from ratoon.model.families.qwen3_next import QWEN3_5_MOE
from ratoon.model.folder import FIELD

# Beginnings of names of the decoder's tensors and of its head's in folders, and of their own. The
# first is that of transformers 5, the second that of earlier folders.
_FORMS = (
    (("model.language_model.", "model."), ("lm_head.", "lm_head.")),
    (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
)
# Beginning of the names of an adapter's tensors in a decoder.
_ADAPTED = "base_model.model.model."
_FUSED = ".experts.gate_up_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A class of transformers that has a family's decoder as its text model.

    Attributes:
        architecture: The class, which a folder's config.json names.
        model_type: Its `model_type` there.
        models: Released models, for the documentation.
        family: What `text_config` describes.
        towers: Beginnings of the names of a tower's tensors, of which a folder has some.
        media_tokens: Fields with the token that stands for an image or a video, and its default.
    """

    architecture: str
    model_type: str
    models: str
    family: Family
    towers: Sequence[str]
    media_tokens: Sequence[tuple[str, int]]

    def check_tower(self, names: Iterable[str]) -> None:
        """Raises INVALID_ARGUMENT for a folder without a tower."""
        if not any(name.startswith(tuple(self.towers)) for name in names):
            expected = f"the tower of {self.architecture}: tensors {self.towers[0]}*"
            raise invalid(FIELD, "no tensor of a tower", expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names that a folder has for a decoder's tensors.

    `form`: 0 or 1 of a wrapper's two; None: those of the family. `is_fused`: experts are stored as
    the wrapper has them, a tensor for all of a layer.
    """

    form: int | None = None
    is_fused: bool = False

    @classmethod
    def of_wrapped(cls, names: Iterable[str]) -> Names:
        """Names in a wrapper's folder whose tensors have these names."""
        found = list(names)
        ((decoder, _), _) = _FORMS[1]
        return cls(
            form=int(any(name.startswith(decoder) for name in found)),
            is_fused=any(name.endswith(_FUSED) for name in found),
        )

    def own(self, name: str) -> str | None:
        """Name in the decoder's own model of a folder's tensor; None: the decoder has none such."""
        return name if self.form is None else _replaced(name, *_FORMS[self.form])

    def there(self, name: str) -> str:
        """Name in the folder of a tensor of the decoder's own model."""
        if self.form is None:
            return name
        return _replaced(name, *((own, there) for there, own in _FORMS[self.form])) or name

    def adapted(self, name: str) -> str:
        """Name in peft's file of an adapter's tensor: adapters follow the classes of today."""
        if self.form is None:
            return name
        return name.replace(_ADAPTED, f"{_ADAPTED}language_model.", 1)


def _replaced(name: str, *beginnings: tuple[str, str]) -> str | None:
    for before, after in beginnings:
        if name.startswith(before):
            return after + name.removeprefix(before)
    return None


_TOWERS = ("vision_tower.", "model.vision_tower.")
_QWEN_TOWERS = ("model.visual.",)
_QWEN_TOKENS = (("image_token_id", 248056), ("video_token_id", 248057))
QWEN3_5_VL = Wrapper(
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    models="Qwen3.5 0.8B to 27B, Qwen3.6 27B",
    family=QWEN3_5,
    towers=_QWEN_TOWERS,
    media_tokens=_QWEN_TOKENS,
)
QWEN3_5_MOE_VL = Wrapper(
    architecture="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe",
    models="Qwen3.5-35B-A3B, Qwen3.5-122B-A10B, Qwen3.5-397B-A17B, Qwen3.6-35B-A3B",
    family=QWEN3_5_MOE,
    towers=_QWEN_TOWERS,
    media_tokens=_QWEN_TOKENS,
)
GEMMA3_VL = Wrapper(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    models="Gemma 3 4B, 12B, 27B",
    family=GEMMA3,
    towers=_TOWERS,
    media_tokens=(("image_token_index", 262144),),
)
MISTRAL3 = Wrapper(
    architecture="Mistral3ForConditionalGeneration",
    model_type="mistral3",
    models="Mistral Small 3.1, 3.2",
    family=MISTRAL,
    towers=_TOWERS,
    media_tokens=(("image_token_index", 10),),
)
