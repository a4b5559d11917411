"""What CreatePolicy can be told; what is left out is the service's default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

Sequencing = Literal["client", "server"]
Recovery = Literal["replay", "fail"]
OnChangedNumerics = Literal["stop", "rebase"]
PublishKind = Literal["every", "every_n", "on_request"]
ModelDtype = Literal["float32", "bfloat16"]
ReferencePolicy = Literal["none", "base"]
Shard = Literal["states", "gradients", "weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Train an adapter; no `target_modules` means every linear projection of attention and MLP.

    An expert has factors of its own for each of gate_proj, up_proj and down_proj, which are named
    together or not at all.
    """

    rank: int
    alpha: float
    target_modules: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Defaults 0.9, 0.95, 1e-8, 0.01."""

    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """When weights are written for readers; `every_n` counts versions, for that kind alone.

    With `deltas` a reader that has the version before pulls only what changed since.
    """

    kind: PublishKind
    every_n: int | None = None
    deltas: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Devices of the policy, `num_workers` of them, and what they share out.

    `shard` absent: the first of `states`, `gradients` and `weights` that leaves a quarter of a GPU
    for activations, or what leaves most (on CPUs `states`; `weights` on one node alone).
    `sequence_ranks` devices run one group together; absent: as each plan chooses.
    """

    num_workers: int
    shard: Shard | None = None
    sequence_ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsGuard:
    """Limits above which a step is skipped; absent: none. KLs in nats a token.

    `max_skipped_in_row` steps skipped for their numbers, one after the other, fail the policy;
    absent: 5, 0: never.
    """

    max_grad_norm_to_step: float | None = None
    max_reference_kl_to_step: float | None = None
    max_sampler_kl_to_step: float | None = None
    max_skipped_in_row: int | None = None


class PolicyOptions(TypedDict, total=False):
    """One of `preset` and `model_folder` is needed; `lora` absent trains every parameter."""

    preset: str
    model_folder: str
    lora: Lora
    optimizer: AdamW
    dtype: ModelDtype
    seed: int
    sequencing: Sequencing
    deterministic: bool
    recovery: Recovery
    on_changed_numerics: OnChangedNumerics
    publish: Publish
    keep_versions: int
    # Packed tokens of one micro-batch; absent: the server's, or what each plan chooses.
    micro_batch_tokens: int
    reference: ReferencePolicy
    parallel: Parallel
    attention_backend: str
    numerics_guard: NumericsGuard
