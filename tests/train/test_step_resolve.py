"""What a step divides by and how it optimizes: defaults, what it is told, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.train.loss.spec import (
    CounterDivisor,
    NoDivisor,
    Normalisation,
)
from ratoon.train.optim.resolve import resolve_optim
from ratoon_proto.types import AdamWConfig, DivideBy, OptimStepConfig, TokenWeight

_ADAMW = AdamWConfig(weight_decay=0.03)


_TOKENS = Normalisation(token_weight=TokenWeight.PER_TOKEN, default_divide_by=DivideBy.TOKENS)


_SEQUENCES = Normalisation(
    token_weight=TokenWeight.PER_SEQUENCE, default_divide_by=DivideBy.SEQUENCES
)


_CONSTANT = replace(_TOKENS, default_divide_by=DivideBy.CONSTANT)


_MIXED = replace(_TOKENS, default_divide_by=None)


def test_step_takes_the_policys_and_the_losss_defaults() -> None:
    step = resolve_optim(OptimStepConfig(learning_rate=1e-3), _TOKENS, _ADAMW)
    assert step.learning_rate == 1e-3
    assert step.weight_decay == 0.03
    assert step.max_grad_norm == 1.0
    assert step.divisor == CounterDivisor(counter=DivideBy.TOKENS)
    step = resolve_optim(
        OptimStepConfig(
            learning_rate=0.0, weight_decay=0.0, max_grad_norm=2.5, divide_constant=8.0
        ),
        _CONSTANT,
        _ADAMW,
    )
    assert step.weight_decay == 0.0
    assert step.max_grad_norm == 2.5
    assert step.divisor == CounterDivisor(counter=DivideBy.SEQUENCES, times=8.0)


@pytest.mark.parametrize(
    ("divide_by", "asked", "clip"),
    [
        (DivideBy.TOKENS, None, 1.0),
        (DivideBy.NONE, None, math.inf),
        (DivideBy.NONE, 3.0, 3.0),
        (DivideBy.TOKENS, 0.0, math.inf),
    ],
)
def test_gradients_are_clipped_at_1_unless_told_otherwise(
    divide_by: DivideBy, asked: float | None, clip: float
) -> None:
    """Without a default a spike of the gradient was a step of full size. Of sums that nothing
    divides the norm grows with the batch: there is none."""
    request = OptimStepConfig(learning_rate=1e-3, divide_by=divide_by, max_grad_norm=asked)
    assert resolve_optim(request, _TOKENS, _ADAMW).max_grad_norm == clip


@pytest.mark.parametrize(
    ("divide_by", "normalisation", "divisor"),
    [
        (DivideBy.SEQUENCES, _SEQUENCES, CounterDivisor(counter=DivideBy.SEQUENCES)),
        (DivideBy.SEQUENCES, _TOKENS, CounterDivisor(counter=DivideBy.SEQUENCES)),
        (DivideBy.GROUPS, _SEQUENCES, CounterDivisor(counter=DivideBy.GROUPS)),
        (DivideBy.GROUPS, _TOKENS, CounterDivisor(counter=DivideBy.GROUPS)),
        (DivideBy.NONE, _TOKENS, NoDivisor()),
        (DivideBy.TOKENS, _MIXED, CounterDivisor(counter=DivideBy.TOKENS)),
    ],
)
def test_step_divides_as_it_is_told(
    divide_by: DivideBy, normalisation: Normalisation, divisor: CounterDivisor | NoDivisor
) -> None:
    request = OptimStepConfig(learning_rate=1e-3, divide_by=divide_by)
    assert resolve_optim(request, normalisation, _ADAMW).divisor == divisor


@pytest.mark.parametrize(
    ("changes", "normalisation", "field"),
    [
        ({"divide_by": DivideBy.TOKENS}, _SEQUENCES, "optim.divide_by"),
        ({}, _MIXED, "optim.divide_by"),
        ({}, _CONSTANT, "optim.divide_constant"),
        ({"divide_by": DivideBy.TOKENS}, _CONSTANT, "optim.divide_by"),
        ({"divide_constant": 3.0}, _TOKENS, "optim.divide_constant"),
        (
            {"divide_constant": 3.0, "divide_by": DivideBy.TOKENS},
            _TOKENS,
            "optim.divide_constant",
        ),
        ({"divide_constant": 0.0}, _CONSTANT, "optim.divide_constant"),
        ({"divide_constant": math.inf}, _CONSTANT, "optim.divide_constant"),
        ({"learning_rate": -1e-3}, _TOKENS, "optim.learning_rate"),
        ({"learning_rate": math.nan}, _TOKENS, "optim.learning_rate"),
        ({"learning_rate": 1e38}, _TOKENS, "optim.learning_rate"),
        # Times the policy's 0.03 it is above 1.
        ({"learning_rate": 34.0}, _TOKENS, "optim.learning_rate"),
        ({"learning_rate": 34.0, "weight_decay": 0.03}, _TOKENS, "optim.weight_decay"),
        ({"weight_decay": 1e300, "learning_rate": 0.0}, _TOKENS, "optim.weight_decay"),
        ({"eps": 1e-31}, _TOKENS, "optim.eps"),
        ({"max_grad_norm": 1e-31}, _TOKENS, "optim.max_grad_norm"),
        ({"divide_constant": 1e300}, _CONSTANT, "optim.divide_constant"),
        ({"weight_decay": -0.1}, _TOKENS, "optim.weight_decay"),
        ({"beta1": 1.0}, _TOKENS, "optim.beta1"),
        ({"beta2": -0.1}, _TOKENS, "optim.beta2"),
        ({"beta2": math.nan}, _TOKENS, "optim.beta2"),
        ({"eps": 0.0}, _TOKENS, "optim.eps"),
        ({"max_grad_norm": -1.0}, _TOKENS, "optim.max_grad_norm"),
        ({"max_grad_norm": math.nan}, _TOKENS, "optim.max_grad_norm"),
        ({"max_grad_norm": math.inf}, _TOKENS, "optim.max_grad_norm"),
    ],
)
def test_step_refuses_by_field(
    changes: dict[str, Any], normalisation: Normalisation, field: str
) -> None:
    fields: dict[str, Any] = {"learning_rate": 1e-3} | changes
    request = OptimStepConfig(**fields)
    with pytest.raises(RatoonError) as caught:
        resolve_optim(request, normalisation, _ADAMW)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == field
