"""Triton kernels that find changed words, to the bits of `changed_words.find_changes`.

Changed words are bits of a group of 32: what is scanned and compared is a group, not a word.
Imported where there is a GPU: triton comes with torch's CUDA wheels alone. Tiles count their
changed words, a program a run finds from these where each tile's planes begin, and tiles write
them. The host waits once, before they are written, for how many there are.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from ratoon.model import delta_runs
from ratoon.model.changed_words import Planes

# Words of a tile: no gap within one needs an escape of two bytes.
_TILE = 2048
_WARPS = 4
_LONG_GAP = tl.constexpr(delta_runs.LONG_GAP)
_LONG_ESCAPE = tl.constexpr(2**16 - 1)
_SHORT_ESCAPE = tl.constexpr(2**8 - 1)


def find_changes(before: Tensor, after: Tensor, run_words: int, most_changed: int) -> Planes | None:
    """As `changed_words.find_changes`; runs are whole tiles, a power of two of them."""
    num_words, device = len(before), before.device
    assert run_words % _TILE == 0
    tiles_each = run_words // _TILE
    num_tiles, num_runs = triton.cdiv(num_words, _TILE), triton.cdiv(num_words, run_words)
    # A tile's changed words, the first and the last of them, and escapes of gaps within it.
    tiles = torch.empty(4, num_tiles, dtype=torch.int32, device=device)
    # Changed words and digits of a tile's run before it, and the last of these words.
    places = torch.empty(3, num_tiles, dtype=torch.int32, device=device)
    runs = torch.empty(2, num_runs, dtype=torch.int32, device=device)
    count, place, write = _kernels()
    count[(num_tiles,)](
        before, after, tiles, num_words, num_tiles, GROUPS=_TILE // 32, num_warps=_WARPS
    )
    place[(num_runs,)](
        tiles, places, runs, num_words, num_tiles, num_runs, TILE=_TILE, TILES=tiles_each
    )
    num_changed, num_digits = runs.tolist()
    total = sum(num_changed)
    if total > most_changed:
        return None
    word_bytes = before.element_size()
    digits = torch.full((2, sum(num_digits)), 255, dtype=torch.uint8, device=device)
    differences = torch.empty(word_bytes, total, dtype=torch.uint8, device=device)
    if total:
        write[(num_tiles,)](
            before,
            after,
            places,
            runs,
            digits,
            differences,
            num_words,
            num_tiles,
            num_runs,
            digits.shape[1],
            total,
            TILE=_TILE,
            TILES=tiles_each,
            RUNS=triton.next_power_of_2(num_runs),
            WORD_BYTES=word_bytes,
            num_warps=_WARPS,
        )
    return Planes(
        digits=digits, differences=differences, num_changed=num_changed, num_digits=num_digits
    )


def _kernels() -> tuple[Any, Any, Any]:
    return _count, _place, _write


@triton.jit
def _max(left, right):
    return tl.maximum(left, right)


@triton.jit
def _escapes(gap, is_long):
    # Divided by constants, as dividing by a number that is not known is dear.
    return tl.where(is_long, gap // _LONG_ESCAPE, gap // _SHORT_ESCAPE)


@triton.jit
def _popcount(x):
    """Bits that are set in each uint32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _lowest(x):
    """The lowest bit that is set in each uint32 that is not 0."""
    return _popcount((x ^ (x - 1)) >> 1)


@triton.jit
def _highest(x):
    """The highest bit that is set in each uint32; -1: none."""
    x = x | (x >> 1)
    x = x | (x >> 2)
    x = x | (x >> 4)
    x = x | (x >> 8)
    x = x | (x >> 16)
    return _popcount(x) - 1


@triton.jit
def _changes(before, after, start, num_words, GROUPS: tl.constexpr):
    """Words of a tile before and after, [GROUPS, 32], and of each group the changed words as bits,
    the first and the last of them as places in the tile, and the last one of earlier groups; -1:
    none."""
    group, bit = tl.arange(0, GROUPS), tl.arange(0, 32)
    place = start + group[:, None] * 32 + bit[None, :]
    is_there = place < num_words
    old = tl.load(before + place, mask=is_there, other=0)
    new = tl.load(after + place, mask=is_there, other=0)
    changed = tl.sum((old != new).to(tl.int32) << bit[None, :], axis=1).to(tl.uint32)
    first = tl.where(changed != 0, group * 32 + _lowest(changed), -1)
    last = tl.where(changed != 0, group * 32 + _highest(changed), -1)
    is_earlier = group[None, :] < group[:, None]
    previous = tl.max(tl.where(is_earlier, last[None, :], -1), axis=1)
    return old, new, changed, first, last, previous


@triton.jit
def _count(before, after, tiles, num_words, num_tiles, GROUPS: tl.constexpr):
    tile = tl.program_id(0)
    start = tile.to(tl.int64) * (GROUPS * 32)
    _, _, changed, first, last, previous = _changes(before, after, start, num_words, GROUPS)
    gap = tl.where((first >= 0) & (previous >= 0), first - previous - 1, 0)
    tl.store(tiles + tile, tl.sum(_popcount(changed)))
    tl.store(tiles + num_tiles + tile, tl.min(tl.where(first >= 0, first, GROUPS * 32)))
    tl.store(tiles + 2 * num_tiles + tile, tl.max(last))
    # Within a group there are none.
    tl.store(tiles + 3 * num_tiles + tile, tl.sum(gap // _SHORT_ESCAPE))


@triton.jit
def _place(
    tiles, places, runs, num_words, num_tiles, num_runs, TILE: tl.constexpr, TILES: tl.constexpr
):
    run = tl.program_id(0)
    number = tl.arange(0, TILES)
    tile = run * TILES + number
    is_there = tile < num_tiles
    changed = tl.load(tiles + tile, mask=is_there, other=0)
    first = tl.load(tiles + num_tiles + tile, mask=is_there, other=0)
    inner = tl.load(tiles + 3 * num_tiles + tile, mask=is_there, other=0)
    has_one = is_there & (number > 0)
    changed_before = tl.load(tiles + tile - 1, mask=has_one, other=0)
    last_before = tl.load(tiles + 2 * num_tiles + tile - 1, mask=has_one, other=0)
    marks = tl.where(changed_before > 0, (number - 1) * TILE + last_before, -1)
    previous = tl.associative_scan(marks, 0, _max)
    total = tl.sum(changed)
    run_words = tl.minimum(num_words - run.to(tl.int64) * TILES * TILE, TILES * TILE)
    is_long = total * _LONG_GAP <= run_words
    first_gap = tl.where(changed > 0, number * TILE + first - previous - 1, 0)
    digits = changed + _escapes(first_gap, is_long) + tl.where(is_long, 0, inner)
    tl.store(places + tile, tl.cumsum(changed, 0) - changed, mask=is_there)
    tl.store(places + num_tiles + tile, tl.cumsum(digits, 0) - digits, mask=is_there)
    tl.store(places + 2 * num_tiles + tile, previous, mask=is_there)
    tl.store(runs + run, total)
    tl.store(runs + num_runs + run, tl.sum(digits))


# A size of one is no constant, and what divides it no reason to compile again.
@triton.jit(do_not_specialize=["num_digits", "num_changed"])
def _write(
    before,
    after,
    places,
    runs,
    digits,
    differences,
    num_words,
    num_tiles,
    num_runs,
    num_digits,
    num_changed,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    RUNS: tl.constexpr,
    WORD_BYTES: tl.constexpr,
):
    tile = tl.program_id(0)
    run = tile // TILES
    start = tile.to(tl.int64) * TILE
    old, new, changed, first, _, previous = _changes(before, after, start, num_words, TILE // 32)

    # What the runs before this one have, and whether this one has long gaps.
    number = tl.arange(0, RUNS)
    is_earlier = number < run
    index = tl.sum(tl.load(runs + number, mask=is_earlier, other=0))
    digit = tl.sum(tl.load(runs + num_runs + number, mask=is_earlier, other=0))
    index += tl.load(places + tile)
    digit += tl.load(places + num_tiles + tile)
    run_words = tl.minimum(num_words - run.to(tl.int64) * TILES * TILE, TILES * TILE)
    is_long = tl.load(runs + run) * _LONG_GAP <= run_words

    # Only the first gap of a group may have escapes, before all of its digits.
    in_run = (tile % TILES) * TILE
    last = tl.load(places + 2 * num_tiles + tile)
    gap = in_run + first - tl.where(previous >= 0, in_run + previous, last) - 1
    num_escapes = tl.where(first >= 0, _escapes(gap, is_long), 0)
    rest = gap - num_escapes * tl.where(is_long, _LONG_ESCAPE, _SHORT_ESCAPE)
    count = _popcount(changed)
    index += tl.cumsum(count, 0) - count
    digit += tl.cumsum(count + num_escapes, 0) - count

    bit = tl.arange(0, 32)
    earlier = changed[:, None] & ((1 << bit) - 1).to(tl.uint32)[None, :]
    rank = _popcount(earlier)
    rest = tl.where(rank == 0, rest[:, None], bit[None, :] - _highest(earlier) - 1)
    is_changed = old != new
    digit = digit[:, None] + rank
    tl.store(digits + digit, (rest & 255).to(tl.uint8), mask=is_changed)
    high = digits + num_digits.to(tl.int64) + digit
    tl.store(high, ((rest >> 8) & 255).to(tl.uint8), mask=is_changed)

    index = (index[:, None] + rank).to(tl.int64)
    if WORD_BYTES == 2:
        difference = ((new.to(tl.int32) - old.to(tl.int32)) << 16) >> 16
    else:
        difference = new - old
    folded = (difference << 1) ^ (difference >> (63 if WORD_BYTES == 8 else 31))
    for plane in tl.static_range(WORD_BYTES):
        byte = ((folded >> (8 * plane)) & 255).to(tl.uint8)
        at = differences + plane * num_changed.to(tl.int64) + index
        tl.store(at, byte, mask=is_changed)
