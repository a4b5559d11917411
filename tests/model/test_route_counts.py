"""Routers count each token of a forward once, however a layer runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from ratoon.model.policy_model import PolicyModel
from ratoon.model.router import RoutedTokens
from ratoon.model.spec import ModelDtype
from ratoon.planner.activation_plan import Kept
from tests.model.builders import load
from tests.model.packing import Packed, branching_sequences, pack
from tests.tiny_models import write_folder


def _hidden(model: PolicyModel, packed: Packed, copies_T: Tensor | None) -> Tensor:
    routed = None if copies_T is None else RoutedTokens(copies_T=copies_T)
    return model.forward_hidden(packed.tokens_T, packed.position_T, packed.layout, routed)


_MORE = [pytest.param(kept, marks=pytest.mark.more) for kept in Kept if kept is not Kept.NARROW]


@pytest.mark.parametrize("kept", [Kept.NARROW, pytest.param(None, marks=pytest.mark.more), *_MORE])
def test_layers_count_and_balance_once_compiled_or_not(
    tmp_path: Path, kept: Kept | None, graphs: list[GraphModule]
) -> None:
    """Also where they run again for their backward."""
    folder, packed = write_folder(tmp_path / "base", "qwen3_moe"), pack(branching_sequences(0))
    sums: list[Tensor] = []
    grads: list[list[Tensor]] = []
    for is_compiled in (False, True):
        model = load(folder, dtype=ModelDtype.FLOAT32, compile_layers=is_compiled)
        vars(model)["_plan_activations"] = lambda _: None if kept is None else (kept,) * 2
        sums.append(_counted(model, packed))
        grads.append(_balanced(model, packed))
    modules_LF, compiled_LF = sums
    torch.testing.assert_close(compiled_LF, modules_LF, rtol=1e-6, atol=0)
    for modules, compiled in zip(*grads, strict=True):
        assert modules.norm() > 0
        assert (compiled - modules).norm() <= 1e-5 * modules.norm()
    assert len(graphs) == 1


def _counted(model: PolicyModel, packed: Packed) -> Tensor:
    """Sums by layer of two forwards that are counted, and none of one that is not."""
    copies_T = torch.arange(len(packed.tokens_T), dtype=torch.int32)
    for counted_T in (copies_T, None, copies_T):
        _hidden(model, packed, counted_T).sum().backward()
    sums = model.routes.take()
    assert sums.layers == (0, 1)
    assert model.routes.take().layers == ()
    sums_LF = torch.tensor(sums.sums, dtype=torch.float64)
    assert sums_LF[:, -4].tolist() == [2 * int(copies_T.sum())] * 2
    assert sums_LF[:, :-4].sum(1).tolist() == [2 * 2 * int(copies_T.sum())] * 2
    assert len(sums_LF[:, :-4].unique()) > 4
    return sums_LF


class _Given:
    """A balance of given gradients by layer, [2, T, E]."""

    coefficient = 0.5

    def __init__(self, grad_LTE: Tensor) -> None:
        self.grad_LTE = grad_LTE
        self.chosen: list[Tensor] = []
        self.is_settled = False

    def add(self, expert_TC: Tensor, num_experts: int) -> None:
        assert num_experts == self.grad_LTE.shape[2]
        self.chosen.append(expert_TC.clone())

    def settle(self) -> None:
        self.is_settled = True

    def gradient(self, row: int, probs_TE: Tensor) -> Tensor:
        assert self.is_settled
        return self.grad_LTE[row].to(probs_TE.dtype)


def _balanced(model: PolicyModel, packed: Packed) -> list[Tensor]:
    """Gradients of both routers: a balance's beside that of hidden states, one of zeros, none.

    A balance has its gradient once, and none once its backward is over.
    """
    tokens = len(packed.tokens_T)
    grad_LTE = torch.randn(2, tokens, 4, generator=torch.Generator().manual_seed(1))
    ones_T = torch.ones(tokens, dtype=torch.int32)
    gates = [p for name, p in model.named_trainable().items() if ".gate." in name]
    assert len(gates) == 2
    grads: list[Tensor] = []
    for balance in (_Given(grad_LTE), _Given(torch.zeros_like(grad_LTE)), None):
        routed = RoutedTokens(copies_T=ones_T, balance=balance)
        hidden_TD = model.forward_hidden(packed.tokens_T, packed.position_T, packed.layout, routed)
        with model.routes.balancing(routed):
            grads += torch.autograd.grad(hidden_TD.square().sum(), gates)
        assert balance is None or len(balance.chosen) == 2
    assert model.routes.balance_loss() != 0
    assert torch.equal(torch.stack(grads[2:4]), torch.stack(grads[4:]))
    assert (grads[0] - grads[2]).norm() > 0.1
    return grads


def test_forwards_without_gradients_are_not_counted(tmp_path: Path) -> None:
    folder, packed = write_folder(tmp_path / "base", "qwen3_moe"), pack(branching_sequences(0))
    model = load(folder, dtype=ModelDtype.FLOAT32)
    copies_T = torch.ones(len(packed.tokens_T), dtype=torch.int32)
    with torch.no_grad():
        _hidden(model, packed, copies_T)
    assert model.routes.take().layers == ()
    _hidden(model, packed, copies_T)
    assert model.routes.take().layers == (0, 1)
