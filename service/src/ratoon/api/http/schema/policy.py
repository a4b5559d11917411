"""`policy.proto` as JSON. Invariant: field for field the messages of the same names."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from ratoon.api.http.schema.base import Bool, Float, Int32, Int64, Text, UInt64, WireModel, example
from ratoon.engine.types import (
    OnChangedNumerics,
    PolicyState,
    PublishKind,
    Recovery,
    ReferencePolicy,
    Sequencing,
)

_EXAMPLE_SPEC = {
    "policy_id": "tiny-grpo",
    "preset": "tiny",
    "full": {},
    "optimizer": {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01},
    "dtype": "float32",
    "seed": 7,
    "sequencing": "client",
}


class FullTuning(WireModel):
    """Every parameter is trained."""


class LoraTuning(WireModel):
    rank: Int32
    alpha: Float
    target_modules: list[Text] | None = None


class AdamWConfig(WireModel):
    beta1: Float | None = None
    beta2: Float | None = None
    eps: Float | None = None
    weight_decay: Float | None = None


class PublishConfig(WireModel):
    kind: PublishKind | None = None
    every_n: Int32 | None = None


class ParallelLayout(WireModel):
    num_workers: Int32 | None = None


class NumericsGuard(WireModel):
    max_grad_norm_to_step: Float | None = None
    max_reference_kl_to_step: Float | None = None
    max_sampler_kl_to_step: Float | None = None
    max_skipped_in_row: Int32 | None = None


class PolicySpec(WireModel):
    """Exactly one of `preset` and `model_folder`; `full` (the default) or `lora`."""

    model_config = example(_EXAMPLE_SPEC)

    policy_id: Text
    preset: Text | None = None
    model_folder: Text | None = None
    full: FullTuning | None = None
    lora: LoraTuning | None = None
    optimizer: AdamWConfig | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    seed: UInt64 | None = None
    sequencing: Sequencing | None = None
    deterministic: Bool | None = None
    recovery: Recovery | None = None
    on_changed_numerics: OnChangedNumerics | None = None
    publish: PublishConfig | None = None
    keep_versions: Int32 | None = None
    micro_batch_tokens: Int64 | None = None
    reference: ReferencePolicy | None = None
    parallel: ParallelLayout | None = None
    attention_backend: Text | None = None
    numerics_guard: NumericsGuard | None = None


class Policy(WireModel):
    spec: PolicySpec
    state: PolicyState
    version: int
    next_seq: int
    created_at: datetime
    num_parameters: int
    num_trainable_parameters: int
    vocab_size: int
    max_sequence_tokens: int
    attention_backend: str
    optimizer_states: str
    published_version: int | None
    failure: str


class CreatePolicyRequest(WireModel):
    model_config = example({"spec": _EXAMPLE_SPEC})

    spec: PolicySpec


class ListPoliciesResponse(WireModel):
    policies: list[Policy]
