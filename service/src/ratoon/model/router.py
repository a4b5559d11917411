"""Routes tokens to experts in one operation instead of transformers' routers, and counts choices.

The operation's results are always kept for the backward (`model.layers`): recomputed, rounding
could send a token elsewhere than its forward did. What it computes is the router's `RouteRule`; a
correction bias takes part in choosing alone, and has no gradient. A packed token
counts once for each rollout that it is part of, so sums do not depend on how rollouts are packed,
cut or spread over ranks.

T tokens, E experts, C experts of a token, L layers with experts, D features of the model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ratoon.model.numbered import find, numbered
from ratoon.model.route_rules import RouteRule, Scores
from ratoon_kernels.precision import accumulation_dtype

# Name of the bias by which a router of transformers chooses.
CORRECTION = "e_score_correction_bias"
# Added to a sum of sigmoids before it divides, as in transformers.
_EPSILON = 1e-20


class Balance(Protocol):
    """A loss of the choices and probabilities of one forward's tokens."""

    @property
    def coefficient(self) -> float: ...

    def add(self, expert_TC: Tensor, num_experts: int, /) -> None:
        """Adds the choices of the next layer with experts."""
        ...

    def settle(self) -> None:
        """Ends the forward: all layers have chosen."""
        ...

    def gradient(self, row: int, probs_TE: Tensor, /) -> Tensor:
        """Gradient of the loss without its coefficient with respect to the probabilities, in their
        dtype, [T, E]; at the row-th layer with experts."""
        ...


class RouteCount:
    """Rule, inputs and choices of one router, summed on the device, and the loss that balances it.

    The routing operation finds it by number, because a compiled layer takes and returns only hidden
    states. Nothing is counted while `copies_T` is None.
    """

    def __init__(self, rule: RouteRule) -> None:
        self.rule = rule
        # Index among the model's layers with experts.
        self.row = 0
        # How often each token of the running forward counts.
        self.copies_T: Tensor | None = None
        # Experts that its tokens visit instead of the router's own, ascending, int16; -1: that
        # token has none. None: no token has any.
        self.recorded_TC: Tensor | None = None
        # Balance of the running forward, and of the running backward.
        self.balance: Balance | None = None
        self.balance_behind: Balance | None = None
        # Loss of `balance`, without its coefficient; float64 []. None: no backward yet.
        self.balance_loss: Tensor | None = None
        # float64 [E + 4]: choices of each expert, tokens, entropies in nats, tokens with recorded
        # experts, those of them that the router would send elsewhere. None: no forward yet.
        self.sums_F: Tensor | None = None

    def choose(self, score_TE: Tensor, correction_E: Tensor | None) -> Tensor:
        """Returns expert_TC, best first, and counts the tokens. Nothing waits for the device."""
        merit_TE = score_TE if correction_E is None else score_TE + correction_E
        own_TC = _choose(_from_best_groups(merit_TE, self.rule), self.rule.top_k)
        if self.recorded_TC is None:
            self._add(score_TE, own_TC, None)
            return own_TC
        recorded_TC = self.recorded_TC.long()
        is_recorded_T1 = recorded_TC[:, :1] >= 0
        given_TC = _by_merit(merit_TE, recorded_TC.clamp(min=0))
        is_other_T = (own_TC.sort(-1).values != recorded_TC).any(-1) & is_recorded_T1[:, 0]
        expert_TC = torch.where(is_recorded_T1, given_TC, own_TC)
        self._add(score_TE, expert_TC, torch.stack([is_recorded_T1[:, 0], is_other_T]))
        return expert_TC

    def _add(self, score_TE: Tensor, expert_TC: Tensor, recorded_2T: Tensor | None) -> None:
        if self.copies_T is None:
            return
        probs_TE = _probabilities(score_TE, self.rule)
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

    def gradient(self, score_TE: Tensor) -> Tensor | None:
        """Gradient of the balance loss with respect to the logits; None if there is no balance
        loss."""
        if self.balance_behind is None:
            return None
        probs_TE = _probabilities(score_TE, self.rule)
        dprobs_TE = self.balance_behind.gradient(self.row, probs_TE)
        loss = (probs_TE * dprobs_TE).sum(dtype=torch.float64)
        self.balance_loss = loss if self.balance_loss is None else self.balance_loss + loss
        dlogits_TE = _softmax_backward(self.balance_behind.coefficient * dprobs_TE, probs_TE)
        if self.rule.scores is Scores.SIGMOID:
            # The derivative of a score's logarithm, which is 1 before a softmax is normalized.
            dlogits_TE = dlogits_TE * (1 - score_TE)
        return dlogits_TE


class Router(nn.Module):
    """Replaces a router of transformers, and takes over its parameters and its correction bias."""

    def __init__(self, router: Any, rule: RouteRule) -> None:
        super().__init__()
        self.weight: Tensor = router.weight
        self.bias: Tensor | None = getattr(router, "bias", None)
        self.register_buffer(CORRECTION, getattr(router, CORRECTION, None))
        self._top_k, self._is_wide = rule.top_k, rule.is_wide
        self.count = RouteCount(rule)
        self._number_1 = numbered(self.count)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., T, D] -> logits [T, E], weights and experts [T, C]."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        weight_ED = self.weight
        if self._is_wide:
            x_TD, weight_ED = _wide(x_TD), _wide(weight_ED)
        logits_TE = nn.functional.linear(x_TD, weight_ED, self.bias)
        correction_E = getattr(self, CORRECTION)
        return logits_TE, *route(logits_TE, correction_E, self._number_1, self._top_k)


def replace_routers(
    module: nn.Module, rules: Mapping[type[nn.Module], Callable[[Any], RouteRule]]
) -> None:
    """Make every layer of a transformers model route with this module; a dense model has no such
    layer. `rules`: the rule of a router, by its class."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if (rule_of := rules.get(type(child))) is not None:
                setattr(parent, name, Router(child, rule_of(child)))


@torch.library.custom_op("ratoon::route", mutates_args=())
def route(
    logits_TE: Tensor, correction_E: Tensor | None, number_1: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """Returns the weights of the `top_k` best experts, best first, and these experts.

    `number_1` is the number of the `RouteCount` that they are added to, whose rule says how they
    are chosen and weighed. If that has recorded experts of a token, these replace the best ones.
    Scores are computed at least in float32.
    Returns weight_TC in the dtype of the logits and expert_TC as int16. Differentiable in the
    logits through the weights.
    """
    count = cast("RouteCount", find(number_1))
    assert count.rule.top_k == top_k, "the shape is known without the rule"
    score_TE = _scores(logits_TE, count.rule)
    expert_TC = count.choose(score_TE, correction_E)
    weight_TC = _weights(score_TE, expert_TC, count.rule)
    return weight_TC.to(logits_TE.dtype), expert_TC.to(torch.int16)


@route.register_fake
def _(
    logits_TE: Tensor, _correction_E: Tensor | None, _number_1: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    shape = (logits_TE.shape[0], top_k)
    return logits_TE.new_empty(shape), logits_TE.new_empty(shape, dtype=torch.int16)


@torch.library.custom_op("ratoon::route_backward", mutates_args=())
def _backward(dweight_TC: Tensor, logits_TE: Tensor, expert_TC: Tensor, number_1: Tensor) -> Tensor:
    count = cast("RouteCount", find(number_1))
    score_TE = _scores(logits_TE, count.rule)
    dlogits_TE = _logits_gradient(dweight_TC, score_TE, expert_TC, count.rule)
    of_balance_TE = count.gradient(score_TE)
    if of_balance_TE is not None:
        dlogits_TE = dlogits_TE + of_balance_TE
    return dlogits_TE.to(logits_TE.dtype)


@_backward.register_fake
def _(_dweight_TC: Tensor, logits_TE: Tensor, *_others: Any) -> Tensor:
    return logits_TE.new_empty(logits_TE.shape)


def _logits_gradient(
    dweight_TC: Tensor, score_TE: Tensor, expert_TC: Tensor, rule: RouteRule
) -> Tensor:
    """Gradient of the weights with respect to the logits."""
    if rule.scores is Scores.SIGMOID:
        score_TC = score_TE.gather(1, expert_TC.long())
        dscore_TC = rule.scale * dweight_TC.to(score_TC.dtype)
        if rule.is_normalized:
            sum_T1 = score_TC.sum(-1, keepdim=True) + _EPSILON
            dsum_T1 = (dscore_TC * score_TC).sum(-1, keepdim=True) / sum_T1
            dscore_TC = (dscore_TC - dsum_T1) / sum_T1
        return _by_expert(dscore_TC * score_TC * (1 - score_TC), expert_TC, score_TE)
    q_TE = score_TE
    if rule.is_normalized or rule.scores is Scores.CHOSEN:
        # Weights that sum to 1 are a softmax over only the chosen experts.
        q_TE = _by_expert(_weights(q_TE, expert_TC.long(), rule), expert_TC, q_TE)
    dq_TE = _by_expert(dweight_TC.to(q_TE.dtype), expert_TC, q_TE)
    return _softmax_backward(dq_TE, q_TE)


def _scores(logits_TE: Tensor, rule: RouteRule) -> Tensor:
    """What experts are chosen by before any correction, and weighed by."""
    if rule.scores is Scores.SOFTMAX:
        return torch.softmax(logits_TE, dim=-1, dtype=accumulation_dtype(logits_TE.dtype))
    wide_TE = _wide(logits_TE)
    return wide_TE if rule.scores is Scores.CHOSEN else torch.sigmoid(wide_TE)


def _probabilities(score_TE: Tensor, rule: RouteRule) -> Tensor:
    """Probabilities of all experts, which sum to 1: sigmoids over their sum."""
    if rule.scores is Scores.SOFTMAX:
        return score_TE
    if rule.scores is Scores.CHOSEN:
        return torch.softmax(score_TE, dim=-1)
    return score_TE / (score_TE.sum(-1, keepdim=True) + _EPSILON)


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _softmax_backward(dprobs_TE: Tensor, probs_TE: Tensor) -> Tensor:
    return probs_TE * (dprobs_TE - (probs_TE * dprobs_TE).sum(-1, keepdim=True))


def _from_best_groups(merit_TE: Tensor, rule: RouteRule) -> Tensor:
    """Merits, and -inf in all groups but the best."""
    if rule.num_groups == rule.topk_group:
        return merit_TE
    merit_TGE = merit_TE.unflatten(1, (rule.num_groups, -1))
    best_TG = _choose(merit_TGE.topk(2, dim=-1).values.sum(-1), rule.topk_group)
    is_left_TG = torch.ones(merit_TGE.shape[:2], dtype=torch.bool, device=merit_TE.device)
    with in_any_order():
        is_left_TG.scatter_(1, best_TG, value=False)
    return merit_TGE.masked_fill(is_left_TG[..., None], -torch.inf).flatten(1)


def _choose(merit_TE: Tensor, top_k: int) -> Tensor:
    """Returns expert_TC in the order of a stable sort, because topk does not specify the order of
    equal ones."""
    if merit_TE.is_cuda and merit_TE.dtype is torch.float32:
        from ratoon_kernels.routed_experts import choose_experts

        return choose_experts(merit_TE, top_k)
    return merit_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def _by_merit(merit_TE: Tensor, expert_TC: Tensor) -> Tensor:
    """Sorts ascending experts as `_choose` would."""
    order_TC = merit_TE.gather(1, expert_TC).sort(dim=-1, descending=True, stable=True).indices
    return expert_TC.gather(1, order_TC)


def _by_expert(x_TC: Tensor, expert_TC: Tensor, like_TE: Tensor) -> Tensor:
    """Returns each value at its expert, and zeros elsewhere."""
    x_TE = torch.zeros_like(like_TE)
    with in_any_order():
        return x_TE.scatter_(1, expert_TC.long(), x_TC.to(x_TE.dtype))


@contextmanager
def in_any_order() -> Iterator[None]:
    """Within the context, torch assumes that nothing is written twice, as the experts of a token
    differ. Otherwise it would sort scattered values on a GPU, and wait for it."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    set_deterministic = cast("Any", torch._C)._set_deterministic_algorithms
    set_deterministic(False)
    try:
        yield
    finally:
        set_deterministic(is_deterministic)


def _weights(score_TE: Tensor, expert_TC: Tensor, rule: RouteRule) -> Tensor:
    weight_TC = score_TE.gather(1, expert_TC)
    if rule.scores is Scores.CHOSEN:
        return torch.softmax(weight_TC, dim=-1)
    if rule.is_normalized:
        sum_T1 = weight_TC.sum(-1, keepdim=True)
        # Sigmoids may all be zero.
        weight_TC = weight_TC / (sum_T1 + _EPSILON if rule.scores is Scores.SIGMOID else sum_T1)
    return weight_TC if rule.scale == 1 else weight_TC * rule.scale


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits_TE, _correction_E, number_1, _top_k = inputs
    _weight_TC, expert_TC = output
    ctx.save_for_backward(logits_TE, expert_TC, number_1)
    ctx.mark_non_differentiable(expert_TC)


def _differentiate(ctx: Any, dweight_TC: Tensor, _dexpert_TC: Any) -> tuple[Any, ...]:
    return _backward(dweight_TC, *ctx.saved_tensors), None, None, None


route.register_autograd(_differentiate, setup_context=_setup_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSums:
    """`layers`: layers with experts that ran, ascending; () for a dense model."""

    layers: tuple[int, ...] = ()
    # Sums of each layer, E + 4 numbers, as in `RouteCount.sums_F`.
    sums: tuple[tuple[float, ...], ...] = ()

    def __add__(self, other: RouteSums) -> RouteSums:
        if not (self.layers and other.layers):
            return self if self.layers else other
        assert self.layers == other.layers, "of one model"
        pairs = zip(self.sums, other.sums, strict=True)
        sums = tuple(tuple(map(operator.add, mine, theirs)) for mine, theirs in pairs)
        return RouteSums(layers=self.layers, sums=sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTokens:
    """Tokens of one forward: how often each counts, int32 [T], and the loss of their choices."""

    copies_T: Tensor
    balance: Balance | None = None
    # Recorded experts by layer with experts, as in `RouteCount.recorded_TC`. None: no token has
    # any.
    recorded_LTC: Tensor | None = None


class RouteCounts:
    """Owns the counts of one decoder's routers, on its device."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._counts = {
            index: module.count
            for index, layer in enumerate(layers)
            for module in layer.modules()
            if isinstance(module, Router)
        }
        for row, count in enumerate(self._counts.values()):
            count.row = row

    @property
    def num_layers(self) -> int:
        """Number of layers with experts."""
        return len(self._counts)

    @contextmanager
    def routing(self, tokens: RoutedTokens | None, *, is_counted: bool) -> Iterator[None]:
        """Within the context, a forward is of these tokens: it uses their recorded experts, and is
        counted if it `is_counted`. None: a forward of other tokens."""
        counted = tokens if is_counted else None
        for count in self._counts.values():
            if tokens is not None and tokens.recorded_LTC is not None:
                count.recorded_TC = tokens.recorded_LTC[count.row]
            if counted is not None:
                count.copies_T, count.balance = counted.copies_T, counted.balance
        try:
            yield
        finally:
            for count in self._counts.values():
                count.recorded_TC = count.copies_T = count.balance = None
        if counted is not None and counted.balance is not None:
            counted.balance.settle()

    @contextmanager
    def balancing(self, tokens: RoutedTokens) -> Iterator[None]:
        """Within the context, the backward of these tokens' forward includes the gradient of their
        balance."""
        for count in self._counts.values():
            count.balance_behind = tokens.balance
        try:
            yield
        finally:
            for count in self._counts.values():
                count.balance_behind = None

    def clear(self) -> None:
        """Reset the counts."""
        for count in self._counts.values():
            count.sums_F = count.balance_loss = None

    def balance_loss(self) -> float:
        """Balance loss of all backwards since the last reset, without coefficients. Waits for the
        device."""
        counts = self._counts.values()
        losses = [count.balance_loss for count in counts if count.balance_loss is not None]
        return float(torch.stack(losses).sum()) if losses else 0.0

    def take(self) -> RouteSums:
        """Returns the counts since the last reset, and resets them. Waits for the device."""
        found = {
            index: count.sums_F for index, count in self._counts.items() if count.sums_F is not None
        }
        self.clear()
        if not found:
            return RouteSums()
        rows: list[list[float]] = torch.stack([*found.values()]).tolist()
        return RouteSums(layers=tuple(found), sums=tuple(map(tuple, rows)))
