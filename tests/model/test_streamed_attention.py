"""A forest attended in stages: outputs and all gradients against the whole forest at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from ratoon.model.streamed_attention import (
    AttentionStream,
    LayerStage,
    StageAttention,
    path_layout,
)
from ratoon.planner.stage_plan import StreamTokens
from ratoon_kernels import Span, TreeLayout, build_layout, tree_attention
from tests.equivalence import relative_error

# Start, stop, end and parent of each node: a prompt, a turn with three answers, another answer.
NODES = ((0, 7, 24, -1), (7, 11, 20, 0), (11, 15, 15, 1), (15, 18, 18, 1), (18, 20, 20, 1))
NODES = (*NODES, (20, 24, 24, 0))
# Start, stop, parent: two prefixes, two waves below the inner one, one below the outer one.
STAGES = ((0, 7, -1), (7, 11, 0), (11, 15, 1), (15, 20, 1), (20, 24, 0))
MOST = StreamTokens(held=16, waiting=11)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = 0.5


@pytest.mark.parametrize(
    ("spans", "nodes"),
    [
        # The inner prefix with only its second wave: two answers, in what is left of the forest.
        (
            [(0, 7), (7, 11), (15, 20)],
            [(0, 7, 16, -1), (7, 11, 16, 0), (11, 14, 14, 1), (14, 16, 16, 1)],
        ),
        ([(0, 7), (20, 24)], [(0, 7, 11, -1), (7, 11, 11, 0)]),
        # A stage of several nodes whose later tokens another one does not descend from.
        (
            [(0, 20), (20, 24)],
            [*NODES[:-1], (20, 24, 24, 0)],
        ),
        ([(0, 24)], [*NODES]),
    ],
)
def test_a_path_is_a_forest_of_its_own(
    spans: list[tuple[int, int]], nodes: list[tuple[int, int, int, int]]
) -> None:
    layout = path_layout(make_layout(), [Span(*span) for span in spans])
    assert layout.node_table_M4.tolist() == [list(node) for node in nodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a layer's attention may have beside queries, keys and values of one size."""

    window: int | None = None
    has_sink: bool = False
    value_dim: int = HEAD_DIM


PLAIN = Form()
# The longest path has 15 tokens, and nodes have 2 to 7: windows end within any of them.
FORMS = (
    *(Form(window=window) for window in (2, 5, 9, 30)),
    Form(has_sink=True),
    Form(value_dim=6),
    Form(window=5, has_sink=True, value_dim=12),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """q, k, v and the gradient of the output, in packed order; a sink of each head."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sink: Tensor
    form: Form

    def options(self, sink: Tensor) -> dict[str, Any]:
        """Arguments of attention, with `sink` where there is one."""
        return {"window": self.form.window, "sink_N": sink if self.form.has_sink else None}


def make_layout() -> TreeLayout:
    start, stop, end, parent = torch.tensor(NODES).T.numpy()
    return build_layout(
        node_start=start, node_stop=stop, node_end=end, node_parent=parent, device="cpu"
    )


def _stream(most: StreamTokens = MOST) -> AttentionStream:
    return AttentionStream(
        layout=make_layout(), backend="reference", deterministic=True, tokens=most
    )


def make_inputs(dtype: torch.dtype, seed: int = 0, form: Form = PLAIN) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(num_heads: int, head_dim: int) -> Tensor:
        x = torch.randn(NODES[-1][1], num_heads, head_dim, generator=generator)
        return x.to(dtype)

    return Inputs(
        q=draw(HEADS, HEAD_DIM),
        k=draw(KV_HEADS, HEAD_DIM),
        v=draw(KV_HEADS, form.value_dim),
        dout=draw(HEADS, form.value_dim),
        sink=draw(HEADS, 1)[0, :, 0],
        form=form,
    )


def whole(inputs: Inputs) -> list[Tensor]:
    """Output, dQ, dK and dV, and the sink's gradient if there is one."""
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.sink)]
    q, k, v, sink = leaves
    out, _ = tree_attention(q, k, v, make_layout(), SCALE, **inputs.options(sink))
    leaves = leaves[: 3 + inputs.form.has_sink]
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)]


class _Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index


def _attend(
    stage: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Tensor:
    return stage.attend(module, q, k, v, SCALE, **options)


def _staged(inputs: Inputs, attend: Any = _attend, module: nn.Module | None = None) -> list[Tensor]:
    """Results stage by stage, each backward as soon as nothing below it is to come."""
    module = _Layer(0) if module is None else module
    stream = _stream()
    results = [torch.full_like(x, torch.nan) for x in (inputs.dout, inputs.q, inputs.k, inputs.v)]
    dsink = torch.zeros_like(inputs.sink)
    opened: list[tuple[int, StageAttention, Tensor, list[Tensor]]] = []

    def close() -> None:
        index, _stage, out, leaves = opened.pop()
        rows = slice(*STAGES[index][:2])
        grads = torch.autograd.grad(out, leaves, inputs.dout[rows])
        for result, value in zip(results, (out.detach(), *grads[:3]), strict=True):
            result[rows] = value
        for grad in grads[3:]:
            dsink.add_(grad)

    for index, (start, stop, parent) in enumerate(STAGES):
        while opened and opened[-1][0] != parent:
            close()
        above = tuple(each[1] for each in opened)
        stage = stream.stage(Span(start, stop), above, is_kept=index < 2)
        leaves = [x[start:stop].clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        sink = inputs.sink.clone().requires_grad_()
        out = attend(stage, module, *leaves, **inputs.options(sink))
        opened.append((index, stage, out, [*leaves, sink][: 3 + inputs.form.has_sink]))
    while opened:
        close()
    return [*results, dsink][: 4 + inputs.form.has_sink]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_stages_equal_the_whole_forest(dtype: torch.dtype, tolerance: float) -> None:
    inputs = make_inputs(dtype)
    for got, expected in zip(_staged(inputs), whole(inputs), strict=True):
        assert relative_error(got, expected) <= tolerance


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_stages_of_any_form_equal_the_whole_forest(form: Form) -> None:
    inputs = make_inputs(torch.float64, form=form)
    for got, expected in zip(_staged(inputs), whole(inputs), strict=True):
        assert relative_error(got, expected) <= 1e-14


def test_sixteen_bits_lose_no_more_than_at_once() -> None:
    """Over five seeds, all results together, the median distance from float64 is at most a quarter
    more; results come in the dtype of the inputs."""
    ratios: list[float] = []
    for seed in range(5):
        inputs = make_inputs(torch.bfloat16, seed)
        wide = replace(
            inputs, **{name: getattr(inputs, name).double() for name in ("q", "k", "v", "dout")}
        )
        staged, packed, truth = _staged(inputs), whole(inputs), _flat(whole(wide))
        assert all(value.dtype is torch.bfloat16 for value in staged)
        errors = [relative_error(_flat(values), truth) for values in (staged, packed)]
        ratios.append(errors[0] / errors[1])
    assert float(np.median(ratios)) <= 1.25


def _flat(values: list[Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in values])


def test_a_layer_that_is_run_again_adds_its_gradients_once() -> None:
    inputs = make_inputs(torch.float64)

    def again(*args: Any, **options: Any) -> Tensor:
        return checkpoint(_attend, *args, use_reentrant=False, **options)

    for got, expected in zip(_staged(inputs, again), whole(inputs), strict=True):
        assert relative_error(got, expected) <= 1e-14


def test_layers_hold_keys_of_their_own() -> None:
    """Two layers of one stage, forwarded one after the other, do not see each other's keys."""
    first, second = make_inputs(torch.float64), make_inputs(torch.float64, seed=1)
    stream = _stream(StreamTokens(held=24, waiting=7))
    prefix = stream.stage(Span(0, 7), (), is_kept=True)
    wave = stream.stage(Span(7, 24), (prefix,), is_kept=False)
    for inputs, layer in ((first, _Layer(0)), (second, _Layer(1))):
        prefix.attend(layer, inputs.q[:7], inputs.k[:7], inputs.v[:7], SCALE)
    for inputs, layer in ((second, _Layer(1)), (first, _Layer(0))):
        out = wave.attend(layer, inputs.q[7:], inputs.k[7:], inputs.v[7:], SCALE)
        assert relative_error(out, whole(inputs)[0][7:]) <= 1e-14


@pytest.mark.parametrize("form", [PLAIN, FORMS[-1]], ids=str)
def test_one_compiled_graph_serves_all_layers_and_stages(form: Form) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def compiled(
        stage: LayerStage, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> Tensor:
        # A literal, as a layer's scaling is: of a global number a symbol would be made first.
        return stage.attend(module, q * 1.0, k * 1.0, v * 1.0, 0.5, **options)

    def attend(stage: StageAttention, module: _Layer, *args: Tensor, **options: Any) -> Tensor:
        return compiled(stage.at_layer(module.layer_idx), module, *args, **options)

    for index in range(3):
        inputs = make_inputs(torch.float64, seed=index, form=form)
        got = _staged(inputs, attend, _Layer(index))
        for value, expected in zip(got, whole(inputs), strict=True):
            assert relative_error(value, expected) <= 1e-14
    assert counter.frame_count == 1


def test_a_stage_names_kept_ancestors_only() -> None:
    stream = _stream()
    wave = stream.stage(Span(11, 15), (), is_kept=False)
    with pytest.raises(AssertionError, match="what is attended is kept"):
        stream.stage(Span(15, 18), (wave,), is_kept=False)


def test_stages_hold_no_more_than_was_said() -> None:
    stream = _stream(StreamTokens(held=15, waiting=11))
    outer = stream.stage(Span(0, 7), (), is_kept=True)
    inner = stream.stage(Span(7, 11), (outer,), is_kept=True)
    stream.stage(Span(11, 15), (outer, inner), is_kept=False)
    with pytest.raises(AssertionError, match="stages fit together"):
        stream.stage(Span(15, 20), (outer, inner), is_kept=False)
