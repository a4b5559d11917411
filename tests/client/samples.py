"""Groups and manifests for calls whose content does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import xxhash

from ratoon_client import Group, Loss, Optim, group, rollout
from ratoon_proto.types import WeightFile, WeightKind, WeightManifest

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


def weight_file(name: str, data: bytes = b"") -> WeightFile:
    return WeightFile(name=name, size_bytes=len(data), digest=xxhash.xxh3_128_hexdigest(data))


def manifest(
    version: int = 1,
    files: Sequence[WeightFile] = (weight_file("model.safetensors"),),
    *,
    kind: WeightKind = WeightKind.FULL,
    policy_id: str = "p",
) -> WeightManifest:
    return WeightManifest(
        policy_id=policy_id,
        version=version,
        kind=kind,
        files=tuple(files),
        deltas=(),
        created_at=datetime.now(UTC),
    )
