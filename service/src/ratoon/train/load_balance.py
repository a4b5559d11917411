"""The loss that balances the load of experts, over the rollouts of one packed forest.

Sequence by sequence, as the balance loss of DeepSeek-V3 (arXiv 2412.19437, eqs. 17 to 20), with the
router's softmax as scores. Of a rollout s of n tokens and a layer with E experts, C per token:

    L_s = sum over experts of f P,   f = E / (C n) times its choices,   P = its mean probability

It is 1 where all experts are chosen as often; f has no gradient. The loss sum has
`coefficient * w_s * L_s` of each layer, w_s the sum of the token weights of the rollout's counted
terms: as if each such term had `coefficient * L_s`.

A probability of a packed token so has the gradient sum of coefficient w_s f_s / n_s over the
rollouts that it is part of, which all tokens of a node have in common. It is known once the
choices of all these rollouts are: before any of their tokens is run backward.

T tokens of a forward, M nodes, m nodes of a stage, L layers with experts.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.model.policy_model import PolicyModel
from ratoon.rollout.packed import Forest, PackedBatch
from ratoon.shards.sequence_group import SequenceGroup
from ratoon.train.micro_batches import put
from ratoon.train.prepare import Prepared
from ratoon_kernels import Span


def load_balance(
    model: PolicyModel, prepared: Prepared, packed: PackedBatch, group: SequenceGroup
) -> LoadBalance | None:
    """The balance loss of a micro-batch that `group` runs; None: the loss has none."""
    coefficient, columns = prepared.loss.router_aux_loss_coefficient, prepared.columns
    if not coefficient:
        return None
    is_counted_L = columns.counted_J[packed.term_token]
    weight_S = np.bincount(
        packed.term_sequence,
        weights=is_counted_L * columns.weight_J[packed.term_token],
        minlength=len(packed.forest.sequences),
    ).astype(np.float64)
    return LoadBalance(model, packed.forest, weight_S, coefficient, group)


class LoadBalance:
    """Owns the choices of one forest's nodes, [L, M, E]."""

    def __init__(
        self,
        model: PolicyModel,
        forest: Forest,
        weight_S: NDArray[np.float64],
        coefficient: float,
        group: SequenceGroup,
    ) -> None:
        """`weight_S`: w_s of the forest's sequences."""
        self.coefficient = coefficient
        self.group = group
        self._forest = forest
        self.device = model.device
        experts, num_nodes = model.sizes.experts, len(forest.node_start)
        shape = (model.routes.num_layers, num_nodes, experts.num_experts)
        # Whole numbers, of no more tokens than float32 counts.
        self._choices_LME = torch.zeros(shape, device=self.device)
        stop_M = np.searchsorted(forest.node_start, forest.node_end)
        by_stop_M = np.argsort(stop_M, kind="stable")
        ended_M = np.searchsorted(stop_M[by_stop_M], np.arange(num_nodes), side="right")
        is_held_S = forest.sequence_node >= 0
        scale_S = experts.num_experts / experts.experts_per_token * weight_S[is_held_S]
        scale_S /= np.square(forest.sequence_length[is_held_S].astype(np.float64))
        ends = forest.sequence_node[is_held_S]
        scale_M = np.bincount(ends, weights=scale_S, minlength=num_nodes)
        # One past the subtree of each node; how many nodes, in this order, are over by then.
        self._stop_M = put(stop_M, self.device)
        self._by_stop_M = put(by_stop_M, self.device)
        self._ended_M = put(ended_M, self.device)
        self._scale_M1 = put(scale_M[:, None], self.device)

    def tokens(self, span: Span, own: Span) -> BalancedTokens:
        """Hooks for a forward of the tokens `own`, while the group's ranks run those of `span`."""
        return BalancedTokens(self, self._forest, span, own)

    def add(self, nodes: slice, choices_LmE: Tensor) -> None:
        """Add what some of the nodes' tokens chose."""
        self._choices_LME[:, nodes] += choices_LmE

    def gradient(self, row: int) -> Tensor:
        """Gradient of the loss sum over `coefficient` at the row-th layer with experts.

        float64 [M, E]: with respect to the probabilities of any token of each node.
        """
        choices_ME = self._choices_LME[row].double()
        # Choices on a node's path: what began before the node's end, less what is over.
        over_ME = _running_sums(choices_ME[self._by_stop_M])[self._ended_M]
        path_ME = _running_sums(choices_ME)[1:] - over_ME
        # And the sums over all sequences that end in its subtree.
        sums_ME = _running_sums(path_ME * self._scale_M1)
        return sums_ME[self._stop_M] - sums_ME[:-1]


class BalancedTokens:
    """`router.Balance` of one forward and its backward."""

    def __init__(self, whole: LoadBalance, forest: Forest, span: Span, own: Span) -> None:
        self._whole = whole
        self._is_empty = not len(own)
        first = int(np.searchsorted(forest.node_stop, span.start, side="right"))
        last = int(np.searchsorted(forest.node_start, span.stop))
        self._nodes = slice(first, last)
        bounds = np.append(forest.node_start[first:last], forest.node_stop[last - 1])
        bounds = np.clip(bounds, own.start, own.stop) - own.start
        self._bounds = put(bounds, whole.device)
        node_T = np.repeat(np.arange(last - first), np.diff(bounds))
        self._node_T = put(node_T, whole.device)
        self._choices: list[Tensor] = []

    @property
    def coefficient(self) -> float:
        """See `Balance.coefficient`."""
        return self._whole.coefficient

    def add(self, expert_TC: Tensor, num_experts: int) -> None:
        """See `Balance.add`."""
        experts_E1 = torch.arange(num_experts, device=expert_TC.device)[:, None]
        shape = (num_experts, len(expert_TC))
        chosen_ET = torch.zeros(shape, dtype=torch.int32, device=expert_TC.device)
        for expert_T in expert_TC.unbind(1):
            chosen_ET += expert_T == experts_E1
        sums_ET = torch.nn.functional.pad(chosen_ET.cumsum(1, dtype=torch.int32), (1, 0))
        self._choices.append(sums_ET[:, self._bounds].diff(dim=1).T.float())

    def settle(self) -> None:
        """See `Balance.settle`."""
        choices_LmE = torch.stack(self._choices)
        self._choices = []
        self._whole.add(self._nodes, self._whole.group.add_up(choices_LmE))

    def gradient(self, row: int, probs_TE: Tensor) -> Tensor:
        """See `Balance.gradient`."""
        if self._is_empty:
            return torch.zeros_like(probs_TE)
        return self._whole.gradient(row)[self._nodes].to(probs_TE.dtype)[self._node_T]


def _running_sums(x_ME: Tensor) -> Tensor:
    """[M + 1, E], of the rows before each; by shifted sums, as cumsum of floats on a GPU has no
    fixed order."""
    sums_ME, step = x_ME, 1
    while step < len(x_ME):
        sums_ME = torch.cat([sums_ME[:step], sums_ME[step:] + sums_ME[:-step]])
        step *= 2
    return torch.nn.functional.pad(sums_ME, (0, 0, 1, 0))
