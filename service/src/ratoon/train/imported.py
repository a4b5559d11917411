"""A folder's weights for a trainer's model: read whole and checked whole, before any is applied.

A folder is taken if a policy could be made of it, by the same rules, and so is one without an
index. Each byte is read once: what is checked and digested is what is applied, even if the folder
changes meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.errors import invalid
from ratoon.model import value_head
from ratoon.model.aside import Aside
from ratoon.model.export import exported_values, importable_like, imported_values
from ratoon.model.families import family_of
from ratoon.model.families.wrapped import Names
from ratoon.model.folder import FIELD, ModelFolder
from ratoon.model.folder_model import COMPUTED, HEAD, PREFIX, check_tie, matched
from ratoon.model.mxfp4 import unpack
from ratoon.model.policy_model import PolicyModel
from ratoon.model.safetensors_files import (
    Stored,
    add_tensors,
    check_finite,
    check_floats,
    not_safetensors,
    on_meta,
    parse_tensors,
    read_header,
    tensor_field,
    twice,
    weight_files,
)
from ratoon.model.spec import ModelDtype
from ratoon.stream.files import digest_bytes, digest_stream

_EMBEDDING = "model.embed_tokens.weight"
# Bound of all files' headers together.
_MAX_HEADER_BYTES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedWeights:
    """`values`: by the names of `named_trainable()`, finite, on the CPU, bfloat16 or float32, and
    float64 for a model of that dtype.

    `digest`: of the names and bytes of the files that were read, 32 hexadecimal digits. Tensors are
    counted as an export has them, their `dtypes` are those of the files.
    """

    values: dict[str, Tensor]
    digest: str
    num_tensors: int
    size_bytes: int
    dtypes: tuple[str, ...]


def read_weights(
    model: PolicyModel, folder: ModelFolder, digest: str, *, adds: bool = False
) -> ImportedWeights:
    """Read `folder` for `model`; `digest`: of the files that it must have, "": any.

    An adapter's folder may have factors of some of the linear maps alone, and no value head. Those
    of the others are then as at the policy's creation, which adds nothing to the base, or with
    `adds` zeros. It may have the base's embedding and LM head, as peft saves them beside adapters
    of theirs.
    Takes as much of the host's memory as all files and the largest of them. Raises what
    `weight_files` raises, and INVALID_ARGUMENT or UNSUPPORTED naming the file or tensor: names and
    shapes must be those of the model's export, where experts may be fused and the decoder's names
    short, values floats and finite, and a head beside the embeddings that it is tied to their like.
    """
    expected, aside, is_adapter = _expected(model), model.base.aside, model.adapter is not None
    own = _base_tensors(model)
    known = (*expected.values(), *own.values())
    most = 8 * sum(like.numel() for like in known) + _MAX_HEADER_BYTES
    names = weight_files(folder, has_adapter=is_adapter)
    has_head = model.value_head is not None
    if has_head and folder.has(value_head.NAME):
        names.append(value_head.FILE)
    files = _sizes(folder, names, most + (aside.num_bytes if aside else 0))
    if digest:
        # First, for a folder that was changed may not even load.
        _check_digest(_digest({name: _digest_of(folder, name) for name in files}), digest)
    targets: tuple[str, ...] = ()
    if model.adapter is not None:
        from ratoon.model.lora import check_adapter_config

        targets = check_adapter_config(model.adapter, folder)
    stored: dict[str, Stored] = {}
    digests: dict[str, str] = {}
    for name, size in files.items():
        within, leaf = _place(folder, name)
        data = within.read(leaf, size)
        digests[name] = digest_bytes(data)
        add_tensors(stored, parse_tensors(name, data))
    if digest:
        _check_digest(_digest(digests), digest)
    _check_others(folder, files, stored)
    _take_base(stored, own)
    trained = _trained(stored, aside)
    if has_head:
        trained |= value_head.take_head(trained)
    if model.adapter is not None:
        from ratoon.model.lora import covered

        expected = covered(expected, trained, targets)
    tensors = _checked(model, trained, expected)
    return ImportedWeights(
        values=imported_values(model, _uncovered(model, tensors, adds=adds) | tensors),
        digest=_digest(digests),
        num_tensors=len(tensors),
        size_bytes=sum(files.values()),
        dtypes=tuple(sorted({tensor.get_dtype() for tensor in trained.values()})),
    )


def _place(folder: ModelFolder, name: str) -> tuple[ModelFolder, str]:
    """The folder that has a file, and its name there."""
    within, _, leaf = name.rpartition("/")
    return (folder.below(within) if within else folder), leaf


def _expected(model: PolicyModel) -> dict[str, Tensor]:
    """What a folder may have, on the meta device: a head, too, that is tied to the embeddings."""
    expected = importable_like(model)
    if model.adapter is None and model.config.tie_word_embeddings:
        expected[HEAD] = expected[_EMBEDDING]
    return expected


def _base_tensors(model: PolicyModel) -> dict[str, Tensor]:
    """Tensors of the base that peft may have saved beside an adapter, by the folder's names."""
    if model.adapter is None:
        return {}
    from ratoon.model.lora import base_tensors

    names = model.base.names
    return {names.adapted(name): p.detach() for name, p in base_tensors(model.adapter).items()}


def _take_base(stored: dict[str, Stored], own: Mapping[str, Tensor]) -> None:
    """Take the base's tensors out of `stored`. Raises INVALID_ARGUMENT where one is of another
    base than the policy's."""
    given = {name: stored.pop(name) for name in sorted(stored.keys() & own.keys())}
    check_floats(given)
    for name, tensor in given.items():
        found, base = tensor[...], own[name].cpu()
        if found.shape != base.shape or not torch.equal(found.to(base.dtype), base):
            expected = "the tensor of the policy's own base, or none: it is not trained"
            raise invalid(tensor_field(name), "another tensor", expected)


def _uncovered(model: PolicyModel, tensors: Collection[str], *, adds: bool) -> dict[str, Tensor]:
    """Values of the tensors that an adapter's folder does not have, as `read_weights` says."""
    absent = importable_like(model).keys() - {*tensors}
    if not absent:
        return {}
    fresh = {name: p.detach().cpu() for name, p in model.new_adapter(model.spec.seed).items()}
    own = exported_values(model, fresh)
    return {name: torch.zeros_like(own[name]) if adds else own[name] for name in absent}


def _sizes(folder: ModelFolder, names: Collection[str], most: int) -> dict[str, int]:
    """Sizes of the files by name: at most `most` bytes, the model's in float64."""
    sizes: dict[str, int] = {}
    for name in names:
        within, leaf = _place(folder, name)
        with within.open(leaf) as file:
            sizes[name] = os.fstat(file.fileno()).st_size
    if (size := sum(sizes.values())) > most:
        raise invalid(FIELD, f"{size} bytes of weights", f"at most {most}: the model's as float64")
    return sizes


def _digest_of(folder: ModelFolder, name: str) -> str:
    within, leaf = _place(folder, name)
    with within.open(leaf) as file:
        return digest_stream(file)


def _check_others(folder: ModelFolder, read: Collection[str], stored: Collection[str]) -> None:
    """Raises INVALID_ARGUMENT where a file that was not read has one of the tensors, too: one of
    the two is of an earlier export."""
    for file in weight_files(folder, has_adapter=True):
        if file in read:
            continue
        with folder.open(file) as opened:
            try:
                names = read_header(opened)[0].keys()
            except ValueError as err:
                raise not_safetensors(file, err) from err
        if both := names & set(stored):
            raise twice(min(both))


def _trained(stored: Mapping[str, Stored], aside: Aside | None) -> dict[str, Stored]:
    """All tensors but those that stay as the policy's folder has them, by the folder's names."""
    digests = aside.digests if aside else {}
    # Folders of two forms have the tower's tensors with and without a prefix.
    kept = {name.removeprefix(PREFIX): digest for name, digest in digests.items()}
    trained: dict[str, Stored] = {}
    for name, tensor in stored.items():
        known = kept.get(name.removeprefix(PREFIX))
        if known is None and not name.endswith(COMPUTED):
            trained[name] = tensor
        elif known is not None and digest_bytes(tensor.data) != known:
            expected = "the bytes of the policy's own folder: it is not trained"
            raise invalid(tensor_field(name), "another tensor", expected)
    return unpack(trained)


def _checked(
    model: PolicyModel, stored: Mapping[str, Stored], expected: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Values by the names of `importable_like`. Raises as `read_weights` does."""
    check_floats(stored)
    names = model.base.names
    if names.form is not None:
        names = Names.of_wrapped(stored)
    shapes = [on_meta(name, tensor) for name, tensor in stored.items()]
    own = [names.own(name) or name for name in stored]
    if model.config.tie_word_embeddings and HEAD not in own:
        expected.pop(HEAD, None)
    exported = family_of(model.config).exported
    matched(zip(own, shapes, strict=True), expected, names, exported)
    is_wide = model.spec.dtype is ModelDtype.FLOAT64
    values = (_read(tensor, is_wide=is_wide) for tensor in stored.values())
    tensors = matched(zip(own, values, strict=True), expected, names, exported)
    for name, tensor in tensors.items():
        check_finite(names.there(name), tensor)
    if model.config.tie_word_embeddings and HEAD in tensors:
        is_tied = torch.equal(tensors.pop(HEAD), tensors[_EMBEDDING])
        check_tie(model.config, is_tied=is_tied)
    return tensors


def _read(stored: Stored, *, is_wide: bool) -> Tensor:
    """All values; what an optimizer does not read becomes float32."""
    tensor = stored[...]
    is_kept = tensor.dtype in (torch.bfloat16, torch.float32) or is_wide
    return tensor if is_kept else tensor.float()


def _check_digest(got: str, expected: str) -> None:
    if got != expected:
        what = "the bytes that were imported at first, which recovery needs, of digest"
        raise invalid(FIELD, f"files of digest {got}", f"{what} {expected}")


def _digest(digests: Mapping[str, str]) -> str:
    return digest_bytes("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode())
