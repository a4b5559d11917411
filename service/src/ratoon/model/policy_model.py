"""A policy's network: packed tokens in, final hidden states [T, D] out; the caller computes the
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from ratoon.errors import invalid
from ratoon.model.aside import Base
from ratoon.model.attention import PathAttention, SequenceAttention, TreeAttention
from ratoon.model.families import family_of
from ratoon.model.layers import DecoderLayers
from ratoon.model.lm_head import LmHead
from ratoon.model.router import RouteCounts, RoutedTokens
from ratoon.model.safetensors_files import FUSED_EXPERTS
from ratoon.model.spec import ModelDtype, ModelInfo, ModelSpec
from ratoon.model.streamed_attention import AttentionStream
from ratoon.model.support import foreign_window, longest_sequence
from ratoon.model.value_head import ValueHead, first_values, value_head_of
from ratoon.planner.activation_plan import DecoderSizes, HeadLoad, Kept, fetched_at, max_tokens
from ratoon.planner.layer_kinds import Layer, window_of_layers
from ratoon.planner.stage_plan import HeldTokens, StreamTokens, plan_forward
from ratoon.shards.layer_shards import LayerShards
from ratoon.shards.parts import NO_MATRICES, Matrices
from ratoon.shards.sequence_group import ALONE, SequenceGroup
from ratoon_kernels import TreeLayout
from ratoon_proto.types import AdamWConfig, LoraTuning

if TYPE_CHECKING:
    from peft import PeftModel


class Float64Math(TorchFunctionMode):
    """Within this mode, `x.float()`, `x.to(torch.float32)` and `dtype=torch.float32` mean
    float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **widened)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def decoder_sizes(module: PreTrainedModel) -> DecoderSizes:
    """Sizes of a decoder; call it after adapters are attached and weights are frozen."""
    config = module.config
    head = LmHead.of(cast("Any", module).get_output_embeddings())
    weight = head.weight_VD
    kinds = family_of(config).layers(config)
    layers, known = list[Layer](), dict[tuple[int, int, int], Layer]()
    for kind, own in zip(kinds, cast("Any", module).get_decoder().layers, strict=True):
        factors = [p for name, p in own.named_parameters() if ".lora_A." in name]
        adapter_size = sum(p.shape[0] for p in factors if p.ndim == 2)
        of_experts = sum(p.shape[1] for p in factors if p.ndim == 3) * kind.mlp.experts_per_token
        key = id(kind), adapter_size, of_experts
        adapted = replace(kind, adapter_size=adapter_size, expert_adapter_size=of_experts)
        layers.append(known.setdefault(key, adapted))
    return DecoderSizes(
        layers=tuple(layers),
        hidden_size=cast("Any", config).hidden_size,
        vocab_size=weight.shape[0],
        element_bytes=weight.element_size(),
        head_is_trained=weight.requires_grad,
        head_adapter_size=0 if head.adapter is None else len(head.adapter.a_AD),
    )


class PolicyModel:
    """Owns the torch module of one policy, its adapter and its frozen reference.

    States: `policy` (the trained weights answer) and, within `reference()`, `reference` (the frozen
    ones do). Not thread-safe; one forward at a time.

    Adapters of one shape may take turns (`new_adapter`, `bind`): parameters of the module are
    replaced by others like them, which copies nothing, and lets a compiled layer run on, as it
    depends on shapes alone.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        module: PreTrainedModel,
        adapter: PeftModel | None,
        frozen: PreTrainedModel | None,
        attention_backend: str,
        deterministic: bool,
        compile_layers: bool,
        shards: LayerShards | None = None,
        base: Base = Base(),  # noqa: B008 - it is frozen
    ) -> None:
        """`adapter` wraps `module` in place; `frozen` is a copy of `module` that shares nothing
        with it. `shards` holds the weights of the decoder layers of `module`, then of those of
        `frozen`. `base` is what versions take over from a folder."""
        self.spec = spec
        self.module = module
        self.adapter = adapter
        self.shards = shards
        self.base = base
        self._frozen = frozen
        self._active = module
        self._is_reference = False
        # Where the adapter's parameters are in their modules, and those that are there.
        self._slots = {} if adapter is None else _slots(adapter, self.named_trainable())
        self._first_head = {} if adapter is None else first_values(self.named_trainable())
        decoder = cast("Any", module).get_decoder()
        self._trains_decoder = any(p.requires_grad for p in decoder.parameters())
        self._bound: Mapping[str, Parameter] | None = None
        self._attention_backend = attention_backend
        self.sizes = decoder_sizes(module)
        self._deterministic = deterministic
        module.eval()
        self._layers = self._take_layers(module, is_compiled=compile_layers)
        self.routes = RouteCounts(cast("Any", module).get_decoder().layers)
        if frozen is not None:
            # Its parameters stay as trained ones are, so that both run by the same compiled graphs.
            frozen.eval()
            self._take_layers(frozen, is_compiled=compile_layers, is_frozen=True)
        self._device_bytes: int | None = None
        # Largest planned memory of a forward for its backward; the reader resets it.
        self.planned_bytes = 0
        self._host_bytes = 0
        # Number of tokens as which smaller forwards run, too.
        self._at_least = 0

    @property
    def config(self) -> PreTrainedConfig:
        return self.module.config

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of the layers that have one, for `build_layout`."""
        window = window_of_layers(self.sizes.layers)
        return () if window is None else (window,)

    @property
    def device(self) -> torch.device:
        return self.lm_head_VD.device

    @property
    def lm_head_VD(self) -> Tensor:  # noqa: N802
        """Weight of the logits, [V, D]; the embedding itself if the model ties them."""
        return self.lm_head.weight_VD

    @property
    def lm_head(self) -> LmHead:
        """The head of the weights that answer."""
        return LmHead.of(cast("Any", self._active).get_output_embeddings())

    @property
    def value_head(self) -> ValueHead | None:
        """What gives hidden states a value; None: there is none, or the reference answers."""
        return None if self._is_reference else value_head_of(self.module)

    def forward_hidden(
        self,
        tokens_T: Tensor,
        position_T: Tensor,
        layout: TreeLayout,
        routed: RoutedTokens | None = None,
    ) -> Tensor:
        """Final normed hidden states, [T, D] in the model's dtype.

        `tokens_T` and `position_T` are int64 on the model's device; a position is the token's depth
        on its path. `layout` is that of these T tokens. If gradients are enabled, they flow to the
        parameters, and `routes` count the tokens as `routed` says; None: not at all. Tokens visit
        the recorded experts of `routed`, except in a reference, which routes by itself.
        """
        assert len(tokens_T) == layout.num_tokens, "one token a key"
        return self.attend_hidden(tokens_T, position_T, self._whole(layout), routed)

    def attend_hidden(
        self,
        tokens_T: Tensor,
        position_T: Tensor,
        attention: PathAttention,
        routed: RoutedTokens | None = None,
    ) -> Tensor:
        """Hidden states of any tokens, [T, D]; `attention` knows what each token attends to.

        They have no graph where only an adapter of the LM head is trained.
        """
        assert tokens_T.shape == position_T.shape, "one position a token"
        decoder = cast("Any", self._active).get_decoder()
        if self._is_reference and routed is not None:
            routed = replace(routed, recorded_LTC=None)
        is_trained = torch.is_grad_enabled()
        routing = self.routes.routing(routed, is_counted=is_trained)
        has_graph = is_trained and self._trains_decoder
        with torch.set_grad_enabled(has_graph), self._precision(), routing:
            kept = self._layers.kept = self._plan_activations(attention.held)
            self._layers.fetched_at = None if kept is None else fetched_at(self.sizes, kept)
            output = decoder(
                input_ids=tokens_T[None],
                position_ids=position_T[None],
                use_cache=False,
                ratoon_tree=attention,
                ratoon_at_least=self._at_least,
            )
        return output.last_hidden_state[0]

    def limit_activations(
        self, device_bytes: int | None, *, host_bytes: int = 0, layer_gradient_bytes: int = 0
    ) -> None:
        """Keep no more for a backward than fits into `device_bytes`; None: whatever autograd keeps.

        Activations that do not fit the device and are not recomputed wait in pinned host memory, up
        to `host_bytes`, those of waiting stages first. `layer_gradient_bytes` is as in
        `DecoderSizes`. A forward with gradients raises `RatoonError` RESOURCE_EXHAUSTED if it has
        more tokens than `max_tokens`.
        """
        self._device_bytes, self._host_bytes = device_bytes, host_bytes
        self.sizes = replace(self.sizes, layer_gradient_bytes=layer_gradient_bytes)

    @contextmanager
    def carrying(self, load: HeadLoad) -> Iterator[None]:
        """Within the context, what is kept leaves room for this load of the LM head."""
        sizes = self.sizes
        self.sizes = replace(sizes, load=load)
        try:
            yield
        finally:
            self.sizes = sizes

    @property
    def activation_bytes(self) -> int | None:
        """The device bytes of `limit_activations`."""
        return self._device_bytes

    def max_tokens(self) -> int | None:
        """Most packed tokens of a forward with gradients; None: there is no limit."""
        if self._device_bytes is None:
            return None
        return max_tokens(self.sizes, self._device_bytes, self._host_bytes)

    def open_together(self, layout: TreeLayout, group: SequenceGroup) -> SequenceAttention:
        """Returns attention over a whole forest that several ranks run together, each with its
        share."""
        return SequenceAttention(self._whole(layout), group)

    def open_stream(
        self, layout: TreeLayout, tokens: StreamTokens, group: SequenceGroup = ALONE
    ) -> AttentionStream:
        """Returns attention over a forest whose stages run one after the other, by one or several
        ranks."""
        return AttentionStream(
            layout=layout,
            backend=self._attention_backend,
            deterministic=self._deterministic,
            tokens=tokens,
            group=group,
        )

    def named_trainable(self) -> dict[str, Parameter]:
        """Trained parameters by name, in the module's order; a tied one appears once."""
        return trained_parameters(self.module, self.adapter)

    def new_adapter(self, seed: int) -> dict[str, Parameter]:
        """Fresh adapter parameters for `bind`, those that a model of this seed begins with."""
        from ratoon.model.lora import initialize

        assert self.adapter is not None
        like = self.named_trainable()
        made = {name: Parameter(torch.empty_like(parameter)) for name, parameter in like.items()}
        initialize({name: made[name] for name in made.keys() - self._first_head.keys()}, seed)
        with torch.no_grad():
            for name, first in self._first_head.items():
                made[name].copy_(first)
        return made

    def bind(self, trained: Mapping[str, Parameter]) -> None:
        """Make these the trained parameters: those of `new_adapter`, or a `named_trainable()`.

        Of a model without an adapter there are no others.
        """
        if trained is self._bound:
            return
        for name, (parameters, field) in self._slots.items():
            parameters[field] = trained[name]
        self._bound = trained

    def named_layers(self) -> list[list[str]]:
        """Names in `named_trainable()`, by decoder layer."""
        return names_by_layer(self.module, self.named_trainable())

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the context, forwards and the LM head use the frozen reference, without gradients.

        For LoRA that is the base (the adapter off), else the copy of the initial weights. Raises
        INVALID_ARGUMENT if none was kept.
        """
        if self.adapter is None and self._frozen is None:
            raise invalid("reference", "none", "a policy created with reference base")
        adapter_off = nullcontext() if self.adapter is None else self.adapter.disable_adapter()
        self._active, self._is_reference = self._frozen or self.module, True
        try:
            with torch.no_grad(), adapter_off:
                yield
        finally:
            self._active, self._is_reference = self.module, False

    @contextmanager
    def run_as(self, num_tokens: int) -> Iterator[None]:
        """Within the context, fewer tokens run like `num_tokens`: by the same compiled graphs and
        with the same activation plan, except for stages."""
        self._at_least = num_tokens
        try:
            yield
        finally:
            self._at_least = 0

    def info(self) -> ModelInfo:
        return ModelInfo(
            num_parameters=sum(p.numel() for p in self.module.parameters()),
            num_trainable_parameters=sum(p.numel() for p in self.named_trainable().values()),
            vocab_size=self.lm_head_VD.shape[0],
            max_sequence_tokens=longest_sequence(self.config),
            attention_backend=self._attention_backend,
            route_layers=self.routes.num_layers,
            num_experts=self.sizes.experts.num_experts,
            experts_per_token=self.sizes.experts.experts_per_token,
            sliding_window=foreign_window(self.config) or 0,
            media_tokens=dict(self.base.media_tokens),
        )

    def _precision(self) -> Float64Math | nullcontext[None]:
        return Float64Math() if self.spec.dtype is ModelDtype.FLOAT64 else nullcontext()

    def _plan_activations(self, held: HeldTokens) -> tuple[Kept, ...] | None:
        if self._device_bytes is None or not torch.is_grad_enabled():
            return None
        if held.stream is None:
            held = replace(held, tokens=max(held.tokens, self._at_least))
        sizes = self.sizes.over(held.num_ranks)
        plan = plan_forward(sizes, held, self._device_bytes, self._host_bytes)
        self.planned_bytes = max(self.planned_bytes, plan.peak_bytes)
        return plan.kept

    def _whole(self, layout: TreeLayout) -> TreeAttention:
        return TreeAttention(
            layout=layout,
            backend=self._attention_backend,
            deterministic=self._deterministic,
            windows=self.windows,
        )

    def _take_layers(
        self, module: PreTrainedModel, *, is_compiled: bool, is_frozen: bool = False
    ) -> DecoderLayers:
        tuning = self.spec.tuning
        layers = cast("Any", module).get_decoder().layers
        return DecoderLayers(
            layers,
            wide_features={layer.mlp.dense_size for layer in self.sizes.layers},
            adapter_rank=tuning.rank if isinstance(tuning, LoraTuning) else 0,
            is_compiled=is_compiled,
            precision=self._precision,
            shards=self.shards,
            first_shard=len(layers) if is_frozen else 0,
        )


def trained_parameters(
    module: PreTrainedModel, adapter: PeftModel | None = None
) -> dict[str, Parameter]:
    """Trained parameters by name, in the module's order; those of the adapter, if there is one,
    under its names."""
    owner = module if adapter is None else adapter
    return {name: p for name, p in owner.named_parameters() if p.requires_grad}


def muon_matrices(
    optimizer: AdamWConfig, module: PreTrainedModel, parameters: Mapping[str, Parameter]
) -> Matrices:
    """The matrices of those of `parameters` that Muon steps: weights of products in the decoder
    layers.

    A tensor of all experts has one for each, and `gate_up_proj` two, unless it is transposed.
    """
    if optimizer.muon is None:
        return NO_MATRICES
    found: dict[str, tuple[int, int]] = {}
    for name in (name for layer in names_by_layer(module, parameters) for name in layer):
        shape = parameters[name].shape
        owner, _, leaf = name.rpartition(".")
        projections = FUSED_EXPERTS.get(leaf, ())
        if len(shape) == 2 and leaf == "weight":
            found[name] = (shape[0], shape[1])
        elif len(shape) == 3 and projections:
            is_transposed = getattr(module.get_submodule(owner), "is_transposed", False)
            num_fused = 1 if is_transposed else len(projections)
            found[name] = (shape[1] // num_fused, shape[2])
    return found


def _slots(
    adapter: PeftModel, names: Iterable[str]
) -> dict[str, tuple[dict[str, Parameter | None], str]]:
    """The parameters of the module that has each of these, and its name there."""
    found: dict[str, tuple[dict[str, Parameter | None], str]] = {}
    for name in names:
        owner, _, field = name.rpartition(".")
        found[name] = adapter.get_submodule(owner)._parameters, field
    return found


def names_by_layer(module: PreTrainedModel, parameters: Mapping[str, Parameter]) -> list[list[str]]:
    """Names of the `parameters` of each decoder layer; a layer may have none."""
    layers = cast("Any", module).get_decoder().layers
    owner = {id(p): index for index, layer in enumerate(layers) for p in layer.parameters()}
    found: list[list[str]] = [[] for _ in layers]
    for name, parameter in parameters.items():
        if id(parameter) in owner:
            found[owner[id(parameter)]].append(name)
    return found
