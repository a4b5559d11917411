"""A packed batch that is run in stages: prefixes stay, waves of siblings go through one by one.

Each packed token goes through the model once; what becomes of a stage's hidden states is in
`stage_heads`. Several ranks may run it together, each a share of every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ratoon.model.attention import PathAttention
from ratoon.model.policy_model import PolicyModel
from ratoon.model.router import RoutedTokens
from ratoon.model.streamed_attention import AttentionStream, StageAttention
from ratoon.planner.stage_plan import StreamTokens
from ratoon.planner.waves import fits_forest, peak_states, peak_tokens, resident_tokens, runs_of
from ratoon.rollout.packed import Forest, PackedBatch, Stage
from ratoon.shards.sequence_group import ALONE, SequenceGroup
from ratoon.train.clock import DeviceClock
from ratoon.train.load_balance import LoadBalance
from ratoon.train.loss.batch_loss import LossOfTerms
from ratoon.train.micro_batches import DeviceBatch, TokenOutputs
from ratoon.train.stage_heads import (
    ForwardHead,
    RowHead,
    StageHead,
    StageRun,
    TwoPhaseHead,
    Whole,
    cut_outputs,
)
from ratoon_kernels import Span


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
        group: SequenceGroup = ALONE,
        balance: LoadBalance | None = None,
    ) -> None:
        """`batch` is `packed` on the device; `between_stages` may raise, to give up.

        No `stages`: it is run at once, by a `group` of several ranks.
        """
        self._is_whole = not stages
        if self._is_whole:
            stages = (Stage(start=0, stop=packed.forest.num_tokens, parent=-1),)
        assert fits_forest(stages, packed.forest), "the plan is of another batch"
        self._model = model
        self._batch = batch
        self._stages = stages
        self._between_stages = between_stages
        self._group = group
        self._balance = balance
        self._parents = {stage.parent for stage in stages}
        self._tokens = stream_tokens(stages, packed.forest)
        self._whole = Whole(
            lm_head=model.lm_head,
            packed=packed,
            batch=batch,
            parts=cut_outputs(
                packed, stages, group, model.device, has_candidates=batch.has_candidates
            ),
            group=group,
        )

    def forward(self) -> TokenOutputs:
        """Outputs of all targets and rows, without graphs; zero where other ranks have them."""
        head = ForwardHead(self._whole)
        with torch.no_grad():
            self._run_all(head)
        return head.results

    def forward_backward(
        self, loss: LossOfTerms, clock: DeviceClock, *, is_of_rows: bool
    ) -> list[Tensor]:
        """Add the gradient of the loss of all terms to the parameters' gradients.

        `is_of_rows`: `loss` may be asked for any of the terms, those of a few rows; else it is
        for all terms of whole sequences.

        Returns:
            Sums of the loss, as of `LossOutput`, of each part of it; over all ranks of the group
            they are those of all terms.
        """
        head = (RowHead if is_of_rows else TwoPhaseHead)(self._whole, loss, clock)
        self._run_all(head)
        return head.sums

    def _run_all(self, head: StageHead) -> None:
        """Forward every stage; close it once nothing that is still to come descends from it."""
        stream = self._model.open_stream(self._batch.layout, self._tokens, self._group)
        still_open: list[StageRun] = []
        for index, is_backward in runs_of(self._stages):
            if is_backward:
                run = still_open.pop()
                with self._model.routes.balancing(run.routed):
                    head.close(run)
                continue
            self._between_stages()
            still_open.append(
                self._forward_stage(index, self._attention(stream, index, still_open))
            )
            head.add(still_open[-1])

    def _attention(
        self, stream: AttentionStream, index: int, still_open: Sequence[StageRun]
    ) -> PathAttention:
        if self._is_whole:
            return self._model.open_together(self._batch.layout, self._group)
        stage = self._stages[index]
        ancestors = tuple(cast("StageAttention", above.attention) for above in still_open)
        span = Span(stage.start, stage.stop)
        return stream.stage(span, ancestors, is_kept=index in self._parents)

    def _forward_stage(self, index: int, attention: PathAttention) -> StageRun:
        own = self._whole.parts[index].tokens
        # One for nothing, where there is none: see `sequence_group`.
        tokens = slice(own.start, own.stop) if len(own) else slice(1)
        routed = self._routed(index, tokens)
        hidden_TD = self._model.attend_hidden(
            self._batch.tokens_T[tokens], self._batch.position_T[tokens], attention, routed
        )
        return StageRun(
            index=index,
            has_gradient=(
                index in self._parents or self._group.size > 1 or self._balance is not None
            ),
            attention=attention,
            hidden_TD=hidden_TD,
            routed=routed,
        )

    def _routed(self, index: int, tokens: slice) -> RoutedTokens:
        stage, own = self._stages[index], self._whole.parts[index].tokens
        whole = self._batch.routed
        copies_T = whole.copies_T[tokens]
        recorded_LTC = None if whole.recorded_LTC is None else whole.recorded_LTC[:, tokens]
        if not len(own):
            copies_T = torch.zeros_like(copies_T)
        balance = None
        if self._balance is not None:
            balance = self._balance.tokens(Span(stage.start, stage.stop), own)
        return RoutedTokens(copies_T=copies_T, balance=balance, recorded_LTC=recorded_LTC)


def stream_tokens(stages: Sequence[Stage], forest: Forest) -> StreamTokens:
    """What is held of so many stages, and waits, at a time."""
    return StreamTokens(
        held=peak_tokens(stages),
        waiting=max(resident_tokens(stages), default=0),
        states=peak_states(stages, forest),
    )
