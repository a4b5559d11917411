"""What a step is run by: one model of given sizes, and the ways to attend in it.

Enters sizes and the name of a way, leaves a `PolicyModel` and steps over its micro-batches.
Invariant: the ways differ in tree attention's backend and in whether prefixes are shared, and in
nothing else: module, weights, compilation, activations, loss head and gradients are the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks.step import varlen as step_varlen
from benchmarks.step.rollouts import SeededBatch
from benchmarks.step.sizes import ModelSize
from ratoon.model.attention import ATTENTION_NAME, TreeAttention, register_tree_attention
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import FullTuning, ModelDtype, ModelSpec, PresetBase
from ratoon.train.device_batch import DeviceBatch, put
from ratoon.train.loss.compute import LossOutput
from ratoon.train.loss.row_loss import LossOfTerms
from ratoon.train.loss.sums import pack_sums
from ratoon.train.passes import train_rows
from ratoon.train.report.clock import DeviceClock
from ratoon.train.streamed.passes import StagedBatch

REPLICATED = "-replicated"
WAVES = "-waves-of-"
MAX_RECOMPILES = 64
LayerCalls = list[Callable[..., Any]]
_COMPARED = re.compile(r"layers\.(\d+)\.(self_attn\.[qv]_proj|mlp\.down_proj)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A row of a table: `backend` of tree attention, over packed or replicated rollouts.

    `wave` > 0: packed ones are streamed, so many responses at a time.
    """

    backend: str
    is_packed: bool
    wave: int = 0

    @property
    def how(self) -> str:
        """Its name in a result."""
        streamed = f"{WAVES}{self.wave}" if self.wave else ""
        return self.backend + ("" if self.is_packed else REPLICATED) + streamed


def build_module(
    size: ModelSize, device: torch.device, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """A model with random weights, made on the device; global random state stays as it was."""
    register_tree_attention()
    config = Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2**21,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=size.ties_embeddings,
        attention_dropout=0.0,
    )
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        module = cast("Any", AutoModelForCausalLM).from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    return cast("PreTrainedModel", module)


def open_policy(
    module: PreTrainedModel, way: Way, frozen: PreTrainedModel | None = None
) -> PolicyModel:
    """The service's own model around `module`; `frozen` answers inside `reference()`.

    It takes over the calls of the module's layers, see `layer_calls`.
    """
    weight = next(module.parameters())
    is_gpu = weight.device.type == "cuda"
    if is_gpu:
        # Before anything is compiled, which is of one table of backends.
        step_varlen.install()
        # Each way compiles its own layers; all of them stay.
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
    """How the layers are called at present: by the policy that was opened last."""
    return [layer.forward for layer in cast("Any", module).get_decoder().layers]


def restore_calls(module: PreTrainedModel, calls: LayerCalls) -> None:
    """Hands the layers back to the policy whose calls these are."""
    for layer, call in zip(cast("Any", module).get_decoder().layers, calls, strict=True):
        layer.forward = call


def run_step(
    policy: PolicyModel, batches: Sequence[SeededBatch], *, gradients_stay: bool = False
) -> list[Tensor]:
    """Forward and backward of every micro-batch, whose gradients add up.

    Args:
        policy: Any gradients that it has are forgotten.
        batches: The micro-batches.
        gradients_stay: All are there from the start, zeros, as the service's sums are; else each
            begins to be with its first backward.

    Returns:
        Log-prob of each term, by micro-batch.
    """
    policy.module.zero_grad(set_to_none=not gradients_stay)
    if gradients_stay:
        for parameter in policy.named_trainable().values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return [_run_streamed(policy, b) if b.stages else _run_at_once(policy, b) for b in batches]


def _run_at_once(policy: PolicyModel, seeded: SeededBatch) -> Tensor:
    logprob_L, loss_of = _seeded_loss(seeded)
    train_rows(policy, seeded.packed, seeded.batch, loss_of, DeviceClock(policy.device))
    return logprob_L


def _run_streamed(policy: PolicyModel, seeded: SeededBatch) -> Tensor:
    logprob_L, loss_of = _seeded_loss(seeded)
    staged = StagedBatch(policy, seeded.packed, seeded.batch, seeded.stages, lambda: None)
    staged.forward_backward(loss_of, DeviceClock(policy.device), is_of_rows=True)
    return logprob_L


def _seeded_loss(seeded: SeededBatch) -> tuple[Tensor, LossOfTerms]:
    """A loss whose gradients are the batch's weights, and where it leaves log-probs, by term."""
    found_L = torch.zeros_like(seeded.weight_L)
    no_sums = pack_sums({}, None, torch.zeros(0))

    def loss_of(terms: NDArray[np.int64], logprob_L: Tensor, _entropy_L: Tensor) -> LossOutput:
        index_L = put(terms, found_L.device)
        found_L[index_L] = logprob_L
        weight_L = seeded.weight_L[index_L]
        return LossOutput(grad_logprob_L=weight_L, grad_entropy_L=None, sums_F=no_sums)

    return found_L, loss_of


def compared_values(
    policy: PolicyModel, batches: Sequence[SeededBatch], *, gradients_stay: bool = False
) -> dict[str, Tensor]:
    """Runs a step; leaves log-probs by response token, and some gradients, to judge the way by."""
    outputs = run_step(policy, batches, gradients_stay=gradients_stay)
    columns = torch.cat([seeded.column_L for seeded in batches])
    logprob_J = torch.empty(len(columns), device=columns.device)
    logprob_J[columns] = torch.cat(outputs)
    return {"logprob": logprob_J, **compared_gradients(policy)}


def compared_gradients(policy: PolicyModel) -> dict[str, Tensor]:
    """Copies of the gradients of a few weights of the first and the last layer."""
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

    The returned call takes hidden_TD and its output's gradient and returns the gradient of
    hidden_TD; gradients of weights add up in the module.
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
