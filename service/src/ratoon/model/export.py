"""Writes a model's weights as a folder that transformers (full) or peft (adapter) loads, and reads
it back.

Equal weights give equal files, byte for byte. An adapter's folder has no tokenizer, because its
reader has the base's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import torch
import xxhash
from torch import Tensor

from ratoon.model.aside import link_earlier
from ratoon.model.compared_copy import (
    Chunk,
    ComparedCopy,
    CopyStreams,
    FileLayout,
    Piece,
    cut_file,
    device_bytes,
)
from ratoon.model.config_words import write_both_words, write_wrapper
from ratoon.model.delta_runs import DeltaPart
from ratoon.model.families import family_of
from ratoon.model.folder_model import quiet_transformers
from ratoon.model.host_memory import host_tensors
from ratoon.model.loader import TORCH_DTYPES
from ratoon.model.policy_model import PolicyModel
from ratoon.model.presets import write_tokenizer
from ratoon.model.safetensors_files import (
    FileContent,
    digest_files,
    plan_files,
    write_files,
    write_index,
)
from ratoon.model.spec import PresetBase
from ratoon.model.support import CONFIG_NAME, wrapper_of
from ratoon.model.value_head import FILE as VALUE_HEAD
from ratoon.model.value_head import NAME as HEAD_NAME
from ratoon.model.value_head import is_of_head

T = TypeVar("T")
_ADAPTER_NAME = "adapter_model.safetensors"

# Elements of a tensor, such as those of norms, that is copied together with others: a GPU takes
# some hundreds of copies before the host has to wait.
_SMALL = 1 << 19


class WeightsCopy:
    """Host copy of a model's trained weights, in memory that the next copy reuses.

    With several ranks, which have the same model, each copies and writes its share of the files.
    `take` runs between two steps, `write` on any thread while later steps run. A GPU copies while
    later work runs, so `settle` must be called before weights change, and `finish` on all ranks
    before any rank's weights do.

    With `is_merged` it is of the whole model, with the adapter merged into it. With `compares` a
    copy finds what differs from the one before, for `write_delta`; merged models are not compared.
    """

    def __init__(
        self,
        model: PolicyModel,
        rank: int = 0,
        num_ranks: int = 1,
        *,
        is_merged: bool = False,
        compares: bool = False,
    ) -> None:
        self._model, self._is_merged = model, is_merged
        self._compares = compares and not is_merged
        self._rank, self._num_ranks = rank, num_ranks
        # Small tensors come first, one after the other.
        self._values: dict[str, Tensor] = {}
        self._small: list[str] = []
        # Whether what an adapter leaves as it is has been copied, which never changes.
        self._has_base = False
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        # The streams of compared copies, on a GPU.
        self._streams = (
            CopyStreams(model.device) if self._compares and self._stream is not None else None
        )
        # Events by file, after which its tensors are on the host.
        self._arrivals: dict[str, torch.cuda.Event] = {}
        # Digests of this rank's weight files: of the values on the host, once they are written, and
        # of those that they were compared with.
        self._digests: dict[str, str] | None = None
        self._before: dict[str, str] | None = None
        self._compared: ComparedCopy | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Copy the values as they are now, cast to the model's dtype.

        Raises RESOURCE_EXHAUSTED if the host has no memory for a first copy.
        """
        if self._compared is not None:
            # Where it failed, nobody has waited for it.
            self._compared.end()
        self._before, self._digests, self._compared = self._digests, None, None
        if self._is_merged:
            self._take_merged()
            return
        if self._compares and self._before is not None:
            self._compared = self._compare()
            return
        trainable, shards = self._model.named_trainable(), self._model.shards
        own = [name for names in self._parameters.values() for name in names]
        if own and not self._values:
            whole = [name for name in own if shards is None or name not in shards]
            self._small = [name for name in whole if trainable[name].numel() < _SMALL]
            shapes = {name: trainable[name].shape for name in (*self._small, *own)}
            self._values = host_tensors(shapes, self._dtype, self._model.device)
        small = {*self._small}
        with self._beside():
            if self._small:
                gathered = torch.cat([trainable[name].reshape(-1) for name in self._small])
                first = self._values[self._small[0]]
                first.as_strided(gathered.shape, (1,)).copy_(gathered, non_blocking=True)
            for file, names in self._parameters.items():
                for name in names:
                    if name in small:
                        continue
                    if shards is not None and name in shards:
                        shards.read(name, self._values[name])
                    else:
                        self._values[name].copy_(trainable[name], non_blocking=True)
                self._arrived(file)

    def _compare(self) -> ComparedCopy:
        shards = self._model.shards
        live = {name: p.detach().view(-1) for name, p in self._model.named_trainable().items()}

        def read(name: str, start: int, stop: int, into: Tensor) -> None:
            if shards is not None and name in shards:
                shards.read(name, into, start)
            else:
                into.copy_(live[name][start:stop])

        return ComparedCopy(self._chunks, read, self._values, self._dtype, self._streams)

    def _take_merged(self) -> None:
        from ratoon.model.lora import merged_weights

        weights, shards = merged_weights(self._model.module), self._model.shards
        own = [name for names in self._parameters.values() for name in names]
        if own and not self._values:
            shapes = {name: weights[name].parameter.shape for name in own}
            self._values = host_tensors(shapes, self._dtype, self._model.device)
        with self._beside():
            for file, names in self._parameters.items():
                for name in names:
                    weight = weights[name]
                    if self._has_base and not weight.is_trained:
                        continue
                    base = weight.parameter
                    if shards is not None and weight.name in shards:
                        base = torch.empty_like(base)
                        shards.read(weight.name, base)
                    weight.write(base, self._values[name])
                self._arrived(file)
        self._has_base = True

    def _arrived(self, file: str) -> None:
        if self._stream is not None:
            self._arrivals[file] = torch.cuda.Event(blocking=True)
            self._arrivals[file].record()

    def finish(self) -> None:
        """Wait until no copy reads from other ranks any more: they may then change their
        weights."""
        if self._stream is not None and self._model.shards is not None:
            self._stream.synchronize()

    def settle(self) -> None:
        """Make later work on this thread's stream of the device wait until everything is copied."""
        if self._compared is not None:
            self._compared.settle()
        if self._stream is not None:
            torch.cuda.current_stream(self._model.device).wait_stream(self._stream)

    @property
    def device_bytes(self) -> int:
        """Most bytes of a GPU that a copy takes beside what is copied."""
        if self._streams is None:
            return 0
        sizes = (
            sum(self._exported[name].num_elements for name in names)
            for names in self._own_files.values()
        )
        return device_bytes(max(sizes, default=0) * self._dtype.itemsize)

    def write(self, folder: Path) -> dict[str, str]:
        """Write this rank's files of the last copied values over the existing ones; rank 0 also
        writes the other files.

        Returns the digests of the weight files by name.
        """
        for file in self._content:
            (folder / file).parent.mkdir(exist_ok=True)
        num_writers = self._model.sizes.num_on_host
        self._digests = write_files(folder, self._content, self._wait, num_writers, self._digests)
        return self._digests if self._rank else self._digests | self.write_rest(folder)

    def write_rest(self, folder: Path) -> dict[str, str]:
        """Write, or link those of an earlier version, the files without trained weights; returns
        the digests of weight files among them."""
        for name, content in self._rest.items():
            if not link_earlier(folder, name, xxhash.xxh3_128_hexdigest(content)):
                (folder / name).write_bytes(content)
        aside = self._model.base.aside
        if aside is None:
            return {}
        *_, last = self._files
        return {last: aside.publish(folder, last)}

    def write_delta(
        self, path: Path, parents: Mapping[str, str]
    ) -> tuple[DeltaPart, dict[str, str]] | None:
        """Write to a new file what makes this rank's files of the last copied values out of those
        of a parent, whose digests by name are `parents`.

        Returns it with the digests of these files by name, which need not be written yet. Returns
        None, and writes nothing, if the values were not compared with exactly the parent's.
        """
        if self._compared is None or self._before is None:
            return None
        if not self._before.items() <= parents.items():
            return None
        with ThreadPoolExecutor(1) as beside:
            digesting = beside.submit(digest_files, self._content, self._wait)
            part = self._compared.write(path)
            self._digests = digesting.result()
        return None if part is None else (part, self._digests)

    def _wait(self, file: str, num_bytes: int | None = None) -> None:
        """Wait until the host has the first bytes of a file's tensors, or more; None: all."""
        if self._compared is not None:
            self._compared.wait(file, num_bytes)
        elif self._stream is not None:
            self._arrivals[file].synchronize()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Within the context, copies begin once earlier work of the device is done; later work does
        not wait for them."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
        with torch.cuda.stream(self._stream):
            yield

    @cached_property
    def _files(self) -> dict[str, list[str]]:
        return _planned_files(self._model, is_merged=self._is_merged)

    # The content's layout is the same for each version, so it is made once: a model of many experts
    # has tens of thousands of tensors to name.
    @cached_property
    def _content(self) -> dict[str, FileContent]:
        tensors = exported_values(self._model, self._values, is_merged=self._is_merged)
        return {
            file: FileContent.of({name: tensors[name] for name in names})
            for file, names in self._own_files.items()
        }

    @cached_property
    def _chunks(self) -> list[Chunk]:
        """The chunks of this rank's files, by name."""
        tensors = self._exported
        chunks: list[Chunk] = []
        for file, names in sorted(self._own_files.items()):
            pieces: list[Piece] = []
            place = 0
            for name in sorted(names):
                tensor = tensors[name]
                stop = tensor.start + tensor.num_elements
                pieces.append(
                    Piece(parameter=tensor.parameter, start=tensor.start, stop=stop, place=place)
                )
                place += tensor.num_elements
            start = len(self._content[file].header)
            layout = FileLayout(name=file, start=start, pieces=tuple(pieces))
            chunks += cut_file(layout, self._dtype)
        return chunks

    @cached_property
    def _rest(self) -> dict[str, bytes]:
        return _rest_of(self._model, self._files, is_merged=self._is_merged)

    @cached_property
    def _own_files(self) -> dict[str, list[str]]:
        """This rank's files in the order in which they are written, the largest first."""
        like = exported_like(self._model, is_merged=self._is_merged)
        trained = {file: names for file, names in self._files.items() if like.keys() >= {*names}}
        sizes = [sum(like[name].nbytes for name in names) for names in trained.values()]
        owners = _owners(sizes, self._num_ranks)
        files = zip(sizes, owners, trained.items(), strict=True)
        own = [(size, file) for size, owner, file in files if owner == self._rank]
        return dict(file for _, file in sorted(own, key=lambda each: -each[0]))

    @cached_property
    def _exported(self) -> dict[str, ExportedTensor]:
        return exported_tensors(self._model, is_merged=self._is_merged)

    @property
    def _dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self._model.spec.dtype]

    @cached_property
    def _parameters(self) -> dict[str, list[str]]:
        """Parameters in files of this rank, even if only in part, by the first such file."""
        tensors = self._exported
        found = dict[str, str]()
        for file, names in self._own_files.items():
            for name in names:
                found.setdefault(tensors[name].parameter, file)
        by_file: dict[str, list[str]] = {file: [] for file in self._own_files}
        for parameter, file in found.items():
            by_file[file].append(parameter)
        return by_file


def export_weights(model: PolicyModel, folder: Path, *, is_merged: bool = False) -> dict[str, str]:
    """Write the current weights to `folder`, overwriting its weight files, if any.

    `is_merged`: those of the whole model, with the adapter merged into it. Returns the digests of
    the weight files by name.
    """
    copy = WeightsCopy(model, is_merged=is_merged)
    copy.take()
    return copy.write(folder)


def _planned_files(model: PolicyModel, *, is_merged: bool) -> dict[str, list[str]]:
    """The names of exported tensors by file."""
    like, aside = exported_like(model, is_merged=is_merged), model.base.aside
    of_head = {VALUE_HEAD: names} if (names := sorted(filter(is_of_head, like))) else {}
    like = _without_head(like)
    if model.adapter is not None and not is_merged:
        return {**of_head, _ADAPTER_NAME: sorted(like)}
    return {**of_head, **plan_files(like, sorted(aside.digests) if aside else ())}


def _without_head(names: Mapping[str, T]) -> dict[str, T]:
    """What is of a model that has no value head, by the names of tensors."""
    return {name: each for name, each in names.items() if not is_of_head(name)}


def _owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Assigns a rank to each file, in file order, by the position of its middle byte. A single file
    belongs to rank 0."""
    if len(sizes) == 1:
        return [0]
    total, before = sum(sizes), accumulate(sizes, initial=0)
    # The total is one byte larger, so that an empty file at the end has a rank.
    middles = ((2 * start + size) for start, size in zip(before, sizes, strict=False))
    return [middle * num_ranks // (2 * total + 1) for middle in middles]


def _rest_of(
    model: PolicyModel, files: Mapping[str, Sequence[str]], *, is_merged: bool
) -> dict[str, bytes]:
    """Configuration and tokenizer, and the index of several weight files, by name."""
    with TemporaryDirectory() as aside:
        folder = Path(aside)
        if model.adapter is not None and not is_merged:
            from ratoon.model.lora import export_config

            is_wrapped = model.base.names.form is not None
            export_config(model.adapter, folder, is_wrapped=is_wrapped)
        else:
            with quiet_transformers():
                cast("Any", model.module).save_pretrained(folder, state_dict={})
            said = json.loads(model.base.files.get(CONFIG_NAME, "{}"))
            if wrapper_of(said):
                write_wrapper(folder / CONFIG_NAME, said)
            else:
                write_both_words(folder / CONFIG_NAME, said, model.config)
            files = {name: each for name, each in files.items() if name != VALUE_HEAD}
            if len(files) > 1:
                aside = model.base.aside
                others = (aside.num_elements, aside.num_bytes) if aside else (0, 0)
                like = _without_head(exported_like(model, is_merged=is_merged))
                write_index(folder, files, like, others)
            if isinstance(model.spec.base, PresetBase):
                write_tokenizer(folder)
        taken_over = {name: each for name, each in model.base.files.items() if name != CONFIG_NAME}
        # The folder's own generation_config.json, and not that of transformers.
        return {path.name: path.read_bytes() for path in folder.iterdir()} | taken_over


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """A tensor of exported weights: `num_elements` of the flat `parameter`, from `start` on."""

    parameter: str
    start: int
    num_elements: int


def exported_tensors(model: PolicyModel, *, is_merged: bool = False) -> dict[str, ExportedTensor]:
    """Tensors that `export_weights` writes, by name: several for a fused parameter."""
    found: dict[str, ExportedTensor] = {}
    for name, tensor in _on_meta(model, is_merged=is_merged).items():
        for exported, part in exported_values(model, {name: tensor}, is_merged=is_merged).items():
            assert part.is_contiguous()
            start = int(part.storage_offset())
            found[exported] = ExportedTensor(parameter=name, start=start, num_elements=part.numel())
    return found


def exported_values(
    model: PolicyModel, values: dict[str, Tensor], *, is_merged: bool = False
) -> dict[str, Tensor]:
    """Values of parameters, all or some, by the names and in the shapes of an export.

    They are those that are trained or, with `is_merged`, those of the whole model. All are the
    values themselves or, for fused experts, dense views of them.
    """
    names = model.base.names
    if model.adapter is None or is_merged:
        own = values if names.is_fused else family_of(model.config).exported(values)
        return {names.there(name): value for name, value in own.items()}
    parted = _part_adapters(_without_head(values))
    adapted = {names.adapted(name): value for name, value in parted.items()}
    of_head = {name: value for name, value in values.items() if is_of_head(name)}
    return adapted | {name[name.index(HEAD_NAME) :]: value for name, value in of_head.items()}


def _own_values(model: PolicyModel, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of trained parameters by the decoder's own names, as finely parted as any export."""
    if model.adapter is not None:
        return exported_values(model, values)
    return family_of(model.config).exported(values)


def _part_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of peft's files: without the adapter's own name, and one for each
    expert."""
    parted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            # Factors of an embedding are parameters of the name alone.
            parted[name.replace(".default.", ".").removesuffix(".default")] = tensor
            continue
        experts, _, factor = name.rpartition(".experts.")
        for expert, rows in enumerate(tensor.unbind()):
            parted[f"{experts}.experts.{expert}.{factor}"] = rows
    return parted


def exported_like(model: PolicyModel, *, is_merged: bool = False) -> dict[str, Tensor]:
    """Names and shapes of all that `export_weights` writes, on the meta device."""
    like = _on_meta(model, is_merged=is_merged)
    return exported_values(model, like, is_merged=is_merged)


def importable_like(model: PolicyModel) -> dict[str, Tensor]:
    """Names and shapes of what `imported_values` takes, on the meta device."""
    return _own_values(model, _on_meta(model))


def imported_values(model: PolicyModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `tensors`, named and shaped as `importable_like`, by the names of
    `named_trainable()`.

    The result is on the CPU, with the same bits; a fused parameter is as wide as the widest of its
    parts.
    """
    return {name: _imported(model, name, like, tensors) for name, like in _on_meta(model).items()}


def _imported(model: PolicyModel, name: str, like: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    parts = [tensors[part] for part in _own_values(model, {name: like})]
    if len(parts) == 1 and parts[0].shape == like.shape:
        return parts[0]
    dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
    fused = torch.empty(like.shape, dtype=dtype)
    # An exported tensor is a view of its parameter.
    views = _own_values(model, {name: fused}).values()
    for view, part in zip(views, parts, strict=True):
        view.copy_(part)
    return fused


def _on_meta(model: PolicyModel, *, is_merged: bool = False) -> dict[str, Tensor]:
    parameters: Mapping[str, Tensor] = model.named_trainable()
    if is_merged:
        from ratoon.model.lora import merged_weights

        parameters = {n: each.parameter for n, each in merged_weights(model.module).items()}
    return {name: p.detach().to("meta") for name, p in parameters.items()}
