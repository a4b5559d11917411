"""JSON bodies of the Tinker wire.

A newer SDK sends fields that this service does not know. They are kept beside the others, so that
they are counted and logged, and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seq = Annotated[int, Field(ge=1, lt=2**31)]
Number = Annotated[int, Field(ge=0, lt=10**6)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
# At most 100 years.
TtlSeconds = Annotated[int, Field(gt=0, le=100 * 366 * 86_400)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """A body, or an object within one."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())

    def unknown_fields(self) -> Iterator[str]:
        """Yield the paths of fields that are not known."""
        yield from self.model_extra or ()
        for name in type(self).model_fields:
            if isinstance(value := getattr(self, name), Body):
                yield from (f"{name}.{field}" for field in value.unknown_fields())


class CreateSession(Body):
    type: str = ""
    tags: list[str] = []
    user_metadata: dict[str, object] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Body):
    type: str = ""
    session_id: str


class Lora(Body):
    rank: int
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    type: str = ""
    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: Optimizer | None = None
    user_metadata: dict[str, object] | None = None


class OfModel(Body):
    type: str = ""
    model_id: str


class OfPath(Body):
    tinker_path: str
    access_scope: str | None = None


class AdamParams(Body):
    learning_rate: _Finite = 1e-4
    beta1: _Finite = 0.9
    beta2: _Finite = 0.95
    eps: _Finite = 1e-12
    weight_decay: _Finite = 0.0
    grad_clip_norm: _Finite = 0.0


class OptimStep(OfModel):
    seq_id: Seq
    adam_params: AdamParams


class Ttl(Body):
    ttl_seconds: TtlSeconds | None


class SaveWeights(OfModel):
    seq_id: Seq
    path: str | None = None
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, object] | None = None


class SaveWeightsForSampler(OfModel):
    seq_id: Seq
    path: str | None = None
    sampling_session_seq_id: Annotated[int, Field(ge=0)] | None = None
    kind: str = "snapshot"
    ttl_seconds: TtlSeconds | None = None
    user_metadata: dict[str, object] | None = None


class SamplingSource(Body):
    """Weights to sample from: a base model, or a path of weights that were saved for it."""

    type: str = ""
    base_model: str | None = None
    model_path: str | None = None


class CreateSamplingSession(SamplingSource):
    session_id: str
    sampling_session_seq_id: int = 0


class PromptChunk(Body):
    type: str = "encoded_text"
    tokens: list[_Token] = []


class Prompt(Body):
    chunks: list[PromptChunk]


class SamplingParams(Body):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | list[_Token] | None = None
    temperature: _Finite = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: _Finite = 1.0


class TensorData(Body):
    """Integers, dense or as CSR: then `data` has the listed ones."""

    data: list[Annotated[int, Field(ge=-1, lt=2**31)]]
    dtype: Literal["int64"]
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]]
    sparse_crow_indices: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None
    sparse_col_indices: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = None


class Asample(SamplingSource):
    num_samples: Annotated[int, Field(ge=1, le=2**20)] = 1
    prompt: Prompt
    sampling_params: SamplingParams = SamplingParams()
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, lt=2**31)] = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    # For a loss that is refused by its name.
    record_stability_info: bool = False


class LoadWeights(Body):
    """Either an existing model with a seq, or a new one of a session."""

    type: str = ""
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Seq | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, object] | None = None
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False
