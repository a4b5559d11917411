"""Argument checks of token log-probs.

Values are checked only on the CPU, where that costs no synchronisation.
"""

import torch
from torch import Tensor

from ratoon_kernels.errors import KernelArgumentError
from ratoon_kernels.precision import ACCUMULATION_DTYPES
from ratoon_kernels.token_logprobs.operands import Operands


def check_shapes(
    hidden_RD: Tensor,
    lm_head_VD: Tensor,
    targets_M: Tensor,
    row_of_target_M: Tensor,
    temperature_R: Tensor,
) -> None:
    """Raises `KernelArgumentError` for a wrong shape, dtype or device."""
    num_rows = hidden_RD.shape[0] if hidden_RD.ndim else 0
    num_targets = targets_M.shape[0] if targets_M.ndim else 0
    expected_dims = (
        ("hidden_RD", hidden_RD, 2),
        ("lm_head_VD", lm_head_VD, 2),
        ("targets_M", targets_M, 1),
        ("row_of_target_M", row_of_target_M, 1),
        ("temperature_R", temperature_R, 1),
    )
    for name, tensor, num_dims in expected_dims:
        if tensor.ndim != num_dims:
            raise KernelArgumentError(name, f"{tensor.ndim} dimensions, expected {num_dims}")
        if tensor.device != hidden_RD.device:
            got = f"on {tensor.device}, expected {hidden_RD.device} as hidden_RD"
            raise KernelArgumentError(name, got)
    expected_dtypes = (
        ("hidden_RD", hidden_RD, tuple(ACCUMULATION_DTYPES)),
        ("lm_head_VD", lm_head_VD, (hidden_RD.dtype,)),
        ("targets_M", targets_M, (torch.int64,)),
        ("row_of_target_M", row_of_target_M, (torch.int64,)),
        ("temperature_R", temperature_R, (torch.float32, torch.float64)),
    )
    for name, tensor, dtypes in expected_dtypes:
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(dtype) for dtype in dtypes)
            raise KernelArgumentError(name, f"dtype {tensor.dtype}, expected {expected}")
    if lm_head_VD.shape[0] == 0 or lm_head_VD.shape[1] != hidden_RD.shape[1]:
        got = f"shape {tuple(lm_head_VD.shape)}, expected [1 or more, {hidden_RD.shape[1]}]"
        raise KernelArgumentError("lm_head_VD", got)
    if row_of_target_M.shape[0] != num_targets:
        got = f"{row_of_target_M.shape[0]} values, expected {num_targets} as targets_M"
        raise KernelArgumentError("row_of_target_M", got)
    if temperature_R.shape[0] != num_rows:
        got = f"{temperature_R.shape[0]} values, expected {num_rows} as hidden_RD"
        raise KernelArgumentError("temperature_R", got)


def check_values(operands: Operands) -> None:
    """Checks indices and temperatures where that costs no synchronisation."""
    if operands.hidden_RD.device.type != "cpu":
        return
    indices = (
        ("targets_M", operands.targets_M, len(operands.lm_head_VD)),
        ("row_of_target_M", operands.row_of_target_M, len(operands.hidden_RD)),
    )
    for name, index_M, size in indices:
        _require_all((index_M >= 0) & (index_M < size), name, index_M, f"in [0, {size})")
    temperature_R = operands.temperature_R
    is_positive = (temperature_R > 0) & temperature_R.isfinite()
    _require_all(is_positive, "temperature_R", temperature_R, "a positive finite number")


def _require_all(holds: Tensor, name: str, values: Tensor, rule: str) -> None:
    if not holds.all():
        first = int(holds.logical_not().nonzero()[0])
        raise KernelArgumentError(name, f"value {values[first].item()} at {first}, expected {rule}")
