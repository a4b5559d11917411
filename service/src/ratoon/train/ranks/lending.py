"""Lends memory of a policy's devices to activations, and makes the planner that stays within it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ratoon.model.policy_model import PolicyModel
from ratoon.planner.device_costs import DeviceRates
from ratoon.planner.planning import Planner, cpu_planner, device_planner
from ratoon.train.ranks.group import RankGroup
from ratoon.train.ranks.rank import OnlyBackward, Rank
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
    """Lend all free memory of the GPUs to activations; returns a planner that stays within it.

    It is called once everything permanent (weights, optimizer states) is allocated. Room for
    gradient sums is set aside, except in a window's only backward on each device, which makes none.
    `rates`: None for CPUs, whose memory is not counted.
    """
    host_bytes, sizes = spec.host_activation_bytes, model.sizes
    # All ranks get the same limit, as the activations that are kept decide the bits.
    device_bytes = _least(ranks.all(Rank.activation_bytes))
    if device_bytes is None:
        ranks.all(Rank.limit_activations, None, host_bytes)
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
    # The sums of adapters are small, and those of shared gradients are always allocated.
    only = None
    if model.adapter is None and spec.shard is Shard.STATES:
        only_bytes = _least(ranks.all(Rank.activation_bytes, is_only=True))
        assert only_bytes is not None
        only = OnlyBackward(device_bytes=only_bytes, layer_gradient_bytes=_largest_layer(model))
        sizes = replace(sizes, layer_gradient_bytes=only.layer_gradient_bytes)
        alone = planner(sizes, only_bytes, host_bytes, is_only=True)
        found = found.with_only(alone)
    ranks.all(Rank.limit_activations, device_bytes, host_bytes, only)
    return found


def _least(bytes_by_rank: Sequence[int | None]) -> int | None:
    return min((each for each in bytes_by_rank if each is not None), default=None)


def _largest_layer(model: PolicyModel) -> int:
    """Bytes of the trained parameters of the largest layer."""
    named = model.named_trainable()
    return max((sum(named[n].nbytes for n in names) for names in model.named_layers()), default=0)
