"""Norm and largest value of each tensor's gradient, for a step that asks for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.shards.parts import origin_of
from ratoon.train.optim.adamw import block_norms
from ratoon.train.report.step_report import TensorGradNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNorm:
    """Of a part's gradient sum: Euclidean norms of its blocks, and the largest magnitude."""

    parameter: str
    norms: tuple[float, ...]
    max_abs: float


def part_norms(sums: Mapping[str, Tensor]) -> dict[str, PartNorm]:
    """Of gradient sums by part; waits for the device."""
    maxima = [torch.linalg.vector_norm(each, math.inf).double() for each in sums.values()]
    largest = torch.stack(maxima).tolist() if maxima else []
    return {
        name: PartNorm(
            parameter=origin_of(name)[0],
            norms=tuple(block_norms([each], exactly=True)),
            max_abs=max_abs,
        )
        for (name, each), max_abs in zip(sums.items(), largest, strict=True)
    }


def tensor_norms(
    parts: Iterable[PartNorm], names: Mapping[str, str], divisor: float
) -> tuple[TensorGradNorm, ...]:
    """Of whole tensors after division, from all of their parts in order; named by `names`."""
    by_parameter: dict[str, list[PartNorm]] = {}
    for part in parts:
        by_parameter.setdefault(part.parameter, []).append(part)
    return tuple(
        TensorGradNorm(
            name=names[parameter],
            norm=_norm([norm for part in own for norm in part.norms]) / divisor,
            max_abs=_largest([part.max_abs for part in own]) / divisor,
        )
        for parameter, own in by_parameter.items()
    )


def _norm(norms: Sequence[float]) -> float:
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64)))


def _largest(values: Sequence[float]) -> float:
    """NaN where one is."""
    return float(torch.tensor(values, dtype=torch.float64).amax())
