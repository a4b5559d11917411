"""The terms of one micro-batch: one per (sequence path, trained token).

Shape letters of this package: L terms, C terms that count, S sequences of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TermColumns:
    """What is known of each term before the model runs. None: the loss does not use it.

    Terms that do not count (`shared_tokens: once`, paid by an earlier path) are here all the same:
    sequence ratios and sequence weights are over all of a path's trained tokens.
    """

    # int64 [L], ascending: index of the term's sequence in 0 .. num_sequences - 1.
    sequence_L: Tensor
    num_sequences: int
    # int64 [C]: indexes of the terms that count, ascending, or the range of them.
    counted_C: Tensor | slice
    # [L]: 1 or 1 / (the path's counted tokens); unused where the term does not count.
    weight_L: Tensor
    # [L]: advantage, or the signed token weight of cross_entropy.
    advantage_L: Tensor
    # [L]; None: the loss has no old log-probs, or they are the current ones (on_policy).
    old_L: Tensor | None
    # [L]; bool [L]: false where the sampler's log-probs are not at the sampling temperature.
    sampler_L: Tensor | None
    sampler_usable_L: Tensor
    # [L]; None: no KL term.
    reference_L: Tensor | None

    def at(self, terms: Tensor | slice, counted_C: Tensor | slice) -> TermColumns:
        """Columns of some terms, of which `counted_C` count."""

        def pick(column_L: Tensor | None) -> Tensor | None:
            return None if column_L is None else column_L[terms]

        return TermColumns(
            sequence_L=self.sequence_L[terms],
            num_sequences=self.num_sequences,
            counted_C=counted_C,
            weight_L=self.weight_L[terms],
            advantage_L=self.advantage_L[terms],
            old_L=pick(self.old_L),
            sampler_L=pick(self.sampler_L),
            sampler_usable_L=self.sampler_usable_L[terms],
            reference_L=pick(self.reference_L),
        )
