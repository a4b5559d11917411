"""Lists the backends of each op, and selects the one that serves a call.

A backend requested by name is that backend, or an error with its reason; another one never replaces
it.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from ratoon_kernels.backend import Backend
from ratoon_kernels.errors import BackendUnavailableError
from ratoon_kernels.token_logprobs import backends as token_logprobs
from ratoon_kernels.tree_attention import backends as tree_attention

_logger = logging.getLogger(__name__)

_BACKENDS: Final[Mapping[str, Mapping[str, Backend]]] = MappingProxyType(
    {
        tree_attention.OP: tree_attention.BACKENDS,
        token_logprobs.OP: token_logprobs.BACKENDS,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """One backend of one op on this machine; `reason` is empty where it is available."""

    op: str
    name: str
    is_available: bool
    reason: str


def list_backends() -> list[BackendStatus]:
    """Returns every backend of every op, best first, with its reason where it is unavailable."""
    statuses: list[BackendStatus] = []
    for op, backends in _BACKENDS.items():
        for name, backend in backends.items():
            reason = backend.unavailable_reason()
            statuses.append(
                BackendStatus(op=op, name=name, is_available=reason is None, reason=reason or "")
            )
    return statuses


# torch.compile runs this once while it traces, and keeps the name: the choice depends on nothing
# that a compiled graph can change, and logging is not traceable.
@torch.compiler.assume_constant_result
def select_backend(
    op: str,
    requested: str | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    deterministic: bool = False,
) -> str:
    """Returns the backend for a call: the one asked for, else the best that can serve it.

    The first choice of each backend is logged once per process.

    Args:
        op: "tree_attention" or "token_logprobs".
        requested: A backend's name, or None for the best one.
        device: Device of the call's tensors.
        dtype: Dtype of the call's tensors.
        head_dim: Their innermost size (the hidden size for token_logprobs).
        deterministic: Require a backend whose forward and backward repeat their bits.

    Raises:
        BackendUnavailableError: The one asked for cannot serve the call, or none can.
    """
    backends = _BACKENDS[op]
    if requested is not None and requested not in backends:
        reason = f"there is none of that name, only {list(backends)}"
        raise BackendUnavailableError(op, requested, reason)
    refusals: list[str] = []
    for name in backends if requested is None else [requested]:
        backend = backends[name]
        reason = backend.unavailable_reason() or backend.unsupported_reason(
            device, dtype, head_dim, deterministic
        )
        if reason is None:
            _log_choice(op, name)
            return name
        refusals.append(reason if requested is not None else f"{name}: {reason}")
    raise BackendUnavailableError(op, requested or "any", "; ".join(refusals))


def max_tokens(backend: str) -> int | None:
    """Returns the most packed tokens that a backend of tree attention serves; None: any number."""
    return tree_attention.MAX_TOKENS.get(backend)


@functools.cache
def _log_choice(op: str, name: str) -> None:
    _logger.info("kernel backend chosen: op=%s backend=%s", op, name)
