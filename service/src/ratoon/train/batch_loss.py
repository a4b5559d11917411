"""The loss of a packed batch, of any of its terms.

What is known of terms before the model runs is put on the device once. Those that are asked for are
most often a range of them, which takes no copy and no kernel to pick.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ratoon.rollout.packed import PackedBatch
from ratoon.train.device_batch import put, put_index
from ratoon.train.loss.compute import LossOutput, compute_loss
from ratoon.train.loss.terms import TermColumns
from ratoon.train.prepare import Prepared
from ratoon_proto.types import OldLogprobsKind

# Response tokens [L], and their log-probs [L] on the device.
OnLogprobs = Callable[[NDArray[np.int64], Tensor], None]


def not_kept(_tokens: NDArray[np.int64], _logprobs: Tensor) -> None:
    """Log-probs that nobody asks for."""


class BatchLoss:
    """The loss of any of a batch's terms: int64 [n], ascending indexes of the packed batch's."""

    def __init__(
        self,
        prepared: Prepared,
        packed: PackedBatch,
        forward_logprobs_J: NDArray[np.floating] | None,
        reference_L: Tensor | None,
        on_logprobs: OnLogprobs,
        like: Tensor,
    ) -> None:
        """`reference_L`: of all terms, None without a KL term; `like`: of the device and dtype of
        log-probs."""
        self._loss, self._device = prepared.loss, like.device
        self._token_L = packed.term_token
        self._is_counted_L = prepared.columns.counted_J[packed.term_token]
        self._on_logprobs = on_logprobs
        self._columns = _columns(prepared, packed, forward_logprobs_J, reference_L, like)

    def of(self, terms: NDArray[np.int64], logprob_L: Tensor, entropy_L: Tensor) -> LossOutput:
        """Of terms with these log-probs and entropies."""
        counted = put_index(np.flatnonzero(self._is_counted_L[terms]), self._device)
        columns = self._columns.at(put_index(terms, self._device), counted)
        return compute_loss(self._loss, columns, logprob_L, entropy_L)

    def sums(self, terms: NDArray[np.int64], logprob_L: Tensor, entropy_L: Tensor) -> Tensor:
        """What the same adds to the report, as `LossOutput.sums`. Asked once for each term."""
        self._on_logprobs(self._token_L[terms], logprob_L)
        return self.of(terms, logprob_L, entropy_L).sums()


def _columns(
    prepared: Prepared,
    packed: PackedBatch,
    forward_logprobs_J: NDArray[np.floating] | None,
    reference_L: Tensor | None,
    like: Tensor,
) -> TermColumns:
    """Of all terms, floats in the dtype of `like`; all of them count."""
    batch, columns = prepared.batch, prepared.columns

    def take(column_J: NDArray[np.floating]) -> Tensor:
        return put(column_J[packed.term_token], like.device).to(like.dtype)

    old_J, sampler_J = _old_logprobs(prepared, forward_logprobs_J), batch.sampler_logprobs
    is_usable_S = ~batch.sampler_is_raw[packed.forest.sequences]
    if sampler_J is None:
        is_usable_S = np.zeros_like(is_usable_S)
    return TermColumns(
        sequence_L=put(packed.term_sequence, like.device),
        num_sequences=len(packed.forest.sequences),
        counted_C=slice(None),
        weight_L=take(columns.weight_J),
        advantage_L=take(columns.advantage_J),
        old_L=None if old_J is None else take(old_J),
        sampler_L=None if sampler_J is None else take(sampler_J),
        sampler_usable_L=put(is_usable_S[packed.term_sequence], like.device),
        reference_L=None if reference_L is None else reference_L.to(like.dtype),
    )


def _old_logprobs(
    prepared: Prepared, forward_logprobs_J: NDArray[np.floating] | None
) -> NDArray[np.floating] | None:
    """Old log-probs [J]; None: there are none, or they are the current ones."""
    old = prepared.loss.old_logprobs
    if old is None or old.kind is OldLogprobsKind.ON_POLICY:
        return None
    if old.kind is OldLogprobsKind.SAMPLER:
        return prepared.batch.sampler_logprobs
    if old.kind is OldLogprobsKind.GIVEN:
        return prepared.batch.old_logprobs
    return forward_logprobs_J
