"""What of a policy's devices is lent to activations, and the planner of updates within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ratoon.model.device_costs import DeviceRates
from ratoon.model.policy_model import PolicyModel
from ratoon.train.planning import Planner, cpu_planner, device_planner
from ratoon.train.rank import OnlyBackward
from ratoon.train.rank_group import RankGroup
from ratoon.train.spec import TrainerSpec
from ratoon_kernels import max_tokens
from ratoon_proto.types import Shard


def lend_activations(
    spec: TrainerSpec,
    model: PolicyModel,
    ranks: RankGroup,
    group_sizes: Sequence[int],
    rates: DeviceRates | None,
) -> Planner:
    """Lend a GPU's memory to activations, as much as there is; the plans are within it.

    To be called once all that stays (weights, optimizer states) is there. Gradient sums have their
    room, but for a window's only backward on each device, which has none. `rates`: None for CPUs,
    of which nothing is counted.
    """
    host_bytes, sizes = spec.host_activation_bytes, model.sizes
    # The same for all: what is kept decides bits.
    device_bytes = _least(ranks.all("activation_bytes"))
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
    # Adapters have small sums, and those of shared out gradients are always there.
    only = None
    if model.adapter is None and spec.shard is Shard.STATES:
        only_bytes = _least(ranks.all("activation_bytes", is_only=True))
        assert only_bytes is not None
        only = OnlyBackward(device_bytes=only_bytes, layer_gradient_bytes=_largest_layer(model))
        sizes = replace(sizes, layer_gradient_bytes=only.layer_gradient_bytes)
        alone = planner(sizes, only_bytes, host_bytes, is_only=True)
        found = found.with_only(alone)
    ranks.all("limit_activations", device_bytes, host_bytes, only)
    return found


def _least(bytes_by_rank: Sequence[int | None]) -> int | None:
    return min((each for each in bytes_by_rank if each is not None), default=None)


def _largest_layer(model: PolicyModel) -> int:
    """Bytes of the most parameters that a layer trains."""
    named = model.named_trainable()
    return max((sum(named[n].nbytes for n in names) for names in model.named_layers()), default=0)
