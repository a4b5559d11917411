"""Describes a policy's model and everything that decides its initial weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ratoon_proto.types import (
    FullTuning,
    LoraTuning,
    WeightFile,
)

PRESET_NAMES = ("tiny", "small", "tiny-qwen3.5", "tiny-gpt-oss")


class ModelDtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    # Float64 is for proofs of exactness; the wire does not offer it.
    FLOAT64 = "float64"


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetBase:
    """A built-in random model, one of PRESET_NAMES."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderBase:
    """A Hugging Face model folder; `folder` is an absolute path below the models root.

    One that was sent consists of `files`, and is the policy's own folder (""; not placed yet).
    """

    folder: str
    files: tuple[WeightFile, ...] = ()

    @property
    def is_sent(self) -> bool:
        return bool(self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    base: PresetBase | FolderBase
    tuning: FullTuning | LoraTuning
    dtype: ModelDtype
    # Seed of random initial weights and adapters.
    seed: int
    # Whether there is a value head beside the LM head.
    value_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts that a loaded model reports to its policy; counts are parameters, lengths are
    tokens."""

    num_parameters: int
    num_trainable_parameters: int
    vocab_size: int
    max_sequence_tokens: int
    attention_backend: str
    # Name of the `train.config.OptimizerStates` that the trainer keeps. "": not known.
    optimizer_states: str = ""
    # Name of the `train.config.Shard`: what the ranks share. "": not known.
    shard: str = ""
    # Nodes each of which has the weights that its ranks share; 0: not known, or none are shared.
    num_nodes: int = 0
    # Whether it was loaded on a GPU; the policy sets it.
    uses_gpu: bool = False
    # Layers with experts, and the experts of each; 0 for a dense model.
    route_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    # Window, in tokens, that other readers of the folder may have and transformers does not; 0:
    # there is none. No sequence is longer.
    sliding_window: int = 0
    # Tokens that stand for images or videos, which no rollout has, by their fields in config.json.
    media_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
