"""Every loss as a torch scalar of one path, so that autograd gives the gradient.

Written from the papers: PPO (arXiv 1707.06347, eq. 7), dual clip (1912.09729), GRPO (2402.03300),
DAPO (2503.14476), Dr. GRPO (2503.20783), GSPO-token (2507.18071, eq. 14), GMPO (2507.20673), CISPO
(2506.13585), SAPO (2511.20347), IPO (docs.primeintellect.ai/prime-rl/ipo), KL estimators k1, k2, k3
(Schulman, 2020). Clamps are torch's own, with the bounds of verl: 20 for a log-ratio and for a KL
gap, 10 for k3. Invariant: what leaves is a plain sum over the path's terms; nothing is divided by a
counter here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracle.advantages import Counted
from tests.oracle.paths import Correction, OracleLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over the terms of one path, each a float64 scalar; `total` carries the gradient."""

    total: Tensor
    policy_gradient: Tensor
    kl: Tensor
    entropy: Tensor


def old_logprobs(counted: Counted, loss: OracleLoss, logp: Tensor) -> Tensor:
    """Old log-probs of the ratio, float64 [R], detached."""
    if loss.old == "on_policy":
        return logp.detach()
    assert loss.old in ("given", "sampler")
    values = counted.path.old if loss.old == "given" else counted.path.sampler
    assert values is not None
    return torch.as_tensor(values)


def _mismatch(rule: Correction, counted: Counted, old: Tensor) -> Tensor:
    assert counted.path.sampler is not None
    gap = (old - torch.as_tensor(counted.path.sampler)).detach()
    trained = gap[torch.as_tensor(counted.path.mask)]
    if rule.level == "sequence":
        gap = torch.full_like(gap, float(trained.sum()))
    if rule.level == "geometric":
        gap = torch.full_like(gap, float(trained.mean()))
    return gap.exp()


def _correction(rule: Correction, counted: Counted, old: Tensor) -> Tensor:
    weight = _mismatch(rule, counted, old)
    if rule.mode == "truncate":
        return weight.clamp(max=rule.high)
    return torch.where((weight >= rule.low) & (weight <= rule.high), weight, 0.0)


def _clipped(ratio: Tensor, advantage: Tensor, loss: OracleLoss) -> Tensor:
    inside = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    gain = torch.minimum(ratio * advantage, inside * advantage)
    if loss.dual_clip is not None:
        bounded = torch.maximum(gain, loss.dual_clip * advantage)
        gain = torch.where(advantage < 0, bounded, gain)
    return -gain


def _policy_gradient(counted: Counted, loss: OracleLoss, logp: Tensor) -> Tensor:
    """Per-token policy-gradient terms, float64 [R]; those of untrained tokens mean nothing."""
    advantage = torch.as_tensor(counted.advantages)
    if loss.kind in ("distillation", "value"):
        return torch.zeros_like(logp)
    if loss.kind == "cross_entropy":
        weights = counted.path.weights
        return -logp if weights is None else -torch.as_tensor(weights) * logp
    if loss.old == "none":
        return -advantage * logp
    old = old_logprobs(counted, loss, logp)
    ratio = (logp - old).clamp(-20, 20).exp()
    if loss.kind == "gspo":
        mask = torch.as_tensor(counted.path.mask)
        log_sequence = (logp - old)[mask].mean() if mask.any() else torch.zeros(())
        ratio = (log_sequence.detach() + logp - logp.detach()).clamp(-20, 20).exp()
        terms = _clipped(ratio, advantage, loss)
    elif loss.kind == "gmpo":
        # The sequence's term, with all of its gradient, is each token's share of it.
        mask = torch.as_tensor(counted.path.mask)
        gap, sign = logp - old, torch.where(advantage < 0, -1.0, 1.0)
        held = sign * torch.minimum(sign * gap, sign * gap.clamp(-loss.clip_low, loss.clip_high))
        mean = held.detach()[mask].mean() if mask.any() else torch.zeros(())
        terms = -(mean + held - held.detach()).clamp(-20, 20).exp() * advantage
    elif loss.kind == "reinforce":
        terms = -advantage * logp
    elif loss.kind == "cispo":
        terms = -ratio.clamp(loss.clip_low, loss.clip_high).detach() * advantage * logp
    elif loss.kind == "sapo":
        tau = torch.full_like(advantage, loss.tau_negative)
        tau[advantage > 0] = loss.tau_positive
        terms = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    elif loss.kind == "ipo":
        moved = (logp.exp() - old.exp()).detach()
        is_kept = (moved <= loss.clip_high) & (moved >= -loss.clip_low)
        terms = torch.where(is_kept, -ratio * advantage, 0.0)
    elif loss.kind == "importance_sampling":
        terms = -ratio * advantage
    else:
        terms = _clipped(ratio, advantage, loss)
    if loss.correction is not None:
        terms = terms * _correction(loss.correction, counted, old)
    if loss.correction_mask is not None:
        rule = loss.correction_mask
        weight = _mismatch(rule, counted, old)
        terms = torch.where((weight >= rule.low) & (weight <= rule.high), terms, 0.0)
    return terms


def _kl(kind: str, logp: Tensor, reference: Tensor) -> Tensor:
    difference = (logp - reference).clamp(-20, 20)
    half_square = difference.square() / 2
    if kind == "k2":
        return half_square
    value = difference
    if kind.startswith("k3"):
        value = ((-difference).exp() + difference - 1).clamp(max=10)
    if kind.endswith("_plus"):
        return half_square + (value - half_square).detach()
    return value


def _weighted(value: Tensor, logp: Tensor, old: Tensor, reference: Tensor, kind: str) -> Tensor:
    """DeepSeek-V3.2 (arXiv 2512.02556, eq. 7); held by a clamp, a term is a constant."""
    ratio = (logp - old).clamp(-20, 20).exp()
    far = ((logp - old).abs() > 20) | ((logp - reference).abs() > 20)
    if kind == "k3":
        far |= value.detach() >= 10
    return torch.where(far, (ratio * value).detach(), ratio * value)


def divergence(counted: Counted, loss: OracleLoss, rows: Tensor) -> Tensor:
    """The divergence at each response token, float64 [R], from log-probs `rows`, [R, V].

    Forward and reverse KL, and GKD's divergence (arXiv 2306.13649, eq. 1), of the teacher's K
    tokens and one more, whose probability is that of all others; it is 1e-5 at least.
    """
    path = counted.path
    assert path.teacher_tokens is not None
    assert path.teacher is not None
    is_named = torch.zeros_like(rows, dtype=torch.bool)
    is_named.scatter_(1, torch.as_tensor(path.teacher_tokens), True)
    p = rows.exp().gather(1, torch.as_tensor(path.teacher_tokens))
    p_rest = torch.where(is_named, 0.0, rows.exp()).sum(1, keepdim=True)
    q = torch.as_tensor(path.teacher).exp()
    p = torch.cat([p, p_rest.clamp(min=1e-5)], dim=1)
    q = torch.cat([q, (1 - q.sum(1, keepdim=True)).clamp(min=1e-5)], dim=1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(1)

    if loss.divergence == "forward_kl":
        return kl(q, p)
    if loss.divergence == "reverse_kl":
        return kl(p, q)
    mixture = loss.beta * q + (1 - loss.beta) * p
    return loss.beta * kl(q, mixture) + (1 - loss.beta) * kl(p, mixture)


def value_error(counted: Counted, loss: OracleLoss, values: Tensor) -> Tensor:
    """PPO's value loss at each response token, float64 [R], clipped as in openai/baselines."""
    assert counted.path.returns is not None
    returns = torch.as_tensor(counted.path.returns)
    error = (values - returns) ** 2
    if loss.value_clip is None:
        return error / 2
    assert counted.path.old_values is not None
    old = torch.as_tensor(counted.path.old_values)
    moved = old + torch.clamp(values - old, -loss.value_clip, loss.value_clip)
    return torch.maximum(error, (moved - returns) ** 2) / 2


def path_loss(
    counted: Counted,
    loss: OracleLoss,
    logp: Tensor,
    entropy: Tensor,
    rows: Tensor | None = None,
    values: Tensor | None = None,
) -> LossSums:
    """The sums of one path. `logp`, `entropy`: float64 [R] of the current model, with gradient;
    `rows`: its log-probs of the vocabulary, [R, V], for a loss with a teacher; `values`: those of
    its value head, [R], for a critic's."""
    own = torch.as_tensor(counted.own)
    share = 1.0 / int(own.sum()) if loss.token_weight == "per_sequence" else 1.0
    terms = _policy_gradient(counted, loss, logp)[own].sum() * share
    bonus = entropy[own].sum() * share
    kl = torch.zeros((), dtype=torch.float64)
    if loss.kl is not None:
        assert counted.path.reference is not None
        reference = torch.as_tensor(counted.path.reference)
        kl = _kl(loss.kl, logp, reference)
        if loss.kl_weighted:
            kl = _weighted(kl, logp, old_logprobs(counted, loss, logp), reference, loss.kl)
        kl = kl[own].sum() * share
    total = terms + loss.kl_coefficient * kl - loss.entropy_coefficient * bonus
    if loss.divergence is not None:
        assert rows is not None
        apart = divergence(counted, loss, rows)[own].sum() * share
        total = total + loss.divergence_coefficient * apart
    if loss.value_coefficient is not None:
        assert values is not None
        wrong = value_error(counted, loss, values)[own].sum() * share
        total = total + loss.value_coefficient * wrong
    return LossSums(total=total, policy_gradient=terms, kl=kl, entropy=bonus)
