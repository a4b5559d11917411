"""Protocol of every backend module, whatever its op.

Importing a backend's module needs only torch and numpy. Functions import any other package that the
backend needs, so that `unavailable_reason` can report that it is missing.
"""

from typing import Protocol

import torch


class Backend(Protocol):
    """A backend of any op; each op's own protocol adds what it computes."""

    def unavailable_reason(self) -> str | None:
        """Returns why this machine cannot run the backend at all, or None."""
        ...

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, is_deterministic: bool, /
    ) -> str | None:
        """Returns why the backend does not serve such a call, or None.

        A deterministic call asks for the same bits every time, in forward and backward.
        """
        ...
