"""The ratio and the term that make up each loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ratoon.train.loss.cispo import cispo_terms
from ratoon.train.loss.clip import clip_terms, sequence_clip_terms
from ratoon.train.loss.linear import importance_sampling_terms, logprob_terms
from ratoon.train.loss.ratio import sequence_log_ratio, token_log_ratio
from ratoon.train.loss.soft import ipo_terms, sapo_terms
from ratoon.train.loss.terms import PolicyInputs, PolicyTerms, RatioInputs
from ratoon_proto.types import LossKind

RatioFunction = Callable[[RatioInputs], Tensor]
TermFunction = Callable[[PolicyInputs], PolicyTerms]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFunctions:
    """How a loss makes its ratio of all terms, and its terms of those that count."""

    ratio: RatioFunction
    terms: TermFunction


_CLIP = LossFunctions(ratio=token_log_ratio, terms=clip_terms)
_LOGPROB = LossFunctions(ratio=token_log_ratio, terms=logprob_terms)

LOSS_FUNCTIONS: Mapping[LossKind, LossFunctions] = {
    LossKind.GRPO: _CLIP,
    LossKind.PPO_CLIP: _CLIP,
    LossKind.DAPO: _CLIP,
    LossKind.DR_GRPO: _CLIP,
    LossKind.GSPO: LossFunctions(ratio=sequence_log_ratio, terms=sequence_clip_terms),
    LossKind.CISPO: LossFunctions(ratio=token_log_ratio, terms=cispo_terms),
    LossKind.SAPO: LossFunctions(ratio=token_log_ratio, terms=sapo_terms),
    LossKind.IPO: LossFunctions(ratio=token_log_ratio, terms=ipo_terms),
    LossKind.IMPORTANCE_SAMPLING: LossFunctions(
        ratio=token_log_ratio, terms=importance_sampling_terms
    ),
    LossKind.REINFORCE: _LOGPROB,
    LossKind.CROSS_ENTROPY: _LOGPROB,
}
