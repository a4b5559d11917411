"""What a step keeps for its backward: all that fits, or the least.

Enters a policy and the forwards of a step, leaves the policy limited to a budget. Invariant: the
plan is the service's own, for all ways alike; where even the least does not fit, the service's
refusal is raised before anything runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ratoon.model.activation_plan import Kept
from ratoon.model.policy_model import PolicyModel
from ratoon.model.stage_plan import ForwardPlan, HeldTokens, least_plan, plan_forward
from ratoon.train.numerics import activation_bytes

_PLANS = "_plan_activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What layers keep, and what of memory follows from it.

    Attributes:
        layers: By kind, of the largest forward that no other waits for.
        waiting: The same of the largest stage that waits for others; empty: there is none.
        predicted_bytes: The peak that the service predicts beyond weights.
        gradients_stay: All of them are there at the peak.
    """

    layers: dict[str, int]
    waiting: dict[str, int]
    predicted_bytes: int
    gradients_stay: bool


def keep_what_fits(
    policy: PolicyModel, held: Sequence[HeldTokens], *, gradients_stay: bool, host_bytes: int
) -> MemoryPlan | None:
    """Limits the policy to the device's free memory; None on a CPU, where nothing is limited.

    Args:
        policy: Without gradients.
        held: By each forward.
        gradients_stay: They are there from an earlier micro-batch or stage, and not only from the
            end of the backward of each layer on.
        host_bytes: Of the host's memory, where what does not fit the device may wait.
    """
    free = activation_bytes(policy.device)
    if free is None:
        return None
    all_bytes, layer_bytes = _gradient_bytes(policy)
    # Those of the head are the plan's own; those of layers too, unless they stay.
    resident = all_bytes if gradients_stay else 0
    vars(policy).pop(_PLANS, None)
    layer_gradient_bytes = 0 if gradients_stay else layer_bytes
    policy.limit_activations(
        free - resident, host_bytes=host_bytes, layer_gradient_bytes=layer_gradient_bytes
    )
    plans = [plan_forward(policy.sizes, one, free - resident, host_bytes) for one in held]
    return _plan(held, plans, resident)


def keep_the_least(
    policy: PolicyModel, held: Sequence[HeldTokens], *, host_bytes: int
) -> MemoryPlan | None:
    """Has all but attention run again, in every forward; None on a CPU.

    All gradients are to be there from the start. `held` as of `keep_what_fits`. `host_bytes`: where
    stages that wait for others do so, and nothing else.
    """
    if policy.device.type != "cuda":
        return None
    resident, _ = _gradient_bytes(policy)
    policy.limit_activations(None, layer_gradient_bytes=0)
    sizes = policy.sizes
    # A budget would let the smaller forwards of a stream keep more.
    vars(policy)[_PLANS] = lambda one: least_plan(sizes, one, host_bytes).kept
    return _plan(held, [least_plan(sizes, one, host_bytes) for one in held], resident)


def keep_each_kind(policy: PolicyModel) -> None:
    """Has the layers keep each kind, in the order of every plan: a step compiles all of them."""
    kinds, num_layers = tuple(Kept), policy.sizes.num_layers
    mixed = tuple(kinds[i * len(kinds) // num_layers] for i in range(num_layers))
    vars(policy)[_PLANS] = lambda _held: mixed


def _plan(held: Sequence[HeldTokens], plans: Sequence[ForwardPlan], resident: int) -> MemoryPlan:
    by_waiting: dict[bool, ForwardPlan] = {}
    for one, plan in sorted(zip(held, plans, strict=True), key=lambda pair: pair[0].tokens):
        by_waiting[one.waits] = plan
    running, waiting = (
        dict(Counter(map(str, by_waiting[waits].kept))) if waits in by_waiting else {}
        for waits in (False, True)
    )
    return MemoryPlan(
        layers=running,
        waiting=waiting,
        predicted_bytes=resident + max(plan.peak_bytes for plan in plans),
        gradients_stay=resident > 0,
    )


def _gradient_bytes(policy: PolicyModel) -> tuple[int, int]:
    """Of all trained parameters, and of those of one layer, in their own dtype."""
    named = policy.named_trainable().items()
    of_layers = sum(p.numel() * p.element_size() for name, p in named if ".layers." in name)
    everything = sum(p.numel() * p.element_size() for _, p in named)
    return everything, of_layers // policy.sizes.num_layers
