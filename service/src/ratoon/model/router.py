"""Which experts each token visits, and with what weights: transformers' router as one operation.

Its results are always kept for the backward (`model.layers`): run again, rounding could send a
token elsewhere than its forward did. Ties go to the lower expert.

T tokens, E experts, C experts of a token, D features of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ratoon.model.numbered import find, numbered
from ratoon_kernels.precision import accumulation_dtype


class Balance(Protocol):
    """A loss of the choices and probabilities of one forward's tokens."""

    @property
    def coefficient(self) -> float: ...

    def add(self, expert_TC: Tensor, num_experts: int, /) -> None:
        """What the next layer with experts chooses."""
        ...

    def settle(self) -> None:
        """All layers have chosen."""
        ...

    def gradient(self, row: int, probs_TE: Tensor, /) -> Tensor:
        """Of the loss without its coefficient in the probabilities, in their dtype, [T, E]; at the
        row-th layer with experts."""
        ...


class RouteCount:
    """What one router is given and chooses, added up on the device, and the loss that balances it.

    The routing operation finds it by number, as a compiled layer takes in and gives out hidden
    states alone. Nothing is counted while `copies_T` is None.
    """

    def __init__(self) -> None:
        # Among the model's layers with experts.
        self.row = 0
        # How often each token of the forward under way counts.
        self.copies_T: Tensor | None = None
        # Experts that its tokens visit in place of the router's own, ascending, int16; -1: that
        # token has none. None: of no token.
        self.recorded_TC: Tensor | None = None
        # Of the forward under way, and of the backward.
        self.balance: Balance | None = None
        self.balance_behind: Balance | None = None
        # Of `balance`, without its coefficient; float64 []. None: no backward yet.
        self.balance_loss: Tensor | None = None
        # float64 [E + 4]: choices of each expert, tokens, entropies in nats, tokens with recorded
        # experts, those of them that the router would send elsewhere. None: no forward yet.
        self.sums_F: Tensor | None = None

    def choose(self, probs_TE: Tensor, top_k: int) -> Tensor:
        """expert_TC, by falling probability; counts the tokens. Nothing waits for the device."""
        own_TC = _choose(probs_TE, top_k)
        if self.recorded_TC is None:
            self._add(probs_TE, own_TC, None)
            return own_TC
        recorded_TC = self.recorded_TC.long()
        is_recorded_T1 = recorded_TC[:, :1] >= 0
        given_TC = _by_probability(probs_TE, recorded_TC.clamp(min=0))
        is_other_T = (own_TC.sort(-1).values != recorded_TC).any(-1) & is_recorded_T1[:, 0]
        expert_TC = torch.where(is_recorded_T1, given_TC, own_TC)
        self._add(probs_TE, expert_TC, torch.stack([is_recorded_T1[:, 0], is_other_T]))
        return expert_TC

    def _add(self, probs_TE: Tensor, expert_TC: Tensor, recorded_2T: Tensor | None) -> None:
        if self.copies_T is None:
            return
        copies_TC = self.copies_T.to(probs_TE.dtype)[:, None].expand_as(expert_TC)
        load_E = _by_expert(copies_TC, expert_TC, probs_TE).sum(0, dtype=torch.float64)
        copies_T = self.copies_T.double()
        entropy_T = torch.special.entr(probs_TE).sum(-1, dtype=torch.float64)
        recorded_2 = copies_T.new_zeros(2)
        if recorded_2T is not None:
            recorded_2 = (copies_T * recorded_2T).sum(1)
        tokens_2 = torch.stack([copies_T.sum(), (copies_T * entropy_T).sum()])
        sums_F = torch.cat([load_E, tokens_2, recorded_2])
        self.sums_F = sums_F if self.sums_F is None else self.sums_F + sums_F
        if self.balance is not None:
            self.balance.add(expert_TC, probs_TE.shape[1])

    def gradient(self, probs_TE: Tensor) -> Tensor | None:
        """Of the balance loss in the logits; None: there is none."""
        if self.balance_behind is None:
            return None
        dprobs_TE = self.balance_behind.gradient(self.row, probs_TE)
        loss = (probs_TE * dprobs_TE).sum(dtype=torch.float64)
        self.balance_loss = loss if self.balance_loss is None else self.balance_loss + loss
        return _softmax_backward(self.balance_behind.coefficient * dprobs_TE, probs_TE)


class Router(nn.Module):
    """In place of a router of transformers, whose parameter it takes over."""

    def __init__(self, router: Qwen3MoeTopKRouter) -> None:
        super().__init__()
        self.weight = router.weight
        self._top_k = router.top_k
        self._is_normalized = router.norm_topk_prob
        self.count = RouteCount()
        self._number_1 = numbered(self.count)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, D] -> logits [T, E], weights and experts [T, C]."""
        logits_TE = nn.functional.linear(hidden_states, self.weight)
        return logits_TE, *route(logits_TE, self._number_1, self._top_k, self._is_normalized)


def replace_routers(module: nn.Module) -> None:
    """Have every layer of a transformers model route as here; a dense one has none that does."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Qwen3MoeTopKRouter):
                setattr(parent, name, Router(child))


@torch.library.custom_op("ratoon::route", mutates_args=())
def route(
    logits_TE: Tensor, number_1: Tensor, top_k: int, is_normalized: bool
) -> tuple[Tensor, Tensor]:
    """The `top_k` largest probabilities in falling order, and whose they are.

    `number_1`: of the `RouteCount` that they are added to. Where that has recorded experts of a
    token, theirs in place of the largest ones.
    The softmax is computed in float32 at least. Returns weight_TC in the dtype of the logits,
    which sum to 1 per token if `is_normalized`, and expert_TC as int16. Differentiable in the
    logits through the weights.
    """
    probs_TE = _softmax(logits_TE)
    expert_TC = cast("RouteCount", find(number_1)).choose(probs_TE, top_k)
    weight_TC = _weights(probs_TE, expert_TC, is_normalized)
    return weight_TC.to(logits_TE.dtype), expert_TC.to(torch.int16)


@route.register_fake
def _(
    logits_TE: Tensor, _number_1: Tensor, top_k: int, _is_normalized: bool
) -> tuple[Tensor, Tensor]:
    shape = (logits_TE.shape[0], top_k)
    return logits_TE.new_empty(shape), logits_TE.new_empty(shape, dtype=torch.int16)


@torch.library.custom_op("ratoon::route_backward", mutates_args=())
def _backward(
    dweight_TC: Tensor,
    logits_TE: Tensor,
    expert_TC: Tensor,
    number_1: Tensor,
    is_normalized: bool,
) -> Tensor:
    probs_TE = q_TE = _softmax(logits_TE)
    if is_normalized:
        # Weights that sum to 1 are a softmax over the chosen experts alone.
        q_TE = _by_expert(_weights(q_TE, expert_TC.long(), is_normalized), expert_TC, q_TE)
    dq_TE = _by_expert(dweight_TC.to(q_TE.dtype), expert_TC, q_TE)
    dlogits_TE = _softmax_backward(dq_TE, q_TE)
    of_balance_TE = cast("RouteCount", find(number_1)).gradient(probs_TE)
    if of_balance_TE is not None:
        dlogits_TE = dlogits_TE + of_balance_TE
    return dlogits_TE.to(logits_TE.dtype)


@_backward.register_fake
def _(_dweight_TC: Tensor, logits_TE: Tensor, *_others: Any) -> Tensor:
    return logits_TE.new_empty(logits_TE.shape)


def _softmax(logits_TE: Tensor) -> Tensor:
    return torch.softmax(logits_TE, dim=-1, dtype=accumulation_dtype(logits_TE.dtype))


def _softmax_backward(dprobs_TE: Tensor, probs_TE: Tensor) -> Tensor:
    return probs_TE * (dprobs_TE - (probs_TE * dprobs_TE).sum(-1, keepdim=True))


def _choose(probs_TE: Tensor, top_k: int) -> Tensor:
    """expert_TC; as a stable sort has them, for topk leaves open which of equal ones it takes."""
    if probs_TE.is_cuda and probs_TE.dtype is torch.float32:
        from ratoon.model.route_kernel import choose_experts

        return choose_experts(probs_TE, top_k)
    return probs_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def _by_probability(probs_TE: Tensor, expert_TC: Tensor) -> Tensor:
    """Experts that ascend, sorted as `_choose` would have them."""
    order_TC = probs_TE.gather(1, expert_TC).sort(dim=-1, descending=True, stable=True).indices
    return expert_TC.gather(1, order_TC)


def _by_expert(x_TC: Tensor, expert_TC: Tensor, like_TE: Tensor) -> Tensor:
    """Each value at its expert, zeros elsewhere."""
    x_TE = torch.zeros_like(like_TE)
    with in_any_order():
        return x_TE.scatter_(1, expert_TC.long(), x_TC.to(x_TE.dtype))


@contextmanager
def in_any_order() -> Iterator[None]:
    """Inside, torch takes our word for it that nothing is written twice, as the experts of a token
    differ. Else it sorts what is scattered on a GPU, and waits for it."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    set_deterministic = cast("Any", torch._C)._set_deterministic_algorithms
    set_deterministic(False)
    try:
        yield
    finally:
        set_deterministic(is_deterministic)


def _weights(probs_TE: Tensor, expert_TC: Tensor, is_normalized: bool) -> Tensor:
    weight_TC = probs_TE.gather(1, expert_TC)
    return weight_TC / weight_TC.sum(-1, keepdim=True) if is_normalized else weight_TC


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits_TE, number_1, _top_k, ctx.is_normalized = inputs
    _weight_TC, expert_TC = output
    ctx.save_for_backward(logits_TE, expert_TC, number_1)
    ctx.mark_non_differentiable(expert_TC)


def _differentiate(ctx: Any, dweight_TC: Tensor, _dexpert_TC: Any) -> tuple[Any, ...]:
    return _backward(dweight_TC, *ctx.saved_tensors, ctx.is_normalized), None, None, None


route.register_autograd(_differentiate, setup_context=_setup_context)
