"""Settings of torch that hold for a whole process, and that a trainer changes for its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._inductor import config as inductor_config


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSettings:
    """What `ratoon.train.numerics.configure_torch` sets."""

    threads: int
    is_deterministic: bool
    fills_empty: bool
    float32_products: str
    compiles_deterministic: bool

    @classmethod
    def of_this_process(cls) -> TorchSettings:
        return cls(
            threads=torch.get_num_threads(),
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            fills_empty=cast("Any", torch.utils.deterministic).fill_uninitialized_memory,
            float32_products=torch.get_float32_matmul_precision(),
            compiles_deterministic=cast("Any", inductor_config).deterministic,
        )

    def restore(self) -> None:
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.is_deterministic)
        cast("Any", torch.utils.deterministic).fill_uninitialized_memory = self.fills_empty
        torch.set_float32_matmul_precision(self.float32_products)
        cast("Any", inductor_config).deterministic = self.compiles_deterministic
