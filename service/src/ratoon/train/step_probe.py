"""How far a step has moved the policy: a few response tokens are run again with the new weights.

A norm alone says little: what is much for a model of billions of weights is little for a tiny one
or an adapter. The KL says it whatever the model, but costs a forward. So it is measured only where
`update_norm` is unusually large beside `weight_norm` (full training at 1e-5 stays below), on tokens
whose log-probs before the step the pass has left, and at most a 64th of a batch's tokens in the
mean: a probe that costs more comes only at every so many versions, unless the step is so large that
nothing of the run is worth saving. Which versions is decided by numbers alone, so that a replay
reports the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ratoon.rollout.batch import (
    RolloutBatch,
    group_of_sequence,
    offsets_of,
    prompt_lengths,
    ragged_arange,
)
from ratoon.rollout.sampling_masks import kept_of, kept_tokens
from ratoon.train.loss.ratios import clamp_k3
from ratoon.train.rollout_figures import FoundRollouts
from ratoon_proto.types import StepReport

# update_norm / weight_norm: below the first nothing is measured, from the second on every step is.
MIN_SHARE = 1e-3
LARGE_SHARE = 0.1
# A probe takes this share of a batch's tokens in the mean, and counts as so many at least.
_TOKEN_SHARE = 1 / 64
_LEAST_COST = 256
_MOST_TOKENS = 4096
# Response tokens of each rollout from its first trained one on; rollouts of different groups.
_RESPONSE_TOKENS = 32
_MAX_ROLLOUTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The beginnings of some rollouts, and their log-probs before the step."""

    batch: RolloutBatch
    # float64 [J] of `batch`, NaN where they are not known.
    logprob_J: NDArray[np.float64]

    def figures(self, logprob_J: NDArray[np.floating]) -> dict[str, float | int | None]:
        """Fields of a `StepReport`, from the log-probs after the step, [J]."""
        mask_J = self.batch.loss_mask
        gap = logprob_J[mask_J].astype(np.float64) - self.logprob_J[mask_J]
        kl, _ = clamp_k3(torch.from_numpy(gap))
        return {"step_kl": float(kl.mean()), "step_kl_tokens": len(gap)}


def update_share(report: StepReport) -> float:
    """`update_norm` over `weight_norm` of a report; 0 where no step was taken."""
    if report.update_norm is None or report.weight_norm is None or not report.update_norm:
        return 0.0
    return report.update_norm / report.weight_norm if report.weight_norm else math.inf


def probe_of(found: FoundRollouts, report: StepReport) -> Probe | None:
    """What to run again after a step; None: nothing.

    Args:
        found: The last forward-backward of its window, and the log-probs of the weights before.
        report: The step's.
    """
    share = update_share(report)
    if share < MIN_SHARE:
        return None
    sequences, lengths, cost = _cheapest(found)
    if not len(sequences) or cost > _MOST_TOKENS:
        return None
    prepared = found.prepared
    most = max(1, int(prepared.plan.packed_tokens * _TOKEN_SHARE))
    every = -(-max(cost, _LEAST_COST) // most)
    if share < LARGE_SHARE and prepared.version % every:
        return None
    batch, tokens = _cut(prepared.batch, sequences, lengths)
    logprob_J = found.columns_4J[0][tokens]
    return Probe(batch=replace(batch, loss_mask=~np.isnan(logprob_J)), logprob_J=logprob_J)


def _cheapest(found: FoundRollouts) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Rollouts of different groups, response tokens of each to run, and tokens in all."""
    batch = found.prepared.batch
    known = np.flatnonzero(~np.isnan(found.columns_4J[0]))
    sequence = np.searchsorted(batch.response_offsets, known, side="right") - 1
    run_S, place = np.unique(sequence, return_index=True)
    first_S = known[place] - batch.response_offsets[run_S]
    head_S = prompt_lengths(batch)[run_S] + first_S
    order = np.argsort(head_S, kind="stable")
    _, one_each = np.unique(group_of_sequence(batch)[run_S][order], return_index=True)
    chosen = order[np.sort(one_each)][:_MAX_ROLLOUTS]
    left = np.diff(batch.response_offsets)[run_S[chosen]] - first_S[chosen]
    lengths = first_S[chosen] + np.minimum(left, _RESPONSE_TOKENS)
    costs = np.cumsum(prompt_lengths(batch)[run_S[chosen]] + lengths)
    num = max(1, int(np.searchsorted(costs, _LEAST_COST, side="right"))) if len(costs) else 0
    return run_S[chosen][:num], lengths[:num], int(costs[num - 1]) if num else 0


def _cut(
    batch: RolloutBatch, sequences: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[RolloutBatch, NDArray[np.int64]]:
    """A batch of the first response tokens of some sequences, of different groups, without outcomes
    and log-probs; and the tokens' indexes in `batch`."""
    groups = group_of_sequence(batch)[sequences]
    tokens = ragged_arange(batch.response_offsets[sequences], lengths)
    prompts = np.diff(batch.prompt_offsets)[groups]
    prompt = ragged_arange(batch.prompt_offsets[groups], prompts)
    cut = RolloutBatch(
        group_ids=tuple(batch.group_ids[group] for group in groups),
        group_offsets=np.arange(len(sequences) + 1),
        prompt_tokens=batch.prompt_tokens[prompt],
        prompt_offsets=offsets_of(prompts),
        response_tokens=batch.response_tokens[tokens],
        response_offsets=offsets_of(lengths),
        loss_mask=batch.loss_mask[tokens],
        sampler_logprobs=None,
        old_logprobs=None,
        reference_logprobs=None,
        rewards=None,
        advantages=None,
        token_weights=None,
        temperature=batch.temperature[sequences],
        sampler_is_raw=batch.sampler_is_raw[sequences],
        truncated=batch.truncated[sequences],
        policy_version=batch.policy_version[sequences],
        top_p=batch.top_p[sequences],
        top_k=batch.top_k[sequences],
    )
    kept = kept_tokens(batch)
    if kept is not None:
        kept = kept_of(kept, tokens)
        cut = replace(cut, sampling_mask=kept.tokens, mask_offsets=kept.offsets)
    if batch.routed_experts is None or batch.route_first is None or batch.route_offsets is None:
        return cut, tokens
    first, offsets = batch.route_first[sequences], batch.route_offsets
    rows = np.clip(prompts + lengths - first, 0, np.diff(offsets)[sequences])
    return (
        replace(
            cut,
            routed_experts=batch.routed_experts[ragged_arange(offsets[sequences], rows)],
            route_first=first,
            route_offsets=offsets_of(rows),
        ),
        tokens,
    )
