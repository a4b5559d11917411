"""Compiled layers on a GPU: their gradients, the predicted peak, and that nothing waits."""

from __future__ import annotations

import pytest
import torch

from ratoon.model.policy_model import PolicyModel
from ratoon.planner.activation_plan import Kept, peak_bytes
from tests.kernels.forests import star
from tests.model.gpu_policies import DEVICE, Step, make_policy

pytestmark = pytest.mark.gpu

# Kinds without AWAY, which keeps what PRODUCTS keeps.
KINDS = tuple(kept for kept in Kept if kept is not Kept.AWAY)
SMALL = star(300, 5, 90)
LARGE = star(2048, 15, 960)


def _keep(policy: PolicyModel, kept: Kept, tokens: int) -> int:
    """Limits every layer to that; returns the predicted bytes."""
    plan = (kept,) * policy.sizes.num_layers
    layer_bytes = sum(2 * p.numel() for p in policy.module.model.layers[0].parameters())
    policy.limit_activations(0, layer_gradient_bytes=layer_bytes)
    budget = peak_bytes(policy.sizes, plan, tokens, tokens)
    on_host = tokens * policy.sizes.num_layers * policy.sizes.kept_bytes(Kept.HOST)
    policy.limit_activations(
        budget,
        host_bytes=on_host if kept is Kept.HOST else 0,
        layer_gradient_bytes=layer_bytes,
    )
    return budget


def test_compiled_gradients_are_those_of_the_modules() -> None:
    """To rounding: the error against fp32 is no more than twice that of the modules themselves."""
    step = Step(SMALL)
    exact = step.gradients(make_policy(is_compiled=False, dtype=torch.float32, backend="reference"))
    modules = step.gradients(make_policy(is_compiled=False))
    policy = make_policy(is_compiled=True)
    for kept in KINDS:
        _keep(policy, kept, SMALL.num_tokens)
        for name, grad in step.gradients(policy).items():
            error = (grad.float() - exact[name]).norm()
            bound = 2 * (modules[name].float() - exact[name]).norm()
            assert 0 < error <= bound, (kept, name, float(error / bound))


@pytest.mark.parametrize("kept", KINDS)
def test_the_predicted_peak_is_within_a_tenth(kept: Kept) -> None:
    policy, step = make_policy(is_compiled=True, layers=12, hidden=1024), Step(LARGE)
    predicted = _keep(policy, kept, LARGE.num_tokens)
    step.gradients(policy)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.gradients(policy)
    measured = torch.cuda.max_memory_allocated() - before
    assert measured == pytest.approx(predicted, rel=0.1)


def test_the_largest_micro_batch_by_formula_fits() -> None:
    policy = make_policy(is_compiled=True, layers=12, hidden=1024)
    budget = 3 * 2**30
    policy.limit_activations(budget)
    tokens = policy.max_tokens()
    assert tokens is not None
    gradients = sum(2 * p.numel() for p in policy.named_trainable().values())
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    try:
        # A share for fragments and for the gradients, which the formula leaves out here.
        limit = held + int(1.03 * budget) + gradients + 2**28
        torch.cuda.set_per_process_memory_fraction(limit / total)
        Step(star(tokens // 4, 3, tokens // 4)).run(policy)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_step_does_not_wait_for_the_device() -> None:
    policy, step = make_policy(is_compiled=True), Step(SMALL)
    _keep(policy, Kept.NARROW, SMALL.num_tokens)
    step.run(policy)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run(policy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_products_that_are_away_leave_their_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, step = make_policy(is_compiled=True, layers=12, hidden=1024), Step(LARGE)
    _keep(policy, Kept.PRODUCTS, LARGE.num_tokens)
    expected = step.gradients(policy)
    plan = tuple(Kept.AWAY if index in (0, 4) else Kept.PRODUCTS for index in range(12))
    predicted = peak_bytes(policy.sizes, plan, LARGE.num_tokens, LARGE.num_tokens)
    monkeypatch.setattr(policy, "_plan_activations", lambda _held: plan)
    got = step.gradients(policy)
    for name, grad in expected.items():
        assert (got[name] - grad).norm() < 0.02 * grad.norm(), name
    del got, expected
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.gradients(policy)
    measured = torch.cuda.max_memory_allocated() - before
    assert 0.85 * predicted < measured < 1.05 * predicted
