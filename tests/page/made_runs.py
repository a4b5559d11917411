"""Runs as the API tells them, made up: JSON of the shapes of docs/api.md, without a service.

What a real service cannot be brought to in a test's time is made here: a hundred thousand steps,
a forest of ten thousand nodes, hostile text everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NAMES = (
    "reward_mean",
    "reward_std",
    "loss",
    "entropy",
    "response_length_mean",
    "kl",
    "grad_norm",
    "sampler_kl",
    "sampler_gap_max",
    "ratio_max",
    "clip_fraction_high",
    "clip_fraction_low",
    "zero_variance_fraction",
    "staleness_mean",
    "token_reduction",
    "tokens_per_second",
    "num_groups",
)
HOSTILE = '<img src=x onerror="document.title=1">\x1b[31m\u202eevil'
BEGUN = 1_790_000_000.0
TEXT = (
    "So we need to find how many apples remain after she gives three of the twelve to her "
    "brother , then half of what is left to a friend . 12 - 3 = 9 and 9 / 2 = 4.5 , so she "
    "has 4.5 apples .\n Let me check that again : yes . The answer is \\boxed{ 4.5 }"
)
WORDS = tuple(TEXT.split(" "))


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeRun:
    """One policy's steps. `bad`: the step with one planted bad rollout, at `BAD`."""

    policy_id: str
    num_steps: int
    bad: int | None = None
    seed: int = 0
    hostile: bool = False
    points: dict[str, list[float | None]] = field(default_factory=dict)

    def figures(self) -> dict[str, list[float | None]]:
        if not self.points:
            self.points.update(_figures(self.num_steps, self.bad, self.seed))
        return self.points


BAD_GROUP, BAD_ROLLOUT, BAD_TOKEN = 5, 3, 17
NUM_GROUPS, NUM_ROLLOUTS, PROMPT = 8, 8, 24


def _figures(num_steps: int, bad: int | None, seed: int) -> dict[str, list[float | None]]:
    random_ = random.Random(seed)
    columns: dict[str, list[float | None]] = {name: [] for name in NAMES}
    wander = 0.0
    for step in range(1, num_steps + 1):
        share = step / max(num_steps, 50)
        wander = 0.9 * wander + random_.gauss(0, 0.02)
        is_bad = step == bad
        values: Mapping[str, float | None] = {
            "reward_mean": 0.12 + 0.7 * (1 - math.exp(-3 * share)) + wander - 0.05 * is_bad,
            "reward_std": 0.3 - 0.15 * share + random_.gauss(0, 0.01),
            "loss": random_.gauss(0, 0.01) - 0.02 * share + 0.3 * is_bad,
            "entropy": 1.2 * math.exp(-1.5 * share) + 0.2 + random_.gauss(0, 0.015),
            "response_length_mean": 180 + 160 * share + random_.gauss(0, 9),
            "kl": 0.02 * share + abs(random_.gauss(0, 0.001)),
            "grad_norm": abs(0.8 - 0.3 * share + random_.gauss(0, 0.06)) + 4 * is_bad,
            "sampler_kl": 2e-4 + abs(random_.gauss(0, 5e-5)) + 0.06 * is_bad,
            "sampler_gap_max": 0.3 + abs(random_.gauss(0, 0.05)) + 8 * is_bad,
            "ratio_max": 1.4 + abs(random_.gauss(0, 0.1)),
            "clip_fraction_high": 0.01 + 0.02 * share + random_.random() * 0.004,
            "clip_fraction_low": 0.008 + random_.random() * 0.004,
            "zero_variance_fraction": min(1.0, 0.05 + 0.35 * share + random_.random() * 0.05),
            "staleness_mean": float(step % 3 == 0),
            "token_reduction": 3.4 + random_.gauss(0, 0.12),
            "tokens_per_second": 21_000 + random_.gauss(0, 700),
            "num_groups": 8.0,
        }
        for name, value in values.items():
            columns[name].append(value)
    return columns


def policy(run: MadeRun) -> dict[str, Any]:
    spec = {
        "policy_id": run.policy_id,
        "preset": None,
        "model_folder": "my-model",
        "full": {},
        "lora": None,
        "dtype": "bfloat16",
        "parallel": {"num_workers": 1},
        "keep_rollouts": "worst",
    }
    return {
        "spec": spec,
        "state": "ready",
        "version": run.num_steps,
        "next_seq": run.num_steps + 1,
        "created_at": f"2026-11-28T0{run.seed}:12:03.120Z",
        "num_parameters": 596_049_920,
        "num_trainable_parameters": 596_049_920,
        "vocab_size": 151_936,
        "attention_backend": "cuda",
        "published_version": run.num_steps,
        "failure": "",
        "optimizer_states": "bf16_split",
        "shard": "states",
    }


def list_steps(run: MadeRun, figures: list[str], after_seq: int, max_points: int) -> dict[str, Any]:
    columns = run.figures()
    seqs = list(range(after_seq + 1, run.num_steps + 1))
    width = max(1, math.ceil(len(seqs) / max_points))
    bins = [seqs[start : start + width] for start in range(0, len(seqs), width)]
    series = []
    for name in figures or NAMES:
        parts = [[columns[name][seq - 1] for seq in few] for few in bins]
        known = [[value for value in part if value is not None] for part in parts]
        series.append(
            {
                "figure": name,
                "mean": [sum(part) / len(part) if part else None for part in known],
                "low": [min(part, default=None) for part in known] if width > 1 else [],
                "high": [max(part, default=None) for part in known] if width > 1 else [],
            }
        )
    marks = []
    if run.bad is not None and run.bad > after_seq:
        kinds = ["dominant_rollout"] + ([HOSTILE] if run.hostile else [])
        mark = {"seq": run.bad, "version": run.bad, "kind": "update", "warnings": kinds}
        marks.append({**mark, "skip_reason": None})
    return {
        "seq": [few[-1] for few in bins],
        "version": [few[-1] for few in bins],
        "finished_at": [BEGUN + 4.0 * few[-1] for few in bins],
        "series": series,
        "marks": marks,
        "num_steps": len(seqs),
    }


def operation(run: MadeRun, seq: int) -> dict[str, Any]:
    report: dict[str, Any] = {name: values[seq - 1] for name, values in run.figures().items()}
    offender = {
        "group": BAD_GROUP,
        "group_id": group_id(run, BAD_GROUP),
        "rollout": BAD_ROLLOUT,
        "token": BAD_TOKEN,
        "value": 8.31,
    }
    warning = {
        "kind": "dominant_rollout",
        "message": "one rollout makes 93% of the sampler's gap: its log-probs are 0.31 nats a "
        "token from the policy's, those of the others 0.016; they are of other tokens or another "
        "prompt" + HOSTILE * run.hostile,
        "offenders": [offender],
    }
    report |= {
        "warnings": [warning] if seq == run.bad else [],
        "skipped": False,
        "skip_reason": None,
        "groups": [],
        "num_groups": NUM_GROUPS,
        "num_sequences": NUM_GROUPS * NUM_ROLLOUTS,
        "seconds": {"prepare": 0.04, "forward_backward": 2.71, "optimizer_step": 0.21},
    }
    at = f"2026-11-28T09:{seq // 15 % 60:02d}:{seq * 4 % 60:02d}"
    return {
        "operation_id": f"{run.policy_id}.{seq}",
        "policy_id": run.policy_id,
        "kind": "update",
        "seq": seq,
        "request_id": "",
        "state": "done",
        "blocked_by_seq": 0,
        "progress": {"micro_batches_done": 4, "micro_batches_planned": 4},
        "created_at": f"{at}.000Z",
        "started_at": f"{at}.010Z",
        "finished_at": f"{at}.970Z",
        "error": None,
        "step": {"version": seq, "report": report},
        "forward": None,
        "checkpoint": None,
        "imported": None,
    }


def group_id(run: MadeRun, group: int) -> str:
    return HOSTILE if run.hostile else f"sum-{1000 + 37 * group}"


def kept(run: MadeRun, seq: int, group: int, index: int, *, whole: bool) -> dict[str, Any]:
    """A rollout; the planted one has a gap of 8.31 nats at one token and smaller ones after it."""
    random_ = random.Random(seq * 10_000 + group * 100 + index + 7 * run.seed)
    length = random_.randint(36, len(WORDS) + 30)
    is_bad = (seq, group, index) == (run.bad, BAD_GROUP, BAD_ROLLOUT)
    gaps: list[float | None] = [random_.gauss(0, 0.02) for _ in range(length)]
    if is_bad:
        gaps[BAD_TOKEN : BAD_TOKEN + 4] = [-8.31, -2.2, 0.9, -0.4]
    sizes = [abs(gap or 0) for gap in gaps]
    worst = max(range(length), key=sizes.__getitem__)
    ratios = [math.exp(gap or 0) for gap in gaps]
    reward = float(random_.random() < 0.5)
    answer: dict[str, Any] = {
        "group": group,
        "group_id": group_id(run, group),
        "rollout": index,
        "prompt_tokens": PROMPT,
        "response_tokens": length,
        "reward": reward,
        "advantage": reward - 0.5,
        "gap_abs_mean": sum(sizes) / length,
        "gap_max": gaps[worst],
        "gap_max_token": worst,
        "ratio_max": max(ratios),
        "ratio_max_token": worst,
        "clip_fraction": sum(abs(ratio - 1) > 0.2 for ratio in ratios) / length,
        "policy_version": seq - 1,
        "weight_share": 0.93 if is_bad else 0.001,
        "truncated": length == len(WORDS) + 30,
        "dropped": False,
        "leaf": NUM_GROUPS + group * NUM_ROLLOUTS + index,
    }
    if not whole:
        return answer
    prompt = "Ann has twelve apples . She gives three away , and then half . How many are left ?\n"
    texts = [f"{word} " for word in (prompt.split(" ") * 2)[:PROMPT]]
    texts += [f" {WORDS[i % len(WORDS)]}" for i in range(length)]
    if run.hostile:
        texts[PROMPT + BAD_TOKEN] = HOSTILE
    return answer | {
        "tokens": [random_.randint(0, 151_000) for _ in texts],
        "texts": texts,
        "advantages": [answer["advantage"]] * length,
        "gaps": gaps,
        "ratios": ratios,
        "clipped": [abs(ratio - 1) > 0.2 for ratio in ratios],
        "trained": [i % 41 != 40 for i in range(length)],
    }


def rollouts(run: MadeRun, seq: int) -> dict[str, Any]:
    pairs = [(group, index) for group in range(NUM_GROUPS) for index in range(NUM_ROLLOUTS)]
    rows = [kept(run, seq, *pair, whole=False) for pair in pairs]
    rewards = [row["reward"] for row in rows]
    means = [
        sum(rewards[group * NUM_ROLLOUTS : (group + 1) * NUM_ROLLOUTS]) / NUM_ROLLOUTS
        for group in range(NUM_GROUPS)
    ]
    forest = {
        "parent": [-1] * NUM_GROUPS + [group for group, _ in pairs],
        "num_tokens": [PROMPT] * NUM_GROUPS + [row["response_tokens"] for row in rows],
        "num_rollouts": [NUM_ROLLOUTS] * NUM_GROUPS + [1] * len(rows),
        "reward_mean": means + rewards,
    }
    return {"rollouts": rows, "forest": forest}


def large_forest(num_nodes: int) -> dict[str, list[Any]]:
    """Branching trees of `num_nodes` in all, parents before children."""
    random_ = random.Random(1)
    parent = [-1] * 40
    while len(parent) < num_nodes:
        parent.append(random_.randrange(max(0, len(parent) - 4000), len(parent)))
    has_child = set(parent)
    counts = [0 if i in has_child else 1 for i in range(num_nodes)]
    for i in reversed(range(num_nodes)):
        if parent[i] >= 0:
            counts[parent[i]] += counts[i]
    return {
        "parent": parent,
        "num_tokens": [random_.randint(1, 400) for _ in parent],
        "num_rollouts": counts,
        "reward_mean": [random_.random() for _ in parent],
    }
