"""Defines the dtypes that the ops take, and the dtype that each accumulates in.

Sums, log-sum-exps and log-probs are never kept in a 16-bit dtype.
"""

from types import MappingProxyType
from typing import Final

import torch

ACCUMULATION_DTYPES: Final = MappingProxyType(
    {
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
        torch.float32: torch.float32,
        torch.float64: torch.float64,
    }
)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns fp64 for fp64 and fp32 for every other supported dtype.

    Raises:
        KeyError: The dtype is none of `ACCUMULATION_DTYPES` (callers check it first).
    """
    return ACCUMULATION_DTYPES[dtype]
