"""Losses that the caller writes: a function of log-probs here, gradients of the policy there.

The gradient of any L(logprobs) is the sum over tokens of dL/dlogp times the gradient of logp, which
is that of `reinforce` with advantages -dL/dlogp. So no code goes to the service: a Forward
brings the log-probs, the function runs in the caller's process, and its gradient goes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratoon_client.arguments import FloatsLike, ValueArray, number, value_array
from ratoon_client.errors import InvalidArgumentError
from ratoon_client.rollouts import Group
from ratoon_client.values import Loss

# float32 [R] a rollout, all groups' one after the other, 0 at tokens that are not trained ->
# the loss, and its gradient with respect to each of these arrays.
CustomLoss = Callable[[list[NDArray[np.float32]]], tuple[float, Sequence[FloatsLike]]]

WEIGHTED = Loss("reinforce", advantage="given", token_weight="per_token", shared_tokens="sum")


def by_autograd(
    loss_of: Callable[[list[Any]], Any], as_tensor: Callable[[NDArray[np.float32]], Any]
) -> CustomLoss:
    """Make a custom loss of a function of torch's tensors, which torch differentiates.

    Args:
        loss_of: From log-probs, one tensor a rollout, to a scalar tensor. Log-probs that it does
            not use have a gradient of zero.
        as_tensor: Makes a tensor of an array: `torch.from_numpy`. Torch is not imported here.
    """

    def differentiated(
        logprobs: list[NDArray[np.float32]],
    ) -> tuple[float, list[NDArray[np.float32]]]:
        tensors = [as_tensor(array.copy()).requires_grad_() for array in logprobs]
        loss = loss_of(tensors)
        if loss.requires_grad:
            loss.backward()
        gradients = [
            np.zeros_like(array) if tensor.grad is None else np.asarray(tensor.grad.cpu())
            for array, tensor in zip(logprobs, tensors, strict=True)
        ]
        return loss.item(), gradients

    return differentiated


def weighted(
    groups: Sequence[Group], logprobs: Sequence[NDArray[np.float32]], loss_of: CustomLoss
) -> tuple[float, list[Group]]:
    """Give tokens advantages so that their policy gradient is the gradient of a loss.

    Returns:
        The loss, and `groups` with those advantages.

    Raises:
        InvalidArgumentError: `loss_of` gives a gradient of another shape, or a number that is not
            finite.
    """
    loss, gradients = loss_of(list(logprobs))
    loss = number("loss", loss)
    if not math.isfinite(loss):
        raise InvalidArgumentError("loss", loss, "a finite number")
    if len(gradients) != len(logprobs):
        raise InvalidArgumentError(
            "gradients", f"{len(gradients)} arrays", f"one a rollout, {len(logprobs)}"
        )
    weights = iter(
        [
            _weights(f"gradients[{index}]", gradient, len(array))
            for index, (gradient, array) in enumerate(zip(gradients, logprobs, strict=True))
        ]
    )
    return loss, [
        replace(
            group,
            rollouts=tuple(
                replace(
                    rollout,
                    outcome=next(weights),
                    old_logprobs=None,
                    reference_logprobs=None,
                    token_weights=None,
                )
                for rollout in group.rollouts
            ),
        )
        for group in groups
    ]


def _weights(field: str, gradient: FloatsLike, length: int) -> ValueArray:
    array = value_array(field, gradient)
    if len(array) != length:
        raise InvalidArgumentError(field, f"{len(array)} values", f"one a token, {length}")
    if not np.isfinite(array).all():
        bad = int(np.argmin(np.isfinite(array)))
        raise InvalidArgumentError(f"{field}[{bad}]", array[bad], "a finite number")
    return -array
