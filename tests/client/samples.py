"""Small groups for calls whose content does not matter."""

from __future__ import annotations

from ratoon_client import Group, Loss, Optim, group, rollout

LOSS = Loss("grpo")
OPTIM = Optim(learning_rate=1e-3)


def one_group(name: str = "g", *, num_tokens: int = 3) -> list[Group]:
    """A group of two rollouts of `num_tokens` and `num_tokens + 1` tokens."""
    rollouts = [
        rollout(
            response=list(range(length)),
            sampler_logprobs=[-0.5] * length,
            reward=float(length),
            policy_version=0,
        )
        for length in (num_tokens, num_tokens + 1)
    ]
    return [group(name, [1, 2, 3], rollouts)]


def bad_group() -> list[Group]:
    """What the fake refuses at validation."""
    return [group("empty", [1], [])]
