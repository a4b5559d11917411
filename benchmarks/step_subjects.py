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

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from benchmarks import step_varlen
from benchmarks.step_rollouts import SeededBatch
from benchmarks.step_sizes import ModelSize
from ratoon.model.attention import ATTENTION_NAME, TreeAttention, register_tree_attention
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import FullTuning, ModelDtype, ModelSpec, PresetBase
from ratoon.train.device import DeviceBatch, run_model

REPLICATED = "-replicated"
MAX_RECOMPILES = 64
_COMPARED = re.compile(r"layers\.(\d+)\.(self_attn\.[qv]_proj|mlp\.down_proj)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A row of a table: `backend` of tree attention, over packed or replicated rollouts."""

    backend: str
    is_packed: bool

    @property
    def how(self) -> str:
        """Its name in a result."""
        return self.backend if self.is_packed else self.backend + REPLICATED


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

    It takes over the module's layers: what was opened around the module before is of no use then.
    """
    if way.backend == step_varlen.FA2:
        step_varlen.install()
    weight = next(module.parameters())
    is_gpu = weight.device.type == "cuda"
    if is_gpu:
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


def run_step(policy: PolicyModel, batches: Sequence[SeededBatch]) -> list[Tensor]:
    """Forward and backward of every micro-batch; gradients start from none and add up.

    Returns:
        Log-prob of each target, by micro-batch.
    """
    policy.module.zero_grad(set_to_none=True)
    logprobs: list[Tensor] = []
    for seeded in batches:
        logprob_M = run_model(policy, seeded.batch).logprob_M
        logprob_M.backward(seeded.seed_M)
        logprobs.append(logprob_M.detach())
    return logprobs


def compared_values(policy: PolicyModel, batches: Sequence[SeededBatch]) -> dict[str, Tensor]:
    """Runs a step; leaves log-probs by response token, and some gradients, to judge the way by."""
    outputs = run_step(policy, batches)
    columns = torch.cat([seeded.column_L for seeded in batches])
    terms = [out[seeded.batch.term_target_L] for out, seeded in zip(outputs, batches, strict=True)]
    logprob_J = torch.empty(len(columns), device=columns.device)
    logprob_J[columns] = torch.cat(terms)
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
