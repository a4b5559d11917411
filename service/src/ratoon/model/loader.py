"""Builds a `PolicyModel` on a device from a `ModelSpec`; the same spec gives the same bits of every
parameter."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import Parameter
from transformers import PreTrainedConfig, PreTrainedModel

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.aside import Base
from ratoon.model.attention import register_tree_attention
from ratoon.model.experts import register_grouped_experts
from ratoon.model.families import family_of
from ratoon.model.folder import ModelFolder
from ratoon.model.folder_model import load_folder
from ratoon.model.policy_model import PolicyModel, names_by_layer
from ratoon.model.presets import build_preset
from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.model.value_head import add_value_head, value_head_of
from ratoon.planner.layer_kinds import Attention
from ratoon.shards.layer_shards import RING, LayerShards
from ratoon.shards.parts import NO_MATRICES, Matrices, Part, parts_of, shared_on_node
from ratoon_kernels import BackendUnavailableError, list_backends, select_backend
from ratoon_proto.types import LoraTuning

if TYPE_CHECKING:
    from peft import PeftModel

TORCH_DTYPES = {
    ModelDtype.FLOAT32: torch.float32,
    ModelDtype.BFLOAT16: torch.bfloat16,
    ModelDtype.FLOAT64: torch.float64,
}
# A folder of the hub's cache is called models--OWNER--NAME.
_CACHED = "models--"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostModel:
    """A loaded model on the host. `num_copies` is 2 if its initial weights must stay, for
    `PolicyModel.reference`. `base` is what versions take over from a folder."""

    spec: ModelSpec
    module: PreTrainedModel
    adapter: PeftModel | None
    num_copies: int
    base: Base

    def place(
        self,
        device: torch.device,
        *,
        attention_backend: str = "",
        deterministic: bool = True,
        compile_layers: bool = False,
        rank: int = 0,
        num_sharing: int = 1,
        num_nodes: int = 1,
        matrices: Matrices = NO_MATRICES,
    ) -> PolicyModel:
        """Returns the policy's model on a device. This object gives its module away and cannot be
        used again.

        `attention_backend` is a name of the kernels' registry, "" for the best one.
        `compile_layers` fuses elementwise operations (by torch.compile, on GPUs). If `num_sharing`
        is more than one, each rank keeps only its parts of the decoder layers' weights, and of the
        copy's, cut between `matrices`; each of `num_nodes` has `num_sharing` ranks in a row, which
        have all parts together. Raises UNSUPPORTED if no backend serves the model.
        """
        module, shards, frozen = self.module, None, None
        backend = backend_of_layers(
            module.config,
            attention_backend,
            device,
            TORCH_DTYPES[self.spec.dtype],
            deterministic=deterministic,
        )
        if num_sharing > 1:
            has_copy = self.num_copies > 1
            parts = _shared_parts(module, num_sharing, num_nodes, matrices)
            place = rank % num_sharing
            shards, frozen = _share_out(module, parts, place, device, has_copy=has_copy)
        elif self.num_copies > 1:
            frozen = copy.deepcopy(module)
        return PolicyModel(
            spec=self.spec,
            module=module.to(cast("Any", device)),
            adapter=self.adapter,
            frozen=None if frozen is None else frozen.to(cast("Any", device)),
            attention_backend=backend,
            deterministic=deterministic,
            compile_layers=compile_layers,
            shards=shards,
            base=self.base,
        )


def read_model(
    spec: ModelSpec,
    *,
    keep_reference: bool = False,
    publishes_merged: bool = False,
    models_root: Path | None = None,
) -> HostModel:
    """Build or load the model of `spec`.

    `keep_reference` copies the initial weights (LoRA needs no copy: its reference is the base).
    `publishes_merged`: whether versions are whole models with the adapter merged into them.
    Links in a folder below `models_root` may lead to any place below that root; where it is None, a
    link may not leave the folder.
    Raises INVALID_ARGUMENT (no such preset, unreadable folder, wrong adapter settings) and
    UNSUPPORTED (a model feature or an adapter target that is not served).
    """
    register_tree_attention()
    register_grouped_experts()
    dtype = TORCH_DTYPES[spec.dtype]
    base, is_full = Base(), not isinstance(spec.tuning, LoraTuning)
    if isinstance(spec.base, PresetBase):
        module, name = build_preset(spec.base.name, spec.seed), spec.base.name
        if spec.value_head:
            add_value_head(module, {})
    else:
        folder = ModelFolder.of(Path(spec.base.folder), models_root)
        name = _base_name(folder)
        # The reader of an adapter has its base's files.
        module, base = load_folder(
            folder,
            dtype,
            is_published=is_full or publishes_merged,
            has_value_head=spec.value_head,
        )
    _cast_parameters(module, dtype)
    # Nothing is padded: the padding token is trained like any other.
    cast("Any", module.get_input_embeddings()).padding_idx = None
    adapter = None
    if isinstance(spec.tuning, LoraTuning):
        from ratoon.model.lora import add_adapter, check_merges

        adapter = add_adapter(module, spec.tuning, spec.seed, name)
        if publishes_merged:
            check_merges(module)
        if (head := value_head_of(module)) is not None:
            head.requires_grad_()
    num_copies = 2 if keep_reference and adapter is None else 1
    return HostModel(
        spec=spec,
        module=module,
        adapter=adapter,
        num_copies=num_copies,
        base=base,
    )


def _base_name(folder: ModelFolder) -> str:
    """Name by which a reader of an adapter finds its base: a folder in a cache of the hub's is a
    repository, any other has its place below the models root, where folders may be named so."""
    for part in folder.path.parts:
        if part.startswith(_CACHED):
            return part.removeprefix(_CACHED).replace("--", "/")
    place = folder.path.relative_to(folder.root)
    return str(place) if place.parts else folder.path.name


def placed_bytes(
    module: PreTrainedModel,
    num_sharing: int = 1,
    num_copies: int = 1,
    matrices: Matrices = NO_MATRICES,
    num_nodes: int = 1,
) -> int:
    """Bytes of a module's weights on a device; with `num_sharing` devices on each of `num_nodes`,
    on the fullest.

    If the devices share the layers, this counts its own parts of them, the layers that it reads,
    and everything else.
    """
    total = num_copies * sum(p.nbytes for p in module.parameters())
    if num_sharing == 1:
        return total
    layers = _shared_layers(module)
    sizes = [sum(p.nbytes for p in layer.values()) for layer in layers]
    (itemsize,) = {p.itemsize for layer in layers for p in layer.values()}
    parts = _shared_parts(module, num_sharing, num_nodes, matrices)
    most = max(sum(part.num_elements for part in own) for own in parts) * itemsize
    return total - num_copies * (sum(sizes) - most) + RING * max(sizes)


def _share_out(
    module: PreTrainedModel,
    by_place: Sequence[Sequence[Part]],
    place: int,
    device: torch.device,
    *,
    has_copy: bool,
) -> tuple[LayerShards, PreTrainedModel | None]:
    """Keep only this rank's parts of the decoder layers' weights, and of the copy of `module`, if
    it has one. `place`: this rank's among those of its node."""
    layers, frozen = _shared_layers(module), None
    if has_copy:
        # Memory that nothing touches replaces tensors that must not be copied.
        shared = [p for layer in layers for p in layer.values()]
        memo = {id(p): Parameter(torch.empty_like(p)) for p in shared}
        frozen = copy.deepcopy(module, memo)
    shards = LayerShards(layers, by_place, place, device)
    if frozen is not None:
        shards.add_reference(_shared_layers(frozen))
    return shards, frozen


def _shared_layers(module: PreTrainedModel) -> list[dict[str, Parameter]]:
    """Parameters of each decoder layer that ranks may share, by name, without an adapter's."""
    named = _shareable(module)
    return [{name: named[name] for name in names} for names in names_by_layer(module, named)]


def _shared_parts(
    module: PreTrainedModel, num_sharing: int, num_nodes: int, matrices: Matrices
) -> list[list[Part]]:
    """The parts of the shared parameters that each rank of a node keeps; of those that are trained,
    they include the parts that it steps."""
    shared = {name for layer in _shared_layers(module) for name in layer}
    parts = parts_of(_shareable(module), matrices=matrices)
    return [
        [part for part in own if part.parameter in shared]
        for own in shared_on_node(parts, num_sharing, num_nodes)
    ]


def _shareable(module: PreTrainedModel) -> dict[str, Parameter]:
    """Parameters other than an adapter's; with an adapter nothing else is trained."""
    named = dict(module.named_parameters())
    is_frozen = not all(p.requires_grad for p in named.values())
    return {name: p for name, p in named.items() if not (is_frozen and p.requires_grad)}


def _cast_parameters(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast only parameters. Rotary frequencies are buffers and stay float32, as when transformers
    loads a folder; `module.to(dtype)` would round them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def backend_of_layers(
    config: PreTrainedConfig,
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    deterministic: bool,
) -> str:
    """The best backend that serves the attention of all layers."""
    mixers = {layer.mixer: None for layer in family_of(config).layers(config)}
    of_attention = [status.name for status in list_backends() if status.op == "tree_attention"]
    refusals: dict[str, None] = {}
    for name in [requested] if requested else of_attention:
        try:
            for mixer in mixers:
                if isinstance(mixer, Attention):
                    select_backend(
                        "tree_attention",
                        name,
                        device,
                        dtype,
                        mixer.head_dim,
                        value_dim=mixer.value_size,
                        window=mixer.window,
                        deterministic=deterministic,
                    )
        except BackendUnavailableError as err:
            refusals[str(err)] = None
        else:
            return name
    raise RatoonError(
        ErrorCode.UNSUPPORTED,
        f"attention_backend: {'; '.join(refusals)}",
        field="attention_backend",
        got=requested,
        expected="a backend that is available here",
    )
