"""The balance loss of routers on a GPU: the CPU's gradients, and no wait for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.planner.layer_kinds import Mlp
from ratoon.rollout.forest import build_forest
from ratoon.rollout.packed import Forest
from ratoon.rollout.prefixes import sort_sequences
from ratoon.shards.sequence_group import ALONE
from ratoon.train.load_balance import LoadBalance
from ratoon_kernels import Span
from tests.builders import random_batch

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 128, 8


def _gradients(forest: Forest, expert_LTC: Tensor, device: torch.device) -> Tensor:
    """Gradients of both layers with respect to the probabilities of all tokens, [L, T, E],
    forwarded in two stages."""
    model: Any = SimpleNamespace(
        device=device,
        routes=SimpleNamespace(num_layers=NUM_LAYERS),
        sizes=SimpleNamespace(
            experts=Mlp(size=1, num_experts=NUM_EXPERTS, experts_per_token=TOP_K)
        ),
    )
    weight_S = np.linspace(0.5, 2.0, len(forest.sequences))
    balance = LoadBalance(model, forest, weight_S, 0.5, ALONE)
    middle = forest.num_tokens // 2 + 1
    spans = [Span(0, middle), Span(middle, forest.num_tokens)]
    stages = [balance.tokens(span, span) for span in spans]
    for span, stage in zip(spans, stages, strict=True):
        for expert_TC in expert_LTC:
            stage.add(expert_TC[span.start : span.stop], NUM_EXPERTS)
        stage.settle()
    return torch.stack(
        [
            torch.cat(
                [
                    stage.gradient(row, torch.zeros(len(span), NUM_EXPERTS, device=device))
                    for span, stage in zip(spans, stages, strict=True)
                ]
            )
            for row in range(NUM_LAYERS)
        ]
    )


def test_gradients_are_those_of_the_cpu_and_nothing_waits() -> None:
    batch = random_batch(np.random.default_rng(0), num_groups=6, max_response=200)
    forest = build_forest(batch, sort_sequences(batch), None)
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(NUM_LAYERS, forest.num_tokens, NUM_EXPERTS, generator=generator)
    expert_LTC = scores.argsort(-1)[..., :TOP_K].to(torch.int16)
    expected = _gradients(forest, expert_LTC, torch.device("cpu"))
    on_gpu = expert_LTC.to(DEVICE)
    first = _gradients(forest, on_gpu, DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = _gradients(forest, on_gpu, DEVICE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, first)
    assert expected.norm() > 0
    assert (first.cpu() - expected).norm() <= 1e-6 * expected.norm()
