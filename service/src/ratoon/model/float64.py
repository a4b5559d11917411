"""True float64, which makes a float64 model a proof.

transformers computes norms and router probabilities in float32 whatever the model's dtype, so
gradients are rounded to float32 once per token that the model sees: a packed and a replicated run
of one model differ by 1e-7. Under `Float64Math` every explicit float32 is float64. Only
`ModelDtype.FLOAT64` uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Math(TorchFunctionMode):
    """Within this mode, `x.float()`, `x.to(torch.float32)` and `dtype=torch.float32` mean
    float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        widened = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **widened)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
