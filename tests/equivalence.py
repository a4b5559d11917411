"""Where the code under test meets the oracle: one batch for both, and how far apart they are.

In: a validated batch, tensors by name of both sides. Out: the oracle's paths, relative errors.
Invariant: values are copied, never computed, on the way to the oracle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ratoon.rollout.batch import RolloutBatch
from tests.oracle import hf
from tests.oracle.paths import Path

FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-5


def paths_of(batch: RolloutBatch) -> list[Path]:
    """Every sequence of the batch as the oracle takes it, in request order."""
    return [
        _path(batch, group, sequence)
        for group in range(batch.num_groups)
        for sequence in range(batch.group_offsets[group], batch.group_offsets[group + 1])
    ]


def _path(batch: RolloutBatch, group: int, sequence: int) -> Path:
    start, stop = batch.response_offsets[sequence], batch.response_offsets[sequence + 1]

    def column(values: NDArray[np.generic] | None) -> NDArray[np.float64] | None:
        return None if values is None else values[start:stop].astype(np.float64)

    tokens_JK = batch.teacher_tokens
    prompt = batch.prompt_tokens[batch.prompt_offsets[group] : batch.prompt_offsets[group + 1]]
    return Path(
        group_id=batch.group_ids[group],
        prompt=prompt.astype(np.int64),
        response=batch.response_tokens[start:stop].astype(np.int64),
        mask=batch.loss_mask[start:stop].copy(),
        temperature=float(batch.temperature[sequence]),
        reward=None if batch.rewards is None else float(batch.rewards[sequence]),
        advantages=column(batch.advantages),
        sampler=column(batch.sampler_logprobs),
        old=column(batch.old_logprobs),
        reference=column(batch.reference_logprobs),
        weights=column(batch.token_weights),
        truncated=bool(batch.truncated[sequence]),
        version=int(batch.policy_version[sequence]),
        routes=_routes(batch, sequence, len(prompt) + int(stop - start)),
        kept=_kept(batch, slice(start, stop)),
        teacher_tokens=None if tokens_JK is None else tokens_JK[start:stop].astype(np.int64),
        teacher=column(batch.teacher_logprobs),
        returns=column(batch.returns),
        old_values=column(batch.old_values),
    )


def _kept(batch: RolloutBatch, tokens: slice) -> tuple[NDArray[np.int64], ...] | None:
    if batch.sampling_mask is None or batch.mask_offsets is None:
        return None
    bounds = batch.mask_offsets[tokens.start : tokens.stop + 1].tolist()
    return tuple(batch.sampling_mask[a:b].astype(np.int64) for a, b in pairwise(bounds))


def _routes(batch: RolloutBatch, sequence: int, length: int) -> NDArray[np.int64] | None:
    if batch.routed_experts is None or batch.route_first is None or batch.route_offsets is None:
        return None
    rows = batch.routed_experts[batch.route_offsets[sequence] : batch.route_offsets[sequence + 1]]
    routes = np.full((length, *rows.shape[1:]), -1, np.int64)
    first = int(batch.route_first[sequence])
    routes[first : first + len(rows)] = rows
    return routes


def near_policy(
    batch: RolloutBatch, model: nn.Module, rng: np.random.Generator, *, noise: float = 0.2
) -> RolloutBatch:
    """The batch with recorded log-probs near to the model's own, on both sides of every clip.

    Three different ones, sampler, old and reference, each off by a normal of scale `noise`.
    """
    paths = paths_of(batch)
    if batch.routed_experts is None:
        own = hf.padded_logprobs(model, paths)
    else:
        own = [logprob for logprob, _ in hf.all_logprobs(model, paths)]
    logprobs = np.concatenate([logprob.numpy() for logprob in own])

    def recorded() -> NDArray[np.float32]:
        moved = logprobs + noise * rng.normal(size=len(logprobs))
        return np.minimum(moved, 0.0).astype(np.float32)

    return replace(
        batch,
        sampler_logprobs=recorded(),
        old_logprobs=recorded(),
        reference_logprobs=recorded(),
    )


def relative_error(got: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """rel-L2 = ||a - b|| / max(||b||, floor)."""
    scale = max(expected.double().norm().item(), floor)
    assert scale > 0, "nothing to compare with"
    return (got.double() - expected.double()).norm().item() / scale


def relative_errors(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, may_be_zero: Collection[str] = ()
) -> dict[str, float]:
    """rel-L2 of each tensor, the floor being 1e-6 of the norm of all.

    Every expected tensor must be non-zero, those excepted whose name has a part of `may_be_zero`.
    """
    assert list(got) == list(expected), "the two sides have other parameters"
    norms = {name: tensor.double().norm().item() for name, tensor in expected.items()}
    total = float(np.linalg.norm(list(norms.values())))
    for name, norm in norms.items():
        assert norm > 0 or any(part in name for part in may_be_zero), f"{name} is zero"
    return {name: relative_error(got[name], expected[name], floor=1e-6 * total) for name in got}


def assert_close(errors: Mapping[str, float], tolerance: float) -> None:
    """Every error is within the tolerance; the message names the worst."""
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]:.3g} > {tolerance:.3g}"
