"""Loads a folder that a caller names as a model on the host.

In: a folder. Out: a module of transformers, and what every version of it has beside its trained
weights. Invariant: transformers receives a checked configuration and checked tensors, and no path,
so it opens nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ratoon.errors import invalid, shown, unsupported
from ratoon.log import get_logger
from ratoon.model.aside import Aside, Base
from ratoon.model.attention import ATTENTION_NAME
from ratoon.model.experts import EXPERTS_NAME
from ratoon.model.families import family_of
from ratoon.model.families.family import Family, Tensors
from ratoon.model.families.wrapped import Names
from ratoon.model.folder import FIELD, TEMPLATES, ModelFolder, file_field
from ratoon.model.mxfp4 import Unpacked, unpack
from ratoon.model.safetensors_files import (
    Stored,
    check_finite,
    check_floats,
    check_names_and_shapes,
    on_meta,
    open_tensors,
    twice,
)
from ratoon.model.support import (
    CONFIG_NAME,
    add_undeclared,
    media_tokens,
    read_config,
    text_words,
    wrapper_of,
)
from ratoon.model.value_head import add_value_head, take_head

_LOG = get_logger("folders")
# Files that are published beside the weights, if the folder has them.
_PUBLISHED_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)
_MAX_PUBLISHED_BYTES = 2**26
# All published files may have so many together.
_MAX_TOTAL_BYTES = 2**27
_TEMPLATE = re.compile(r"[a-zA-Z0-9._-]{1,128}\.jinja")
_MAX_TEMPLATES = 64
# Name of the head's tensor, prefix of all the decoder's tensors, and suffix of those that
# transformers computes itself.
HEAD, PREFIX, COMPUTED = "lm_head.weight", "model.", "rotary_emb.inv_freq"
# Prefix of layers that predict further tokens, which no training here changes.
_PREDICTORS = "mtp."


def published_files(folder: ModelFolder) -> dict[str, bytes]:
    """Current contents of the tokenizer's and the processors' files and the sampler's settings, by
    name; those of named chat templates are in a folder of theirs.

    Raises INVALID_ARGUMENT for a file that is not regular or has more than 64 MiB, for more than
    128 MiB together, and for more than 64 templates or one whose name is not plain.
    """
    names = [name for name in _PUBLISHED_FILES if folder.has(name)]
    files = {name: folder.read(name, _MAX_PUBLISHED_BYTES) for name in names}
    if folder.has(TEMPLATES):
        within = folder.below(TEMPLATES)
        templates = [name for name in within.names() if name.endswith(".jinja")]
        if len(templates) > _MAX_TEMPLATES:
            got = f"{len(templates)} templates"
            raise invalid(file_field(TEMPLATES), got, f"at most {_MAX_TEMPLATES}")
        for name in templates:
            if not _TEMPLATE.fullmatch(name):
                raise invalid(file_field(TEMPLATES), shown(name), "a plain name of a template")
            files[f"{TEMPLATES}/{name}"] = within.read(name, _MAX_PUBLISHED_BYTES)
    if (size := sum(map(len, files.values()))) > _MAX_TOTAL_BYTES:
        got = f"{size} bytes beside the weights"
        raise invalid(FIELD, got, f"at most {_MAX_TOTAL_BYTES}")
    return files


def load_folder(
    folder: ModelFolder,
    dtype: torch.dtype,
    *,
    is_published: bool = True,
    has_value_head: bool = False,
) -> tuple[PreTrainedModel, Base]:
    """Returns the model of a folder, on the host, and what versions take over from the folder.

    `is_published`: whether they have its weights, and not those of an adapter alone.
    `has_value_head`: whether the model has a value head, the folder's or one of zeros. Raises what
    `read_config` and `open_tensors` raise, and INVALID_ARGUMENT naming a tensor that is missing,
    not the model's, of another shape, or not finite.
    """
    config, said = read_config(folder, has_value_head=has_value_head)
    stored = unpack(open_tensors(folder))
    head = take_head(stored, folder) if has_value_head else {}
    if any(isinstance(each, Unpacked) for each in stored.values()):
        _LOG.warning(
            "experts in MXFP4 are read as bfloat16, and published so", folder=str(folder.path)
        )
    names = Names()
    if wrapper := wrapper_of(said):
        wrapper.check_tower(stored)
        names = Names.of_wrapped(stored)
    own = _own_tensors(stored, names, said, config)
    if wrapper:
        _decide_tie(config, said, has_head=HEAD in own)
    kept = _judge_tensors(own, names, config)
    module = _loaded(config, own, dtype)
    add_undeclared(module.config, said)
    if has_value_head:
        add_value_head(module, head)
    base = Base(names=names, media_tokens=media_tokens(said))
    if not is_published:
        return module, base
    trained = own.keys() - kept
    aside = {name for name in stored if names.own(name) not in trained}
    aside = {name for name in aside if not name.endswith(COMPUTED)}
    files = {**published_files(folder), CONFIG_NAME: json.dumps(said).encode()}
    return module, replace(base, files=files, aside=Aside.read(folder, aside))


def implementations(family: Family) -> dict[str, str]:
    """Settings of transformers under which a model computes packed forests."""
    settings = {"attn_implementation": ATTENTION_NAME}
    # A model without experts raises an error if this one is given.
    return (
        settings if family.experts is None else {**settings, "experts_implementation": EXPERTS_NAME}
    )


def _own_tensors(
    stored: Mapping[str, Stored],
    names: Names,
    said: Mapping[str, object],
    config: PreTrainedConfig,
) -> dict[str, Stored]:
    """Tensors of the decoder and its head, by their own names."""
    words = text_words(said)
    predictors = words.get("num_nextn_predict_layers", words.get("num_mtp_layers"))
    layers = cast("int", config.num_hidden_layers)
    # Layers that predict further tokens follow the decoder's own, or are beside it.
    stop = layers + (predictors if isinstance(predictors, int) else 0)
    others = (_PREDICTORS, *(f"{PREFIX}layers.{index}." for index in range(layers, stop)))
    own = {names.own(name): each for name, each in stored.items()}
    return {
        name: each
        for name, each in own.items()
        # Older folders have a tensor of frequencies in each layer, which transformers computes.
        if name is not None and not name.startswith(others) and not name.endswith(COMPUTED)
    }


def _decide_tie(config: PreTrainedConfig, said: Mapping[str, object], *, has_head: bool) -> None:
    """Sets whether a wrapper's embeddings are tied: its own words and the decoder's may differ, or
    say nothing, and then the tensors decide."""
    name = "tie_word_embeddings"
    stated = {said.get(name), text_words(said).get(name)} - {None}
    config.tie_word_embeddings = not has_head if len(stated) != 1 else bool(*stated)


def _loaded(
    config: PreTrainedConfig, tensors: dict[str, Stored], dtype: torch.dtype
) -> PreTrainedModel:
    """Model of `config` with these tensors, whose names and shapes were checked."""
    family = family_of(config)
    try:
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            loaded = _model_class(config).from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                **implementations(family),
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
            module, loading = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
            # Generation settings are the sampler's: export copies the folder's own file.
            module.generation_config = GenerationConfig.from_model_config(module.config)
    except Exception as err:
        got = f"weights that do not load ({shown(str(err))})"
        raise invalid(FIELD, got, "whole ones") from err
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, loading[kind])):
            got = f"{len(keys)} {kind.replace('_', ' ')}, the first {shown(keys[0])}"
            raise invalid(FIELD, got, "every weight of the model and no other")
    _check_tie(module)
    _check_buffers(module)
    family.prepare(module)
    return module


def _judge_tensors(stored: dict[str, Stored], names: Names, config: PreTrainedConfig) -> set[str]:
    """Checks that the tensors of `stored` are those of the model of `config`, and finite.

    Returns those that the model keeps and does not train.
    """
    check_floats({names.there(name): each for name, each in stored.items()})
    # This is checked before the layers are made, even on the meta device.
    layers = int(cast("int", config.num_hidden_layers))
    if layers > len(stored):
        expected = f"a tensor for each of num_hidden_layers, {layers}"
        raise invalid(FIELD, f"{len(stored)} tensors", expected)
    try:
        with torch.device("meta"), quiet_transformers():
            model = _model_class(config)(config)
        like = cast("dict[str, Tensor]", model.state_dict())
    except Exception as err:
        raise invalid(FIELD, f"no model that can be made ({shown(str(err))})", "one") from err
    if config.tie_word_embeddings and HEAD not in stored:
        like.pop(HEAD)
    shapes = [(name, on_meta(names.there(name), each)) for name, each in stored.items()]
    exported = family_of(config).exported
    matched(shapes, exported(like), names, exported)
    for name, each in stored.items():
        check_finite(names.there(name), each[...])
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = like.keys() - trained
    return {name for name in stored if name in kept or f"{PREFIX}{name}" in kept}


def matched(
    tensors: Iterable[tuple[str, Tensor]],
    expected: Tensors,
    names: Names,
    exported: Callable[[Tensors], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Tensors by the names of `expected`, in its shapes; those that are fused, in parts.

    Raises INVALID_ARGUMENT naming, as the folder has it, a tensor that is there twice, missing, not
    the model's, or of another shape.
    """
    found = dict[str, Tensor]()
    for name, tensor in tensors:
        for part, value in exported({name: tensor}).items():
            # transformers takes the names of a decoder without its head, too.
            own = f"{PREFIX}{part}"
            own = own if part not in expected and own in expected else part
            if own in found:
                raise twice(names.there(own))
            found[own] = value
    check_names_and_shapes(
        {names.there(name): value for name, value in found.items()},
        {names.there(name): like for name, like in expected.items()},
    )
    return found


def _model_class(config: PreTrainedConfig) -> Any:
    (architecture,) = cast("list[str]", config.architectures)
    return getattr(transformers, architecture)


def _check_buffers(module: PreTrainedModel) -> None:
    """Checks that rotary frequencies are those computed from the configuration."""
    for name, buffer in module.named_buffers():
        if not torch.isfinite(buffer).all():
            expected = "one whose frequencies are finite"
            raise unsupported("config.rope_parameters", f"a {name} that is not", expected)


def _check_tie(module: PreTrainedModel) -> None:
    """Refuses a tied configuration with a separate head: it would be two models under one name."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    is_tied = cast("Any", head).weight is cast("Any", embedding).weight
    check_tie(module.config, is_tied=is_tied)


def check_tie(config: PreTrainedConfig, *, is_tied: bool) -> None:
    """Raises UNSUPPORTED where `is_tied`, what the weights are, is not what `config` says."""
    if bool(config.tie_word_embeddings) != is_tied:
        raise unsupported(
            "config.tie_word_embeddings",
            config.tie_word_embeddings,
            "what the weights are" if is_tied else f"false where {HEAD} differs",
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disables transformers' progress bars within the context."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
