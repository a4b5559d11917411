"""A model with random weights, the ways to attend in it, and steps over its micro-batches.

Ways differ only in the backend of tree attention and in whether prefixes are shared: module,
weights, compilation, activation plan, loss head and gradients are the same. The service's own
planner decides what layers keep for the backward; its refusals are raised before anything runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.step import varlen as step_varlen
from benchmarks.step.workload import AnySize, FamilySize, ModelSize, RoutedSize, SeededBatch
from ratoon.model.attention import ATTENTION_NAME, TreeAttention, register_tree_attention
from ratoon.model.experts import EXPERTS_NAME, register_grouped_experts
from ratoon.model.families import family_of
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.planner.activation_plan import Kept
from ratoon.planner.stage_plan import ForwardPlan, HeldTokens, least_plan, plan_forward
from ratoon.train.clock import DeviceClock
from ratoon.train.loss.compute import LossGradients
from ratoon.train.loss.sums import pack_sums
from ratoon.train.micro_batches import DeviceBatch, put_index
from ratoon.train.numerics import activation_bytes
from ratoon.train.passes import train_rows
from ratoon.train.staged_batch import StagedBatch
from ratoon_proto.types import FullTuning

REPLICATED = "-replicated"
STREAMED = "-waves-of-"
MAX_RECOMPILES = 64
_PLANS = "_plan_activations"
LayerCalls = list[Callable[..., Any]]
_COMPARED = re.compile(
    r"layers\.(\d+)\.((self_attn\.[qv]_proj|mlp\.down_proj)\.weight|mlp\.experts\.down_proj)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A row of a table: a backend of tree attention, over packed or replicated rollouts.

    With `wave` > 0, packed rollouts are streamed, that many responses at a time. `recurrence` names
    the library that runs recurrences, level by level; empty: ours does.
    """

    backend: str
    is_packed: bool
    wave: int = 0
    recurrence: str = ""

    @property
    def how(self) -> str:
        """The way's name in a result."""
        streamed = f"{STREAMED}{self.wave}" if self.wave else ""
        library = f"+{self.recurrence}" if self.recurrence else ""
        return self.backend + library + ("" if self.is_packed else REPLICATED) + streamed


def build_module(
    size: AnySize, device: torch.device, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """Makes a model with random weights on the device; the global random state stays unchanged."""
    register_tree_attention()
    register_grouped_experts()
    config = size.config if isinstance(size, FamilySize) else _config(size)
    family = family_of(config)
    if isinstance(size, FamilySize) and family.experts is not None:
        config._experts_implementation = EXPERTS_NAME
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        module = cast("Any", AutoModelForCausalLM).from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    if family.experts is None or config._experts_implementation == EXPERTS_NAME:
        family.prepare(module)
    return cast("PreTrainedModel", module)


def _config(size: ModelSize) -> PreTrainedConfig:
    settings: dict[str, Any] = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 2**21,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": size.ties_embeddings,
        "attention_dropout": 0.0,
    }
    if not isinstance(size, RoutedSize):
        return Qwen3Config(intermediate_size=size.intermediate_size, **settings)
    settings["experts_implementation"] = size.implementation
    return Qwen3MoeConfig(
        moe_intermediate_size=size.intermediate_size // size.experts_per_token,
        num_experts=size.num_experts,
        num_experts_per_tok=size.experts_per_token,
        norm_topk_prob=True,
        **settings,
    )


def open_policy(
    module: PreTrainedModel, way: Way, frozen: PreTrainedModel | None = None
) -> PolicyModel:
    """The service's own model around `module`; `frozen` is used inside `reference()`.

    It replaces the layers' `forward`, see `layer_calls`.
    """
    weight = next(module.parameters())
    is_gpu = weight.device.type == "cuda"
    if is_gpu:
        # This happens before anything is compiled, because compiled code is for one table of
        # backends.
        step_varlen.install()
        # Each variant compiles its own layers, and all of them stay.
        cast("Any", torch)._dynamo.config.recompile_limit = MAX_RECOMPILES
    spec = ModelSpec(
        base=PresetBase(name="benchmark"),
        tuning=FullTuning(),
        dtype=ModelDtype(str(weight.dtype).removeprefix("torch.")),
        seed=0,
    )
    return PolicyModel(
        spec=spec,
        module=module,
        adapter=None,
        frozen=frozen,
        attention_backend=way.backend,
        deterministic=False,
        compile_layers=is_gpu,
    )


def layer_calls(module: PreTrainedModel) -> LayerCalls:
    """The layers' present `forward`s: those of the policy that was opened last."""
    return [layer.forward for layer in cast("Any", module).get_decoder().layers]


def restore_calls(module: PreTrainedModel, calls: LayerCalls) -> None:
    """Gives the layers back to the policy that these calls belong to."""
    for layer, call in zip(cast("Any", module).get_decoder().layers, calls, strict=True):
        layer.forward = call


def run_step(
    policy: PolicyModel, batches: Sequence[SeededBatch], *, gradients_stay: bool = False
) -> list[Tensor]:
    """Forward and backward of every micro-batch, accumulating gradients.

    Args:
        policy: Its present gradients are dropped.
        batches: The micro-batches.
        gradients_stay: Allocate all gradients up front, as zeros, as the service does; otherwise
            the first backward allocates each.

    Returns:
        Per micro-batch, the log-prob of each term.
    """
    policy.module.zero_grad(set_to_none=not gradients_stay)
    if gradients_stay:
        for parameter in policy.named_trainable().values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return [_run_streamed(policy, b) if b.stages else _run_at_once(policy, b) for b in batches]


def _run_at_once(policy: PolicyModel, seeded: SeededBatch) -> Tensor:
    loss = _SeededLoss(seeded.weight_L, torch.zeros_like(seeded.weight_L))
    train_rows(policy, seeded.packed, seeded.batch, loss, DeviceClock(policy.device))
    return loss.logprob_L


def _run_streamed(policy: PolicyModel, seeded: SeededBatch) -> Tensor:
    loss = _SeededLoss(seeded.weight_L, torch.zeros_like(seeded.weight_L))
    staged = StagedBatch(policy, seeded.packed, seeded.batch, seeded.stages, lambda: None)
    staged.forward_backward(loss, DeviceClock(policy.device), is_of_rows=True)
    return loss.logprob_L


@dataclass(frozen=True)
class _SeededLoss:
    """A loss whose gradients are the batch's weights; it keeps the log-probs that it is told."""

    weight_L: Tensor
    logprob_L: Tensor

    def of(self, terms: NDArray[np.int64], *_outputs: Tensor | None) -> LossGradients:
        index_L = put_index(terms, self.weight_L.device)
        return LossGradients(grad_logprob_L=self.weight_L[index_L], grad_entropy_L=None)

    def sums(self, terms: NDArray[np.int64], logprob_L: Tensor, *_others: Tensor | None) -> Tensor:
        self.logprob_L[put_index(terms, self.weight_L.device)] = logprob_L
        return pack_sums({}, None, torch.zeros(0))


def compared_values(
    policy: PolicyModel, batches: Sequence[SeededBatch], *, gradients_stay: bool = False
) -> dict[str, Tensor]:
    """Runs a step; log-probs per response token and some gradients, to check the way by."""
    outputs = run_step(policy, batches, gradients_stay=gradients_stay)
    columns = torch.cat([seeded.column_L for seeded in batches])
    logprob_J = torch.empty(len(columns), device=columns.device)
    logprob_J[columns] = torch.cat(outputs)
    return {"logprob": logprob_J, **compared_gradients(policy)}


def compared_gradients(policy: PolicyModel) -> dict[str, Tensor]:
    """Copies of the gradients of a few weights in the first and the last layer."""
    last = int(policy.config.num_hidden_layers) - 1
    found: dict[str, Tensor] = {}
    for name, parameter in policy.module.named_parameters():
        match = _COMPARED.search(name)
        if match is not None and int(match[1]) in (0, last) and parameter.grad is not None:
            found[match[0]] = parameter.grad.clone()
    return found


def layer_step(
    policy: PolicyModel, way: Way, batch: DeviceBatch
) -> Callable[[Tensor, Tensor], Tensor]:
    """A forward and backward of the first decoder layer alone, for hidden states of `batch`.

    The returned call maps hidden_TD and the output's gradient to the gradient of hidden_TD; weight
    gradients accumulate in the module.
    """
    decoder = cast("Any", policy.module).get_decoder()
    attention = TreeAttention(layout=batch.layout, backend=way.backend, deterministic=False)

    def step(hidden_TD: Tensor, dout_TD: Tensor) -> Tensor:
        leaf = hidden_TD.detach()[None].requires_grad_()
        out = decoder.layers[0](
            leaf,
            attention_mask=None,
            position_ids=batch.position_T[None],
            position_embeddings=decoder.rotary_emb(leaf, batch.position_T[None]),
            use_cache=False,
            ratoon_tree=attention,
        )
        out.backward(dout_TD[None])
        assert leaf.grad is not None
        return leaf.grad[0]

    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Activations that layers keep for the backward, and the memory that follows from them.

    Attributes:
        layers: Number of layers by kind, for the largest forward whose backward comes at once.
        waiting: Layers by kind for the largest stage that waits for others; empty if there is none.
        predicted_bytes: The peak beyond weights that the service predicts.
        gradients_stay: Whether all gradients exist at the peak.
    """

    layers: dict[str, int]
    waiting: dict[str, int]
    predicted_bytes: int
    gradients_stay: bool


def keep_what_fits(
    policy: PolicyModel,
    held: Sequence[HeldTokens],
    *,
    gradients_stay: bool,
    host_bytes: int,
    spare_bytes: int = 0,
) -> MemoryPlan | None:
    """Limits the policy to the device's free memory; None on a CPU, where there is no limit.

    Args:
        policy: Without gradients.
        held: What each forward holds.
        gradients_stay: Gradients exist from an earlier micro-batch or stage, instead of only from
            the end of each layer's backward on.
        host_bytes: Host memory for what does not fit the device.
        spare_bytes: Of the device, for others.
    """
    free = activation_bytes(policy.device)
    if free is None:
        return None
    free -= spare_bytes
    all_bytes, layer_bytes = _gradient_bytes(policy)
    # The plan counts the head's gradients itself, and the layers' too unless they stay.
    resident = all_bytes if gradients_stay else 0
    vars(policy).pop(_PLANS, None)
    layer_gradient_bytes = 0 if gradients_stay else layer_bytes
    policy.limit_activations(
        free - resident, host_bytes=host_bytes, layer_gradient_bytes=layer_gradient_bytes
    )
    plans = [plan_forward(policy.sizes, one, free - resident, host_bytes) for one in held]
    return _plan(held, plans, resident)


def keep_the_least(
    policy: PolicyModel, held: Sequence[HeldTokens], *, host_bytes: int
) -> MemoryPlan | None:
    """Makes every forward recompute all but attention in its backward; None on a CPU.

    All gradients must exist from the start. `held` is as in `keep_what_fits`; `host_bytes` is host
    memory for stages that wait for others, and nothing else.
    """
    if policy.device.type != "cuda":
        return None
    resident, _ = _gradient_bytes(policy)
    policy.limit_activations(None, layer_gradient_bytes=0)
    sizes = policy.sizes
    # With a budget, the smaller forwards of a stream would keep more.
    vars(policy)[_PLANS] = lambda one: least_plan(sizes, one, host_bytes).kept
    return _plan(held, [least_plan(sizes, one, host_bytes) for one in held], resident)


def keep_each_kind(policy: PolicyModel) -> None:
    """Spreads all kinds over the layers, in a plan's order, so that one step compiles them all."""
    kinds, num_layers = tuple(Kept), policy.sizes.num_layers
    mixed = tuple(kinds[i * len(kinds) // num_layers] for i in range(num_layers))
    vars(policy)[_PLANS] = lambda _held: mixed


def _plan(held: Sequence[HeldTokens], plans: Sequence[ForwardPlan], resident: int) -> MemoryPlan:
    by_waiting: dict[bool, ForwardPlan] = {}
    for one, plan in sorted(zip(held, plans, strict=True), key=lambda pair: pair[0].tokens):
        by_waiting[one.waits] = plan
    running, waiting = (
        dict(Counter(map(str, by_waiting[waits].kept))) if waits in by_waiting else {}
        for waits in (False, True)
    )
    return MemoryPlan(
        layers=running,
        waiting=waiting,
        predicted_bytes=resident + max(plan.peak_bytes for plan in plans),
        gradients_stay=resident > 0,
    )


def _gradient_bytes(policy: PolicyModel) -> tuple[int, int]:
    """Gradient bytes of all trained parameters, and of one layer's, in their own dtype."""
    named = policy.named_trainable().items()
    of_layers = sum(p.numel() * p.element_size() for name, p in named if ".layers." in name)
    everything = sum(p.numel() * p.element_size() for _, p in named)
    return everything, of_layers // policy.sizes.num_layers
