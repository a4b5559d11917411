"""Which words of two arrays differ, as the planes of a delta's runs: on the device that has them.

This is the reference, of torch alone, and what a CPU runs. A GPU runs `changed_words_kernels`, in
three launches instead of some forty, to the same bits. The planes are those of docs/api.md, *Weight
deltas*, before they are compressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ratoon.model.delta_runs import LONG_GAP, gap_bytes_of

# Integers with as many bytes as a word.
WORD_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """Planes of consecutive runs, one run's after the other's in each.

    Attributes:
        digits: uint8 [2, num_digits], the lower and the higher bytes of gaps; the higher ones
            matter only in runs with gaps of two bytes.
        differences: uint8 [word_bytes, num_changed], from the lowest bytes to the highest.
        num_changed: Changed words of each run.
        num_digits: Digits of each run's gaps.
    """

    digits: Tensor
    differences: Tensor
    num_changed: list[int]
    num_digits: list[int]

    @property
    def num_bytes(self) -> int:
        return self.digits.numel() + self.differences.numel()

    def places(self, number: int, num_words: int) -> list[tuple[int, int]]:
        """Start and length of the planes of a run of `num_words`, in memory that has `digits` and
        then `differences`."""
        digits, changed = self.digits.shape[1], self.differences.shape[1]
        first = sum(self.num_digits[:number])
        places = [
            (plane * digits + first, self.num_digits[number])
            for plane in range(gap_bytes_of(self.num_changed[number], num_words))
        ]
        first = 2 * digits + sum(self.num_changed[:number])
        return places + [
            (first + plane * changed, self.num_changed[number])
            for plane in range(len(self.differences))
        ]


def most_bytes(num_words: int, word_bytes: int, most_changed: int) -> int:
    """Bytes of the planes of `num_words`, at most `most_changed` of which differ."""
    # A digit of a gap without a changed word is an escape, of 255 words at least.
    return 2 * (most_changed + num_words // 255) + word_bytes * most_changed


def find_changes(before: Tensor, after: Tensor, run_words: int, most_changed: int) -> Planes | None:
    """Compare `before` and `after`, integers [num_words] of one device, in runs of `run_words`.

    Returns None if more than `most_changed` words differ. Waits for the device.
    """
    places = (before != after).nonzero().view(-1)
    if len(places) > most_changed:
        return None
    bounds = _bounds(len(before), run_words, places.device)
    first = torch.searchsorted(places, bounds)
    run = torch.bucketize(places, bounds, right=True) - 1
    within = places - bounds[run]
    previous = torch.cat([within.new_full((1,), -1), within[:-1]])
    # The first changed word of a run has none before it.
    is_first = first[:-1][run] == torch.arange(len(places), device=places.device)
    gap = within - torch.where(is_first, -1, previous) - 1
    is_long = first.diff() * LONG_GAP <= bounds.diff()
    escape = torch.where(is_long, 2**16 - 1, 2**8 - 1)[run]
    num_escapes = gap // escape
    before_place = torch.cat([num_escapes.new_zeros(1), num_escapes.cumsum(0)])
    counts = torch.stack([first, first + before_place[first]]).tolist()
    num_digits = counts[1][-1]
    # Digits of a gap: its escapes, all ones, then what is left.
    which = torch.repeat_interleave(num_escapes + 1, output_size=num_digits)
    ends = torch.cat([which.diff() != 0, which.new_ones(min(num_digits, 1), dtype=torch.bool)])
    rest = (gap - escape * num_escapes)[which]
    low, high = (torch.where(ends, (rest >> shift) & 255, 255) for shift in (0, 8))
    difference = after[places] - before[places]
    word_bytes = difference.element_size()
    folded = (difference << 1) ^ (difference >> (8 * word_bytes - 1))
    return Planes(
        digits=torch.stack([low, high]).to(torch.uint8),
        differences=folded.view(torch.uint8).view(-1, word_bytes).t().contiguous(),
        num_changed=_steps(counts[0]),
        num_digits=_steps(counts[1]),
    )


def _bounds(num_words: int, run_words: int, device: torch.device) -> Tensor:
    """Where runs begin, and the last one ends."""
    starts = range(0, num_words, run_words)
    return torch.tensor([*starts, num_words], device=device)


def _steps(totals: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(totals)]
