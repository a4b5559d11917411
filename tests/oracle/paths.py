"""One rollout as the oracle sees it: a prompt, a response and what was recorded about it.

Enters from the tests, which copy it out of the batch that they hand to the code under test.
Invariant: nothing of that code is imported here or anywhere in `tests.oracle`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A prompt of P and a response of R tokens; every per-token array is float64 [R] or None."""

    group_id: str
    prompt: NDArray[np.int64]
    response: NDArray[np.int64]
    # bool [R]: trained tokens.
    mask: NDArray[np.bool_]
    temperature: float
    reward: float | None
    advantages: NDArray[np.float64] | None
    sampler: NDArray[np.float64] | None
    old: NDArray[np.float64] | None
    reference: NDArray[np.float64] | None
    weights: NDArray[np.float64] | None
    truncated: bool
    # -1: not said.
    version: int
    # Entropies of a Forward, float64 [R].
    entropy: NDArray[np.float64] | None = None
    # Experts that its tokens visit in place of the routers' own, int64 [P + R, layers with experts,
    # C]; -1: that token has none.
    routes: NDArray[np.int64] | None = None
    # Ids that truncation left the sampler at each response token; none: all of the vocabulary.
    kept: tuple[NDArray[np.int64], ...] | None = None
    # A teacher's tokens, int64 [R, K], and its log-probs of them, float64 [R, K].
    teacher_tokens: NDArray[np.int64] | None = None
    teacher: NDArray[np.float64] | None = None
    # What a critic is to say at each response token, and has said, float64 [R].
    returns: NDArray[np.float64] | None = None
    old_values: NDArray[np.float64] | None = None

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Prompt and response, int64 [P + R]."""
        return np.concatenate([self.prompt, self.response])

    @property
    def trained(self) -> NDArray[np.int64]:
        """Indexes of trained response tokens, ascending."""
        return np.flatnonzero(self.mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Rollout correction: bounds of the weight of a token, sequence or its geometric mean.

    Mode truncate or mask; of a mask beside a correction, only whether the weight is within them.
    """

    mode: str
    level: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13); lengths in tokens."""

    max_tokens: int
    buffer_tokens: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleLoss:
    """A complete loss; names are those of the table in the documentation of the loss."""

    kind: str
    advantage: str
    clip_low: float
    clip_high: float
    token_weight: str
    divide_by: str
    dual_clip: float | None = None
    # sapo alone: temperatures of the gate for positive and for other advantages.
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    # sampler, given or on_policy; "none" where the loss has no ratio.
    old: str = "sampler"
    kl: str | None = None
    kl_coefficient: float = 0.0
    kl_weighted: bool = False
    entropy_coefficient: float = 0.0
    correction: Correction | None = None
    correction_mask: Correction | None = None
    # Share of the counted tokens, those of most entropy, that have a policy gradient.
    top_entropy_share: float | None = None
    shared: str = "sum"
    filter_truncated: bool = False
    overlong: Overlong | None = None
    drop_zero_variance: bool = False
    # Rollouts older than this many versions are dropped; None: none is.
    max_versions: int | None = None
    # forward_kl, reverse_kl or jensen_shannon.
    divergence: str | None = None
    divergence_coefficient: float = 1.0
    beta: float = 0.5
    # The factor of a critic's loss, and its clip; None: there is none.
    value_coefficient: float | None = None
    value_clip: float | None = None


# kind: clip_low, clip_high, token_weight, divide_by, advantage, old log-probs.
_DEFAULTS = {
    "grpo": (0.2, 0.2, "per_sequence", "sequences", "group_mean_std", "sampler"),
    "ppo_clip": (0.2, 0.2, "per_token", "tokens", "group_mean_std", "sampler"),
    "dapo": (0.2, 0.28, "per_token", "tokens", "group_mean_std", "sampler"),
    "dr_grpo": (0.2, 0.2, "per_token", "constant", "group_mean", "sampler"),
    "gspo": (3e-4, 4e-4, "per_sequence", "sequences", "group_mean_std", "required"),
    "gmpo": (0.4, 0.4, "per_sequence", "sequences", "group_mean_std", "sampler"),
    "cispo": (0.0, 5.0, "per_token", "tokens", "group_mean_std", "sampler"),
    "sapo": (0.0, 0.0, "per_sequence", "sequences", "group_mean_std", "sampler"),
    "ipo": (0.3, 0.3, "per_token", "tokens", "group_mean", "sampler"),
    "importance_sampling": (0.0, 0.0, "per_token", "none", "group_mean_std", "sampler"),
    "reinforce": (0.0, 0.0, "per_token", "none", "group_mean_std", "none"),
    "cross_entropy": (0.0, 0.0, "per_token", "tokens", "none", "none"),
    "distillation": (0.0, 0.0, "per_token", "tokens", "none", "none"),
    "value": (0.0, 0.0, "per_token", "tokens", "none", "none"),
}


def default_loss(kind: str, **overrides: object) -> OracleLoss:
    """The loss with the defaults of its row of the table; overrides are fields of `OracleLoss`."""
    clip_low, clip_high, token_weight, divide_by, advantage, old = _DEFAULTS[kind]
    fields: dict[str, object] = {
        "kind": kind,
        "clip_low": clip_low,
        "clip_high": clip_high,
        "token_weight": token_weight,
        "divide_by": divide_by,
        "advantage": advantage,
        "old": old,
        "drop_zero_variance": kind == "dapo",
    }
    return OracleLoss(**(fields | overrides))  # type: ignore[arg-type]
