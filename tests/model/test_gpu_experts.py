"""Experts on a GPU: errors of bfloat16 against float32, bits on repeat, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DeepseekV3Config, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeSparseMoeBlock,
)

from ratoon.model.experts import (
    EXPERTS_NAME,
    register_grouped_experts,
    sort_by_expert,
    to_rows,
    to_tokens,
)
from ratoon.model.families.deepseek_v3 import DEEPSEEK_V3
from ratoon.model.families.family import Family
from ratoon.model.families.gpt_oss import GPT_OSS
from ratoon.model.families.qwen3_moe import QWEN3_MOE
from ratoon.model.lora import LoraExperts
from ratoon.model.numbered import numbered
from ratoon.model.route_rules import RouteRule, Scores
from ratoon.model.router import RouteCount, Router, route

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NUM_EXPERTS, D, F = 64, 256, 96


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    """float32 is float32: without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def _chosen(popularity_E: Tensor, tokens: int, top_k: int) -> Tensor:
    """Distinct experts of each token, drawn by how popular they are."""
    weights_TE = popularity_E.expand(tokens, -1).contiguous()
    return weights_TE.multinomial(top_k, generator=_generator(0)).to(torch.int16)


def _even(tokens: int, top_k: int) -> Tensor:
    return _chosen(torch.ones(NUM_EXPERTS, device=DEVICE), tokens, top_k)


def _zipf() -> Tensor:
    """The most popular of 64 has a fifth of 12,000 rows, and odd numbers have the others."""
    return _chosen(1 / torch.arange(1, NUM_EXPERTS + 1, device=DEVICE), 3001, 4)


def _few() -> Tensor:
    """Choices in which five of 64 experts have rows, not the first and not the last."""
    popularity_E = torch.zeros(NUM_EXPERTS, device=DEVICE)
    popularity_E[[3, 4, 17, 40, 62]] = 1.0
    return _chosen(popularity_E, 501, 2)


CASES: dict[str, Callable[[], Tensor]] = {
    "even": lambda: _even(1000, 8),
    "zipf": _zipf,
    "few": _few,
    "one_has_everything": lambda: torch.full((777, 1), 5, dtype=torch.int16, device=DEVICE),
    "every_expert": lambda: _even(33, NUM_EXPERTS),
    "one_token": lambda: _even(1, 3),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def _experts(
    implementation: str, dtype: torch.dtype, inner: int = F, *, has_bias: bool = False
) -> Any:
    """Experts with equal weights in any dtype, up to its rounding to bfloat16; gpt-oss' if they
    have biases."""
    register_grouped_experts()
    config: Any
    if has_bias:
        config = GptOssConfig(
            num_local_experts=NUM_EXPERTS, hidden_size=D, intermediate_size=inner, swiglu_limit=1.0
        )
    else:
        config = Qwen3MoeConfig(
            num_experts=NUM_EXPERTS, hidden_size=D, moe_intermediate_size=inner, hidden_act="silu"
        )
    config._experts_implementation = implementation
    module: Any = (GptOssExperts if has_bias else Qwen3MoeExperts)(config).to(device=DEVICE)
    generator = _generator(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
    return module.to(torch.bfloat16).to(dtype)


def _adapted(dtype: torch.dtype, rank: int) -> LoraExperts:
    """Frozen experts with adapters, the same in any dtype, to its rounding to bfloat16."""
    module = LoraExperts(_experts(EXPERTS_NAME, dtype), "default", r=rank, scale=2.0)
    module.base_layer.requires_grad_(requires_grad=False)
    generator = _generator(7)
    for parameter in module.parameters():
        if parameter.requires_grad:
            value = torch.randn(parameter.shape, generator=generator, device=DEVICE)
            parameter.data = (value * parameter.shape[-1] ** -0.5).bfloat16().to(dtype)
    return module


def _block(rank: int) -> Any:
    """A router and experts in bfloat16, as a decoder layer has them; `rank` 0: without adapters."""
    register_grouped_experts()
    config = Qwen3MoeConfig(
        num_experts=NUM_EXPERTS, hidden_size=D, moe_intermediate_size=F, num_experts_per_tok=8
    )
    config._experts_implementation = EXPERTS_NAME
    block: Any = Qwen3MoeSparseMoeBlock(config).to(device=DEVICE)
    generator = _generator(6)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
    QWEN3_MOE.prepare(block)
    if rank:
        block.requires_grad_(requires_grad=False)
        block.experts = _adapted(torch.bfloat16, rank)
    return block.to(torch.bfloat16)


def _other_block(family: Family) -> Any:
    """A router by another rule and its experts, with shared ones or with biases."""
    register_grouped_experts()
    fields: dict[str, Any] = {
        "hidden_size": D,
        "num_experts_per_tok": 8,
        "num_local_experts": NUM_EXPERTS,
    }
    if family is GPT_OSS:
        config: Any = GptOssConfig(**fields, intermediate_size=F)
    else:
        config = DeepseekV3Config(**fields, moe_intermediate_size=F)
    config._experts_implementation = EXPERTS_NAME
    block: Any = (GptOssMLP if family is GPT_OSS else DeepseekV3MoE)(config).to(device=DEVICE)
    generator = _generator(6)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
    block = block.to(torch.bfloat16)
    family.prepare(block)
    return block


def _run(module: Any, expert_TC: Tensor) -> dict[str, Tensor]:
    """The output and all gradients, of inputs that bfloat16 has."""
    dtype = next(module.parameters()).dtype
    shapes = ((len(expert_TC), D), expert_TC.shape, (len(expert_TC), D))
    generator = _generator(2)
    x_TD, weight_TC, dout_TD = (
        torch.randn(shape, generator=generator, device=DEVICE).bfloat16().to(dtype)
        for shape in shapes
    )
    x_TD.requires_grad_()
    weight_TC.requires_grad_()
    base = getattr(module, "base_layer", module)
    is_ours = base.config._experts_implementation == EXPERTS_NAME
    out_TD = module(x_TD, expert_TC if is_ours else expert_TC.long(), weight_TC)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    inputs = {"x": x_TD, "weight": weight_TC, **trained}
    grads = torch.autograd.grad(out_TD, list(inputs.values()), dout_TD)
    return {"out": out_TD.detach(), **dict(zip(inputs, grads, strict=True))}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("has_bias", [False, True])
@each_case
def test_errors_are_at_most_twice_those_of_torch(
    case: Callable[[], Tensor], has_bias: bool
) -> None:
    """Errors are those of bfloat16 against float32; transformers' experts, one after the other,
    stand for torch."""
    expert_TC = case()
    truth = _run(_experts("eager", torch.float32, has_bias=has_bias), expert_TC)
    torchs = _run(_experts("eager", torch.bfloat16, has_bias=has_bias), expert_TC)
    ours = _run(_experts(EXPERTS_NAME, torch.bfloat16, has_bias=has_bias), expert_TC)
    for name, exact in truth.items():
        error, bound = ((each[name].float() - exact).norm() for each in (ours, torchs))
        assert exact.norm() > 0
        assert error <= 2 * bound, (name, float(error / bound))


@pytest.mark.usefixtures("poisoned_memory")
@each_case
def test_an_expert_without_rows_has_a_gradient_of_zeros(case: Callable[[], Tensor]) -> None:
    expert_TC = case()
    grads = _run(_experts(EXPERTS_NAME, torch.bfloat16), expert_TC)
    rows_E = expert_TC.flatten().long().bincount(minlength=NUM_EXPERTS)
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(grads[name].flatten(1).any(1), rows_E > 0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_case
def test_a_repeat_has_the_same_bits(
    case: Callable[[], Tensor], dtype: torch.dtype, has_bias: bool
) -> None:
    module, expert_TC = _experts(EXPERTS_NAME, dtype, has_bias=has_bias), case()
    first = _run(module, expert_TC)
    for _ in range(3):
        again = _run(module, expert_TC)
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_widths_that_grouped_products_refuse_run_one_after_the_other() -> None:
    """Rows of 12 bfloat16 are no whole 16 bytes."""
    expert_TC = _even(100, 2)
    truth = _run(_experts("eager", torch.float32, inner=12), expert_TC)
    ours = _run(_experts(EXPERTS_NAME, torch.bfloat16, inner=12), expert_TC)
    for name, exact in truth.items():
        assert (ours[name].float() - exact).norm() <= 0.02 * exact.norm(), name


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("rank", [3, 16])
@each_case
def test_adapters_are_those_of_float32(case: Callable[[], Tensor], rank: int) -> None:
    """By grouped products, and of a rank that these refuse; twice the same bits."""
    expert_TC = case()
    truth = _run(_adapted(torch.float32, rank), expert_TC)
    ours, again = (_run(_adapted(torch.bfloat16, rank), expert_TC) for _ in range(2))
    assert len(truth) == 3 + 6
    for name, exact in truth.items():
        assert (ours[name].float() - exact).norm() <= 0.02 * exact.norm(), name
        assert torch.equal(ours[name], again[name]), name


@each_case
def test_rows_are_those_of_the_cpu(case: Callable[[], Tensor]) -> None:
    expert_TC = case()
    found = sort_by_expert(expert_TC, NUM_EXPERTS)
    expected = sort_by_expert(expert_TC.cpu(), NUM_EXPERTS)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, expected, strict=True))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("features", [1, 96, 2048, 4096])
@each_case
def test_rows_move_as_on_the_cpu(case: Callable[[], Tensor], features: int) -> None:
    place_TC, _stop_E = sort_by_expert(case(), NUM_EXPERTS)
    for move, count in ((to_rows, len(place_TC)), (to_tokens, place_TC.numel())):
        x = torch.randn(count, features, generator=_generator(8), device=DEVICE).bfloat16()
        assert torch.equal(move(x, place_TC).cpu(), move(x.cpu(), place_TC.cpu()))


@pytest.mark.parametrize(
    "rule",
    [
        RouteRule(top_k=8, is_normalized=True),
        RouteRule(top_k=8, scores=Scores.SIGMOID, is_normalized=True, scale=2.5),
        RouteRule(top_k=8, scores=Scores.SIGMOID, num_groups=8, topk_group=3),
        RouteRule(top_k=8, scores=Scores.CHOSEN),
    ],
)
def test_routes_are_those_of_the_cpu(rule: RouteRule) -> None:
    """Logits have few values, so that most tokens have ties; gradients agree to rounding."""
    logits_TE = torch.randint(-4, 5, (4001, 128), generator=_generator(3), device=DEVICE).bfloat16()
    correction_E = None
    if rule.scores is Scores.SIGMOID:
        correction_E = torch.randint(-2, 3, (128,), generator=_generator(9), device=DEVICE).float()
    dweight_TC = torch.randn(4001, 8, generator=_generator(4), device=DEVICE).bfloat16()
    copies_T = torch.randint(0, 65, (4001,), generator=_generator(5), device=DEVICE)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    sums: list[Tensor] = []
    for device in (DEVICE, torch.device("cpu")):
        leaf_TE = logits_TE.detach().to(device, copy=True).requires_grad_()
        count = RouteCount(rule)
        count.copies_T = copies_T.int().to(device)
        weight_TC, expert_TC = route(
            leaf_TE,
            None if correction_E is None else correction_E.to(device),
            numbered(count),
            8,
        )
        assert count.sums_F is not None
        sums.append(count.sums_F.cpu())
        weight_TC.backward(dweight_TC.to(device))
        assert leaf_TE.grad is not None
        found.append((weight_TC.detach().cpu(), expert_TC.cpu(), leaf_TE.grad.cpu()))
    (weight_TC, expert_TC, grad_TE), (other_TC, other_expert_TC, other_TE) = found
    assert torch.equal(expert_TC, other_expert_TC)
    # All are whole numbers but the entropy, behind the choices of each expert and the tokens.
    of_entropy = 128 + 1
    entropies = [float(each[of_entropy]) for each in sums]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-6)
    for each in sums:
        each[of_entropy] = 0
    assert torch.equal(*sums)
    assert (weight_TC.float() - other_TC.float()).norm() <= 0.01 * other_TC.float().norm()
    assert (grad_TE.float() - other_TE.float()).norm() <= 0.01 * other_TE.float().norm()


@pytest.mark.usefixtures("deterministic_compiler")
@pytest.mark.parametrize(
    "make",
    [
        partial(_block, 0),
        partial(_block, 16),
        partial(_other_block, DEEPSEEK_V3),
        partial(_other_block, GPT_OSS),
    ],
    ids=["qwen3_moe", "qwen3_moe_adapted", "deepseek_v3", "gpt_oss"],
)
def test_a_compiled_block_repeats_its_bits_and_does_not_wait(make: Callable[[], Any]) -> None:
    """Router and experts, forward and backward, as one graph without a break."""
    block = make()
    run = torch.compile(block, fullgraph=True)
    x_1TD = torch.randn(1, 3001, D, generator=_generator(5), device=DEVICE).bfloat16()
    (router,) = (m for m in block.modules() if isinstance(m, Router))
    router.count.copies_T = torch.ones(3001, dtype=torch.int32, device=DEVICE)

    def gradients() -> list[Tensor]:
        leaf_1TD = x_1TD.clone().requires_grad_()
        out = run(leaf_1TD)
        out_1TD = out[0] if isinstance(out, tuple) else out
        inputs = [leaf_1TD, *(p for p in block.parameters() if p.requires_grad)]
        return [out_1TD, *torch.autograd.grad(out_1TD, inputs, x_1TD)]

    first = gradients()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = gradients()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(first, again, strict=True):
        assert one.count_nonzero() > 0
        assert torch.equal(one, other)


def test_no_kernel_adds_floats_by_atomics() -> None:
    """What torch runs for an index that repeats: `index_put` and `index_add` are not there."""
    module, expert_TC = _experts(EXPERTS_NAME, torch.bfloat16), _zipf()
    _run(module, expert_TC)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _run(module, expert_TC)
    names = {event.key for event in profiler.key_averages()}
    assert "aten::_grouped_mm" in names
    assert not names & {"aten::index_put_", "aten::_index_put_impl_", "aten::index_add_"}
