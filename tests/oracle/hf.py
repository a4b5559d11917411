"""The model side of the oracle: stock Hugging Face, one unpadded forward a rollout.

Enters a model folder (and an adapter folder), leaves log-probs and entropies with their gradient.
Invariant: batch size 1, no padding, no attention mask but the model's own causal one. A float64
model is float64 throughout: its code asks for float32 in norms, rotary angles and router, whose
rounding would differ between one long backward and many short ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path as FilePath
from typing import Any, cast
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.oracle.merged_lora import has_experts, merge
from tests.oracle.paths import Path

# Scores of attention of one padded forward, for each head: 32 MiB for four of them.
_PADDED_PAIRS = 2**20


def load(folder: FilePath, *, dtype: torch.dtype, attention: str = "eager") -> nn.Module:
    """The folder's model in `dtype` with stock attention (`eager` or `sdpa`)."""
    has_tower = "text_config" in json.loads((folder / "config.json").read_text())
    auto = cast(Any, AutoModelForImageTextToText if has_tower else AutoModelForCausalLM)
    model = auto.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
    )
    # No rollout is padded: every token that is there is one, also where it is the padding's.
    model.get_input_embeddings().padding_idx = None
    return in_double(model) if dtype is torch.float64 else model.to(dtype)


def with_adapter(base: nn.Module, adapter: FilePath) -> nn.Module:
    """`base`, which is frozen, with a trainable adapter: by peft but of experts."""
    from peft import PeftModel

    if has_experts(adapter):
        # peft trains more: it has gate and up as one map, whose factors are twice as wide.
        return merge(base, adapter)
    return PeftModel.from_pretrained(
        cast(Any, base), str(adapter), is_trainable=True, autocast_adapter_dtype=False
    )


def logprobs(model: nn.Module, path: Path) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every response token at the path's temperature, float64 [R] each.

    Response token t is predicted by the token before it: the last prompt token for t = 0. With an
    empty prompt nothing predicts t = 0: log-prob and entropy are 0 there.
    """
    if len(path.response) == 0:
        empty = torch.zeros(0, dtype=torch.float64)
        return empty, empty
    ids = torch.as_tensor(path.tokens, dtype=torch.int64)
    with precision_of(model), _forced(model, path):
        logits_TV = model(input_ids=ids[None], use_cache=False).logits[0]
    return _of_response(logits_TV, ids, path)


def _of_response(logits_TV: Tensor, ids: Tensor, path: Path) -> tuple[Tensor, Tensor]:
    num_prompt = len(path.prompt)
    first = max(num_prompt - 1, 0)
    rows = logits_TV[first : len(ids) - 1].to(torch.float64) / path.temperature
    is_out = _outside(path, rows)
    log_softmax = torch.log_softmax(rows.masked_fill(is_out, -torch.inf), dim=-1)
    entropy = -(log_softmax.exp() * log_softmax.masked_fill(is_out, 0)).sum(-1)
    logprob = log_softmax.gather(1, ids[first + 1 :, None])[:, 0]
    if num_prompt == 0:
        zero = logprob.new_zeros(1)
        return torch.cat([zero, logprob]), torch.cat([zero, entropy])
    return logprob, entropy


def _outside(path: Path, rows: Tensor) -> Tensor:
    """bool [rows, V]: what truncation took from the sampler; the rows predict the last tokens."""
    is_out = torch.zeros_like(rows, dtype=torch.bool)
    for t, kept in enumerate(path.kept or (), start=len(rows) - len(path.response)):
        if t >= 0 and len(kept):
            is_out[t] = True
            is_out[t, torch.as_tensor(kept)] = False
    return is_out


def distributions(model: nn.Module, path: Path) -> Tensor:
    """Log-probs of the whole vocabulary at every response token, float64 [R, V], R not 0.

    With an empty prompt nothing predicts the first one: those of the second stand in its place.
    """
    ids = torch.as_tensor(path.tokens, dtype=torch.int64)
    with precision_of(model), _forced(model, path):
        logits_TV = model(input_ids=ids[None], use_cache=False).logits[0]
    predicting = torch.arange(len(path.prompt) - 1, len(ids) - 1).clamp(min=0)
    rows = logits_TV[predicting].to(torch.float64) / path.temperature
    return torch.log_softmax(rows, dim=-1)


def values(model: nn.Module, path: Path) -> Tensor:
    """What `model.value_head` says of the state that each response token is sampled in, [R].

    That of token t is made of the hidden state of the token before it; R is not 0. With an empty
    prompt there is none for t = 0: the second's stands in its place.
    """
    ids = torch.as_tensor(path.tokens, dtype=torch.int64)
    with precision_of(model), _forced(model, path):
        output = model(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    predicting = torch.arange(len(path.prompt) - 1, len(ids) - 1).clamp(min=0)
    return head_of(model)(output.hidden_states[-1][0, predicting])[:, 0].double()


def add_value_head(model: nn.Module, file: FilePath) -> None:
    """Put the value head of a file on the model, with an adapter or without."""
    owner = _without_adapter(model)
    stored = load_file(file)
    like = next(model.parameters())
    owner.value_head = nn.Linear(stored["value_head.weight"].shape[1], 1, dtype=like.dtype)
    owner.value_head.load_state_dict({n.rpartition(".")[2]: t for n, t in stored.items()})


def head_of(model: nn.Module) -> nn.Module:
    """The value head of a model, with an adapter or without."""
    return _without_adapter(model).value_head


def _without_adapter(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def of_distributions(rows: Tensor, path: Path) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every response token, float64 [R] each, from `distributions`."""
    logprob = rows.gather(1, torch.as_tensor(path.response)[:, None])[:, 0]
    return logprob, -(rows.exp() * rows).sum(-1)


def router_logits(model: nn.Module, path: Path) -> list[Tensor]:
    """Router logits of each layer with experts over all tokens of the path, [T, E] each."""
    return [logits_TE for logits_TE, _chosen_TC in _routes(model, path)]


def routes(model: nn.Module, path: Path) -> list[tuple[Tensor, Tensor]]:
    """Probabilities [T, E] and experts [T, C] of each layer with experts, over all tokens.

    Where scores are sigmoids, a probability is its share of their sum.
    """
    gates = routers(model)
    found: list[tuple[Tensor, Tensor]] = []
    for gate, (logits_TE, chosen_TC) in zip(gates, _routes(model, path), strict=True):
        score_TE = _scores(gate, logits_TE)
        found.append((score_TE / score_TE.sum(-1, keepdim=True), chosen_TC))
    return found


def routers(model: nn.Module) -> list[Any]:
    """Routers of a model of transformers, by layer."""
    ends = ("TopKRouter", "TopkRouter")
    return [module for module in model.modules() if type(module).__name__.endswith(ends)]


def _routes(model: nn.Module, path: Path) -> list[tuple[Tensor, Tensor]]:
    ids = torch.as_tensor(path.tokens, dtype=torch.int64)[None]
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        gate.register_forward_hook(lambda _gate, _x, out: seen.append((out[0], out[2])))
        for gate in routers(model)
    ]
    with precision_of(model), _forced(model, path):
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def _scores(gate: Any, logits_TE: Tensor) -> Tensor:
    has_sigmoids = hasattr(gate, "e_score_correction_bias")
    return logits_TE.sigmoid() if has_sigmoids else logits_TE.softmax(-1)


@contextmanager
def _forced(model: nn.Module, path: Path) -> Iterator[None]:
    """Inside, routers choose the path's experts, and weigh them by their own scores."""
    gates = routers(model)
    if path.routes is None:
        yield
        return
    for layer, gate in enumerate(gates):
        given_TC = torch.as_tensor(path.routes[:, layer])

        def forward(x_TD: Tensor, gate: Any = gate, given_TC: Tensor = given_TC) -> Any:
            logits_TE, _weight_TC, own_TC = type(gate).forward(gate, x_TD)
            # No order is specified of those that a router chooses.
            chosen_TC = torch.where(given_TC < 0, own_TC, given_TC)
            weight_TC = _scores(gate, logits_TE).gather(1, chosen_TC)
            # gpt-oss has the softmax over the chosen ones.
            if getattr(gate, "norm_topk_prob", True):
                weight_TC = weight_TC / weight_TC.sum(-1, keepdim=True)
            return logits_TE, weight_TC * getattr(gate, "routed_scaling_factor", 1), chosen_TC

        gate.forward = forward
    try:
        yield
    finally:
        for gate in gates:
            del gate.forward


def all_logprobs(model: nn.Module, paths: list[Path]) -> list[tuple[Tensor, Tensor]]:
    """`logprobs` of each path, without gradients."""
    with torch.no_grad():
        return [logprobs(model, path) for path in paths]


def padded_logprobs(model: nn.Module, paths: list[Path]) -> list[Tensor]:
    """Log-probs as of `all_logprobs` but for their last bits: many paths in one padded forward.

    Only for data that is to be near to the policy, never to compare with.
    """
    found: list[Tensor] = []
    remaining = [path for path in paths if len(path.response)]
    while remaining:
        part = [remaining.pop(0)]
        longest = len(part[0].tokens)
        while remaining:
            longest = max(longest, len(remaining[0].tokens))
            if (len(part) + 1) * longest**2 > _PADDED_PAIRS:
                break
            part.append(remaining.pop(0))
        rows = [torch.as_tensor(path.tokens, dtype=torch.int64) for path in part]
        # Causal attention lets no token see the padding behind it.
        ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.no_grad(), precision_of(model):
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        found.extend(
            _of_response(logits_TV, ids, path)[0]
            for logits_TV, ids, path in zip(logits_BTV, rows, part, strict=True)
        )
    return found


def precision_of(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, a float64 model is float64 throughout."""
    is_double = next(model.parameters()).dtype is torch.float64
    return double_names() if is_double else nullcontext()


def in_double(model: nn.Module) -> Any:
    """The model in float64, for forwards within `double_names`, which it has been tried with.

    `DoublePrecision` sees each of a forward's calls and takes as long as the model, so it only says
    what is right. What a first forward imports is there then, and has float32 by its right name.
    """
    model.double()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        with DoublePrecision():
            expected = model(input_ids=ids, use_cache=False).logits
        num_modules = len(sys.modules)
        with double_names():
            got = model(input_ids=ids, use_cache=False).logits
    assert len(sys.modules) == num_modules, "a module was imported that takes float64 for float32"
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    return model


@contextmanager
def double_names() -> Iterator[None]:
    """Inside, torch's names of float32, where they are looked up, are float64's."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        yield


class DoublePrecision(TorchFunctionMode):
    """Whoever asks for float32 gets float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        if kwargs and kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **(kwargs or {}))


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[nn.Module]:
    """The model without its adapter, for the frozen reference of a LoRA policy."""
    off = cast(Any, model).disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()
    with off:
        yield model
