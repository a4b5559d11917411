"""Converts one call's operands into the form of the kernels, for all launchers of the cuda backend.

The copy engine can walk the converted tensors (16-byte addresses and strides), and the scale is
positive.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon_kernels.jit import Kernel, load
from ratoon_kernels.schedule import ScheduleHeader, Section
from ratoon_kernels.tree_attention.cuda_specs import kernel_spec
from ratoon_kernels.tree_attention.operands import Operands

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the op.

    Attributes:
        q_QNH: Queries times `sign`.
        k_SKH: Keys.
        v_SKH: Values.
        table: Packed schedule on the GPU, int32.
        header: Where its sections lie.
        scale: Factor of q k^T, positive.
        sign: What the caller's scale was divided by: 1, -1, or 0 for a scale of 0. The gradient of
            the caller's q is that of `q_QNH` times it.
        is_partial: Results in fp32, dK and dV added to buffers.
        is_deterministic: Same bits on every call are required.
        sink_N: Logits that join the softmax's denominator, fp32, or None.
    """

    q_QNH: Tensor
    k_SKH: Tensor
    v_SKH: Tensor
    table: Tensor
    header: ScheduleHeader
    scale: float
    sign: int
    is_partial: bool
    is_deterministic: bool
    sink_N: Tensor | None

    @staticmethod
    def of(operands: Operands, *, is_partial: bool) -> "Call":
        """Brings operands into the shape of the kernels; copies only what the GPU cannot walk."""
        table, header = operands.plan
        sign = int(math.copysign(1, operands.scale)) if operands.scale else 0
        q_QNH = operands.q_QNH if sign == 1 else operands.q_QNH * sign
        sink_N = operands.sink_N
        return Call(
            q_QNH=aligned(q_QNH),
            k_SKH=aligned(operands.k_SKH),
            v_SKH=aligned(operands.v_SKH),
            table=table,
            header=ScheduleHeader.from_tensor(header),
            scale=abs(operands.scale) or 1.0,
            sign=sign,
            is_partial=is_partial,
            is_deterministic=operands.is_deterministic,
            sink_N=None if sink_N is None else sink_N.float().contiguous(),
        )

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self.q_QNH.device

    @property
    def scale_log2(self) -> float:
        """Scale of logits whose exponential has base 2."""
        return self.scale / math.log(2)

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share a kv head."""
        return self.q_QNH.shape[1] // self.k_SKH.shape[1]

    @property
    def stream(self) -> int:
        """The current stream of the GPU."""
        return torch.cuda.current_stream(self.device).cuda_stream

    def kernel(self, name: str, *, with_dq: bool = True) -> Kernel:
        """Returns this call's variant of a kernel, compiled at the first request."""
        spec = kernel_spec(
            name,
            self.q_QNH.shape[2],
            self.v_SKH.shape[2],
            self.q_QNH.dtype,
            is_partial=self.is_partial,
            is_windowed=self.header.start.count > 0,
            with_dq=with_dq,
        )
        return load(spec, self.device.index)

    def section(self, section: Section) -> int:
        """Returns the address of a section of the schedule."""
        return self.table.data_ptr() + 4 * section.offset

    def empty(self, *shape: int) -> Tensor:
        """Returns an fp32 buffer that is not initialised."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def grid(self, num_items: int) -> tuple[int, int, int]:
        """Returns the blocks of a persistent kernel: no more than there is work or room for."""
        return min(num_items, _num_multiprocessors(self.device.index)), 1, 1


def aligned(x: Tensor) -> Tensor:
    """Returns the tensor, or a contiguous copy where address or strides are not whole 16 bytes."""
    step = _ALIGNMENT_BYTES // x.element_size()
    if x.data_ptr() % _ALIGNMENT_BYTES == 0 and all(
        stride % step == 0 for stride in x.stride()[:2]
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@functools.cache
def _num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count
