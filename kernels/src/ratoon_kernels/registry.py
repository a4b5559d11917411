"""Which backends exist for each op, and which of them serves a call.

In: an op's name, the backend asked for (or None), and the device, dtype and width of the call.
Out: the name of one backend that can serve it. Invariant: a backend asked for by name is that
backend or an error with its reason; another one never takes its place.

A backend is one module with two functions beside the op's own (its protocol is in `op.py`):
`unavailable_reason()` about this machine and `unsupported_reason(device, dtype, head_dim)` about a
call. It is imported when first asked about; a module that needs an optional package imports that
package inside its functions, so that `unavailable_reason` can say what is missing. A new backend
is that module and one line in `_BACKEND_MODULES`.
"""

import functools
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, cast

import torch

from ratoon_kernels.errors import BackendUnavailableError

_logger = logging.getLogger(__name__)

# In order of preference, the best first.
_BACKEND_MODULES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "tree_attention": MappingProxyType(
            {"reference": "ratoon_kernels.tree_attention.reference"},
        ),
        "token_logprobs": MappingProxyType(
            {"reference": "ratoon_kernels.token_logprobs.reference"},
        ),
    }
)


class Backend(Protocol):
    """What every backend module answers, whatever its op."""

    def unavailable_reason(self) -> str | None:
        """Returns why this machine cannot run the backend at all, or None."""
        ...

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, /
    ) -> str | None:
        """Returns why the backend does not serve such a call, or None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """One backend of one op on this machine; `reason` is empty where it is available."""

    op: str
    name: str
    is_available: bool
    reason: str


@torch.compiler.assume_constant_result
def load_backend(op: str, name: str) -> object:
    """Imports the module of a backend.

    Raises:
        BackendUnavailableError: The op has no backend of that name.
    """
    modules = _BACKEND_MODULES[op]
    if name not in modules:
        raise BackendUnavailableError(op, name, f"there is none of that name, only {list(modules)}")
    return importlib.import_module(modules[name])


def list_backends() -> list[BackendStatus]:
    """Returns every backend of every op, best first, with its reason where it is unavailable."""
    statuses: list[BackendStatus] = []
    for op, modules in _BACKEND_MODULES.items():
        for name in modules:
            reason = cast(Backend, load_backend(op, name)).unavailable_reason()
            statuses.append(
                BackendStatus(op=op, name=name, is_available=reason is None, reason=reason or "")
            )
    return statuses


# torch.compile runs this once while it traces, and keeps the name: the choice depends on nothing
# that a compiled graph can change, and logging is not traceable.
@torch.compiler.assume_constant_result
def select_backend(
    op: str, requested: str | None, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str:
    """Returns the backend for a call: the one asked for, else the best that can serve it.

    The first choice of each backend is logged once per process.

    Args:
        op: "tree_attention" or "token_logprobs".
        requested: A backend's name, or None for the best one.
        device: Device of the call's tensors.
        dtype: Dtype of the call's tensors.
        head_dim: Their innermost size (the hidden size for token_logprobs).

    Raises:
        BackendUnavailableError: The one asked for cannot serve the call, or none can.
    """
    names = list(_BACKEND_MODULES[op]) if requested is None else [requested]
    refusals: list[str] = []
    for name in names:
        backend = cast(Backend, load_backend(op, name))
        reason = backend.unavailable_reason() or backend.unsupported_reason(device, dtype, head_dim)
        if reason is None:
            _log_choice(op, name)
            return name
        refusals.append(reason if requested is not None else f"{name}: {reason}")
    raise BackendUnavailableError(op, requested or "any", "; ".join(refusals))


@functools.cache
def _log_choice(op: str, name: str) -> None:
    _logger.info("kernel backend chosen: op=%s backend=%s", op, name)
