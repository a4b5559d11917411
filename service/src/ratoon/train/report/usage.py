"""How much of the device a pass used; None where the device's peak is not known."""

from __future__ import annotations

from dataclasses import dataclass

from ratoon.model.policy_model import PolicyModel
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.train.numerics import peak_memory_bytes
from ratoon.train.passes import ForwardColumns, PassTotals
from ratoon.train.report import flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Share of the device's peak, None where that is not known; memory in bytes."""

    hardware_mfu: float | None
    logical_mfu: float | None
    peak_memory_bytes: int


class UsageMeter:
    """Holds the sizes of one model and the peak of its devices, of which each has it whole."""

    def __init__(self, model: PolicyModel, num_devices: int) -> None:
        self._device = model.device
        self._geometry = flops.geometry(model)
        peak = flops.peak_flops(model.device, model.lm_head_VD.dtype)
        self._peak_flops = None if peak is None else peak * num_devices

    def training(self, batch: RolloutBatch, plan: UpdatePlan, totals: PassTotals) -> Usage:
        """Usage of a forward-backward."""
        packed = flops.packed_work(plan, totals.rows)
        logical = flops.logical_work(batch, plan)
        return self._usage(
            flops.training_flops(self._geometry, packed),
            flops.training_flops(self._geometry, logical),
            totals.forward_s + totals.backward_s,
        )

    def forward(self, batch: RolloutBatch, plan: UpdatePlan, columns: ForwardColumns) -> Usage:
        """Usage of a forward alone."""
        packed = flops.packed_work(plan, columns.rows)
        logical = flops.logical_work(batch, plan)
        return self._usage(
            flops.forward_flops(self._geometry, packed),
            flops.forward_flops(self._geometry, logical),
            columns.forward_s,
        )

    def _usage(self, hardware_flops: float, logical_flops: float, seconds: float) -> Usage:
        return Usage(
            hardware_mfu=flops.utilisation(hardware_flops, seconds, self._peak_flops),
            logical_mfu=flops.utilisation(logical_flops, seconds, self._peak_flops),
            peak_memory_bytes=peak_memory_bytes(self._device),
        )
