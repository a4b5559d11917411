"""A model on the sampler's device, whose weights become those of the version that is asked for.

Weights are read as ImportWeights reads them, into the parameters of a `PolicyModel`, which the
module of transformers that samples, with its cache of keys and values, has for its own.

R rows, T tokens of a row, D features, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.families import family_of
from ratoon.model.folder import ModelFolder
from ratoon.model.loader import read_model
from ratoon.model.presets import preset_config
from ratoon.model.spec import FolderBase, ModelSpec, PresetBase
from ratoon.model.support import longest_sequence, media_tokens, read_config
from ratoon.model.tokenizer import tokenizer_of
from ratoon.model.value_head import is_of_head
from ratoon.planner.layer_kinds import Attention
from ratoon.sampler.port import BaseFacts, Weights
from ratoon.train.imported import read_weights
from ratoon_proto.types import LoraTuning

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GENERATION_CONFIG = "generation_config.json"
_MAX_BYTES = 2**20


def base_facts(spec: ModelSpec, models_root: Path) -> BaseFacts:
    """Facts of a base, whose weights are not read. Raises what `read_config` raises."""
    if isinstance(spec.base, PresetBase):
        config, media = preset_config(spec.base.name), dict[str, int]()
    else:
        folder = ModelFolder.of(Path(spec.base.folder), models_root)
        config, said = read_config(folder, has_value_head=spec.value_head)
        media = media_tokens(said)
    return BaseFacts(
        vocab_size=int(cast("int", config.vocab_size)),
        max_sequence_tokens=longest_sequence(config),
        media_tokens=media,
    )


def base_key(spec: ModelSpec) -> ModelSpec:
    """Equal for models that differ by weights alone: a seed decides no weight of a folder's."""
    return replace(spec, seed=0) if isinstance(spec.base, FolderBase) else spec


class SampledModel:
    """Not safe across threads. States: the base's weights, or those of one version."""

    def __init__(self, spec: ModelSpec, models_root: Path, device: torch.device) -> None:
        """Raises what `read_model` raises."""
        self._spec, self._models_root, self._device = spec, models_root, device
        self._load()
        config = self._module.config
        self.end_tokens = _ids(config.eos_token_id) | _ids(self._generation().get("eos_token_id"))
        element_bytes = self._policy.sizes.element_bytes
        mixers = [layer.mixer for layer in family_of(config).layers(config)]
        # Recurrent states do not grow with the sequence.
        self.cache_bytes_per_token = element_bytes * sum(
            mixer.num_kv_heads * (mixer.head_dim + mixer.value_size)
            for mixer in mixers
            if isinstance(mixer, Attention)
        )

    def tokenizer(self) -> Tokenizer | None:
        """The base's tokenizer, if there is one."""
        return tokenizer_of(self._spec.base, self._models_root)

    @contextmanager
    def become(self, weights: Weights) -> Iterator[None]:
        """Have these weights within the context. Raises UNAVAILABLE where their files are gone."""
        is_base = weights.version is None
        if is_base and self._digest and self._adapter is None:
            self._load()
        elif not is_base and weights.digest != self._digest:
            self._read(weights)
        adapter = self._adapter if is_base else None
        with nullcontext() if adapter is None else adapter.disable_adapter():
            yield

    def make_cache(self) -> DynamicCache:
        return DynamicCache(config=self._module.config)

    def hidden(
        self, tokens_RT: Tensor, mask_RT: Tensor, position_RT: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Final hidden states [R, T, D] of tokens that go behind those of the cache.

        `mask_RT` [R, all tokens of the row]: 0 for padding, which stands at the left.
        """
        output = self._module.get_decoder()(
            input_ids=tokens_RT,
            attention_mask=mask_RT,
            position_ids=position_RT,
            past_key_values=cache,
            use_cache=True,
        )
        return output.last_hidden_state

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """[R, V], in float32 at least."""
        return self._module.get_output_embeddings()(hidden_RD).float()

    @property
    def device(self) -> torch.device:
        return self._device

    def _load(self) -> None:
        host = read_model(self._spec, models_root=self._models_root)
        source = host.module
        self._policy = host.place(self._device)
        self._module, self._adapter = _with_cache(source, self._spec)
        # Digest of the version whose weights it has; "": those of the base.
        self._digest = ""

    def _read(self, weights: Weights) -> None:
        assert weights.folder is not None, "a version has files"
        try:
            read = read_weights(self._policy, ModelFolder.of(weights.folder), "")
        except RatoonError as err:
            text = f"version {weights.version} cannot be read any more, or not yet: {err.message}"
            raise RatoonError(ErrorCode.UNAVAILABLE, text) from err
        # Half of a version is none.
        self._digest = "?"
        with torch.no_grad():
            for name, parameter in self._policy.named_trainable().items():
                parameter.copy_(read.values[name])
        self._digest = weights.digest

    def _generation(self) -> dict[str, object]:
        if not isinstance(self._spec.base, FolderBase):
            return {}
        folder = ModelFolder.of(Path(self._spec.base.folder), self._models_root)
        if not folder.has(_GENERATION_CONFIG):
            return {}
        return folder.read_object(_GENERATION_CONFIG, _MAX_BYTES)


def _with_cache(source: PreTrainedModel, spec: ModelSpec) -> tuple[Any, Any]:
    """A module of transformers with the parameters of `source`, and its adapter, if any.

    `source` runs packed forests; this one attends to a cache of keys and values.
    """
    config = copy.deepcopy(source.config)
    kind = cast("Any", type(source))
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    with torch.device("meta"):
        module = kind(config).eval()
    adapter = None
    if isinstance(spec.tuning, LoraTuning):
        from ratoon.model.lora import attach_adapter

        adapter = attach_adapter(module, spec.tuning, "")
    module.requires_grad_(requires_grad=False)
    # Tied weights come as one, under two names.
    stored = {name: each for name, each in source.state_dict().items() if not is_of_head(name)}
    module.load_state_dict(stored, strict=True, assign=True)
    buffers = dict(source.named_buffers())
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            owner, _, last = name.rpartition(".")
            cast("nn.Module", module.get_submodule(owner)).register_buffer(
                last, buffers[name], persistent=False
            )
    assert not any(p.is_meta for p in module.parameters()), "every parameter is the source's"
    return module, adapter


def _ids(given: object) -> frozenset[int]:
    """Token ids that a configuration gives as a number, a list or nothing."""
    ids = given if isinstance(given, list) else [given]
    return frozenset(each for each in cast("list[object]", ids) if isinstance(each, int))
