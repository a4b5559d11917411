"""The report of a step."""

from ratoon_proto.types import (
    PhaseSeconds,
    RouterReport,
    SelfCheckReport,
    SkipReason,
    StepReport,
    TensorGradNorm,
)

__all__ = [
    "PhaseSeconds",
    "RouterReport",
    "SelfCheckReport",
    "SkipReason",
    "StepReport",
    "TensorGradNorm",
]
