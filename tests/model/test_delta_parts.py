"""Linear attention in stages, against the whole forest at once; and what stages keep of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.model import delta_parts
from ratoon.model.attention import PathAttention, TreeAttention
from ratoon.model.delta_parts import DeltaPart
from ratoon.model.streamed_attention import AttentionStream, StageAttention
from ratoon.planner.layer_kinds import GatedDelta
from ratoon.planner.stage_plan import StreamTokens
from ratoon_kernels import Span
from tests.kernels.forests import Forest, chain, forest_from, random_forests

SIZES = GatedDelta(num_heads=4, num_key_heads=2, key_dim=6, value_dim=5, taps=4)
MODULE = cast("Any", SimpleNamespace(num_k_heads=2, head_k_dim=6, head_v_dim=5, layer_idx=0))


def _second_half(forest: Forest) -> list[int]:
    """Parents of the second half of the nodes."""
    return forest.parent[len(forest.parent) // 2 :].tolist()


# The second half continues nodes in the midst of the first; and a chain shorter than the taps.
FORESTS = [
    forest_from([-1, 0, 1, 1, 0, 4, 4], [3, 2, 1, 4, 1, 5, 2]),
    chain(7, 1),
    *(
        forest
        for forest in random_forests(3, 16, 12, 5)
        if any(0 <= parent < len(forest.parent) // 2 for parent in _second_half(forest))
    ),
]

Tensors = dict[str, Tensor]


def _inputs(num_tokens: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "x": draw(num_tokens, SIZES.convolved_size),
        "weight": draw(SIZES.convolved_size, SIZES.taps),
        "g": -draw(num_tokens, 4).exp() / 8,
        "beta": draw(num_tokens, 4).sigmoid(),
    }


def _mixed(attention: PathAttention, inputs: Tensors, tokens: slice) -> Tensor:
    x, g, beta = (inputs[name][tokens] for name in ("x", "g", "beta"))
    return attention.at_layer(0).mix(MODULE, x, inputs["weight"], g, beta)


def _dout(num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((num_tokens, 4, 5), generator=generator, dtype=torch.float64)


def _at_once(forest: Forest) -> Tensors:
    leaves = {n: x.requires_grad_() for n, x in _inputs(forest.num_tokens).items()}
    whole = TreeAttention(layout=forest.layout(), backend="reference", deterministic=True)
    out = _mixed(whole, leaves, slice(None))
    out.backward(_dout(forest.num_tokens))
    return {"out": out.detach(), **{n: cast("Tensor", x.grad) for n, x in leaves.items()}}


def _in_stages(forest: Forest) -> tuple[Tensors, list[StageAttention]]:
    """A first half of the nodes, then the first of the rest, then all others."""
    num_nodes, num_tokens = len(forest.parent), forest.num_tokens
    cuts = [num_nodes // 2, num_nodes // 2 + 1]
    bounds = [0, *(int(forest.start[cut]) for cut in cuts), num_tokens]
    stream = AttentionStream(
        layout=forest.layout(),
        backend="reference",
        deterministic=True,
        tokens=StreamTokens(held=num_tokens, waiting=num_tokens),
    )
    leaves = {n: x.requires_grad_() for n, x in _inputs(num_tokens).items()}
    stages: list[StageAttention] = []
    outs: list[Tensor] = []
    for index in range(3):
        span = Span(bounds[index], bounds[index + 1])
        stages.append(stream.stage(span, tuple(stages), is_kept=index < 2))
        outs.append(_mixed(stages[-1], leaves, slice(span.start, span.stop)))
    for stage, out in zip(reversed(stages), reversed(outs), strict=True):
        out.backward(_dout(num_tokens)[stage.span.start : stage.span.stop])
    grads = {n: cast("Tensor", x.grad) for n, x in leaves.items()}
    return {"out": torch.cat(outs).detach(), **grads}, stages


def _distance(got: Tensors, expected: Tensors) -> float:
    return max(float((got[n] - x).norm() / x.norm()) for n, x in expected.items())


@pytest.mark.parametrize("forest", FORESTS)
def test_stages_equal_the_whole_forest(forest: Forest) -> None:
    got, stages = _in_stages(forest)
    assert _distance(got, _at_once(forest)) <= 1e-12
    kept = [_kept(stage) for stage in stages]
    handed = [np.unique(_behind(forest, stage.span)) for stage in stages]
    # To the element, what is planned.
    assert kept == [len(nodes) * SIZES.state_elements(1) for nodes in handed]
    assert kept[0] > 0


def _behind(forest: Forest, span: Span) -> list[int]:
    """Parents in `span` of nodes behind it."""
    return [
        int(parent)
        for start, parent in zip(forest.start, forest.parent, strict=True)
        if start >= span.stop and parent >= 0 and span.start <= forest.start[parent] < span.stop
    ]


def _kept(stage: StageAttention) -> int:
    ends = stage.at_layer(0).delta._ends
    assert ends is not None
    return ends.state_ENDV.numel() + ends.rows_ERC.numel()


def _no_states(self: DeltaPart, own: Any, num_taps: int) -> Any:
    first = _FIRST(self, own, num_taps)
    return delta_parts._Ends(torch.zeros_like(first.state_ENDV), first.rows_ERC)


def _no_rows(self: DeltaPart, own: Any, num_taps: int) -> Any:
    first = _FIRST(self, own, num_taps)
    return delta_parts._Ends(first.state_ENDV, torch.zeros_like(first.rows_ERC))


def _no_sums(self: DeltaPart) -> Any:
    self._sums = None
    return _ENDED(self)


_FIRST, _ENDED = DeltaPart._first, DeltaPart._ended


@pytest.mark.parametrize(
    ("name", "fault"), [("_first", _no_states), ("_first", _no_rows), ("_ended", _no_sums)]
)
def test_what_is_lost_between_stages_is_seen(
    name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeltaPart, name, fault)
    assert _distance(_in_stages(FORESTS[0])[0], _at_once(FORESTS[0])) > 1e-3
