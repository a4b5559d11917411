"""bfloat16 with fixed routes: the packed run's gradients are as near to float64's as those of
replicated Hugging Face runs.

Which experts a token visits is told by the float64 run, to all: rounding may choose others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ratoon.model import router
from ratoon.model.spec import ModelDtype
from tests.model.builders import hidden_of, load
from tests.model.packing import Packed, branching_sequences, pack
from tests.model.stock import load_stock, sequence_outputs
from tests.tiny_models import write_folder
from tests.train.bf16_runs import MAX_PARAMETER_RATIO, MAX_RATIO, SEEDS

Gradients = dict[str, Tensor]
# Experts [P, C] of a sequence's tokens, for each of the two layers.
Routes = list[Tensor]


def _routers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]


def _follow(module: Any, experts: Iterator[Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the router, at experts that are given."""
    logits = nn.functional.linear(x.reshape(-1, x.shape[-1]), module.weight)
    expert = next(experts)
    weight = logits.softmax(-1, dtype=torch.float32).gather(1, expert)
    return logits, (weight / weight.sum(-1, keepdim=True)).to(logits.dtype), expert


def _sequence_gradients(
    model: nn.Module, sequences: list[list[int]], weights: list[Tensor], routes: list[Routes] | None
) -> tuple[Gradients, list[Routes]]:
    """Summed in float64, of one backward per sequence; and the routes that were taken."""
    sums: Gradients = {}
    taken: list[Routes] = []
    for index, sequence in enumerate(sequences):
        seen: Routes = []
        hooks = [
            each.register_forward_hook(lambda _m, _x, out, seen=seen: seen.append(out[2]))
            for each in _routers(model)
        ]
        if routes is not None:
            given = iter(routes[index])
            for each in _routers(model):
                each.forward = partial(_follow, each, given)
        hidden, _ = sequence_outputs(model, sequence)
        model.zero_grad()
        hidden.backward(weights[index].to(hidden.dtype))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad.double()
        for hook in hooks:
            hook.remove()
        taken.append(seen)
    return sums, taken


def _packed_routes(packed: Packed, routes: list[Routes]) -> Routes:
    """Routes of the packed tokens: sequences that share one agree, in float64."""
    found: Routes = []
    for layer in range(len(routes[0])):
        expert_TC = torch.full((len(packed.tokens_T), routes[0][layer].shape[1]), -1)
        for path, of_sequence in zip(packed.paths, routes, strict=True):
            expert_TC[path] = of_sequence[layer]
        found.append(expert_TC)
    return found


def _packed_gradients(
    folder: Path, packed: Packed, weights: list[Tensor], routes: Routes
) -> Gradients:
    model, given = load(folder, dtype=ModelDtype.BFLOAT16), iter(routes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "_choose", lambda _probs_TE, _top_k: next(given))
        hidden_TD = hidden_of(model, packed).double()
    loss = sum((hidden_TD[p] * w).sum() for p, w in zip(packed.paths, weights, strict=True))
    cast("Tensor", loss).backward()
    named = model.named_trainable().items()
    return {name: p.grad.double() for name, p in named if p.grad is not None}


def _errors(got: Gradients, truth: Gradients) -> dict[str, float]:
    assert got.keys() == truth.keys()
    return {name: float((got[name] - grad).norm()) for name, grad in truth.items()}


def _ratios(tmp_path: Path, seed: int, edit: Callable[[Routes], Routes]) -> tuple[float, float]:
    """Ratios of the packed error to the replicated one: over all parameters, and for the worst."""
    folder = write_folder(tmp_path / str(seed), "qwen3_moe", seed=seed)
    rounded, truth = (load_stock(folder, dtype=d) for d in (torch.bfloat16, torch.float64))
    with torch.no_grad():
        for wide, narrow in zip(truth.parameters(), rounded.parameters(), strict=True):
            wide.copy_(narrow)
    sequences = branching_sequences(seed)
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(len(each), 16, generator=generator, dtype=torch.float64) for each in sequences
    ]
    exact, routes = _sequence_gradients(truth, sequences, weights, None)
    replicated, _ = _sequence_gradients(rounded, sequences, weights, routes)
    packed = pack(sequences)
    got = _packed_gradients(folder, packed, weights, edit(_packed_routes(packed, routes)))
    errors, others = _errors(got, exact), _errors(replicated, exact)
    assert all(grad.norm() > 0 for grad in exact.values())
    ratio = math.hypot(*errors.values()) / math.hypot(*others.values())
    return ratio, max(error / others[name] for name, error in errors.items())


def test_packed_error_is_that_of_replicated_runs(tmp_path: Path) -> None:
    found = [_ratios(tmp_path, seed, lambda routes: routes) for seed in SEEDS]
    assert statistics.median(ratio for ratio, _ in found) <= MAX_RATIO, found
    assert max(worst for _, worst in found) <= MAX_PARAMETER_RATIO, found


def test_one_token_sent_elsewhere_is_seen(tmp_path: Path) -> None:
    def other_way(routes: Routes) -> Routes:
        routes[0][-1] = (routes[0][-1] + 1) % 4
        return routes

    ratio, worst = _ratios(tmp_path, 0, other_way)
    assert ratio > 2 * MAX_RATIO
    assert worst > 2 * MAX_PARAMETER_RATIO
