"""Attention of a rank's share: its forms, what layers keep of it, and how it is compiled.

Where layers are run the other rank is an echo, whose tokens and heads are this rank's own: what is
exchanged is then wrong, but the same whatever is kept. `tests/train/test_sequence_ranks.py` has
real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from ratoon.model.attention import SequenceAttention, TreeAttention
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype
from ratoon.planner.activation_plan import Kept, peak_bytes
from ratoon.shards.sequence_group import SequenceGroup
from ratoon_kernels import Span
from tests.equivalence import relative_error
from tests.model.builders import TINY, load
from tests.model.packing import Packed, branching_sequences, pack
from tests.model.test_streamed_attention import (
    FORMS,
    PLAIN,
    SCALE,
    Form,
    Inputs,
    make_inputs,
    make_layout,
    whole,
)


@dataclass
class _Echo:
    """A link that has what it is sent, as far as there is room for it."""

    lengths: list[int] = field(default_factory=list[int])

    def exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        self.lengths.append(len(sends[0]))
        for sent, received in zip(sends[0], receives[1], strict=True):
            num_tokens = min(len(sent), len(received))
            received.zero_()
            received[:num_tokens] = sent[:num_tokens]

    def any(self, is_so: bool) -> bool:
        return is_so


def _gradients(model: PolicyModel, packed: Packed, link: _Echo) -> dict[str, Tensor]:
    """Gradients of the first of two ranks."""
    group = SequenceGroup(index=0, size=2, link=link)
    own = len(packed.tokens_T) // 2
    attention = model.open_together(packed.layout, group)
    hidden_tD = model.attend_hidden(packed.tokens_T[:own], packed.position_T[:own], attention)
    weight_tD = torch.randn(hidden_tD.shape, generator=torch.Generator().manual_seed(5))
    hidden_tD.backward(weight_tD.to(hidden_tD.dtype))
    grads = {n: p.grad for n, p in model.named_trainable().items() if p.grad is not None}
    for parameter in model.named_trainable().values():
        parameter.grad = None
    return grads


def _keep(model: PolicyModel, packed: Packed, kept: Kept) -> None:
    tokens, sizes = -(-len(packed.tokens_T) // 2), model.sizes.over(2)
    model.limit_activations(peak_bytes(sizes, (kept,) * sizes.num_layers, tokens, tokens))


class _Table:
    """Where two ranks, which are threads, lay down what they send."""

    def __init__(self) -> None:
        self._both = Barrier(2, timeout=30)
        self._sent: dict[int, Sequence[Sequence[Tensor]]] = {}

    def rank(self, index: int, inputs: Inputs) -> list[Tensor]:
        """Output of the rank's tokens, their dQ, dK and dV, and its part of the sink's gradient."""
        group = SequenceGroup(index=index, size=2, link=_Seat(self, index))
        own = group.share(Span(0, len(inputs.q)))
        tree = TreeAttention(layout=make_layout(), backend="reference", deterministic=True)
        attention = SequenceAttention(tree, group)
        of_tokens = [x[own.start : own.stop] for x in (inputs.q, inputs.k, inputs.v)]
        leaves = [x.clone().requires_grad_() for x in (*of_tokens, inputs.sink)]
        q, k, v, sink = leaves
        out = attention.attend(nn.Identity(), q, k, v, SCALE, **inputs.options(sink))
        leaves = leaves[: 3 + inputs.form.has_sink]
        grads = torch.autograd.grad(out, leaves, inputs.dout[own.start : own.stop])
        return [out.detach(), *grads]

    def exchange(
        self,
        index: int,
        sends: Sequence[Sequence[Tensor]],
        receives: Sequence[Sequence[Tensor]],
    ) -> None:
        other = 1 - index
        self._sent[index] = sends
        self._both.wait()
        for sent, received in zip(self._sent[other][index], receives[other], strict=True):
            received.copy_(sent)
        self._both.wait()


@dataclass(frozen=True, slots=True)
class _Seat:
    """A rank's link to the table."""

    table: _Table
    index: int

    def exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        self.table.exchange(self.index, sends, receives)

    def any(self, is_so: bool) -> bool:
        return is_so


@pytest.mark.parametrize("form", [PLAIN, *FORMS], ids=str)
def test_two_ranks_of_any_form_equal_one(form: Form) -> None:
    """Gradients of the sinks add up over the ranks, as those of any parameter do."""
    inputs, table = make_inputs(torch.float64, form=form), _Table()
    with ThreadPoolExecutor(2) as pool:
        parts = list(zip(*pool.map(lambda index: table.rank(index, inputs), range(2)), strict=True))
    got = [torch.cat(of_tokens) for of_tokens in parts[:4]]
    got += [first + second for first, second in parts[4:]]
    for own, expected in zip(got, whole(inputs), strict=True):
        assert relative_error(own, expected) <= 1e-14


@pytest.mark.parametrize("kept", [Kept.ATTENTION, Kept.NARROW, Kept.PRODUCTS])
def test_what_runs_again_exchanges_nothing(kept: Kept) -> None:
    """Twice forward, twice backward: queries, keys, values; results; all of these; gradients."""
    packed, free, least = pack(branching_sequences(0)), _Echo(), _Echo()
    expected = _gradients(load(TINY), packed, free)
    model = load(TINY)
    _keep(model, packed, kept)
    got = _gradients(model, packed, least)
    layers = model.sizes.num_layers
    assert least.lengths == free.lengths == [3, 2] * layers + [6, 3] * layers
    for name, grad in expected.items():
        assert float((got[name] - grad).norm()) <= 1e-12 * float(grad.norm()), name


@pytest.mark.more
def test_a_compiled_layer_has_one_graph_for_all(graphs: list[GraphModule]) -> None:
    """Other forests and layers run through the same one."""
    packed = pack(branching_sequences(0))
    expected = _gradients(load(TINY, dtype=ModelDtype.FLOAT32), packed, _Echo())
    model = load(TINY, dtype=ModelDtype.FLOAT32, compile_layers=True)
    _keep(model, packed, Kept.ATTENTION)
    got = _gradients(model, packed, _Echo())
    for name, grad in expected.items():
        assert (got[name] - grad).norm() / grad.norm() < 1e-5, name
    num_graphs = len(graphs)
    assert 0 < num_graphs <= 2
    _gradients(model, packed, _Echo())
    other = pack(branching_sequences(1))
    _keep(model, other, Kept.ATTENTION)
    _gradients(model, other, _Echo())
    assert len(graphs) == num_graphs
