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


class SaveWeights(OfModel):
    seq_id: Seq
    path: str | None = None
    ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    overwrite: bool = False
    user_metadata: dict[str, object] | None = None


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
