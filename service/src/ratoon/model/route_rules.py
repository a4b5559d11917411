"""Rules by which a router sends a token to experts, and weighs them.

A rule is what the routing operation is told beside logits, and all that families differ in. It is
read off the router of transformers that it replaces, whose attributes have the numbers. Neither
torch nor transformers is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Scores(StrEnum):
    """What is computed of a token's logits: SOFTMAX over all experts, the SIGMOID of each, or the
    softmax over only the CHOSEN experts, which are those with the largest logits."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    CHOSEN = "chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """One router's way from logits to experts and weights.

    Attributes:
        top_k: Experts of a token. Ties go to the lower expert.
        scores: What experts are chosen by, and weighed by.
        is_wide: Whether logits are computed at least in float32, from inputs in another dtype.
        is_normalized: Whether weights sum to `scale`.
        num_groups: Groups of neighbouring experts. A group counts as much as its two best experts
            together, and the best `topk_group` groups are chosen from.
        topk_group: See `num_groups`.
        scale: Factor of all weights.
    """

    top_k: int
    scores: Scores = Scores.SOFTMAX
    is_wide: bool = False
    is_normalized: bool = False
    num_groups: int = 1
    topk_group: int = 1
    scale: float = 1.0


def by_softmax(router: Any) -> RouteRule:
    """Rule of Qwen's routers; one without the flag always normalizes."""
    is_normalized = bool(getattr(router, "norm_topk_prob", True))
    return RouteRule(top_k=router.top_k, is_normalized=is_normalized)


def by_sigmoid(router: Any) -> RouteRule:
    """Rule of DeepSeek-V3's router (arXiv:2412.19437, section 2.1.2), and of GLM's."""
    return RouteRule(
        top_k=router.top_k,
        scores=Scores.SIGMOID,
        is_wide=True,
        is_normalized=bool(router.norm_topk_prob),
        num_groups=router.num_group,
        topk_group=router.topk_group,
        scale=router.routed_scaling_factor,
    )


def by_chosen(router: Any) -> RouteRule:
    """Rule of gpt-oss' router."""
    return RouteRule(top_k=router.top_k, scores=Scores.CHOSEN)
