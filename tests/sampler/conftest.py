"""Weights to sample from that several tests share."""

from __future__ import annotations

from ratoon.model.spec import ModelDtype, ModelSpec, PresetBase
from ratoon.sampler.port import Weights
from ratoon_proto.types import FullTuning

WEIGHTS = Weights(
    policy_id="p",
    base="tiny",
    model=ModelSpec(
        base=PresetBase(name="tiny"), tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=0
    ),
    version=None,
    folder=None,
    digest="",
)
