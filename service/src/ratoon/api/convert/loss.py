"""Loss and optimizer step of a call.

Only names and presence are checked here; `train.loss.resolve` checks the numbers against the batch.
"""

from __future__ import annotations

from ratoon.api.convert.checks import at_least
from ratoon.api.convert.records import read
from ratoon_proto.types import LossConfig, OptimStepConfig
from ratoon_proto.v1 import training_pb2 as wire


def loss_request(message: wire.LossConfig) -> LossConfig:
    """Raises INVALID_ARGUMENT naming the field below `loss`."""
    loss = read(message, LossConfig, "loss")
    if loss.staleness is not None:
        at_least("loss.staleness.max_versions", loss.staleness.max_versions, 0)
    return loss


def optim_request(message: wire.OptimStepConfig) -> OptimStepConfig:
    """Raises INVALID_ARGUMENT naming the field below `optim`."""
    return read(message, OptimStepConfig, "optim")
