"""The steps of verl, TRL, NeMo-RL and Tinker's API by their own settings: AdamW, clip, schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracle.peers import Array, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRule:
    """AdamW's numbers, the learning rate after t steps, and whether norms and biases decay."""

    rate: Callable[[int], float]
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_norm: float
    decays_norms: bool


def step_rule(peer: str, c: Settings) -> StepRule:
    """The rule of verl's FSDP engine, of transformers' Trainer, of NeMo-RL's torch optimizer or of
    Tinker's AdamParams; what `c` leaves out is the project's default."""
    if peer == "verl":
        own = {name.rpartition(".")[2]: value for name, value in c.items()}
        beta1, beta2 = own.get("betas", (0.9, 0.999))
        peak, decay, most = own["lr"], own.get("weight_decay", 0.01), own.get("clip_grad", 1.0)
        kind, warmup = own.get("lr_scheduler_type", "constant"), own.get("lr_warmup_steps", 0)
        total, least = own.get("total_training_steps", 0), own.get("min_lr_ratio", 0.0)
        return StepRule(
            rate=lambda t: peak * _warmed(kind, t, warmup, total, least),
            beta1=beta1,
            beta2=beta2,
            eps=1e-8,
            weight_decay=decay,
            max_norm=most,
            decays_norms=True,
        )
    if peer == "TRL":
        peak, kind = c["learning_rate"], c["lr_scheduler_type"]
        warmup, total = c.get("warmup_steps", 0), c.get("max_steps", 0)
        return StepRule(
            rate=lambda t: peak * _warmed(kind, t, warmup, total, 0.0),
            beta1=0.9,
            beta2=c.get("adam_beta2", 0.999),
            eps=1e-8,
            weight_decay=c.get("weight_decay", 0.0),
            max_norm=1.0,
            decays_norms=False,
        )
    if peer == "Tinker":
        return StepRule(
            rate=lambda _: c["learning_rate"],
            beta1=c["beta1"],
            beta2=c["beta2"],
            eps=c["eps"],
            weight_decay=c["weight_decay"],
            max_norm=c["grad_clip_norm"],
            decays_norms=True,
        )
    kwargs = "policy.optimizer.kwargs."
    beta1, beta2 = c.get(kwargs + "betas", (0.9, 0.999))
    scheduler = c.get("policy.scheduler", [])

    def rate(t: int) -> float:
        share = 1.0
        for one in scheduler:
            own = one["kwargs"]
            done = min(t / own["total_iters"], 1.0)
            share = own["start_factor"] + (own["end_factor"] - own["start_factor"]) * done
        return c[kwargs + "lr"] * share

    return StepRule(
        rate=rate,
        beta1=beta1,
        beta2=beta2,
        eps=c.get(kwargs + "eps", 1e-8),
        weight_decay=c.get(kwargs + "weight_decay", 0.01),
        max_norm=c.get("policy.max_grad_norm", 1.0),
        decays_norms=True,
    )


def _warmed(kind: str, t: int, warmup: int, total: int, least: float) -> float:
    """The share of its learning rate that a scheduler of transformers or verl has after t steps."""
    if t < warmup:
        return t / warmup
    if kind == "constant":
        return 1.0
    done = (t - warmup) / (total - warmup)
    left = (1 + np.cos(np.pi * done)) / 2 if kind == "cosine" else 1 - done
    return least + (1 - least) * left


def stepped(
    rule: StepRule, weights: Mapping[str, Array], gradients: Sequence[Mapping[str, Array]]
) -> dict[str, Array]:
    """Weights after a step of AdamW for each of the gradients, by its formulas."""
    weights = dict(weights)
    first = {name: np.zeros_like(weight) for name, weight in weights.items()}
    second = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for t, own in enumerate(gradients):
        norm = math.sqrt(sum(float((g**2).sum()) for g in own.values()))
        rate = rule.rate(t)
        for name, weight in weights.items():
            g = own[name] * min(1.0, rule.max_norm / (norm + 1e-6))
            first[name] = rule.beta1 * first[name] + (1 - rule.beta1) * g
            second[name] = rule.beta2 * second[name] + (1 - rule.beta2) * g**2
            mean = first[name] / (1 - rule.beta1 ** (t + 1))
            root = np.sqrt(second[name] / (1 - rule.beta2 ** (t + 1)))
            decay = rule.weight_decay * (rule.decays_norms or "norm" not in name)
            weights[name] = weight * (1 - rate * decay) - rate * mean / (root + rule.eps)
    return weights
