"""Routing and experts: results and all gradients against a loop over tokens, and their bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ratoon.model import experts
from ratoon.model.experts import (
    _weight_gradient,
    gated_linear,
    grouped_experts,
    grouped_linear,
    sort_by_expert,
    to_rows,
    to_tokens,
)
from ratoon.model.numbered import numbered
from ratoon.model.route_rules import RouteRule, by_softmax
from ratoon.model.router import RouteCount, Router, route
from ratoon.model.spec import ModelDtype
from tests.model.builders import hidden_of, load, randomize
from tests.model.packing import branching_sequences, pack
from tests.tiny_models import write_folder

D, F = 6, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Which experts [T, C] tokens visit, of so many."""

    expert_TC: Tensor
    num_experts: int


def _random(tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, num_experts, generator=generator).argsort(-1)
    return Case(expert_TC=order[:, :top_k].to(torch.int16), num_experts=num_experts)


def _same(tokens: int, experts: list[int], num_experts: int) -> Case:
    expert_TC = torch.tensor([experts] * tokens, dtype=torch.int16)
    return Case(expert_TC=expert_TC, num_experts=num_experts)


CASES = {
    "random": _random(17, 5, 2),
    "every_expert": _random(9, 4, 4),
    "one_token": _random(1, 5, 3),
    "more_experts_than_rows": _random(3, 300, 2),
    "one_expert_with_everything": _same(11, [2], 5),
    "no_rows_first_and_last": _same(7, [3, 1], 5),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def _leaves(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, num_experts = len(case.expert_TC), case.num_experts
    shapes = {
        "x": (tokens, D),
        "weight": case.expert_TC.shape,
        "gate_up": (num_experts, 2 * F, D),
        "down": (num_experts, D, F),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def _grouped(case: Case, leaves: dict[str, Tensor]) -> Tensor:
    module = SimpleNamespace(
        num_experts=case.num_experts,
        gate_up_proj=leaves["gate_up"],
        down_proj=leaves["down"],
        act_fn=nn.functional.silu,
        has_bias=False,
    )
    return grouped_experts(module, leaves["x"], case.expert_TC, leaves["weight"])


def _token_by_token(case: Case, leaves: dict[str, Tensor]) -> Tensor:
    """By the formula: the sum over a token's experts of weight * down(silu(gate x) * up x)."""
    rows: list[Tensor] = []
    for token, chosen in enumerate(case.expert_TC.tolist()):
        total = torch.zeros(D, dtype=torch.float64)
        for place, expert in enumerate(chosen):
            gate, up = (leaves["gate_up"][expert] @ leaves["x"][token]).split(F)
            product = gate * torch.sigmoid(gate) * up
            total = total + leaves["weight"][token, place] * (leaves["down"][expert] @ product)
        rows.append(total)
    return torch.stack(rows)


def _gradients(out_TD: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    dout_TD = torch.randn(out_TD.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad(out_TD, list(leaves.values()), dout_TD.to(out_TD.dtype))
    return dict(zip(leaves, grads, strict=True))


@pytest.mark.usefixtures("poisoned_memory")
@each_case
def test_experts_are_those_of_each_token_alone(case: Case) -> None:
    leaves = _leaves(case)
    got, expected = _grouped(case, leaves), _token_by_token(case, leaves)
    assert (got - expected).norm() <= 1e-14 * expected.norm()
    grads, truth = _gradients(got, leaves), _gradients(expected, leaves)
    for name, grad in truth.items():
        assert grad.norm() > 0
        assert (grads[name] - grad).norm() <= 1e-14 * grad.norm(), name


@pytest.mark.usefixtures("poisoned_memory")
@each_case
def test_an_expert_without_rows_has_a_gradient_of_zeros(case: Case) -> None:
    leaves = _leaves(case)
    grads = _gradients(_grouped(case, leaves), leaves)
    visited = case.expert_TC.long().unique()
    is_empty = torch.ones(case.num_experts, dtype=torch.bool).index_fill_(0, visited, value=False)
    for name in ("gate_up", "down"):
        assert grads[name][is_empty].count_nonzero() == 0
        assert grads[name][~is_empty].flatten(1).any(1).all()


@each_case
def test_rows_are_sorted_by_expert_and_then_by_token(case: Case) -> None:
    place_TC, stop_E = sort_by_expert(case.expert_TC, case.num_experts)
    choices = sorted(enumerate(case.expert_TC.flatten().tolist()), key=lambda item: item[1])
    assert place_TC.flatten()[[index for index, _ in choices]].tolist() == [*range(len(choices))]
    sorted_S = [expert for _, expert in choices]
    assert stop_E.tolist() == [sum(e <= expert for e in sorted_S) for expert in range(len(stop_E))]
    assert {x.dtype for x in (place_TC, stop_E)} == {torch.int32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_token_add_up_in_its_order(dtype: torch.dtype) -> None:
    """Forward and, for the gradient of what went to rows, backward; rounded once."""
    case = _random(13, 6, 4)
    place_TC, _stop_E = sort_by_expert(case.expert_TC, case.num_experts)
    generator = torch.Generator().manual_seed(3)
    x_SD = torch.randn(place_TC.numel(), D, generator=generator).to(dtype)
    expected_TD = torch.zeros(13, D)
    for column in place_TC.T:
        expected_TD += x_SD[column].float()
    expected_TD = expected_TD.to(dtype)
    assert torch.equal(to_tokens(x_SD, place_TC), expected_TD)
    x_TD = torch.randn(13, D, generator=generator).to(dtype).requires_grad_()
    rows_SD = to_rows(x_TD, place_TC)
    for column in place_TC.T:
        assert torch.equal(rows_SD[column], x_TD)
    rows_SD.backward(x_SD)
    assert x_TD.grad is not None
    assert torch.equal(x_TD.grad, expected_TD)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_repeat_has_the_same_bits(dtype: torch.dtype) -> None:
    case = CASES["random"]
    leaves = _leaves(case, dtype)
    first, second = (_gradients(_grouped(case, leaves), leaves) for _ in range(2))
    for name, grad in first.items():
        assert torch.equal(second[name], grad)


@pytest.mark.parametrize(
    ("name", "capability"), [*((name, (9, 0)) for name in CASES), ("random", (10, 0))]
)
def test_grouped_products_are_asked_for_what_the_loop_computes(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]
) -> None:
    """As on a GPU, here by torch's own of the CPU, which wants the same of strides and widths."""
    case = CASES[name]
    place_TC, stop_E = sort_by_expert(case.expert_TC, case.num_experts)
    generator = torch.Generator().manual_seed(7)
    x_SD, weight_EFD, dy_SF = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((place_TC.numel(), 16), (case.num_experts, 24, 16), (place_TC.numel(), 24))
    )

    def products() -> list[Tensor]:
        return [
            grouped_linear(x_SD, weight_EFD, stop_E),
            grouped_linear(dy_SF, weight_EFD.mT, stop_E),
            _weight_gradient(dy_SF, x_SD, stop_E),
        ]

    looped = products()
    monkeypatch.setattr(experts, "_has_grouped_products", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        grouped = products()
    assert sum(event.name == "aten::_grouped_mm" for event in profiler.events() or ()) == 3
    for got, expected in zip(grouped, looped, strict=True):
        assert got.stride() == expected.stride()
        assert (got.float() - expected.float()).norm() <= 0.005 * expected.float().norm()


def _router(top_k: int, *, is_normalized: bool, dtype: torch.dtype) -> Qwen3MoeTopKRouter:
    config = Qwen3MoeConfig(
        num_experts=8, num_experts_per_tok=top_k, norm_topk_prob=is_normalized, hidden_size=D
    )
    router = Qwen3MoeTopKRouter(config).to(dtype)
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(4))
    return router


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_routes_are_those_of_transformers(
    top_k: int, is_normalized: bool, dtype: torch.dtype
) -> None:
    """Bit for bit, where no two logits of a token are equal."""
    theirs = _router(top_k, is_normalized=is_normalized, dtype=dtype)
    x_TD = torch.randn(64, D, generator=torch.Generator().manual_seed(5)).to(dtype)
    logits_TE, weight_TC, expert_TC = theirs(x_TD)
    has_ties_T = logits_TE.sort(-1).values.diff(dim=-1).eq(0).any(-1)
    assert has_ties_T.sum() < 8
    got = Router(theirs, by_softmax(theirs))(x_TD)
    assert torch.equal(got[0], logits_TE)
    assert torch.equal(got[1], weight_TC)
    assert torch.equal(got[2][~has_ties_T].long(), expert_TC[~has_ties_T])


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_gradients_of_routes_are_those_of_the_formula(top_k: int, is_normalized: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    logits_TE = torch.randn(20, 8, generator=generator, dtype=torch.float64).requires_grad_()
    count = RouteCount(RouteRule(top_k=top_k, is_normalized=is_normalized))
    weight_TC, expert_TC = route(logits_TE, None, numbered(count), top_k)
    probs_TE = logits_TE.exp() / logits_TE.exp().sum(-1, keepdim=True)
    expected_TC = torch.stack([probs_TE[t, e] for t, e in enumerate(expert_TC.long())])
    if is_normalized:
        expected_TC = expected_TC / expected_TC.sum(-1, keepdim=True)
    dweight_TC = torch.randn(20, top_k, generator=generator, dtype=torch.float64)
    (got,), (expected,) = (
        torch.autograd.grad(out_TC, logits_TE, dweight_TC, retain_graph=True)
        for out_TC in (weight_TC, expected_TC)
    )
    assert (weight_TC - expected_TC).norm() <= 1e-15 * expected_TC.norm()
    assert (got - expected).norm() <= 1e-14 * max(float(expected.norm()), 0.1)
    # The weight of one expert alone is 1, whatever its logit.
    assert (expected.norm() > 1e-12) == (top_k > 1 or not is_normalized)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ties_go_to_the_lower_expert(dtype: torch.dtype) -> None:
    """Two of three tied experts get the two places; if all are equal, the first ones do."""
    count = RouteCount(RouteRule(top_k=3, is_normalized=True))
    logits_TE = torch.tensor([[0, 2, 1, 2, 2, 3], [1, 1, 1, 1, 1, 1], [3, 0, 3, 0, 3, 0]])
    for _ in range(3):
        _weight_TC, expert_TC = route(logits_TE.to(dtype), None, numbered(count), 3)
        assert expert_TC.tolist() == [[5, 1, 3], [0, 1, 2], [0, 2, 4]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_routes_are_counted_as_often_as_rollouts_have_the_token(dtype: torch.dtype) -> None:
    """Added up over forwards, exactly; not where nobody says how often."""
    theirs = _router(3, is_normalized=True, dtype=dtype)
    router = Router(theirs, by_softmax(theirs))
    load_E, tokens, entropy = torch.zeros(8, dtype=torch.int64), 0, 0.0
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x_TD = 2 * torch.randn(33, D, generator=generator).to(dtype)
        copies_T = torch.randint(0, 100_000, (33,), generator=generator, dtype=torch.int32)
        router.count.copies_T = copies_T
        logits_TE, _weight_TC, expert_TC = router(x_TD)
        router.count.copies_T = None
        router(x_TD)
        for copies, experts_C, logits_E in zip(
            copies_T.tolist(), expert_TC, logits_TE, strict=True
        ):
            load_E[experts_C.long()] += copies
            tokens += copies
            p_E = logits_E.detach().double().softmax(-1)
            entropy -= copies * float((p_E * p_E.log()).sum())
    assert router.count.sums_F is not None
    *found_E, found_tokens, found_entropy, _recorded, _other = router.count.sums_F.tolist()
    assert found_E == load_E.tolist()
    assert found_tokens == tokens
    assert found_entropy == pytest.approx(entropy, rel=1e-14 if dtype is torch.float64 else 1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.more)]
)
def test_operations_are_what_torch_expects_of_them(dtype: torch.dtype) -> None:
    """Schema, fake results, autograd registration, and all of it under a compiler."""
    check: Any = torch.library.opcheck
    case, count = CASES["no_rows_first_and_last"], RouteCount(RouteRule(top_k=2))
    place_TC, stop_E = sort_by_expert(case.expert_TC, case.num_experts)
    leaves = _leaves(case, dtype)
    logits_TE = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    check(route, (logits_TE, torch.rand(5), numbered(count), 2))
    x_SD = torch.randn(14, D, dtype=dtype, requires_grad=True)
    check(grouped_linear, (x_SD, leaves["gate_up"], stop_E))
    # As the gradient of the rows is computed.
    dy_SF = torch.randn(14, 2 * F, dtype=dtype)
    check(grouped_linear, (dy_SF, leaves["gate_up"].detach().mT, stop_E))
    gates = dy_SF.clone().requires_grad_(), torch.rand(14, 1, dtype=dtype, requires_grad=True)
    check(gated_linear, (*gates, leaves["down"], stop_E))
    check(_weight_gradient, (dy_SF, x_SD.detach(), stop_E))
    check(to_tokens, (x_SD, place_TC))
    check(to_rows, (leaves["x"], place_TC))
    check(sort_by_expert, (case.expert_TC, case.num_experts))


def test_the_reference_has_routers_of_its_own(tmp_path: Path) -> None:
    """A copy of the module copies them: it does not follow the trained ones."""
    base = write_folder(tmp_path / "base", "qwen3_moe")
    model = load(base, dtype=ModelDtype.FLOAT32, keep_reference=True)
    packed = pack(branching_sequences(0))
    with torch.no_grad():
        expected = hidden_of(model, packed)
    gates = [m for m in model.module.modules() if isinstance(m, Router)]
    assert len(gates) == model.sizes.num_layers
    with torch.no_grad():
        for gate in gates:
            gate.weight.neg_()
        assert not torch.equal(hidden_of(model, packed), expected)
    randomize(model, seed=3)
    with model.reference():
        assert torch.equal(hidden_of(model, packed), expected)
