"""Stochastic rounding: exact neighbours, right in the mean, over the whole range of each format."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor

from ratoon.train.optim.rounding import (
    BLOCK,
    decode_positive,
    decode_signed,
    encode_positive,
    encode_signed,
    mix,
    random_words,
    round_bf16,
)

_DRAWS = 1 << 16
_FORMATS = ((encode_signed, decode_signed), (encode_positive, decode_positive))


def _drawn(key: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """For a weight and its moments, of elements in a row, in the step that `key` names."""
    origin, keys = torch.tensor([3, 5]).int(), torch.tensor([key, ~key]).int()
    return random_words(torch.arange(count, dtype=torch.int32), origin, keys)


def _words(key: int, count: int) -> Tensor:
    return _drawn(key, count)[1]


def _bits(value: int) -> float:
    return torch.tensor(value, dtype=torch.int32).view(torch.float32).item()


def _assert_unbiased(got: Tensor, x: float, low: float, high: float) -> None:
    """Only the two neighbours, and the mean within 5 standard errors of x."""
    assert set(got.tolist()) <= {low, high}
    up = (x - low) / (high - low)
    error = 5 * abs(high - low) * math.sqrt(up * (1 - up) / got.numel())
    assert abs(got.double().mean().item() - x) <= error + 1e-6 * abs(high - low)


@pytest.mark.parametrize("x", [1.001, -1.001, 3.14159, -2.7e-30, 6.5e37, 1e-40, 1.0, -0.75, 0.0])
def test_bf16_is_one_of_the_two_neighbours_and_right_in_the_mean(x: float) -> None:
    values = torch.full((_DRAWS,), x, dtype=torch.float32)
    exact = values[0].item()
    toward_zero = int(values[0].view(torch.int32)) & -0x10000
    low, high = _bits(toward_zero), _bits(toward_zero + 0x10000)
    got = round_bf16(values, _words(1, _DRAWS)).float()
    if low == exact:
        assert set(got.tolist()) == {exact}
    else:
        assert set(got.tolist()) == {low, high}
        _assert_unbiased(got, exact, low, high)


def _grid(decode: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The values of all codes, sorted; a negative zero counts as zero."""
    codes = torch.arange(256, dtype=torch.uint8)
    return decode(codes, torch.ones(1)).unique()


def test_grids_are_what_the_module_says() -> None:
    signed, positive = _grid(decode_signed), _grid(decode_positive)
    assert len(signed) == 255
    assert torch.equal(signed, -signed.flip(0))
    assert signed[signed > 0][0].item() == 1.25 * 2.0**-16
    assert len(positive) == 256
    assert positive[0].item() == 1.125 * 2.0**-32
    for grid in (signed[signed > 0], positive):
        assert grid[-1].item() == 1.0
        ratios = grid[1:] / grid[:-1]
        assert 1 + 1 / 15.001 < ratios.min() < ratios.max() <= 1 + 1 / 8


@pytest.mark.parametrize(("scale", "sign"), [(1.0, 1.0), (3.7e-12, -1.0), (2.9e20, 1.0)])
@pytest.mark.parametrize("y", [0.83, 0.5, 1.9e-3, 2.5e-5, 1.3e-5, 4e-8, 0.0])
def test_signed_codes_are_neighbours_and_right_in_the_mean(
    y: float, sign: float, scale: float
) -> None:
    """Below the smallest code the neighbours are zero and that one."""
    x = torch.full((_DRAWS // BLOCK, BLOCK), sign * y * scale)
    x[:, 0] = scale
    codes, scales = encode_signed(x.view(-1), _words(2, _DRAWS))
    assert torch.equal(scales, x[:, 0])
    got = decode_signed(codes, scales).view(-1, BLOCK)
    assert torch.equal(got[:, 0], scales)
    _assert_on_grid(got[:, 1:].double() / scale, sign * y, _grid(decode_signed))


@pytest.mark.parametrize("scale", [1.0, 3.7e-12, 2.9e20])
@pytest.mark.parametrize("y", [0.83, 0.5, 1.9e-3, 2.5e-5, 4e-8, 5e-10])
def test_positive_codes_are_neighbours_and_right_in_the_mean(y: float, scale: float) -> None:
    x = torch.full((_DRAWS // BLOCK, BLOCK), y * scale)
    x[:, 0] = scale
    codes, scales = encode_positive(x.view(-1), _words(3, _DRAWS))
    got = decode_positive(codes, scales).view(-1, BLOCK)
    assert torch.equal(got[:, 0], scales)
    _assert_on_grid(got[:, 1:].double() / scale, y, _grid(decode_positive))


def _assert_on_grid(got: Tensor, x: float, grid: Tensor) -> None:
    """As `_assert_unbiased`, up to a few float32 ulps of the division by the scale."""
    values, inverse = got.reshape(-1).unique(return_inverse=True)
    nearest = grid[(values[:, None] - grid).abs().argmin(dim=1)].double()
    assert ((values - nearest).abs() <= 1e-6 * nearest.abs()).all()
    snapped = nearest[inverse]
    below, above = grid[grid <= x + 1e-7 * abs(x)], grid[grid >= x - 1e-7 * abs(x)]
    low, high = below[-1].item(), above[0].item()
    if low >= high:
        assert set(snapped.tolist()) == {low}
    else:
        _assert_unbiased(snapped, x, low, high)


def test_positive_codes_end_at_a_floor_and_never_at_zero() -> None:
    x = torch.zeros(BLOCK)
    x[0] = 2.0
    codes, scales = encode_positive(x, _words(4, BLOCK))
    got = decode_positive(codes, scales)
    assert got[0].item() == 2.0
    assert (got[1:] > 0).all()
    assert (got[1:] <= 2.0 * 1.25 * 2.0**-32).all()


def test_blocks_of_zeros_and_of_subnormal_numbers_are_zero() -> None:
    for x in (torch.zeros(BLOCK), torch.full((BLOCK,), 1e-40)):
        for encode, decode in _FORMATS:
            codes, scales = encode(x, _words(5, BLOCK))
            assert scales.tolist() == [0.0]
            assert decode(codes, scales).tolist() == [0.0] * BLOCK


def test_scales_are_of_their_own_block_alone() -> None:
    """A large value in one block does not coarsen the next."""
    x = torch.cat([torch.full((BLOCK,), 1e6), torch.full((BLOCK,), 1e-6)])
    for encode, decode in _FORMATS:
        assert torch.equal(decode(*encode(x, _words(6, 2 * BLOCK))), x)


@pytest.mark.parametrize("which", [0, 1])
def test_words_are_a_bijection_whose_bits_are_even_and_independent(which: int) -> None:
    count = 1 << 17
    words = _drawn(7, count)[which]
    assert len(words.unique()) == count
    bits = ((words[:, None] >> torch.arange(32)) & 1).double() * 2 - 1
    assert bits.mean(dim=0).abs().max() < 5 / math.sqrt(count)
    products = (bits.T @ bits) / count - torch.eye(32)
    assert products.abs().max() < 6 / math.sqrt(count)
    # One step's words say nothing of another's, nor an element's of the next.
    for other in (_drawn(8, count)[which], words.roll(1)):
        assert ((bits[:, 15] * (((other >> 15) & 1) * 2 - 1)).mean()).abs() < 5 / math.sqrt(count)


def _draws(key: int, count: int) -> list[Tensor]:
    """The four highest bits of what decides each rounding of an element with codes."""
    weight, first, second = _drawn(key, count)
    return [(weight >> 12) & 15, (first >> 16) & 15, (second >> 16) & 15]


def test_draws_of_an_element_and_of_its_next_step_are_independent() -> None:
    """All pairs of values are equally frequent: chi-squared of 255 degrees of freedom."""
    count = 1 << 17
    draws = [*_draws(9, count), *_draws(10, count), *(d.roll(1) for d in _draws(9, count))]
    for one, two in combinations(draws, 2):
        found = torch.bincount(one * 16 + two, minlength=256).double()
        expected = count / 256
        assert ((found - expected) ** 2 / expected).sum() < 255 + 5 * math.sqrt(2 * 255)


def test_mix_is_the_finaliser_of_murmurhash3() -> None:
    """Against the definition in Python's integers."""
    values = [0, 1, -1, 2**31 - 1, -(2**31), 123456789]

    def definition(word: int) -> int:
        word &= 0xFFFFFFFF
        word = ((word ^ (word >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
        word = ((word ^ (word >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
        return word ^ (word >> 16)

    got = mix(torch.tensor(values, dtype=torch.int32))
    assert [int(word) & 0xFFFFFFFF for word in got] == [definition(value) for value in values]
