"""Low-rank adapters (Hu et al., 2021, arXiv:2106.09685) on the linear maps of a decoder, by peft.

Only this module needs peft: others import it late, so that workers without adapters do not load it.

A is random from (seed, name) and B is zero, so a new adapter changes nothing. Adapters have the
dtype of the base; the optimizer keeps its masters in float32. Each routed expert has its own
factors for each projection: a row x of expert e has scale * B_e A_e x added to its product, by the
grouped products of the experts themselves. The factors of all experts are one parameter: A
[E, r, D], B [E, F, r].

An adapter of the embedding, A [r, V] and B [D, r], adds scale * B a_t to that of token t; there A
is zero at first, and B random. That of the LM head is read by `lm_head`, which never runs peft's
layer. Where the two weights are tied, each adapter is of its own use of the weight, as peft has it.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from ratoon.errors import invalid, shown, unsupported
from ratoon.model.experts import grouped_experts, grouped_linear
from ratoon.model.families import family_of
from ratoon.model.folder import ModelFolder, file_field
from ratoon.model.presets import tensor_generator
from ratoon_kernels.precision import accumulation_dtype
from ratoon_proto.types import LoraTuning

CONFIG_NAME = "adapter_config.json"
# Fields that LoRA had in the first peft; an adapter here sets no others.
_EARLY_FIELDS = (
    "base_model_name_or_path",
    "bias",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "target_modules",
    "task_type",
)
_MAX_CONFIG_BYTES = 2**20
# Fields of the configuration that decide a term's scale, and those that say which linear maps have
# one: the tensors do so, too.
_SCALE = ("r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora")
_PLACES = ("target_modules", "layers_to_transform", "layers_pattern", "exclude_modules")
# Fields that change no term of an adapter whose values are there.
_NEUTRAL = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "revision"),
    *("peft_version", "task_type", "megatron_config", "megatron_core", "eva_config"),
)
# First values that leave the base as it is. Others (PiSSA, OLoRA, CorDA) take them out of it.
_OF_THE_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
_MLP = ("gate_proj", "up_proj", "down_proj")
# Name by which peft finds the experts.
_EXPERTS = "experts"
# Embedding and LM head, which are adapted only by name.
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
# Elements of a weight that an adapter is merged into at once.
_BLOCK_ELEMENTS = 2**24
# An adapter's term is scaled by alpha / rank, which must neither round to zero nor be unbounded.
MIN_ALPHA, MAX_ALPHA = 2.0**-20, 2.0**20


class LoraExperts(nn.Module, BaseTunerLayer):
    """Replaces experts of transformers, whose parameters stay unchanged in `base_layer`.

    States: adapted and, while peft has adapters disabled, only the base.
    """

    def __init__(
        self, base_layer: nn.Module, _adapter: str, *, r: int, scale: float, **_: Any
    ) -> None:
        """Signature that peft calls, but for `scale`; the factors have the base's dtype and device,
        and no values."""
        super().__init__()
        self.base_layer = base_layer
        # The attribute belongs to the instance: if peft set the class's, a compiled layer would be
        # compiled again.
        self._disable_adapters = False
        down_EDF = cast("Tensor", base_layer.down_proj)
        _num_experts, hidden, features = down_EDF.shape
        self.gate_proj = _Adapter(down_EDF, hidden, features, r, scale)
        self.up_proj = _Adapter(down_EDF, hidden, features, r, scale)
        self.down_proj = _Adapter(down_EDF, features, hidden, r, scale)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, D], experts [T, C] and their weights [T, C] -> [T, D]."""
        adapters = None if self.disable_adapters else (self.gate_proj, self.up_proj, self.down_proj)
        return grouped_experts(self.base_layer, hidden_states, top_k_index, top_k_weights, adapters)


class _Adapter(nn.Module):
    def __init__(self, like: Tensor, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        num_experts = like.shape[0]
        self.lora_A = _GroupedLinear(like.new_empty(num_experts, rank, inputs))
        self.lora_B = _GroupedLinear(like.new_empty(num_experts, outputs, rank))
        self.scale = scale

    def forward(self, y_SF: Tensor, x_SD: Tensor, stop_E: Tensor) -> Tensor:
        # The scale multiplies where rows are narrowest.
        return y_SF + self.lora_B(self.scale * self.lora_A(x_SD, stop_E), stop_E)


class _GroupedLinear(nn.Module):
    def __init__(self, weight_EFD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_EFD)

    def forward(self, x_SD: Tensor, stop_E: Tensor) -> Tensor:
        return grouped_linear(x_SD, self.weight, stop_E)


def add_adapter(module: PreTrainedModel, tuning: LoraTuning, seed: int, name: str) -> PeftModel:
    """Put a fresh adapter on `module`, in place; `name` is the adapter's name for its base.

    Raises what `attach_adapter` raises.
    """
    model = attach_adapter(module, tuning, name)
    initialize({name: p for name, p in model.named_parameters() if p.requires_grad}, seed)
    return model


def attach_adapter(module: PreTrainedModel, tuning: LoraTuning, name: str) -> PeftModel:
    """Attach an adapter without values.

    Raises INVALID_ARGUMENT for an alpha out of range, and for a rank above the smallest dimension
    of the adapted matrices, beyond which an adapter adds nothing. Raises UNSUPPORTED for a target
    module that is not a projection of attention, MLP or experts, the embedding or the LM head (a
    router, say), for a subset of the projections of experts, and for missing targets if the model
    has dense layers beside experts.
    """
    if not MIN_ALPHA <= tuning.alpha <= MAX_ALPHA:
        expected = f"a number in [{MIN_ALPHA:g}, {MAX_ALPHA:g}]"
        raise invalid("tuning.lora.alpha", tuning.alpha, expected)
    targets = _resolve_targets(module, tuning.target_modules)
    if _has_experts(module) and not targets.isdisjoint(_MLP):
        targets = targets - {*_MLP} | {_EXPERTS}
    smallest = _smallest_dimension(module, targets)
    if not 1 <= tuning.rank <= smallest:
        expected = f"in [1, {smallest}], the smallest dimension of what is adapted"
        raise invalid("tuning.lora.rank", tuning.rank, expected)
    experts = family_of(module.config).experts
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=tuning.rank,
        lora_alpha=cast("int", tuning.alpha),
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(targets),
        init_lora_weights=False,
        use_rslora=tuning.use_rslora,
    )
    if experts is not None:
        # As peft scales the terms of linear maps.
        divisor = math.sqrt(tuning.rank) if tuning.use_rslora else tuning.rank
        made = partial(LoraExperts, scale=tuning.alpha / divisor)
        config._register_custom_module({experts: cast("Any", made)})
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # It warns that tied weights have adapters apart, as they are to have here.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        model = get_peft_model(cast("Any", module), config, autocast_adapter_dtype=False)
    assert isinstance(model, PeftModel)
    config.base_model_name_or_path = name
    return model


def check_merges(module: PreTrainedModel) -> None:
    """Raises UNSUPPORTED where an adapter is no change of the weights of a folder: where embedding
    and LM head are one weight, and either is adapted."""
    model = cast("Any", module)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    if module.config.tie_word_embeddings and any(isinstance(x, BaseTunerLayer) for x in layers):
        raise unsupported(
            "spec.publish.merged",
            f"true, with an adapter of {_EMBEDDING} or {_HEAD}, which are one weight",
            "false: an adapter's folder has the adapter of each",
        )


def base_tensors(adapter: PeftModel) -> dict[str, nn.Parameter]:
    """Weights of the base that peft saves beside an adapter, by their names among its tensors:
    those of the embedding and the LM head, where they are adapted."""
    layers = (adapter.get_input_embeddings(), adapter.get_output_embeddings())
    adapted = {id(x.weight) for x in layers if isinstance(x, BaseTunerLayer)}
    named = adapter.named_parameters(remove_duplicate=False)
    return {name: p for name, p in named if id(p) in adapted and ".base_layer." in name}


def check_adapter_config(adapter: PeftModel, folder: ModelFolder) -> tuple[str, ...]:
    """Check that an adapter folder's values mean there what they mean here.

    Returns the names, or ends of names, of linear maps that the folder must have factors of, as far
    as its configuration lists them. Raises INVALID_ARGUMENT for another rank or scale, and if
    adapter_config.json is unreadable; UNSUPPORTED for a field that makes the adapter another
    function (`use_dora`, say), and for values that belong to a changed base.
    """
    given = folder.read_object(CONFIG_NAME, _MAX_CONFIG_BYTES)
    config = adapter.peft_config["default"].to_dict()
    for name in (*_SCALE, *sorted(given.keys() - {*_SCALE, *_PLACES, *_NEUTRAL})):
        value, own = given.get(name), config.get(name)
        field = f"{file_field(CONFIG_NAME)}: {name}"
        if name == "init_lora_weights":
            if value not in _OF_THE_BASE:
                expected = "values for the base as it is: save them converted to LoRA"
                raise unsupported(field, shown(value), expected)
        elif (value or None) != (own or None):
            refusal = invalid if name in _SCALE else unsupported
            raise refusal(field, shown(value), f"{own}")
    targets = given.get("target_modules")
    if not isinstance(targets, list) or any(given.get(name) for name in _PLACES[1:]):
        return ()
    return tuple(str(target) for target in cast("list[object]", targets))


def covered(
    expected: Mapping[str, Tensor], found: Collection[str], targets: tuple[str, ...]
) -> dict[str, Tensor]:
    """The part of an adapter's `expected` tensors that a folder with those of `found` must have.

    An adapter may be of some of the linear maps: of those it has both factors. What it lacks stays
    in the part where it has the other factor, where `targets` name the map, or if it has none.
    """
    maps = {name: name.rpartition(".lora_")[0] for name in expected}
    there, listed = {maps[name] for name in found if name in maps}, {*targets}
    for each in {*maps.values()}:
        parts = each.split(".")
        if any(".".join(parts[start:]) in listed for start in range(len(parts))):
            there.add(each)
    return {name: like for name, like in expected.items() if maps[name] in there} or {**expected}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedWeight:
    """A weight of the base, and what the adapter adds to it.

    `name`: of its parameter in the adapted module. `adapted`: the module that adapts it; None: the
    adapter leaves it as it is.
    """

    name: str
    parameter: nn.Parameter
    adapted: nn.Module | None

    @property
    def is_trained(self) -> bool:
        """Whether it changes: by its adapter or, of a value head, itself."""
        return self.adapted is not None or self.parameter.requires_grad

    @torch.no_grad()
    def write(self, base: Tensor, into: Tensor) -> None:
        """Write the base's values or, where it is adapted, W + scale * B A: computed in float32, or
        float64 for that dtype, and rounded once.

        `into`: of the shape and dtype of `base`, on the host or its device. Blocks of rows take the
        little memory of the device that activations leave.
        """
        if self.adapted is None:
            into.copy_(base, non_blocking=True)
            return
        wide, shape = accumulation_dtype(base.dtype), (-1, *base.shape[-2:])
        whole_EFD, into_EFD, first = base.view(shape), into.view(shape), 0
        for a_ERD, b_EFR, scale in self._factors():
            (num_experts, num_rows, _), width = b_EFR.shape, a_ERD.shape[2]
            for experts, rows in _blocks(num_experts, num_rows, width):
                own = slice(first + rows.start, first + rows.stop)
                base_EFD, b, a = whole_EFD[experts, own], b_EFR[experts, rows], a_ERD[experts]
                sums = torch.baddbmm(base_EFD.to(wide), b.to(wide), a.to(wide), alpha=scale)
                into_EFD[experts, own].copy_(sums.to(base.dtype), non_blocking=True)
            first += num_rows

    def _factors(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        """A [E, R, D], B [E, F, R] and the scale of the next F rows of the weight; E is 1 for a
        linear map."""
        adapted = cast("Any", self.adapted)
        if not isinstance(adapted, LoraExperts):
            if adapted.lora_embedding_A:
                # The weight has a row for each token, which A has.
                a, b = adapted.lora_embedding_B["default"].T, adapted.lora_embedding_A["default"].T
            else:
                a, b = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
            yield a[None], b[None], adapted.scaling["default"]
            return
        fused = [adapted.gate_proj, adapted.up_proj]
        for each in fused if self.name.endswith("gate_up_proj") else [adapted.down_proj]:
            yield each.lora_A.weight, each.lora_B.weight, each.scale


def _blocks(num_experts: int, num_rows: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Experts and rows of blocks of [E, F, D] with `_BLOCK_ELEMENTS` at most, or one row."""
    rows_each = min(num_rows, max(1, _BLOCK_ELEMENTS // width))
    experts_each = max(1, _BLOCK_ELEMENTS // (rows_each * width))
    for expert in range(0, num_experts, experts_each):
        for row in range(0, num_rows, rows_each):
            yield slice(expert, expert + experts_each), slice(row, min(row + rows_each, num_rows))


def merged_weights(module: PreTrainedModel) -> dict[str, MergedWeight]:
    """Weights of an adapted module by the names that they have without an adapter."""
    found: dict[str, MergedWeight] = {}
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            continue
        owner, inner, field = name.rpartition(".base_layer.")
        adapted = module.get_submodule(owner) if inner and field != "bias" else None
        own = name.replace(".base_layer.", ".")
        found[own] = MergedWeight(name=name, parameter=parameter, adapted=adapted)
    return found


def export_config(adapter: PeftModel, folder: Path, *, is_wrapped: bool = False) -> None:
    """Write an adapter's configuration with only the fields that every peft knows.

    Earlier versions of peft fail on fields of later ones, which have their defaults here but for
    `use_rslora`.
    `is_wrapped`: the base's folder has a tower, whose linear maps may have the same names.
    """
    config = adapter.peft_config["default"]
    fields = {name: value for name, value in config.to_dict().items() if name in _EARLY_FIELDS}
    if cast("LoraConfig", config).use_rslora:
        fields["use_rslora"] = True
    targets: set[str] = {*fields["target_modules"]}
    if _EXPERTS in targets:
        # The file names the experts' projections like those of an MLP.
        targets = targets - {_EXPERTS} | {*_MLP}
    # peft keeps a set, whose order differs between processes, but equal weights must give equal
    # files.
    fields |= {"inference_mode": True, "target_modules": sorted(targets)}
    if is_wrapped:
        maps = "|".join(sorted(targets - {_EMBEDDING, _HEAD}))
        of_layers = [rf".*\.language_model\..*\.({maps})"] if maps else []
        outside = {_EMBEDDING: rf".*\.language_model\.{_EMBEDDING}", _HEAD: _HEAD}
        others = [each for name, each in outside.items() if name in targets]
        fields["target_modules"] = "|".join([*of_layers, *others])
    text = json.dumps(fields, indent=2, sort_keys=True)
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def _resolve_targets(module: PreTrainedModel, requested: tuple[str, ...]) -> set[str]:
    """Names of the projections to adapt; by default all of attention and of the MLP or the experts.

    Experts are adapted whole, because vLLM takes no adapter for some of their projections. Dense
    MLPs beside them, in layers of their own or shared by all tokens, stay as they are: by one name
    peft reads factors of experts or of these, not of both. So what is adapted is named there.
    """
    family = family_of(module.config)
    linear = {n.rsplit(".", 1)[-1] for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    of_experts = {*_MLP} if _has_experts(module) else set[str]()
    named = linear | of_experts if family.adapts_experts else linear - of_experts
    available = named.intersection((*family.adapted, *_MLP))
    shown_names = ", ".join(sorted(available))
    if not requested and (of_experts & linear or not of_experts <= named):
        raise unsupported(
            "tuning.lora.target_modules",
            "all, of a model whose experts, or dense MLPs beside them, no adapter reaches",
            f"projections by name, of {shown_names}",
        )
    for index, target in enumerate(requested):
        if target not in {*available, _EMBEDDING, _HEAD}:
            field = f"tuning.lora.target_modules[{index}]"
            raise unsupported(field, target, f"one of {shown_names}, {_EMBEDDING}, {_HEAD}")
    part = of_experts.intersection(requested)
    if part and part != of_experts:
        raise unsupported(
            "tuning.lora.target_modules",
            f"{', '.join(sorted(part))} alone of the projections of experts",
            f"all of {', '.join(_MLP)}, or none of them",
        )
    return {*requested} or available


def _smallest_dimension(module: PreTrainedModel, targets: set[str]) -> int:
    """Smallest dimension of the linear maps, embedding and experts with these names."""
    shapes = [
        each.weight.shape
        for name, each in module.named_modules()
        if isinstance(each, nn.Linear | nn.Embedding) and name.rsplit(".", 1)[-1] in targets
    ]
    if _EXPERTS in targets:
        shapes += [cast("Tensor", each.down_proj).shape[1:] for each in _experts(module)]
    return min(min(shape) for shape in shapes)


def _has_experts(module: PreTrainedModel) -> bool:
    return any(True for _ in _experts(module))


def _experts(module: PreTrainedModel) -> Iterator[nn.Module]:
    """Routed experts of each layer that has them."""
    experts = family_of(module.config).experts
    return (each for each in module.modules() if experts and isinstance(each, experts))


@torch.no_grad()
def initialize(adapter: Mapping[str, Tensor], seed: int) -> None:
    """Make A uniform on +-1/sqrt(fan in), and B zero; of the embedding A zero, and B normal.

    `adapter`: parameters by name.
    """
    for name, parameter in adapter.items():
        if ".lora_B." in name or ".lora_embedding_A." in name:
            parameter.zero_()
            continue
        generator = tensor_generator(seed, name)
        if ".lora_embedding_B." in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            continue
        assert ".lora_A." in name, name
        bound = 1 / math.sqrt(parameter.shape[-1])
        uniform = torch.rand(parameter.shape, generator=generator)
        parameter.copy_((2 * uniform - 1) * bound)
