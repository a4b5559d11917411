"""What devices hold, and what running packed sequences there costs: a model with their constants.

Counts are exact, except for rows where one path trains what another only reads. The model's own
plan of bytes accepts whatever is within the limits here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ratoon.planner.waves import peak_tokens, resident_tokens
from ratoon.rollout.batch import RolloutBatch, offsets_of, prompt_lengths, sequence_lengths
from ratoon.rollout.packed import Stage
from ratoon.rollout.prefixes import SortedPrefixes, shared_with_previous


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Most packed tokens held at a time of a forward and backward, those of prefixes among them."""

    # Limit of a micro-batch that is run at once.
    at_once: int
    # Limit of one in stages: besides its activations, on the device or the host, each token needs
    # room in stacks of keys, values and the gradients of these.
    streamed: int
    # As many tokens take what stages keep at a node's end for later ones; 0: they keep nothing.
    of_state: int = 0

    def at_most(self, tokens: int | None) -> TokenLimits:
        """These limits, and no more than `tokens`; None: just these."""
        if tokens is None:
            return self
        at_once, streamed = min(self.at_once, tokens), min(self.streamed, tokens)
        return replace(self, at_once=at_once, streamed=streamed)


# Limits of a CPU, whose memory nothing counts.
NO_LIMITS = TokenLimits(at_once=2**62, streamed=2**62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Packed tokens, causal (query, key) pairs of one head of one layer, rows of the LM head.

    `near_pairs`: those of the pairs within the window of the model's layers that have one; 0 if it
    has none.
    """

    tokens: int
    pairs: int
    rows: int
    near_pairs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Cost for each token of running again what is not kept, by how many tokens are held at a time.

    Linear between the tokens of `held`, ascending, and as the nearest beyond them.
    """

    held: tuple[int, ...]
    cost: tuple[float, ...]
    # Share of the memory for activations that a token takes in a stream's stacks of keys.
    stack_share: float
    # Tokens of stages that wait for others for which there is room on the host.
    host_tokens: int

    def of(self, tokens: int, *, is_streamed: bool) -> float:
        """Cost for each token while so many are held."""
        return self._beside(tokens, stack_tokens=tokens * is_streamed)

    def of_stages(self, stages: Sequence[Stage]) -> float:
        """Mean cost for each token that is run in `stages`.

        Where not everything can be kept, those that wait on the host keep the least, and the
        largest of the others has the memory to itself.
        """
        held, waiting = peak_tokens(stages), max(resident_tokens(stages))
        alike = self.of(held, is_streamed=len(stages) > 1)
        if alike == 0.0 or not 0 < waiting <= self.host_tokens:
            return alike
        parents = {stage.parent for stage in stages}
        tokens = [stage.num_tokens for stage in stages]
        running = [count for index, count in enumerate(tokens) if index not in parents]
        again = self._beside(max(running), stack_tokens=held) * sum(running)
        return (again + self.cost[-1] * (sum(tokens) - sum(running))) / sum(tokens)

    def _beside(self, tokens: int, *, stack_tokens: int) -> float:
        free = 1.0 - self.stack_share * stack_tokens
        # As if all the memory were there, and more tokens held.
        alike = tokens / free if free > 0 else math.inf
        above = bisect_left(self.held, alike)
        if above == 0 or above == len(self.held):
            return self.cost[min(above, len(self.held) - 1)]
        low, high = self.held[above - 1], self.held[above]
        share = (alike - low) / (high - low)
        return self.cost[above - 1] + share * (self.cost[above] - self.cost[above - 1])


# Everything is kept, or nothing ever is.
NOTHING_AGAIN = Recompute(held=(0,), cost=(0.0,), stack_share=0.0, host_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Cost, forward and backward, in any unit: seconds, or by default tokens in linear layers."""

    pair: float
    row: float
    # One forward and backward besides its tokens: launches, gradients of the weights.
    call: float
    # A prefix token, for each stage that runs against it: its keys and their gradients.
    resident: float
    token: float = 1.0
    # Pairs that a token attends in vain for each prefix above its own: a tile of keys has more than
    # the prefix. 0: attention knows no tiles.
    fork: float = 0.0
    # Tokens that a query sees in layers with a window, and what a pair costs in these; `pair` is
    # its cost in the others. None: no layer has a window.
    window: int | None = None
    near_pair: float = 0.0
    recompute: Recompute = NOTHING_AGAIN

    def over(self, num_ranks: int, exchange: float) -> CostModel:
        """Costs if so many ranks run a micro-batch together and exchange a token for `exchange`."""
        return replace(
            self,
            token=self.token / num_ranks + exchange,
            pair=self.pair / num_ranks,
            near_pair=self.near_pair / num_ranks,
            row=self.row / num_ranks,
            resident=self.resident / num_ranks,
        )

    def packed(self, work: Work) -> float:
        """Cost of running it at once."""
        return self._run(work, self.recompute.of(work.tokens, is_streamed=False))

    def streamed(self, work: Work, stages: Sequence[Stage]) -> float:
        """Cost of running it in `stages`, of which there is one at least."""
        resident = sum(resident_tokens(stages))
        again = self.recompute.of_stages(stages)
        return self._run(work, again) + self.call * (len(stages) - 1) + self.resident * resident

    def of_pairs(self, depths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cost of the pairs of runs from the root of so many tokens."""
        pairs = self.pair * path_pairs(depths)
        if self.window is not None:
            pairs += self.near_pair * path_pairs(depths, self.window)
        return np.asarray(pairs, np.float64)

    @property
    def call_tokens(self) -> int:
        """Tokens that cost as much as a call."""
        return int(self.call / self.token)

    def _run(self, work: Work, again: float) -> float:
        of_token = self.token + again
        pairs = self.pair * work.pairs + self.near_pair * work.near_pairs
        return self.call + of_token * work.tokens + pairs + self.row * work.rows


# Used if no device's rates are known: from FLOPs and bytes of an 8B decoder of 36 layers with 32:8
# heads of 128 and 152K tokens.
DEFAULT_COSTS = CostModel(pair=6e-5, row=0.09, call=256.0, resident=0.002)
# Exchange of one token between ranks that each have a share of it.
DEFAULT_EXCHANGE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSums:
    """What running neighbours among n sequences takes, whichever of them begin and end a run."""

    # n + 1 each: sums of the sequences before, each beside the one before it. n each: what that
    # shares.
    tokens: list[int]
    pairs: list[int]
    rows: list[int]
    near_pairs: list[int]
    shared: list[int]
    shared_rows: list[int]
    shared_near: list[int]

    def work(self, start: int, stop: int) -> Work:
        """Work of the sequences [start, stop), packed."""
        shared = self.shared[start]
        return Work(
            tokens=self.tokens[stop] - self.tokens[start] + shared,
            pairs=self.pairs[stop] - self.pairs[start] + shared * (shared + 1) // 2,
            rows=self.rows[stop] - self.rows[start] + self.shared_rows[start],
            near_pairs=self.near_pairs[stop] - self.near_pairs[start] + self.shared_near[start],
        )

    def num_tokens(self, start: int, stop: int) -> int:
        return self.tokens[stop] - self.tokens[start] + self.shared[start]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSizes:
    """Sizes of each place in the sorted order, int64 [S] each."""

    # Tokens shared with the place before, and all of them.
    lcp: NDArray[np.int64]
    lengths: NDArray[np.int64]
    prompt: NDArray[np.int64]
    # First response column of each place; trained tokens before each column, int64 [J + 1].
    first_column: NDArray[np.int64]
    trained_before: NDArray[np.int64]
    # As in `CostModel`.
    window: int | None = None

    def packed_tokens(self, places: NDArray[np.int64]) -> int:
        """Packed tokens of the sequences at `places`, ascending."""
        return int((self.lengths[places] - shared_with_previous(self.lcp, places)).sum())

    def work(self, places: NDArray[np.int64]) -> Work:
        """What running them packed takes."""
        lengths, prompt = self.lengths[places], self.prompt[places]
        shared = shared_with_previous(self.lcp, places)
        first = self.first_column[places]
        rows = (
            self.trained_before[first + lengths - prompt]
            - self.trained_before[first + np.maximum(shared - prompt, 0)]
        )
        return Work(
            tokens=int((lengths - shared).sum()),
            pairs=num_pairs(lengths) - num_pairs(shared),
            rows=int(rows.sum()),
            near_pairs=int((self.near_pairs(lengths) - self.near_pairs(shared)).sum()),
        )

    def run_sums(self, places: NDArray[np.int64]) -> RunSums:
        """Sums of the sequences at `places`, ascending."""
        lengths, shared = self.lengths[places], shared_with_previous(self.lcp, places)
        shared_rows = self.rows_within(places, shared)
        shared_near = self.near_pairs(shared)
        return RunSums(
            tokens=offsets_of(lengths - shared).tolist(),
            pairs=offsets_of(path_pairs(lengths) - path_pairs(shared)).tolist(),
            rows=offsets_of(self.rows_within(places, lengths) - shared_rows).tolist(),
            near_pairs=offsets_of(self.near_pairs(lengths) - shared_near).tolist(),
            shared=shared.tolist(),
            shared_rows=shared_rows.tolist(),
            shared_near=shared_near.tolist(),
        )

    def near_pairs(self, depths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pairs within the window of runs from the root of so many tokens; 0 without a window."""
        return path_pairs(depths, self.window) if self.window else np.zeros_like(depths)

    def rows_within(
        self, places: NDArray[np.int64], depths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Rows of the LM head of the first `depths` tokens of each of `places`; int64 [n] all."""
        first = self.first_column[places]
        columns = np.maximum(depths - self.prompt[places], 0)
        return self.trained_before[first + columns] - self.trained_before[first]


def measure(
    batch: RolloutBatch, prefixes: SortedPrefixes, window: int | None = None
) -> SequenceSizes:
    """Sizes of all sequences of `batch`, with pairs within `window` if there is one."""
    trained_before = np.zeros(len(batch.loss_mask) + 1, np.int64)
    trained_before[1:] = batch.loss_mask
    # Input and output have one type, which is several times as fast.
    np.cumsum(trained_before, out=trained_before)
    return SequenceSizes(
        lcp=prefixes.lcp,
        lengths=sequence_lengths(batch)[prefixes.order],
        prompt=prompt_lengths(batch)[prefixes.order],
        first_column=batch.response_offsets[:-1][prefixes.order],
        trained_before=trained_before,
        window=window,
    )


def num_pairs(lengths: NDArray[np.int64]) -> int:
    """Causal (query, key) pairs of runs from the root of the given lengths."""
    return int(path_pairs(lengths).sum())


def path_pairs(depths: NDArray[np.int64], window: int | None = None) -> NDArray[np.int64]:
    """(query, key) pairs of each run of `depths` tokens from the root, int64; a query sees the last
    `window` tokens, itself included, or all."""
    pairs = depths * (depths + 1) // 2
    if window is None:
        return pairs
    unseen = np.maximum(depths - window, 0)
    return pairs - unseen * (unseen + 1) // 2
