"""What the devices of a policy hold, where that is left open."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.loader import placed_bytes, read_model
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import FolderBase, ModelDtype, PresetBase
from ratoon.shards.copies import Copies
from ratoon.train.numerics import free_bytes
from ratoon.train.ranks.layout import Layout, choose_layout, load
from ratoon.train.spec import OptimizerStates, TrainerSpec
from ratoon_proto.types import LoraTuning, ParallelLayout, Shard
from tests.tiny_models import write_folder
from tests.train.trainer_runs import make_trainer


def _of_size(num_elements: int) -> dict[str, nn.Parameter]:
    return {"a": nn.Parameter(torch.empty(num_elements, dtype=torch.bfloat16, device="meta"))}


_PARAMETERS = 256 << 20


@pytest.mark.parametrize(
    ("free", "kind"),
    [
        # float32 gradient, remainder, and moments; a quarter of the whole beside them.
        ((4 + 2 + 8 + 4) * _PARAMETERS, OptimizerStates.BF16_SPLIT),
        ((4 + 2 + 8 + 4) * _PARAMETERS - 1, OptimizerStates.BF16_SPLIT_8BIT),
        (int((4 + 2 + 2 + 8 / 256) * _PARAMETERS), OptimizerStates.BF16_SPLIT_8BIT),
    ],
)
def test_auto_takes_the_first_that_fits(free: int, kind: OptimizerStates) -> None:
    total = 16 * _PARAMETERS
    held = {Shard.STATES: free_bytes(total, free)}
    layout = choose_layout(_of_size(_PARAMETERS), [], held, total)
    assert layout == (kind, Shard.STATES)


def test_auto_never_gives_up_masters() -> None:
    held, needed = 10, int((4 + 2 + 2 + 8 / 256) * _PARAMETERS)
    total = math.ceil((held + needed) / (1 - 0.04))
    choose_layout(_of_size(_PARAMETERS), [], {Shard.STATES: held}, total)
    with pytest.raises(RatoonError, match="bf16_8bit") as caught:
        choose_layout(_of_size(_PARAMETERS), [], {Shard.STATES: held}, total - 2)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert caught.value.field == "optimizer_states"
    assert str(held + needed) in caught.value.message


_LAYERS = 8
_TOTAL = 10**10


def _model(per_layer: int) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
    """Parameters, half of them outside of layers."""
    layers = [[f"layer.{index}"] for index in range(_LAYERS)]
    sizes = {name: per_layer for (name,) in layers} | {"head": _LAYERS * per_layer}
    return {
        name: torch.empty(size, dtype=torch.bfloat16, device="meta") for name, size in sizes.items()
    }, layers


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        # Beside a quarter of the whole; bytes per parameter: sum, and half of what is kept.
        (4 + (2 + 8) / 2, (OptimizerStates.BF16_SPLIT, Shard.STATES)),
        (4 + (2 + 2 + 8 / 256) / 2, (OptimizerStates.BF16_SPLIT_8BIT, Shard.STATES)),
        # Half of the parameters are in layers: half of their sums; five layers pass at most.
        (3 + (2 + 2 + 8 / 256) / 2 + 4.5 / 8, (OptimizerStates.BF16_SPLIT_8BIT, Shard.GRADIENTS)),
        # A quarter of the weights less.
        (
            2.5 + (2 + 2 + 8 / 256) / 2 + 4.5 / 8,
            (OptimizerStates.BF16_SPLIT_8BIT, Shard.WEIGHTS),
        ),
    ],
)
def test_auto_shares_out_more_where_less_is_not_enough(free: float, expected: Layout) -> None:
    per_layer = 1 << 25
    parameters, layers = _model(per_layer)
    num_elements = 2 * _LAYERS * per_layer
    num_bytes = math.ceil(free * num_elements) + _TOTAL // 4
    whole = free_bytes(_TOTAL, num_bytes)
    held = {Shard.STATES: whole, Shard.GRADIENTS: whole, Shard.WEIGHTS: whole - num_elements // 2}
    assert choose_layout(parameters, layers, held, _TOTAL, num_ranks=2) == expected
    # Whatever it is, it can be asked for, and what cannot be shared out is not.
    states, shard = expected
    named = {shard: held[shard]}
    assert choose_layout(parameters, layers, named, _TOTAL, num_ranks=2, states=states) == expected
    least = {Shard.STATES: whole}
    assert choose_layout(parameters, [], least, _TOTAL, num_ranks=2)[1] is Shard.STATES
    assert choose_layout(parameters, layers, held, None, num_ranks=2)[1] is Shard.STATES


def test_a_refusal_has_the_bytes_of_each_layout() -> None:
    parameters, layers = _model(1 << 25)
    held = dict.fromkeys(Shard, _TOTAL)
    with pytest.raises(RatoonError, match=r"states bf16_split [0-9]+, .*weights bf16_split_8bit"):
        choose_layout(parameters, layers, held, _TOTAL, num_ranks=2)


def test_a_refusal_has_the_ranks_that_would_do() -> None:
    parameters, layers = _model(1 << 25)
    held = dict.fromkeys(Shard, 2 * _TOTAL)
    asked: list[tuple[int, int]] = []

    def refusal(needed: dict[tuple[int, int], int]) -> str:
        def bytes_of_more(num_ranks: int, num_nodes: int) -> int:
            asked.append((num_ranks, num_nodes))
            return needed.get((num_ranks, num_nodes), _TOTAL)

        with pytest.raises(RatoonError) as caught:
            choose_layout(
                parameters, layers, held, _TOTAL, num_ranks=4, bytes_of_more=bytes_of_more
            )
        return caught.value.message.partition("by name")[2]

    assert refusal({(8, 1): 7}) == "; 8 ranks on one node, with shard weights, would need 7 each"
    assert refusal({(32, 4): 7}) == "; 32 ranks on 4 nodes, with shard weights, would need 7 each"
    assert refusal({}) == "; 128 ranks would not do either"
    assert asked[-5:] == [(8, 1), (16, 2), (32, 4), (64, 8), (128, 16)]


_LORA = LoraTuning(rank=2, alpha=4.0)


def _spec(base: FolderBase | PresetBase, tuning: LoraTuning | None = None) -> TrainerSpec:
    """Spec of three ranks that leaves every optional choice open."""
    spec = make_trainer(base, dtype=ModelDtype.BFLOAT16, tuning=tuning).spec
    parallel = ParallelLayout(num_workers=3)
    return replace(spec, optimizer_states=None, parallel=parallel, keep_reference=False)


def _held_bytes(model: PolicyModel, num_copies: int) -> int:
    """Weights, with as many layers of others as there may be at a time."""
    kept = [p for p in model.module.parameters() if p.untyped_storage().nbytes()]
    own = num_copies * sum(p.nbytes for p in kept)
    if model.shards is None:
        return own
    return own + model.shards.owned_bytes + model.shards.ring_bytes


@pytest.mark.parametrize(("tuning", "num_copies"), [(None, 1), (None, 2), (_LORA, 1)])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_device_has_the_weights_that_are_counted(
    tmp_path: Path, kind: str, tuning: LoraTuning | None, num_copies: int
) -> None:
    """Shared out or not, on the rank with the most; but for where parts begin."""
    spec = _spec(FolderBase(folder=str(write_folder(tmp_path, kind))), tuning).model
    for num_sharing in (1, 3):
        held: list[int] = []
        counted, num_parts = 0, 0
        for rank in range(num_sharing):
            read = read_model(spec, keep_reference=num_copies > 1)
            counted = placed_bytes(read.module, num_sharing, read.num_copies)
            num_parts = len([*read.module.parameters()])
            placed = read.place(torch.device("cpu"), rank=rank, num_sharing=num_sharing)
            held.append(_held_bytes(placed, num_copies))
        room = 0 if num_sharing == 1 else 2 * 128 * num_copies * num_parts
        assert counted <= max(held) <= counted + room


@pytest.mark.parametrize(
    ("preset", "tuning", "small"), [("small", None, 72_000_000), ("tiny", _LORA, 2_190_000)]
)
def test_what_is_left_open_is_as_little_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, preset: str, tuning: LoraTuning | None, small: int
) -> None:
    """`small`: bytes of a GPU for which the weights of a whole model are too many."""
    spec = _spec(PresetBase(name=preset), tuning)
    monkeypatch.setattr(Copies, "nodes", lambda _: [[0, 1, 2]])
    for total, expected in ((10 * small, Shard.STATES), (small, Shard.WEIGHTS)):
        monkeypatch.setattr("ratoon.train.ranks.layout.total_bytes", lambda _, total=total: total)
        chosen, model = load(spec)
        assert chosen.shard is expected
        assert (model.shards is not None) == (expected is Shard.WEIGHTS)
        assert chosen.num_nodes == (expected is Shard.WEIGHTS)
    # Ranks of several nodes read no weights of one another.
    monkeypatch.setattr(Copies, "nodes", lambda _: [[0], [1], [2]])
    with pytest.raises(RatoonError) as caught:
        load(spec)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert "weights bf16" not in caught.value.message
    # What would do is what ranks of one node have taken above.
    assert "; 4 ranks on one node, with shard weights, would need " in caught.value.message
