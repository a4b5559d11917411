"""Routers of all kinds against transformers' own modules, where ties go to the lower expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from ratoon.model.numbered import numbered
from ratoon.model.route_rules import RouteRule, Scores, by_chosen, by_sigmoid, by_softmax
from ratoon.model.router import CORRECTION, RouteCount, Router, route
from tests.oracle.hf import DoublePrecision

T, D, E = 96, 6, 12
SIGMOID = {"n_routed_experts": E, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
GROUPS = {"n_group": 4, "topk_group": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A router of transformers, the words of its configuration, and our rule of it."""

    router: type[nn.Module]
    config: str
    rule: Callable[[Any], RouteRule]
    words: dict[str, Any]

    def make(self) -> Any:
        fields = {"hidden_size": D, "num_experts_per_tok": 3, **self.words}
        if self.config == "Qwen3_5MoeTextConfig":
            fields["num_hidden_layers"] = 1
        router: Any = self.router(getattr(transformers, self.config)(**fields))
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for each in (*router.parameters(), *router.buffers()):
                each.copy_(torch.randn(each.shape, generator=generator))
        return router


QWEN3_MOE = Kind(
    router=Qwen3MoeTopKRouter,
    config="Qwen3MoeConfig",
    rule=by_softmax,
    words={"num_experts": E, "norm_topk_prob": True},
)
DEEPSEEK = Kind(
    router=DeepseekV3TopkRouter,
    config="DeepseekV3Config",
    rule=by_sigmoid,
    words={**SIGMOID, **GROUPS},
)
KINDS = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_as_they_are": replace(QWEN3_MOE, words={"num_experts": E, "norm_topk_prob": False}),
    "qwen3_next": replace(QWEN3_MOE, router=Qwen3NextTopKRouter, config="Qwen3NextConfig"),
    "qwen3_5_moe": replace(
        QWEN3_MOE,
        router=Qwen3_5MoeTopKRouter,
        config="Qwen3_5MoeTextConfig",
        words={"num_experts": E},
    ),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3_as_they_are": replace(DEEPSEEK, words={**DEEPSEEK.words, "norm_topk_prob": False}),
    "glm4_moe": replace(
        DEEPSEEK, router=Glm4MoeTopkRouter, config="Glm4MoeConfig", words={**SIGMOID}
    ),
    "glm4_moe_lite": replace(
        DEEPSEEK, router=Glm4MoeLiteTopkRouter, config="Glm4MoeLiteConfig", words={**SIGMOID}
    ),
    "gpt_oss": Kind(
        router=GptOssTopKRouter,
        config="GptOssConfig",
        rule=by_chosen,
        words={"num_local_experts": E},
    ),
}


class _TiesToTheLower(TorchFunctionMode):
    """Whoever asks for the largest ones gets the first ones of a stable sort."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.topk, Tensor.topk):
            x, k = args[0], (kwargs or {}).get("k", args[-1])
            values, indices = x.sort(dim=-1, descending=True, stable=True)
            return values[..., :k], indices[..., :k]
        return func(*args, **(kwargs or {}))


def _inputs(*, has_ties: bool) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    x_TD = torch.randn(T, D, generator=generator, dtype=torch.float64)
    # Equal logits of any expert with equal weights, and of many more.
    return x_TD.round().clamp(-1, 1) if has_ties else x_TD


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_routes_and_gradients_are_those_of_transformers(kind: Kind, has_ties: bool) -> None:
    """Weights by expert, and gradients of inputs and parameters."""
    theirs = kind.make().double()
    if has_ties:
        with torch.no_grad():
            for each in (*theirs.parameters(), *theirs.buffers()):
                each.copy_(each.round())
    ours = Router(theirs, kind.rule(theirs))
    dweight_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(6)).double()
    found: list[list[Tensor]] = []
    for router in (theirs, ours):
        x_TD = _inputs(has_ties=has_ties).requires_grad_()
        with DoublePrecision(), _TiesToTheLower():
            logits_TE, weight_TC, expert_TC = router(x_TD)
        weight_TE = torch.zeros_like(logits_TE).scatter(1, expert_TC.long(), weight_TC)
        grads = torch.autograd.grad((weight_TE * dweight_TE).sum(), [x_TD, *router.parameters()])
        found.append([logits_TE, weight_TE, *grads])
    ties_T = found[0][0].sort(-1).values.diff(dim=-1).eq(0).any(-1)
    assert int(ties_T.sum()) > T // 2 if has_ties else not ties_T.any()
    for expected, got in zip(*found, strict=True):
        assert expected.norm() > 0.1
        assert (got - expected).norm() <= 1e-13 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_routes_have_the_bits_of_transformers(kind: Kind, dtype: torch.dtype) -> None:
    theirs = kind.make().to(dtype)
    if (bias_E := getattr(theirs, CORRECTION, None)) is not None:
        # It stays in float32, whatever the weights are in.
        setattr(theirs, CORRECTION, bias_E.float())
    rule = kind.rule(theirs)
    x_TD = _inputs(has_ties=False).to(dtype)
    with _TiesToTheLower():
        logits_TE, weight_TC, expert_TC = theirs(x_TD)
    got = Router(theirs, rule)(x_TD)
    assert torch.equal(got[0], logits_TE)
    assert torch.equal(got[2].long(), expert_TC)
    # transformers has gpt-oss' softmax in the dtype of the model.
    is_narrow = rule.scores is Scores.CHOSEN and dtype is torch.bfloat16
    torch.testing.assert_close(got[1], weight_TC, rtol=0.01 if is_narrow else 0, atol=0)


class _Balance:
    coefficient = 0.5

    def __init__(self, dprobs_TE: Tensor) -> None:
        self._dprobs_TE = dprobs_TE

    def add(self, expert_TC: Tensor, num_experts: int) -> None:
        raise AssertionError("nothing is counted")

    def settle(self) -> None:
        raise AssertionError("nothing is counted")

    def gradient(self, _row: int, _probs_TE: Tensor) -> Tensor:
        return self._dprobs_TE


@pytest.mark.parametrize("scores", Scores)
def test_a_balance_is_of_scores_over_their_sum(scores: Scores) -> None:
    """The softmax of all experts is balanced, also where only the chosen are weighed."""
    generator = torch.Generator().manual_seed(7)
    logits_TE, dprobs_TE = (
        torch.randn(T, E, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    count = RouteCount(RouteRule(top_k=3, scores=scores, is_normalized=True, scale=2.0))
    count.balance_behind = _Balance(dprobs_TE)
    logits_TE.requires_grad_()
    weight_TC, _expert_TC = route(logits_TE, None, numbered(count), 3)
    (got,) = torch.autograd.grad(weight_TC, logits_TE, torch.zeros_like(weight_TC))
    score_TE = logits_TE.sigmoid() if scores is Scores.SIGMOID else logits_TE.exp()
    loss = (dprobs_TE * score_TE / score_TE.sum(-1, keepdim=True)).sum()
    (expected,) = torch.autograd.grad(0.5 * loss, logits_TE)
    assert expected.norm() > 0.1
    assert (got - expected).norm() <= 1e-14 * expected.norm()
    assert count.balance_loss is not None
    assert float(count.balance_loss) == pytest.approx(loss.item(), rel=1e-13)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_recorded_experts_replace_a_routers_own(kind: Kind) -> None:
    """Weighed by the router's own scores; its own choices are replayed to the same bits."""
    theirs = kind.make().double()
    router = Router(theirs, kind.rule(theirs))
    x_TD = _inputs(has_ties=False)
    _logits_TE, own_weight_TC, own_TC = router(x_TD)
    router.count.recorded_TC = own_TC.sort(-1).values
    _logits_TE, weight_TC, expert_TC = router(x_TD)
    assert torch.equal(expert_TC, own_TC)
    assert torch.equal(weight_TC, own_weight_TC)
    generator = torch.Generator().manual_seed(8)
    given_TC = torch.rand(T, E, generator=generator).argsort(-1)[:, :3].sort(-1).values
    given_TC[::2] = -1
    router.count.recorded_TC = given_TC.to(torch.int16)
    router.count.copies_T = torch.ones(T, dtype=torch.int32)
    logits_TE, weight_TC, expert_TC = router(x_TD)
    assert torch.equal(expert_TC[::2], own_TC[::2])
    assert torch.equal(expert_TC[1::2].long().sort(-1).values, given_TC[1::2])
    rule = router.count.rule
    score_TE = logits_TE.sigmoid() if rule.scores is Scores.SIGMOID else logits_TE.softmax(-1)
    expected_TC = score_TE.gather(1, expert_TC.long())
    if rule.is_normalized or rule.scores is Scores.CHOSEN:
        expected_TC = expected_TC / expected_TC.sum(-1, keepdim=True)
    torch.testing.assert_close(weight_TC, rule.scale * expected_TC, rtol=1e-13, atol=0)
    assert router.count.sums_F is not None
    assert router.count.sums_F[-2] == T // 2
    assert 0 < router.count.sums_F[-1] <= T // 2
