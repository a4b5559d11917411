"""What each device of a policy holds, chosen by sizes, and what it lends to activations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.loader import HostModel, placed_bytes, read_model
from ratoon.model.policy_model import (
    PolicyModel,
    muon_matrices,
    names_by_layer,
    trained_parameters,
)
from ratoon.planner.activation_plan import NO_LOAD, HeadLoad
from ratoon.planner.device_costs import DeviceRates
from ratoon.planner.planning import Planner, cpu_planner, device_planner
from ratoon.shards.copies import Copies
from ratoon.shards.parts import NO_MATRICES, Matrices, parts_of, shared_out
from ratoon.train.numerics import (
    configure_torch,
    free_bytes,
    gpus_reach_each_other,
    total_bytes,
)
from ratoon.train.optim.bf16_state import initial_state
from ratoon.train.optim.gradients import sum_bytes
from ratoon.train.optim.resolve import check_patterns
from ratoon.train.ranks.exchange import handed_bytes
from ratoon.train.ranks.group import RankGroup
from ratoon.train.ranks.rank import OnlyBackward, Rank
from ratoon.train.ranks.shares import outbox_bytes
from ratoon.train.spec import OptimizerStates, TrainerSpec
from ratoon_kernels import max_tokens
from ratoon_proto.types import Shard

# The optimizer states that are kept, and what is divided among the ranks.
Layout = tuple[OptimizerStates, Shard]
# Fraction of a GPU left to activations, where moments of 32 and of 8 bits are to choose from.
_ACTIVATION_SHARE = 0.25
# Numbers of ranks that a refusal looks at, and how many of them a node is assumed to have.
_RANKS, _GPUS_OF_A_NODE = (2, 4, 8, 16, 32, 64, 128), 8


def load(spec: TrainerSpec) -> tuple[TrainerSpec, PolicyModel]:
    """Configure torch for this process, load a policy's model, and choose what its spec leaves
    open: by sizes alone, so that all ranks choose alike.

    Raises what `read_model`, `choose_layout` and `HostModel.place` raise, and UNSUPPORTED where
    ranks are to share out weights and cannot.
    """
    configure_torch(spec)
    place, device = Copies.joined(), torch.device(spec.device)
    num_nodes = len(place.nodes())
    read = read_model(
        spec.model,
        keep_reference=spec.keep_reference,
        publishes_merged=spec.publishes_merged,
        models_root=spec.models_root,
    )
    sharing = {
        shard: spec.num_workers // num_nodes if shard is Shard.WEIGHTS else 1
        for shard in _possible_shards(spec, place, has_adapter=read.adapter is not None)
    }
    trained = trained_parameters(read.module, read.adapter)
    check_patterns("spec.optimizer.groups", spec.optimizer.groups, trained)
    matrices = muon_matrices(spec.optimizer, read.module, trained)
    layers = [] if read.adapter is not None else names_by_layer(read.module, trained)
    states, shard = choose_layout(
        trained,
        layers,
        {
            shard: placed_bytes(read.module, ranks, read.num_copies, matrices, num_nodes)
            for shard, ranks in sharing.items()
        },
        total_bytes(device),
        num_ranks=spec.num_workers,
        num_tenants=spec.max_tenants,
        states=spec.optimizer_states,
        matrices=matrices,
        bytes_of_more=partial(_bytes_of_more, spec, read, trained, layers, matrices),
    )
    model = read.place(
        device,
        attention_backend=spec.attention_backend,
        deterministic=spec.deterministic,
        compile_layers=device.type == "cuda",
        rank=place.rank,
        num_sharing=sharing[shard],
        num_nodes=num_nodes,
        matrices=matrices,
    )
    model.sizes = replace(model.sizes, num_on_host=max(map(len, place.nodes())))
    chosen = replace(
        spec,
        optimizer_states=states,
        parallel=replace(spec.parallel, shard=shard),
        num_nodes=num_nodes if shard is Shard.WEIGHTS else 0,
    )
    return chosen, model


def _possible_shards(spec: TrainerSpec, place: Copies, *, has_adapter: bool) -> list[Shard]:
    """What the ranks of a policy may divide, least first: the named choice, or all possible."""
    if spec.num_workers == 1:
        return [Shard.STATES]
    named = spec.parallel.shard
    if named not in (None, Shard.WEIGHTS):
        return [named]
    can_read = _can_share_weights(spec, place)
    if named is Shard.WEIGHTS and not can_read:
        sizes = ", ".join(str(len(ranks)) for ranks in place.nodes())
        raise RatoonError(
            ErrorCode.UNSUPPORTED,
            "parallel.shard: ranks of a node read each other's weights, which takes as many ranks "
            "on each node, two or more, whose GPUs have access to each other; the nodes of this "
            f"policy have {sizes}",
            field="parallel.shard",
            got=Shard.WEIGHTS.value,
            expected="states or gradients, or as many GPUs of each node, with peer access",
        )
    if named is not None:
        return [named]
    # The gradients of adapters are small.
    refused = {Shard.GRADIENTS} if has_adapter else set[Shard]()
    if not can_read:
        refused.add(Shard.WEIGHTS)
    return [shard for shard in Shard if shard not in refused]


def _can_share_weights(spec: TrainerSpec, place: Copies) -> bool:
    """Whether the ranks of each node may have all weights together; all ranks find the same."""
    nodes, num = place.nodes(), len(place.neighbours())
    in_rows = [[*range(first, first + num)] for first in range(0, spec.num_workers, num)]
    if num == 1 or nodes != in_rows:
        return False
    can_read = gpus_reach_each_other(torch.device(spec.device))
    if len(nodes) == 1:
        return can_read
    # GPUs may be linked otherwise on another node.
    others = [rank for ranks in nodes for rank in ranks if rank != place.rank]
    heard = place.tell(others, int(can_read))
    return can_read and all(heard.get(rank) == 1 for rank in others)


def _bytes_of_more(
    spec: TrainerSpec,
    read: HostModel,
    trained: Mapping[str, Tensor],
    layers: Sequence[Collection[str]],
    matrices: Matrices,
    num_ranks: int,
    num_nodes: int,
) -> int:
    """Bytes of a device's weights, gradients and masters if so many ranks shared the weights."""
    num_sharing, copies = num_ranks // num_nodes, read.num_copies
    kind = spec.optimizer_states or OptimizerStates.BF16_SPLIT_8BIT
    held = placed_bytes(read.module, num_sharing, copies, matrices, num_nodes)
    return held + needed_bytes(trained, kind, num_ranks, Shard.WEIGHTS, layers, matrices)


def choose_layout(
    parameters: Mapping[str, Tensor],
    layers: Sequence[Collection[str]],
    weight_bytes: Mapping[Shard, int],
    total: int | None,
    *,
    num_ranks: int = 1,
    num_tenants: int = 1,
    states: OptimizerStates | None = None,
    matrices: Matrices = NO_MATRICES,
    bytes_of_more: Callable[[int, int], int] | None = None,
) -> Layout:
    """Choose the optimizer states (unless `states` names them) and what the ranks divide.

    A model of bfloat16 keeps exact masters in any case. Its moments are float32; 8 bits are tried
    before more is divided. The first choice that leaves a quarter of the GPU to activations is
    taken, or else the one that leaves most; on a CPU (`total` None), the first of all.

    `parameters`: those that are trained, by each of `num_tenants`. `weight_bytes`: bytes of the
    weights on a GPU that has `total` bytes, by what is divided, least first. `layers`: the names of
    each decoder layer's trained parameters. `matrices`: those that Muon steps. `bytes_of_more`: the
    bytes of a GPU by ranks that share weights and their nodes, for the refusal.

    Raises RESOURCE_EXHAUSTED where nothing fits.
    """
    kinds = (states,) if states else (OptimizerStates.BF16_SPLIT, OptimizerStates.BF16_SPLIT_8BIT)
    if total is None:
        return kinds[0], next(iter(weight_bytes))
    taken = {
        (kind, shard): held
        + tenant_bytes(parameters, kind) * (num_tenants - 1)
        + needed_bytes(parameters, kind, num_ranks, shard, layers, matrices)
        for shard, held in weight_bytes.items()
        for kind in kinds
    }
    for choice, num_bytes in taken.items():
        if free_bytes(total, num_bytes) >= total * _ACTIVATION_SHARE:
            return choice
    fewest = min(taken, key=taken.__getitem__)
    if free_bytes(total, taken[fewest]) >= 0:
        return fewest
    shard = fewest[1]
    smallest = OptimizerStates.BF16_8BIT
    least = needed_bytes(parameters, smallest, num_ranks, shard, layers, matrices)
    least += weight_bytes[shard]
    each = ", ".join(f"{shard} {kind} {size}" for (kind, shard), size in taken.items())
    raise RatoonError(
        ErrorCode.RESOURCE_EXHAUSTED,
        f"optimizer_states: weights, gradients and masters need {taken[fewest]} bytes, the GPU has "
        f"{free_bytes(total, 0)} (bytes by what {num_ranks} ranks share out: {each}); bf16_8bit, "
        f"which keeps no masters, would need {least} and has to be asked for by name"
        f"{_enough(num_ranks, total, bytes_of_more) if bytes_of_more else ''}",
        field="optimizer_states",
        got=str(taken[fewest]),
        expected=f"at most {free_bytes(total, 0)}",
    )


def _enough(num_ranks: int, total: int, bytes_of: Callable[[int, int], int]) -> str:
    """The fewest ranks, of nodes of eight GPUs, that would do if they shared weights, in words."""
    more = [count for count in _RANKS if count > num_ranks]
    for count in more:
        nodes = max(1, count // _GPUS_OF_A_NODE)
        if free_bytes(total, num_bytes := bytes_of(count, nodes)) >= 0:
            where = "one node" if nodes == 1 else f"{nodes} nodes"
            return f"; {count} ranks on {where}, with shard weights, would need {num_bytes} each"
    return f"; {more[-1]} ranks would not do either" if more else ""


def needed_bytes(
    parameters: Mapping[str, Tensor],
    kind: OptimizerStates,
    num_ranks: int = 1,
    shard: Shard = Shard.STATES,
    layers: Sequence[Collection[str]] = (),
    matrices: Matrices = NO_MATRICES,
) -> int:
    """Bytes beside the weights of the rank with the most: gradient sums, states, and buffers.

    `layers`: unless `shard` is STATES, a rank has of their gradients only the sums of its own
    parts, and buffers for gradients on their way. `matrices`: those that Muon steps.
    """
    weights = {name: p.detach().to("meta") for name, p in parameters.items()}
    shares = shared_out(parts_of(weights, matrices=matrices), num_ranks)
    own = max(shares, key=lambda parts: sum(part.stop - part.start for part in parts))
    parts = {part.name: part.of(weights[part.parameter]) for part in own}
    fields = initial_state(parts, kind, matrices).tensors().values()
    kept = [(parts[name], tensor) for tensors in fields for name, tensor in tensors.items()]
    states = sum(tensor.nbytes for weight, tensor in kept if tensor is not weight)
    cut = () if shard is Shard.STATES else layers
    like = [{name: weights[name] for name in layer} for layer in cut]
    sharded = {name for layer in like for name in layer}
    summed = [weight for name, weight in weights.items() if name not in sharded]
    summed += [parts[part.name] for part in own if part.parameter in sharded]
    passing = handed_bytes(like, num_ranks) + (outbox_bytes(like) if shard is Shard.WEIGHTS else 0)
    return states + passing + sum(sum_bytes(weight) * weight.numel() for weight in summed)


def tenant_bytes(adapter: Mapping[str, Tensor], kind: OptimizerStates) -> int:
    """Bytes of one adapter with its optimizer states and the sums of an open window."""
    return sum(p.nbytes for p in adapter.values()) + needed_bytes(adapter, kind)


def lend_activations(
    spec: TrainerSpec,
    model: PolicyModel,
    ranks: RankGroup,
    group_sizes: Sequence[int],
    rates: DeviceRates | None,
    *,
    is_beside: bool = False,
) -> Planner:
    """Lend all free memory of the GPUs to activations; returns a planner that stays within it.

    It is called once everything permanent (weights, optimizer states) is allocated. Room for
    gradient sums is set aside, except in a window's only backward on each device, which makes none;
    and so is room for all tenants that there may be, whoever is there, as what is lent decides
    bits. `rates`: None for CPUs, whose memory is not counted. `is_beside`: the memory was lent for
    a trainer over the same model before.
    """
    host_bytes, sizes = spec.host_activation_bytes, model.sizes
    if is_beside:
        device_bytes = model.activation_bytes
    else:
        # All ranks get the same limit, as the activations that are kept decide the bits.
        device_bytes = _least(ranks.all(Rank.activation_bytes, _set_aside(spec, model)))
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
    # The sums of adapters are small, and those of shared gradients are always allocated.
    only = None
    if model.adapter is None and spec.shard is Shard.STATES:
        only_bytes = _least(ranks.all(Rank.activation_bytes, is_only=True))
        assert only_bytes is not None
        only = OnlyBackward(device_bytes=only_bytes, layer_gradient_bytes=_largest_layer(model))
    ranks.all(Rank.limit_activations, device_bytes, host_bytes, only)

    @cache
    def of(load: HeadLoad) -> Planner:
        carried = replace(sizes, load=load)
        found = planner(carried, device_bytes, host_bytes)
        if only is None:
            return found
        carried = replace(carried, layer_gradient_bytes=only.layer_gradient_bytes)
        return found.with_only(planner(carried, only.device_bytes, host_bytes, is_only=True))

    return replace(of(NO_LOAD), of_load=of)


def _set_aside(spec: TrainerSpec, model: PolicyModel) -> int:
    """Bytes for as many tenants as there may be, beside what this one of them has taken.

    Each may keep the largest states, whatever the first one keeps.
    """
    if spec.max_tenants == 1:
        return 0
    adapter = model.named_trainable()
    most = tenant_bytes(adapter, OptimizerStates.FP32)
    return spec.max_tenants * most - tenant_bytes(adapter, spec.kept_states)


def _least(bytes_by_rank: Sequence[int | None]) -> int | None:
    return min((each for each in bytes_by_rank if each is not None), default=None)


def _largest_layer(model: PolicyModel) -> int:
    """Bytes of the trained parameters of the largest layer."""
    named = model.named_trainable()
    return max((sum(named[n].nbytes for n in names) for names in model.named_layers()), default=0)
