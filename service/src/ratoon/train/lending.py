"""What of a policy's devices is lent to activations, and the planner of updates within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ratoon.model.device_costs import DeviceRates
from ratoon.model.policy_model import PolicyModel
from ratoon.train.planning import Planner, cpu_planner, device_planner
from ratoon.train.rank import OnlyBackward, Rank
from ratoon.train.rank_group import RankGroup
from ratoon.train.spec import TrainerSpec
from ratoon_kernels import max_tokens


def lend_activations(
    spec: TrainerSpec,
    model: PolicyModel,
    ranks: RankGroup,
    group_sizes: Sequence[int],
    rates: DeviceRates | None,
) -> Planner:
    """Lend a GPU's memory to activations, as much as there is; the plans are within it.

    To be called once all that stays (weights, optimizer states) is there. Gradient sums have their
    room, but for a window's only backward on one device, which has none. `rates`: None for CPUs,
    of which nothing is counted.
    """
    host_bytes, sizes = spec.host_activation_bytes, model.sizes
    # The same for all: what is kept decides bits.
    free = [each for each in ranks.all("activation_bytes") if each is not None]
    device_bytes = min(free, default=None)
    if device_bytes is None:
        ranks.all("limit_activations", None, host_bytes)
        return cpu_planner(spec.micro_batch_tokens, num_ranks=ranks.size, group_sizes=group_sizes)
    assert rates is not None
    planner = partial(
        device_planner,
        spec.micro_batch_tokens,
        rates=rates,
        layers_are_trained=model.adapter is None,
        num_ranks=ranks.size,
        group_sizes=group_sizes,
        max_tokens=max_tokens(model.info().attention_backend),
    )
    found = planner(sizes, device_bytes, host_bytes)
    only = _only_backward(model, ranks.own) if ranks.size == 1 else None
    if only is not None:
        sizes = replace(sizes, layer_gradient_bytes=only.layer_gradient_bytes)
        alone = planner(sizes, only.device_bytes, host_bytes, is_only=True)
        found = replace(found, only=alone)
    ranks.all("limit_activations", device_bytes, host_bytes, only)
    return found


def _only_backward(model: PolicyModel, own: Rank) -> OnlyBackward | None:
    """What a window's only backward has; None where sums are those of an adapter, which take
    little, or nothing is counted."""
    device_bytes = own.activation_bytes(is_only=True)
    if model.adapter is not None or device_bytes is None:
        return None
    named = model.named_trainable()
    layers = [sum(named[n].nbytes for n in names) for names in model.named_layers()]
    return OnlyBackward(device_bytes=device_bytes, layer_gradient_bytes=max(layers, default=0))
