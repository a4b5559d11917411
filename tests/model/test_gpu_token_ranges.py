"""Compiled layers on a GPU: bits follow from the tokens, not from what the process ran before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from ratoon.model.policy_model import PolicyModel
from ratoon.planner.activation_plan import Kept
from tests.kernels.forests import star
from tests.model.gpu_policies import Step, make_policy
from tests.train.gpu_streams import cut_stages, make_batch, pack_batch, stream_gradients

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic_compiler")]

# Numbers of tokens, in two or three ranges: whole forests, and prompts whose responses are
# streamed.
WHOLE = (700, 3900, 5500)
STREAMED = (500, 1100, 5000)
LONG = 70_000
Run = Callable[[PolicyModel, int], dict[str, Tensor]]


def _keep(policy: PolicyModel, kept: Kept) -> None:
    plan = (kept,) * policy.sizes.num_layers
    vars(policy)["_plan_activations"] = lambda _: plan if torch.is_grad_enabled() else None


def _gradients(kept: Kept, policy: PolicyModel, tokens: int) -> dict[str, Tensor]:
    _keep(policy, kept)
    return _step(tokens).gradients(policy)


def _streamed(policy: PolicyModel, prompt: int) -> dict[str, Tensor]:
    _keep(policy, Kept.ATTENTION)
    packed = pack_batch(make_batch(prompt, 4, prompt // 3 + 160))
    return stream_gradients(policy, packed, cut_stages(packed, wave=1))


def _hidden(policy: PolicyModel, tokens: int) -> dict[str, Tensor]:
    step = _step(tokens)
    with torch.no_grad():
        hidden_TD = policy.forward_hidden(step.tokens_T, step.position_T, step.layout)
    return {"hidden": hidden_TD}


def _step(tokens: int) -> Step:
    return Step(star(tokens // 4, 3, tokens // 4))


def _bits(run: Run, order: Iterable[int], first_as: int = 0) -> dict[int, dict[str, Tensor]]:
    """As a new process would find them, that runs these in this order; `first_as` so many tokens
    once the first, before."""
    torch.compiler.reset()
    policy = make_policy(is_compiled=True, layers=2, hidden=1024, is_deterministic=True)
    order = tuple(order)
    if first_as:
        with policy.run_as(first_as):
            run(policy, order[0])
    return {
        tokens: {name: value.cpu() for name, value in run(policy, tokens).items()}
        for tokens in order
    }


RUNS: dict[str, tuple[Run, tuple[int, ...]]] = {
    "forward": (_hidden, WHOLE),
    "attention": (partial(_gradients, Kept.ATTENTION), (700, 3900, LONG)),
    "products": (partial(_gradients, Kept.PRODUCTS), (700, 3900)),
    "streamed": (_streamed, STREAMED),
}


@pytest.mark.parametrize("name", RUNS)
def test_bits_do_not_depend_on_what_ran_before(name: str) -> None:
    """A worker that replays from a checkpoint begins with another number of tokens."""
    run, order = RUNS[name]
    up, down = _bits(run, order), _bits(run, reversed(order))
    after = _bits(run, order, first_as=max(order))
    for tokens in order:
        for parameter, value in up[tokens].items():
            assert value.count_nonzero() > 0, (tokens, parameter)
            assert torch.equal(value, down[tokens][parameter]), (tokens, parameter)
            assert torch.equal(value, after[tokens][parameter]), (tokens, parameter)
