"""The gated delta rule and its convolution over forests, against each path alone, token by token.

The oracle knows parent pointers, walks every node's path from its root, and imports nothing of the
ops. Its gradients are torch's own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ratoon_kernels
from ratoon_kernels import (
    Handover,
    KernelArgumentError,
    TreeLayout,
    build_layout,
    causal_convolution,
)
from ratoon_kernels.gated_delta import convolution_reference, reference
from tests.kernels.forests import NAMED, Forest, binary, chain, forest_from, random_forests, star

# Sizes that vary are the compiled layers' part.
_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
# Tensors are passed by tuples.
_OPS: Any = ratoon_kernels
TOLERANCE = 1e-10
CHUNK = reference.CHUNK_TOKENS
RULE = ("q_TKD", "k_TKD", "v_TNV", "g_TN", "beta_TN")
# A fork at a chunk's edge and beside it, and one whose taps read three ancestors.
EDGES = {
    "at_edge": forest_from([-1, 0, 0], [CHUNK, CHUNK, 3]),
    "off_edge": forest_from([-1, 0, 0], [CHUNK - 1, CHUNK + 1, 2 * CHUNK + 5]),
    "within_taps": forest_from([-1, 0, 1, 2, 1, 0, 5], [1, 1, 1, 4, 2, 1, 3]),
}
# The oracle's work grows with the square of a path.
FORESTS = {
    **{name: NAMED[name] for name in ("single_token", "one_sequence", "two_trees", "sequences")},
    "chain_of_tokens": chain(20, 1),
    "star": star(9, 5, 4),
    "binary_of_tokens": binary(3, 1),
    **EDGES,
}

Inputs = dict[str, Tensor]


def _inputs(num_tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """Two key heads of 6, four heads of values of 5."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64)

    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return {
        "q_TKD": draw(2, 6).to(dtype),
        "k_TKD": draw(2, 6).to(dtype),
        "v_TNV": draw(4, 5).to(dtype),
        "g_TN": -torch.nn.functional.softplus(draw(4)).to(wide) / 4,
        "beta_TN": draw(4).sigmoid().to(dtype),
    }


def _rows(num_tokens: int, taps: int = 4) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    shapes = {"x_TC": (num_tokens, 7), "weight_CW": (7, taps)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def _rule(layout: TreeLayout) -> Callable[..., Tensor]:
    return lambda *tensors: _OPS.gated_delta_rule(*tensors, layout, 0.7)


def _convolution(layout: TreeLayout) -> Callable[..., Tensor]:
    return lambda *tensors: _OPS.causal_convolution(*tensors, layout)


def _path(forest: Forest, node: int) -> list[int]:
    """Packed tokens from the root to the node's end."""
    nodes = [node]
    while forest.parent[nodes[0]] >= 0:
        nodes.insert(0, int(forest.parent[nodes[0]]))
    return [t for each in nodes for t in range(forest.start[each], forest.stop[each])]


def _by_path(forest: Forest, along: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Each node's own rows of `along` over its path's tokens alone."""
    rows = [
        along(_path(forest, node), *tensors)[-int(forest.stop[node] - forest.start[node]) :]
        for node in range(len(forest.parent))
    ]
    return torch.cat(rows)


def _naive_rule(
    tokens: list[int], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> Tensor:
    group = v.shape[1] // q.shape[1]
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    state = v.new_zeros((v.shape[1], q.shape[2], v.shape[2]))
    out: list[Tensor] = []
    for t in tokens:
        state = state * g[t].exp()[:, None, None]
        missing = v[t] - torch.einsum("nd,ndv->nv", k[t], state)
        state = state + torch.einsum("nd,nv->ndv", k[t], beta[t][:, None] * missing)
        out.append(0.7 * torch.einsum("nd,ndv->nv", q[t], state))
    return torch.stack(out)


def _naive_convolution(tokens: list[int], x: Tensor, weight: Tensor) -> Tensor:
    taps = weight.shape[1]
    out: list[Tensor] = []
    for place in range(len(tokens)):
        total = torch.zeros_like(x[0])
        for back in range(min(taps, place + 1)):
            total = total + weight[:, taps - 1 - back] * x[tokens[place - back]]
        out.append(torch.nn.functional.silu(total))
    return torch.stack(out)


def _run(of: Callable[..., Tensor], inputs: Inputs, seed: int = 2) -> Inputs:
    """Output and all gradients, for a random gradient of the output."""
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    out = of(*leaves)
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, dout)
    return {"out": out.detach(), **dict(zip(inputs, grads, strict=True))}


def _error(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest distance relative to the larger of a result's norm and a thousandth of all."""
    assert list(got) == list(expected)
    size = max((float(x.norm()) for x in expected.values()), default=0.0)
    return max(
        float((got[name].double() - x).norm()) / max(float(x.norm()), 1e-3 * size, 1e-30)
        for name, x in expected.items()
    )


CASES = [
    *FORESTS.items(),
    *((f"random_{i}", f) for i, f in enumerate(random_forests(5, 6, 14, 9))),
    *((f"long_{i}", f) for i, f in enumerate(random_forests(6, 2, 4, 150))),
]


@pytest.mark.parametrize("forest", [f for _, f in CASES], ids=[name for name, _ in CASES])
def test_rule_equals_each_path_alone(forest: Forest) -> None:
    inputs = _inputs(forest.num_tokens)
    got = _run(_rule(forest.layout()), inputs)
    expected = _run(lambda *x: _by_path(forest, _naive_rule, *x), inputs)
    # Roots of one token decay nothing.
    assert all(float(x.norm()) > 0 for key, x in expected.items() if key != "g_TN")
    assert _error(got, expected) <= TOLERANCE


@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["within_taps", "chain_of_tokens", "star", "two_trees"])
def test_convolution_equals_each_path_alone(name: str, taps: int) -> None:
    forest = FORESTS[name]
    inputs = _rows(forest.num_tokens, taps)
    got = _run(_convolution(forest.layout()), inputs)
    expected = _run(lambda *x: _by_path(forest, _naive_convolution, *x), inputs)
    assert _error(got, expected) <= TOLERANCE


def test_empty_forest() -> None:
    layout = NAMED["empty"].layout()
    assert _run(_rule(layout), _inputs(0))["out"].shape == (0, 4, 5)
    assert _run(_convolution(layout), _rows(0))["out"].shape == (0, 7)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_rule_accumulates_in_float32(dtype: torch.dtype, bound: float) -> None:
    forest = EDGES["off_edge"]
    inputs = _inputs(forest.num_tokens, dtype)
    got = _run(_rule(forest.layout()), inputs)
    exact = {name: x.double() for name, x in inputs.items()}
    assert {name: got[name].dtype for name in RULE} == {n: x.dtype for n, x in inputs.items()}
    assert _error(got, _run(_rule(forest.layout()), exact)) <= bound


def test_no_decay_overflows() -> None:
    """Decays that are far below what a float32 exponential holds, both ways."""
    forest = EDGES["off_edge"]
    inputs = _inputs(forest.num_tokens, torch.float32)
    inputs["g_TN"] = inputs["g_TN"] * 4000
    got = _run(_rule(forest.layout()), inputs)
    assert all(bool(x.isfinite().all()) for x in got.values())


def test_equal_bits_on_repeat() -> None:
    forest = FORESTS["two_trees"]
    layout, inputs = forest.layout(), _inputs(forest.num_tokens, torch.float32)
    first, again = (_run(_rule(layout), inputs) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_op_is_a_proper_custom_op() -> None:
    forest = EDGES["within_taps"]
    layout = forest.layout()
    inputs = [x.requires_grad_() for x in _inputs(forest.num_tokens, torch.float32).values()]
    rows = [x.float().requires_grad_() for x in _rows(forest.num_tokens).values()]
    plan = [layout.node_table_M4]
    rule: Any = torch.ops.ratoon.gated_delta_rule.default
    convolution: Any = torch.ops.ratoon.causal_convolution.default
    torch.library.opcheck(rule, (*inputs, plan, 0.5, "reference", True), test_utils=_CHECKS)
    torch.library.opcheck(convolution, (*rows, plan, "reference"), test_utils=_CHECKS)


def test_ops_compile_as_one_graph() -> None:
    forest = EDGES["within_taps"]
    layout, inputs = forest.layout(), _inputs(forest.num_tokens, torch.float32)
    compiled = torch.compile(_rule(layout), fullgraph=True, backend="aot_eager")
    eager, got = _run(_rule(layout), inputs), _run(compiled, inputs)
    assert all(torch.equal(got[name], eager[name]) for name in eager)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Consecutive nodes of a forest: their own layout, and what they take and hand on."""

    tokens: slice
    layout: TreeLayout
    handover: Handover
    # Nodes of the whole forest that the first states are ends of, and those handed on.
    taken: list[int]
    handed: list[int]


def _parts(forest: Forest, cuts: list[int]) -> list[Part]:
    parts: list[Part] = []
    for first, stop in itertools.pairwise([0, *cuts, len(forest.parent)]):
        parents, origin = forest.parent[first:stop], int(forest.start[first])
        is_here = parents >= first
        taken = sorted({int(p) for p in parents if 0 <= p < first})
        handed = sorted({int(p) for p in forest.parent[stop:] if first <= p < stop})
        rows = [taken.index(int(p)) if 0 <= p < first else -1 for p in parents]
        end = int(forest.stop[stop - 1])
        layout = build_layout(
            node_start=forest.start[first:stop] - origin,
            node_stop=forest.stop[first:stop] - origin,
            node_end=np.minimum(forest.end[first:stop], end) - origin,
            node_parent=np.where(is_here, parents - first, -1),
            device="cpu",
        )
        handover = Handover(
            first_M=torch.tensor(rows), handed_E=torch.tensor([h - first for h in handed]).long()
        )
        tokens = slice(origin, end)
        parts.append(
            Part(tokens=tokens, layout=layout, handover=handover, taken=taken, handed=handed)
        )
    return parts


def _stack(ends: Mapping[int, Tensor], nodes: list[int], like: Tensor) -> Tensor:
    return (
        torch.stack([ends[node] for node in nodes]) if nodes else like.new_zeros((0, *like.shape))
    )


def _in_parts(forest: Forest, cuts: list[int], inputs: Inputs, rows: Inputs) -> tuple[Inputs, ...]:
    """Both ops part by part, forwards in order and backwards the other way."""
    parts = _parts(forest, cuts)
    generator = torch.Generator().manual_seed(2)
    dout = torch.randn(inputs["v_TNV"].shape, generator=generator, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    dout_x = torch.randn(rows["x_TC"].shape, generator=generator, dtype=torch.float64)
    weight, state = rows["weight_CW"], torch.zeros(4, 6, 5, dtype=torch.float64)
    before = torch.zeros(weight.shape[1] - 1, 7, dtype=torch.float64)
    ends, lasts = dict[int, Tensor](), dict[int, Tensor]()
    outs, outs_x = list[Tensor](), list[Tensor]()

    def rule_of(part: Part) -> tuple[list[Tensor], dict[str, Any]]:
        first = _stack(ends, part.taken, state)
        return [x[part.tokens] for x in inputs.values()], {
            "handover": part.handover, "first_SNDV": first
        }  # fmt: skip

    def rows_of(part: Part) -> tuple[list[Tensor], dict[str, Any]]:
        first = _stack(lasts, part.taken, before)
        return [rows["x_TC"][part.tokens], weight], {"handover": part.handover, "first_SRC": first}

    for part in parts:
        own, settings = rule_of(part)
        out, end = _OPS.gated_delta_partial_forward(*own, part.layout, 0.7, **settings)
        own_x, settings_x = rows_of(part)
        out_x, last = _OPS.causal_convolution_partial_forward(*own_x, part.layout, **settings_x)
        outs.append(out)
        outs_x.append(out_x)
        ends |= dict(zip(part.handed, end, strict=True))
        lasts |= dict(zip(part.handed, last, strict=True))
    dends = {node: torch.zeros_like(state) for node in ends}
    dlasts = {node: torch.zeros_like(before) for node in ends}
    grads = {name: torch.zeros_like(x) for name, x in (inputs | rows).items()}
    for part in reversed(parts):
        own, settings = rule_of(part)
        dend = _stack(dends, part.handed, state)
        got = _OPS.gated_delta_partial_backward(
            dout[part.tokens], dend, *own, part.layout, 0.7, **settings
        )
        for name in RULE:
            grads[name][part.tokens] = getattr(got, f"d{name}")
        own_x, settings_x = rows_of(part)
        dlast = _stack(dlasts, part.handed, before)
        got_x = _OPS.causal_convolution_partial_backward(
            dout_x[part.tokens], dlast, *own_x, part.layout, **settings_x
        )
        grads["x_TC"][part.tokens] = got_x.dx_TC
        grads["weight_CW"] += got_x.dweight_CW
        assert got.dfirst_SNDV is not None
        assert got_x.dfirst_SRC is not None
        for place, node in enumerate(part.taken):
            dends[node] += got.dfirst_SNDV[place]
            dlasts[node] += got_x.dfirst_SRC[place]
    rule = {"out": torch.cat(outs), **{name: grads[name] for name in inputs}}
    return rule, {"out": torch.cat(outs_x), **{name: grads[name] for name in rows}}


@pytest.mark.parametrize("seed", range(4))
def test_parts_equal_the_whole(seed: int) -> None:
    """Any split between nodes, so that several roots of a part may continue one node."""
    rng = np.random.default_rng(seed)
    for forest in [*random_forests(seed, 4, 12, 6), EDGES["within_taps"]]:
        inputs, rows = _inputs(forest.num_tokens), _rows(forest.num_tokens)
        num_nodes = len(forest.parent)
        cuts = sorted({int(c) for c in rng.integers(1, num_nodes, 3)}) if num_nodes > 1 else []
        rule, convolution = _in_parts(forest, cuts, inputs, rows)
        assert _error(rule, _run(_rule(forest.layout()), inputs)) <= TOLERANCE
        assert _error(convolution, _run(_convolution(forest.layout()), rows)) <= TOLERANCE


def test_wrong_arguments_are_named() -> None:
    layout = EDGES["within_taps"].layout()
    inputs = _inputs(layout.num_tokens)
    for name, wrong in {
        "q_TKD": inputs["q_TKD"].int(),
        "k_TKD": inputs["k_TKD"][:, :1],
        "v_TNV": inputs["v_TNV"][:, :3],
        "g_TN": inputs["g_TN"].float(),
        "beta_TN": inputs["beta_TN"][1:],
    }.items():
        with pytest.raises(KernelArgumentError, match=name if name != "v_TNV" else "_T?N"):
            _rule(layout)(*(inputs | {name: wrong}).values())
    rows = _rows(layout.num_tokens)
    with pytest.raises(KernelArgumentError, match="weight_CW"):
        causal_convolution(rows["x_TC"], rows["weight_CW"][:3], layout)
    with pytest.raises(KernelArgumentError, match="layout"):
        causal_convolution(rows["x_TC"][1:], rows["weight_CW"], layout)


def test_wrong_handovers_are_named() -> None:
    layout = EDGES["within_taps"].layout()
    inputs, none = _inputs(layout.num_tokens), torch.full((layout.node_table_M4.shape[0],), -1)
    first = torch.zeros(1, 4, 6, 5, dtype=torch.float64)
    of_child, beyond = none.clone(), none.clone()
    of_child[1], beyond[0] = 0, 1
    for rows, handed, field in (
        (of_child, [0], "first_M"),
        (beyond, [0], "first_M"),
        (none, [1, 0], "handed_E"),
        (none, [99], "handed_E"),
    ):
        handover = Handover(first_M=rows, handed_E=torch.tensor(handed))
        with pytest.raises(KernelArgumentError, match=field):
            _OPS.gated_delta_partial_forward(
                *inputs.values(), layout, 0.7, handover=handover, first_SNDV=first
            )


@pytest.mark.parametrize("fault", ["parent", "taps", "decay"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that begin from zeros, taps cut at a fork, and a state that no chunk decays."""
    forest = EDGES["off_edge"]
    inputs, rows = _inputs(forest.num_tokens), _rows(forest.num_tokens)
    right = _run(_rule(forest.layout()), inputs), _run(_convolution(forest.layout()), rows)
    if fault == "decay":
        end = reference._Chunk._end
        monkeypatch.setattr(
            reference._Chunk, "_end", lambda self, s, inner: end(self, s, inner) + 1e-6 * s
        )
    else:
        cut = dataclasses.replace(forest, parent=np.full_like(forest.parent, -1), end=forest.stop)
        module = reference if fault == "parent" else convolution_reference
        monkeypatch.setattr(module, "plan", lambda _layout: [cut.layout().node_table_M4])
    got = _run(_rule(forest.layout()), inputs), _run(_convolution(forest.layout()), rows)
    index = 1 if fault == "taps" else 0
    assert _error(got[index], right[index]) > 1e-7
