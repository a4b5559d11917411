"""verl's ActorConfig as the loss and the step of an Update. Imports neither verl nor torch.

In: an ActorConfig and an FSDPOptimizerConfig. Out: `Loss`, `Optim` and `AdamW`. Invariant: a loss
that an Update cannot express exactly is refused by the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from ratoon_client.errors import InvalidArgumentError
from ratoon_client.values import AdamW, Kl, Loss, Optim

# `policy_loss.loss_mode`, and the kind that has its formula.
LOSS_MODES: Mapping[str, str] = MappingProxyType(
    {
        "vanilla": "ppo_clip",
        "gspo": "gspo",
        "sapo": "sapo",
        "gpg": "reinforce",
        "cispo": "cispo",
    }
)
# Loss modes without a counterpart, and why.
REFUSED_MODES: Mapping[str, str] = MappingProxyType(
    {
        "dppo_tv": "its mask is by the total variation of a token",
        "dppo_kl": "its mask is by the divergence of a token",
        "clip_cov": "it clips random tokens of a micro-batch",
        "kl_cov": "it chooses tokens by their covariance in a micro-batch",
        "geo_mean": "its ratio is a geometric mean of clipped ones",
        "dro": "it has a quadratic penalty of the log-ratio",
        "bypass_mode": "its correction is computed within the loss",
    }
)


@dataclass(frozen=True, slots=True)
class Aggregation:
    """What a `loss_agg_mode` is of an Update."""

    token_weight: str
    divide_by: str


AGGREGATIONS: Mapping[str, Aggregation] = MappingProxyType(
    {
        "token-mean": Aggregation("per_token", "tokens"),
        "token-sum": Aggregation("per_token", "none"),
        "seq-mean-token-sum": Aggregation("per_token", "sequences"),
        "seq-mean-token-mean": Aggregation("per_sequence", "sequences"),
        "seq-mean-token-sum-norm": Aggregation("per_token", "constant"),
    }
)
KL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "kl": "k1",
        "k1": "k1",
        "k1+": "k1_plus",
        "kl+": "k1_plus",
        "mse": "k2",
        "k2": "k2",
        "k2+": "k2",
        "mse+": "k2",
        "low_var_kl": "k3",
        "k3": "k3",
        "k3+": "k3_plus",
        "low_var_kl+": "k3_plus",
    }
)


def loss_of(actor: Any) -> Loss:
    """The loss of a mini-batch, whose advantages, old and reference log-probs are `given`.

    Raises:
        InvalidArgumentError: A field of the ActorConfig has no counterpart; it is named.
    """
    mode = str(actor.policy_loss.get("loss_mode", "vanilla"))
    kind = LOSS_MODES.get(mode)
    if kind is None:
        why = REFUSED_MODES.get(mode, "it is a loss of its own")
        raise _refused("policy_loss.loss_mode", mode, f"{' or '.join(LOSS_MODES)}: {why}")
    options: dict[str, Any] = {}
    low, high = actor.clip_ratio_low, actor.clip_ratio_high
    low = actor.clip_ratio if low is None else low
    high = actor.clip_ratio if high is None else high
    if kind in ("ppo_clip", "gspo"):
        options |= {"clip_low": low, "clip_high": high}
    elif kind == "cispo":
        options |= {"clip_low": 1 - low, "clip_high": 1 + high}
    elif kind == "sapo":
        options |= {"tau_positive": actor.tau_pos, "tau_negative": actor.tau_neg}
    if kind == "ppo_clip":
        if actor.clip_ratio_c <= 1 + high:
            raise _refused("clip_ratio_c", actor.clip_ratio_c, "above 1 + clip_ratio_high")
        options["dual_clip"] = actor.clip_ratio_c
    if kind != "reinforce":
        options["old_logprobs"] = "given"
    if actor.use_kl_loss:
        if actor.kl_loss_type not in KL_TYPES:
            raise _refused("kl_loss_type", actor.kl_loss_type, " or ".join(KL_TYPES))
        options["kl"] = Kl(cast("Any", KL_TYPES[actor.kl_loss_type]), actor.kl_loss_coef, "given")
    if actor.entropy_coeff:
        options["entropy_coefficient"] = actor.entropy_coeff
    return Loss(
        cast("Any", kind),
        advantage="given",
        token_weight=cast("Any", _aggregation(actor).token_weight),
        drop_zero_variance_groups=False,
        # Means over sequences are over all rows there.
        count_untrained=True,
        **options,
    )


def _aggregation(actor: Any) -> Aggregation:
    chosen = AGGREGATIONS.get(actor.loss_agg_mode)
    if chosen is None:
        raise _refused("loss_agg_mode", actor.loss_agg_mode, " or ".join(AGGREGATIONS))
    if actor.policy_loss.get("loss_mode", "vanilla") == "sapo" and actor.loss_agg_mode != (
        "seq-mean-token-mean"
    ):
        expected = "seq-mean-token-mean: sapo takes this mean whatever the mode is"
        raise _refused("loss_agg_mode", actor.loss_agg_mode, expected)
    if chosen.divide_by == "constant" and actor.loss_scale_factor is None:
        expected = "a number: without it the loss depends on the width of the padding"
        raise _refused("loss_scale_factor", None, expected)
    return chosen


def optim_of(actor: Any, optim: Any, *, learning_rate: float) -> Optim:
    """The step of a mini-batch; `learning_rate` is the schedule's."""
    divide_by = _aggregation(actor).divide_by
    return Optim(
        learning_rate=learning_rate,
        max_grad_norm=optim.clip_grad,
        divide_by=cast("Any", divide_by),
        divide_constant=float(actor.loss_scale_factor) if divide_by == "constant" else None,
        # Its optimizer steps by moments and weight decay whatever the gradient is.
        step_on_zero_gradient=True,
    )


def adamw_of(optim: Any) -> AdamW:
    """The optimizer of a policy, as torch's AdamW with verl's numbers: all parameters decay.

    Raises:
        InvalidArgumentError: `optimizer`, `optimizer_impl` or an override names another one.
    """
    if optim.optimizer != "AdamW":
        raise _refused("optim.optimizer", optim.optimizer, "AdamW: the service steps it")
    if optim.optimizer_impl != "torch.optim":
        raise _refused("optim.optimizer_impl", optim.optimizer_impl, "torch.optim")
    other = dict(optim.override_optimizer_config or {})
    eps = other.pop("eps", 1e-8)
    if other:
        raise _refused("optim.override_optimizer_config", sorted(other), "eps alone")
    beta1, beta2 = optim.betas
    return AdamW(beta1=beta1, beta2=beta2, eps=eps, weight_decay=optim.weight_decay, decay="all")


def _refused(field: str, got: object, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(field, repr(got), expected)
