"""Which model a policy is, and everything that decides its initial weights. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ratoon_proto.types import (
    FullTuning,
    LoraTuning,
)

PRESET_NAMES = ("tiny", "small")


class ModelDtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    # For proofs of exactness; not offered on the wire.
    FLOAT64 = "float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetBase:
    """A built-in random model, one of PRESET_NAMES."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderBase:
    """A Hugging Face model folder; `folder` is an absolute path below the models root."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    base: PresetBase | FolderBase
    tuning: FullTuning | LoraTuning
    dtype: ModelDtype
    # Of random initial weights and adapters.
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a loaded model tells its policy; counts are parameters, lengths are tokens."""

    num_parameters: int
    num_trainable_parameters: int
    vocab_size: int
    max_sequence_tokens: int
    attention_backend: str
    # By name, of `train.config.OptimizerStates`: what the trainer keeps. "": nobody has said it.
    optimizer_states: str = ""
    # The same of `train.config.Shard`: what its ranks share out.
    shard: str = ""
    # Whether it was loaded on a GPU; its policy says it.
    uses_gpu: bool = False
    # Layers with experts, and the experts of each; 0 of a dense model.
    route_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    # Tokens that attention goes back to in all layers or in some, 0 where no layer has a window. No
    # sequence is longer, so that attention is full.
    sliding_window: int = 0
