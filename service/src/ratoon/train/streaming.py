"""A packed batch that is run in stages: prefixes stay, waves of siblings go through one by one.

Enters a packed batch with its stages, leave log-probs, or gradients in the parameters. Invariant:
each packed token goes through the model once, and the sums of all stages' gradients are those of
the batch run at once.

A row is run in the stage that holds it, with all its targets: the last row of a prefix predicts the
first tokens of the waves below. A sequence's terms therefore lie in the stages along its path. All
of those have been forwarded when the stage that holds the sequence's end has, and none of them has
been run backward, as that one is below the others. So its loss is computed there, from all its
terms, and the gradients that fall on prefixes wait with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratoon.model.attention import HeldTokens
from ratoon.model.policy_model import PolicyModel
from ratoon.model.streamed_attention import AttentionStream, StageAttention
from ratoon.rollout.packed import PackedBatch, Stage
from ratoon.rollout.waves import fits_forest, peak_tokens
from ratoon.train.clock import DeviceClock
from ratoon.train.device import DeviceBatch, TokenOutputs, put
from ratoon.train.loss.compute import LossOutput
from ratoon.train.stage_parts import cut_outputs
from ratoon_kernels import Span, token_logprobs

# Terms (int64 [n], indexes of the packed batch's), their log-probs and entropies -> their loss.
LossOfTerms = Callable[[NDArray[np.int64], Tensor, Tensor], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A stage that has been forwarded; with its graph, where there is one."""

    index: int
    attention: StageAttention
    # Final hidden states of its tokens, [t, D], and outputs of its rows and their targets.
    hidden_TD: Tensor
    outputs: TokenOutputs


class StagedBatch:
    """A batch on the device that is run stage by stage.

    States: none; `forward` and `forward_backward` run all stages, and keep nothing but the batch.
    """

    def __init__(
        self,
        model: PolicyModel,
        packed: PackedBatch,
        batch: DeviceBatch,
        stages: Sequence[Stage],
        between_stages: Callable[[], None],
    ) -> None:
        """`batch` is `packed` on the device; `between_stages` may raise, to give up."""
        assert fits_forest(stages, packed.forest), "the plan is of another batch"
        self._model = model
        self._batch = batch
        self._stages = stages
        self._between_stages = between_stages
        self._parents = {stage.parent for stage in stages}
        peak = peak_tokens(stages)
        self._held = HeldTokens(tokens=peak, stack_tokens=peak)
        self._parts = cut_outputs(packed, stages, model.device)

    def forward(self) -> TokenOutputs:
        """Outputs of all targets and rows, without graphs."""
        results = self._zeros()
        with torch.no_grad():
            self._run_all(lambda run: self._store(run, results), lambda _run: None)
        return results

    def forward_backward(self, loss_of: LossOfTerms, clock: DeviceClock) -> list[Tensor]:
        """Add the gradient of the loss of all terms to the parameters' gradients.

        Returns:
            Sums of the loss, as of `LossOutput`, of each stage that has any.
        """
        training = _Training(loss_of=loss_of, results=self._zeros(), seeds=self._zeros())

        def add_loss(run: _Run) -> None:
            self._store(run, training.results)
            part = self._parts[run.index]
            if len(part.terms):
                training.add_loss(part.terms, self._batch)
            clock.lap("forward")

        def backward(run: _Run) -> None:
            self._backward(run, training)
            clock.lap("backward")

        self._run_all(add_loss, backward)
        return training.sums

    def _run_all(
        self, on_forwarded: Callable[[_Run], None], on_closed: Callable[[_Run], None]
    ) -> None:
        """Forward every stage; close it once nothing that is still to come descends from it."""
        stream = self._model.open_stream(self._batch.layout, self._held)
        still_open: list[_Run] = []
        for index, stage in enumerate(self._stages):
            while still_open and still_open[-1].index != stage.parent:
                on_closed(still_open.pop())
            self._between_stages()
            ancestors = tuple(above.attention for above in still_open)
            still_open.append(self._forward_stage(stream, index, ancestors))
            on_forwarded(still_open[-1])
            if index not in self._parents:
                on_closed(still_open.pop())
        while still_open:
            on_closed(still_open.pop())

    def _forward_stage(
        self, stream: AttentionStream, index: int, ancestors: tuple[StageAttention, ...]
    ) -> _Run:
        stage, part, batch = self._stages[index], self._parts[index], self._batch
        tokens, rows = slice(stage.start, stage.stop), part.rows
        attention = stream.stage(
            Span(stage.start, stage.stop), ancestors, is_kept=index in self._parents
        )
        hidden_TD = self._model.attend_hidden(
            batch.tokens_T[tokens], batch.position_T[tokens], attention
        )
        logprob_M, entropy_R = token_logprobs(
            hidden_TD.index_select(0, batch.row_index_R[rows] - stage.start),
            self._model.lm_head_VD,
            batch.target_token_M[part.targets_M],
            batch.target_row_M[part.targets_M] - rows.start,
            batch.row_temperature_R[rows],
        )
        outputs = TokenOutputs(logprob_M=logprob_M, entropy_R=entropy_R)
        return _Run(index=index, attention=attention, hidden_TD=hidden_TD, outputs=outputs)

    def _store(self, run: _Run, results: TokenOutputs) -> None:
        part = self._parts[run.index]
        results.logprob_M[part.targets_M] = run.outputs.logprob_M.detach()
        results.entropy_R[part.rows] = run.outputs.entropy_R.detach()

    def _backward(self, run: _Run, training: _Training) -> None:
        """From the seeds of its rows and, in its attention, from what descends from it."""
        part, seeds = self._parts[run.index], training.seeds
        heads: list[Tensor] = []
        grads: list[Tensor] = []
        if part.rows.start < part.rows.stop:
            heads, grads = [run.outputs.logprob_M], [seeds.logprob_M[part.targets_M]]
            if training.has_entropy:
                heads.append(run.outputs.entropy_R)
                grads.append(seeds.entropy_R[part.rows])
        elif run.index in self._parents:
            # Nothing of it is predicted from, but its keys have gradients: they enter at the
            # attention of each layer, which autograd must come by.
            heads, grads = [run.hidden_TD], [torch.zeros_like(run.hidden_TD)]
        if heads:
            torch.autograd.backward(heads, grads)

    def _zeros(self) -> TokenOutputs:
        batch = self._batch
        is_double = self._model.lm_head_VD.dtype is torch.float64
        dtype = torch.float64 if is_double else torch.float32
        sizes = (len(batch.target_token_M), len(batch.row_index_R))
        logprob_M, entropy_R = (
            torch.zeros(size, dtype=dtype, device=self._model.device) for size in sizes
        )
        return TokenOutputs(logprob_M=logprob_M, entropy_R=entropy_R)


class _Training:
    """What builds up over the stages of a forward-backward: outputs, their gradients, sums."""

    def __init__(self, *, loss_of: LossOfTerms, results: TokenOutputs, seeds: TokenOutputs) -> None:
        self.results = results
        self.seeds = seeds
        self.sums: list[Tensor] = []
        self.has_entropy = False
        self._loss_of = loss_of

    def add_loss(self, terms: NDArray[np.int64], batch: DeviceBatch) -> None:
        """Of whole sequences, all of whose log-probs are there."""
        index_L = put(terms, batch.tokens_T.device)
        target_L, row_L = batch.term_target_L[index_L], batch.term_row_L[index_L]
        loss = self._loss_of(terms, self.results.logprob_M[target_L], self.results.entropy_R[row_L])
        self.seeds.logprob_M.index_add_(0, target_L, loss.grad_logprob_L)
        if loss.grad_entropy_L is not None:
            self.has_entropy = True
            self.seeds.entropy_R.index_add_(0, row_L, loss.grad_entropy_L)
        self.sums.append(loss.sums_F)
