"""What the clients of these tests send. It imports the client alone, to start quickly."""

from __future__ import annotations

from ratoon_client import Group, Loss, Optim, group, rollout

LOSS = Loss("grpo")
# Every update makes a version, whatever its loss clips.
OPTIM = Optim(learning_rate=1e-3, step_on_zero_gradient=True)


def batch(num_groups: int = 2, num_tokens: int = 8) -> list[Group]:
    return [
        group(
            f"group-{index}",
            [1, 2, 3, index],
            [
                rollout(
                    response=[(4 + index + token + side) % 256 for token in range(num_tokens)],
                    sampler_logprobs=[-5.0 - 0.25 * side] * num_tokens,
                    reward=float(side),
                    policy_version=0,
                )
                for side in range(2)
            ],
        )
        for index in range(num_groups)
    ]
