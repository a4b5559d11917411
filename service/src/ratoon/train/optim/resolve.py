"""What the caller asked of an optimizer step, judged and completed. Imports no torch."""

from __future__ import annotations

import math

from ratoon.errors import invalid
from ratoon.train.config import AdamWConfig, DivideBy, OptimRequest, TokenWeight
from ratoon.train.loss.checks import require
from ratoon.train.loss.spec import CounterDivisor, NoDivisor, Normalisation, OptimStep

DEFAULT_MAX_GRAD_NORM = 1.0


def check_optim(request: OptimRequest) -> None:
    """Check the numbers alone, without the window; `resolve_optim` does it too.

    Raises `RatoonError` INVALID_ARGUMENT naming the field.
    """
    require(
        "optim.learning_rate",
        request.learning_rate,
        request.learning_rate >= 0,
        "a finite number, at least 0",
    )
    if request.weight_decay is not None:
        require(
            "optim.weight_decay",
            request.weight_decay,
            request.weight_decay >= 0,
            "a finite number, at least 0",
        )
    for name, beta in (("beta1", request.beta1), ("beta2", request.beta2)):
        if beta is not None:
            require(f"optim.{name}", beta, 0 <= beta < 1, "a number in [0, 1)")
    if request.eps is not None:
        require("optim.eps", request.eps, request.eps > 0, "a finite number above 0")
    if request.max_grad_norm is not None:
        require(
            "optim.max_grad_norm",
            request.max_grad_norm,
            request.max_grad_norm >= 0,
            "a finite number, at least 0 (0: no clipping)",
        )
    if request.divide_constant is not None:
        require(
            "optim.divide_constant",
            request.divide_constant,
            request.divide_constant > 0,
            "a finite number above 0",
        )
        if request.divide_by not in (None, DivideBy.CONSTANT):
            raise invalid(
                "optim.divide_constant",
                request.divide_constant,
                f"absent: optim.divide_by is {request.divide_by}",
            )
    elif request.divide_by is DivideBy.CONSTANT:
        raise invalid("optim.divide_constant", "none", "a finite number above 0")


def resolve_optim(
    request: OptimRequest, normalisation: Normalisation, policy: AdamWConfig
) -> OptimStep:
    """Fill in the policy's weight decay and the window's divisor.

    Raises `RatoonError` INVALID_ARGUMENT naming the field.
    """
    check_optim(request)
    divide_by = _resolve_divide_by(request, normalisation)
    return OptimStep(
        learning_rate=request.learning_rate,
        weight_decay=policy.weight_decay if request.weight_decay is None else request.weight_decay,
        max_grad_norm=_resolve_max_grad_norm(request, divide_by),
        divisor=_resolve_divisor(request, divide_by),
        tensor_grad_norms=request.tensor_grad_norms,
        changed_share=request.changed_share,
        beta1=request.beta1,
        beta2=request.beta2,
        eps=request.eps,
    )


def _resolve_max_grad_norm(request: OptimRequest, divide_by: DivideBy) -> float:
    """Sums that nothing divides have a norm that grows with the batch: they have no default."""
    norm = request.max_grad_norm
    if norm is None:
        return math.inf if divide_by is DivideBy.NONE else DEFAULT_MAX_GRAD_NORM
    return norm or math.inf


def _resolve_divide_by(request: OptimRequest, normalisation: Normalisation) -> DivideBy:
    default = normalisation.default_divide_by
    divide_by = request.divide_by or default
    if divide_by is None:
        raise invalid("optim.divide_by", "none", "one: the losses of this window differ in theirs")
    if default is DivideBy.CONSTANT and divide_by is not DivideBy.CONSTANT:
        raise invalid("optim.divide_by", divide_by, "constant: dr_grpo divides by a constant")
    # A sequence's weights add up to 1 already: over tokens that is no mean of anything.
    is_per_sequence = normalisation.token_weight is TokenWeight.PER_SEQUENCE
    if is_per_sequence and divide_by is DivideBy.TOKENS:
        raise invalid(
            "optim.divide_by",
            divide_by,
            f"one that agrees with token_weight {normalisation.token_weight}",
        )
    return divide_by


def _resolve_divisor(request: OptimRequest, divide_by: DivideBy) -> CounterDivisor | NoDivisor:
    if divide_by is DivideBy.CONSTANT:
        if request.divide_constant is None:
            raise invalid("optim.divide_constant", "none", "a finite number above 0")
        return CounterDivisor(counter=DivideBy.SEQUENCES, times=request.divide_constant)
    if request.divide_constant is not None:
        raise invalid(
            "optim.divide_constant",
            request.divide_constant,
            f"absent: this window is divided by {divide_by}",
        )
    if divide_by is DivideBy.NONE:
        return NoDivisor()
    return CounterDivisor(counter=divide_by)
