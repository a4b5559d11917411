"""The losses of verl, TRL, NeMo-RL and Tinker's API by their own settings, in numpy.

Each function is written from a project's formulas: verl 0.9.1 (`core_algos`, `rollout_corr_helper`,
the DAPO reward manager), TRL 1.16.0 (`GRPOTrainer`), NeMo-RL at 7ea279a (`ClippedPGLossFn`, its
advantage estimators and reward functions), and Tinker's page of losses. `settings` has all that it
reads, under the project's names. A loss is a function of complex log-probs and entropies of one
batch, one micro-batch and one process, so that a complex step gives its gradient to the last digit;
a stop-gradient is the real part. Left out: clamps far beyond these batches' values, and epsilons
that float32 does not hold beside a count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Settings = Mapping[str, Any]
_STEP = 1e-30
# In place of an infinite bound, which times 0 is no number.
_FAR = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """S rollouts, those of a group one after the other, with J trained tokens, at least one each.

    `group`, `reward`, that of the group's greedy answer, `length` in response tokens and
    `truncated` are [S]; `rollout` of each token and its log-probs by four other policies are [J].
    """

    group: Array
    reward: Array
    greedy: Array
    length: Array
    truncated: Array
    rollout: Array
    old: Array
    sampler: Array
    reference: Array
    teacher: Array

    @property
    def tokens(self) -> Array:
        """Trained tokens of each rollout, [S]."""
        return np.bincount(self.rollout)

    def sum(self, value_J: Array) -> Array:
        """Sums over each rollout's tokens, [S]."""
        return np.add.reduceat(value_J, np.flatnonzero(np.diff(self.rollout, prepend=-1)))

    def mean(self, value_J: Array) -> Array:
        return self.sum(value_J) / self.tokens

    def by_group(self, of: Callable[[Array], Array], value_S: Array) -> Array:
        """What `of` makes of each group's values, [S]."""
        parts = [value_S[self.group == name] for name in np.unique(self.group)]
        return np.concatenate([np.broadcast_to(of(part), len(part)) for part in parts])


@dataclass(frozen=True, slots=True)
class Peer:
    """A project's losses and advantages.

    Attributes:
        loss: Of settings, samples, advantages, log-probs and entropies, complex [J] the last two.
        advantages: Of settings and samples, [J].
        off: What a setting is that no row says.
        sampling: Settings of the temperature of log-probs, and of how many of the likeliest tokens
            they are of.
    """

    loss: Callable[[Settings, Samples, Array, Array, Array], Any]
    advantages: Callable[[Settings, Samples], Array]
    off: Settings
    sampling: tuple[str, str]

    def gradients(
        self, settings: Settings, samples: Samples, advantage: Array, logp: Array, entropy: Array
    ) -> tuple[float, Array]:
        """The loss, and its gradients with respect to log-probs and entropies, [2, J]."""
        values, found = np.array([logp, entropy], np.complex128), np.zeros((2, len(logp)))
        for index in np.ndindex(*found.shape):
            moved = values.copy()
            moved[index] += 1j * _STEP
            found[index] = np.imag(self.loss(settings, samples, advantage, *moved)) / _STEP
        return float(np.real(self.loss(settings, samples, advantage, *values))), found


def _clip(value: Array, low: float, high: float) -> Array:
    return np.where(np.real(value) < low, low, np.where(np.real(value) > high, high, value))


def _least(a: Array, b: Array) -> Array:
    return np.where(np.real(a) <= np.real(b), a, b)


def _surrogate(ratio: Array, advantage: Array, low: float, high: float, dual: float) -> Array:
    """-min(r A, clip(r) A), of negative advantages at most -c A."""
    term = -_least(ratio * advantage, _clip(ratio, 1 - low, 1 + high) * advantage)
    beyond = (advantage < 0) & (np.real(ratio) > dual)
    return np.where(beyond, -min(dual, _FAR) * advantage, term)


def _k1(logp: Array, reference: Array) -> Array:
    return logp - reference


def _k2(logp: Array, reference: Array) -> Array:
    return (logp - reference) ** 2 / 2


def _k3(logp: Array, reference: Array) -> Array:
    return np.exp(reference - logp) - (reference - logp) - 1


def _centred(reward: Array) -> Array:
    return reward - reward.mean()


def _standardised(reward: Array, epsilon: float) -> Array:
    return _centred(reward) / (reward.std(ddof=1) + epsilon)


def _outside(value: Array, low: float, high: float) -> Array:
    return (value < low) | (value > high)


def _verl(c: Settings, s: Samples, advantage: Array, logp: Array, entropy: Array) -> Any:
    actor = "actor."
    kept_S = np.ones(len(s.group), bool)
    if c["algorithm.filter_groups.enable"]:
        kept_S = s.by_group(np.std, s.reward) > 0
    rule = "algorithm.rollout_correction."
    sampled = c[rule + "bypass_mode"]
    old = s.sampler if sampled else s.old
    # What is rejected leaves every sum, and `token-mean`'s count.
    weight, kept_J = _verl_correction(c, s, np.real(logp) if sampled else s.old)
    kept_J = kept_J & kept_S[s.rollout]
    low, high = c[actor + "clip_ratio_low"], c[actor + "clip_ratio_high"]
    ratio, mode = np.exp(logp - old), c[actor + "policy_loss.loss_mode"]
    aggregation = c[actor + "loss_agg_mode"]
    if sampled and c[rule + "loss_type"] == "reinforce":
        term = -advantage * logp * weight
    elif sampled or mode == "vanilla":
        term = _surrogate(ratio, advantage, low, high, c[actor + "clip_ratio_c"])
    elif mode == "gspo":
        log_s = s.mean(np.real(np)(logp - old))[s.rollout] + logp - np.real(logp)
        term = _surrogate(np.exp(log_s), advantage, low, high, np.inf)
    elif mode == "sapo":
        tau = np.where(advantage > 0, c[actor + "tau_pos"], c[actor + "tau_neg"])
        term = -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantage
        aggregation = "seq-mean-token-mean"
    elif mode == "gpg":
        term = -logp * advantage
    elif mode == "cispo":
        term = -_clip(np.real(ratio), 1 - low, 1 + high) * advantage * logp
    elif mode == "dro":
        beta = c[actor + "policy_loss.dro_beta"]
        term = -(logp * advantage - beta / 2 * (logp - old) ** 2)
    else:
        assert mode == "geo_mean"
        sign = np.sign(advantage)
        held = sign * _least(sign * (logp - old), sign * _clip(logp - old, -low, high))
        value_S = -s.mean(advantage) * np.exp(s.mean(held))
        return value_S.mean()
    if not sampled:
        term = term * weight
    loss = _verl_mean(c, s, term, kept_J, kept_S, aggregation)
    loss -= c[actor + "entropy_coeff"] * _verl_mean(c, s, entropy, kept_J, kept_S, aggregation)
    if c[actor + "use_kl_loss"]:
        kl = _verl_kl(c[actor + "kl_loss_type"], logp, s.reference)
        loss += c[actor + "kl_loss_coef"] * _verl_mean(c, s, kl, kept_J, kept_S, aggregation)
    return loss


def _verl_advantages(c: Settings, s: Samples) -> Array:
    reward, name = s.reward, c["algorithm.adv_estimator"]
    buffer = "reward.reward_kwargs.overlong_buffer_cfg."
    if c[buffer + "enable"]:
        length = c[buffer + "len"]
        exceeds = s.length - (c["reward.reward_kwargs.max_resp_len"] - length)
        reward = reward + np.minimum(-exceeds / length * c[buffer + "penalty_factor"], 0)
    if c["algorithm.use_kl_in_reward"]:
        kl = _verl_kl(c["algorithm.kl_penalty"], s.old, s.reference)
        reward = reward - c["algorithm.kl_ctrl.kl_coef"] * s.sum(kl)
    if name == "grpo":
        by_std = c["algorithm.norm_adv_by_std_in_grpo"]
        of = (lambda r: _standardised(r, 1e-6)) if by_std else _centred
        return s.by_group(of, reward)[s.rollout]
    if name == "rloo":
        return s.by_group(lambda r: r - (r.sum() - r) / (len(r) - 1), reward)[s.rollout]
    if name == "opo":
        base = s.by_group(np.sum, s.tokens * reward) / s.by_group(np.sum, s.tokens)
        return (reward - base)[s.rollout]
    if name == "gpg":
        alpha = len(reward) / np.count_nonzero(reward)
        return alpha * s.by_group(_centred, reward)[s.rollout]
    if name == "grpo_passk":
        assert c["algorithm.norm_adv_by_std_in_grpo"]

        def best(r: Array) -> Array:
            second, first = np.sort(r)[-2:]
            return np.where(r == first, (first - second) / (r.std(ddof=1) + 1e-6), 0.0)

        return s.by_group(best, reward)[s.rollout]
    if name == "remax":
        return (reward - s.greedy)[s.rollout]
    if name == "reinforce_plus_plus_baseline":
        reward = s.by_group(_centred, reward)
    else:
        assert name == "reinforce_plus_plus"
    value = reward[s.rollout]
    return (value - value.mean()) / np.sqrt(value.var(ddof=1) + 1e-8)


def _verl_kl(kind: str, logp: Array, reference: Array) -> Array:
    estimates = {"kl": _k1, "k1": _k1, "mse": _k2, "k2": _k2, "low_var_kl": _k3, "k3": _k3}
    value = estimates[kind.removesuffix("+")](logp, reference)
    if kind.endswith("+"):
        slope = _k2(logp, reference)
        return slope - np.real(slope) + np.real(value)
    return value


def _verl_correction(c: Settings, s: Samples, old: Array) -> tuple[Array, Array]:
    """Weights of tokens, and which of them are kept; [J] each."""
    rule = "algorithm.rollout_correction."
    gap, weight, kept = old - s.sampler, np.ones(len(old)), np.ones(len(old), bool)
    if c[rule + "rollout_is"]:
        whole = c[rule + "rollout_is"] == "sequence"
        weight = np.exp(s.sum(gap)[s.rollout] if whole else gap)
        low, _, high = str(c[rule + "rollout_is_threshold"]).rpartition("_")
        if low:
            weight = np.where(_outside(weight, float(low), float(high)), 0.0, weight)
        else:
            weight = weight.clip(max=float(high))
    if c[rule + "rollout_rs"]:
        low, high = map(float, c[rule + "rollout_rs_threshold"].split("_"))
        levels = {"token_k1": -gap, "seq_sum_k1": -s.sum(gap), "seq_mean_k1": -s.mean(gap)}
        divergence = levels[c[rule + "rollout_rs"]]
        if len(divergence) != len(gap):
            divergence = divergence[s.rollout]
        kept = ~_outside(divergence, np.log(low), np.log(high))
    return weight, kept


def _verl_mean(
    c: Settings, s: Samples, term: Array, kept_J: Array, kept_S: Array, mode: str
) -> Any:
    """`agg_loss`; rows that were rejected are rows of the batch still, those of a dropped group
    are not."""
    term = np.where(kept_J, term, 0.0)
    if mode == "token-mean":
        return term.sum() / kept_J.sum()
    if mode == "token-sum":
        return term.sum()
    value_S = s.sum(term)
    if mode == "seq-mean-token-mean":
        value_S = value_S / np.maximum(s.sum(kept_J.astype(float)), 1)
    loss = value_S.sum() / kept_S.sum()
    return loss / c["actor.loss_scale_factor"] if mode == "seq-mean-token-sum-norm" else loss


def _trl(c: Settings, s: Samples, advantage: Array, logp: Array, entropy: Array) -> Any:
    kind = c["loss_type"]
    counted_S = ~(s.truncated & c["mask_truncated_completions"])
    counted = counted_S[s.rollout]
    old = np.real(logp) if c["num_iterations"] == 1 else s.old
    log_ratio = logp - old
    if c["importance_sampling_level"] == "sequence":
        log_ratio = s.mean(log_ratio)[s.rollout]
    ratio = np.exp(log_ratio)
    low, high = c["epsilon"], c["epsilon_high"]
    high = low if high is None else high
    if kind == "cispo":
        term = -_clip(np.real(ratio), 0, high) * advantage * logp
    elif kind == "sapo":
        tau = np.where(advantage > 0, c["sapo_temperature_pos"], c["sapo_temperature_neg"])
        term = -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantage
    else:
        held = ratio if c["delta"] is None else _clip(ratio, 0, c["delta"])
        term = -_least(held * advantage, _clip(ratio, 1 - low, 1 + high) * advantage)
    most = np.ones(len(logp), bool)
    if c["top_entropy_quantile"] < 1:
        most = np.real(entropy) >= np.quantile(
            np.real(entropy[counted]), 1 - c["top_entropy_quantile"]
        )
        term = term * most
    if c["vllm_importance_sampling_mode"]:
        term = term * _trl_correction(c, s, old)
    if c["beta"]:
        kl = _k3(logp, s.reference)
        term = term + c["beta"] * (kl * ratio if c["use_bias_correction_kl"] else kl)
    value_S = s.sum(np.where(counted, term, 0.0))
    if kind in ("grpo", "sapo"):
        loss = (value_S / s.tokens).mean()
    elif kind == "dr_grpo":
        loss = value_S.sum() / (len(value_S) * c["max_completion_length"])
    elif kind == "luspo":
        loss = value_S.mean()
    else:
        assert kind in ("dapo", "bnpo", "cispo")
        loss = value_S.sum() / counted.sum()
    return loss - c["entropy_coef"] * entropy[counted & most].mean()


def _trl_advantages(c: Settings, s: Samples) -> Array:
    if c["scale_rewards"] == "group":
        return s.by_group(lambda r: _standardised(r, 1e-4), s.reward)[s.rollout]
    centred = s.by_group(_centred, s.reward)[s.rollout]
    return centred if c["scale_rewards"] == "none" else centred / (s.reward.std(ddof=1) + 1e-4)


def _trl_correction(c: Settings, s: Samples, old: Array) -> Array:
    level, _, mode = c["vllm_importance_sampling_mode"].partition("_")
    gap = old - s.sampler
    weight = np.exp(s.sum(gap)[s.rollout] if level == "sequence" else gap)
    low = c["vllm_importance_sampling_clip_min"] or 0.0
    high = c["vllm_importance_sampling_clip_max"]
    if mode == "truncate":
        return weight.clip(low, high)
    return np.where(_outside(weight, low, high), 0.0, weight)


def _nemo(c: Settings, s: Samples, advantage: Array, logp: Array, entropy: Array) -> Any:
    assert not np.imag(entropy).any() or c["loss_fn.token_level_loss"] is not None
    kept_S = ~(s.truncated & c["grpo.overlong_filtering"])
    if c["grpo.use_dynamic_sampling"]:
        kept_S = kept_S & (s.by_group(np.std, s.reward) > 0)
    fn, kept = "loss_fn.", kept_S[s.rollout]
    low, high = c[fn + "ratio_clip_min"], c[fn + "ratio_clip_max"]
    on_policy, whole = c[fn + "force_on_policy_ratio"], c[fn + "sequence_level_importance_ratios"]
    old = np.real(logp) if on_policy else s.old
    ratio = np.exp(s.mean(logp - old)[s.rollout] if whole else logp - old)
    clipped = ratio if on_policy else _clip(ratio, 1 - low, 1 + high)
    if c[fn + "use_cispo"]:
        term = -advantage * np.real(clipped) * logp
    elif c[fn + "disable_ppo_ratio"]:
        term = -advantage * logp
    else:
        term = -_least(advantage * ratio, advantage * clipped)
    if c[fn + "ratio_clip_c"] is not None:
        bound = -advantage * c[fn + "ratio_clip_c"]
        term = np.where(advantage < 0, _least(term, bound), term)
    if c[fn + "use_importance_sampling_correction"]:
        term = term * _nemo_correction(c, s, old)
    if c[fn + "reference_policy_kl_penalty"] and not c[fn + "use_kl_in_reward"]:
        estimate = {"k1": _k1, "k2": _k2, "k3": _k3}[c[fn + "reference_policy_kl_type"]]
        kl = np.exp(logp - np.real(logp)) * estimate(logp, s.reference)
        term = term + c[fn + "reference_policy_kl_penalty"] * kl
    if c[fn + "token_level_loss"]:
        return term[kept].sum() / kept.sum()
    return s.mean(term)[kept_S].sum() / kept_S.sum()


def _nemo_advantages(c: Settings, s: Samples) -> Array:
    name, reward, shaping = c["grpo.adv_estimator.name"], s.reward, "grpo.reward_shaping."
    if c[shaping + "enabled"]:
        buffer = c[shaping + "overlong_buffer_length"]
        exceeds = s.length - (c[shaping + "max_response_length"] - buffer)
        reward = reward + np.minimum(-exceeds / buffer * c[shaping + "overlong_buffer_penalty"], 0)
    if name == "opd":
        return s.teacher - s.old
    if name == "grpo":
        leave_out = c["grpo.use_leave_one_out_baseline"]
        by_std = c["grpo.normalize_rewards"]

        def of(r: Array) -> Array:
            others = [np.delete(r, i) if leave_out else r for i in range(len(r))]
            mean = np.array([x.mean() for x in others])
            std = np.array([x.std(ddof=1) if by_std else 1.0 for x in others])
            return (r - mean) / (std + 1e-6 * by_std)

        return s.by_group(of, reward)[s.rollout]
    assert name == "reinforce_plus_plus"
    if c["grpo.adv_estimator.minus_baseline"]:
        reward = s.by_group(_centred, reward)
    value = reward[s.rollout]
    if c["loss_fn.use_kl_in_reward"]:
        estimate = {"k1": _k1, "k2": _k2, "k3": _k3}[c["loss_fn.reference_policy_kl_type"]]
        value = value - c["loss_fn.reference_policy_kl_penalty"] * estimate(s.old, s.reference)
    return (value - value.mean()) / np.sqrt(value.var())


def _nemo_correction(c: Settings, s: Samples, old: Array) -> Array:
    name, fn = "truncated_importance_sampling_", "loss_fn."
    kind, high, low = (c[fn + name + last] for last in ("type", "ratio", "ratio_min"))
    gap = old - s.sampler
    whole = c[fn + "sequence_level_importance_ratios"]
    weight = np.exp(s.sum(gap)[s.rollout] if whole else gap)
    if kind == "tis":
        return weight.clip(low or 0.0, high)
    if kind == "icepop":
        return np.where(_outside(weight, low, high), 0.0, weight)
    assert kind == "seq-mask-tis"
    return np.where(_outside(np.exp(s.mean(gap)), low, high)[s.rollout], 0.0, weight)


def _tinker(c: Settings, s: Samples, advantage: Array, logp: Array, entropy: Array) -> Any:
    assert len(entropy) == len(logp)
    ratio, kind = np.exp(logp - s.sampler), c["loss_fn"]
    low, high = c["clip_low_threshold"], c["clip_high_threshold"]
    if kind == "cross_entropy":
        return -logp.sum()
    if kind == "importance_sampling":
        return -(ratio * advantage).sum()
    if kind == "ppo":
        return -_least(ratio * advantage, _clip(ratio, low, high) * advantage).sum()
    if kind == "cispo":
        return -(_clip(np.real(ratio), low, high) * advantage * logp).sum()
    assert kind == "dro"
    return -(logp * advantage - c["beta"] / 2 * (logp - s.sampler) ** 2).sum()


PEERS: Mapping[str, Peer] = {
    "verl": Peer(
        loss=_verl,
        advantages=_verl_advantages,
        off={
            "algorithm.filter_groups.enable": False,
            "algorithm.use_kl_in_reward": False,
            "algorithm.rollout_correction.bypass_mode": False,
            "algorithm.rollout_correction.loss_type": "ppo_clip",
            "algorithm.rollout_correction.rollout_is": None,
            "algorithm.rollout_correction.rollout_rs": None,
            "reward.reward_kwargs.overlong_buffer_cfg.enable": False,
            "actor.policy_loss.loss_mode": "vanilla",
            "actor.use_kl_loss": False,
            "actor.entropy_coeff": 0.0,
            "actor.tau_pos": 1.0,
            "actor.tau_neg": 1.05,
            "rollout.temperature": 1.0,
            "rollout.training_top_k": None,
        },
        sampling=("rollout.temperature", "rollout.training_top_k"),
    ),
    "TRL": Peer(
        loss=_trl,
        advantages=_trl_advantages,
        off={
            "epsilon_high": None,
            "delta": None,
            "importance_sampling_level": "token",
            "sapo_temperature_pos": 1.0,
            "sapo_temperature_neg": 1.05,
            "mask_truncated_completions": False,
            "top_entropy_quantile": 1.0,
            "entropy_coef": 0.0,
            "beta": 0.0,
            "vllm_importance_sampling_mode": None,
            "vllm_importance_sampling_clip_min": None,
            "temperature": 1.0,
            "training_top_k": None,
        },
        sampling=("temperature", "training_top_k"),
    ),
    "NeMo-RL": Peer(
        loss=_nemo,
        advantages=_nemo_advantages,
        off={
            "grpo.adv_estimator.name": "grpo",
            "grpo.adv_estimator.minus_baseline": True,
            "grpo.overlong_filtering": False,
            "grpo.use_dynamic_sampling": False,
            "grpo.reward_shaping.enabled": False,
            "loss_fn.use_kl_in_reward": False,
            "loss_fn.force_on_policy_ratio": False,
            "loss_fn.sequence_level_importance_ratios": False,
            "loss_fn.use_cispo": False,
            "loss_fn.disable_ppo_ratio": False,
            "loss_fn.ratio_clip_c": None,
            "loss_fn.reference_policy_kl_penalty": 0.0,
            "loss_fn.use_importance_sampling_correction": False,
            "loss_fn.truncated_importance_sampling_ratio_min": None,
            "policy.generation.temperature": 1.0,
            "policy.generation.top_k": None,
        },
        sampling=("policy.generation.temperature", "policy.generation.top_k"),
    ),
    "Tinker": Peer(
        loss=_tinker,
        advantages=lambda _, s: s.by_group(_centred, s.reward)[s.rollout],
        off={
            "clip_low_threshold": 0.8,
            "clip_high_threshold": 1.2,
            "temperature": 1.0,
            "training_top_k": None,
        },
        sampling=("temperature", "training_top_k"),
    ),
}
