"""Lists the backends of each op, best first, with the protocol of their modules; selects one.

A backend requested by name is that backend, or an error with its reason; another one never replaces
it. Importing a backend's module needs only torch and numpy. Functions import any other package that
the backend needs, so that `unavailable_reason` can report that it is missing.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import torch
from torch import Tensor

from ratoon_kernels.errors import BackendUnavailableError
from ratoon_kernels.gated_delta import convolution_fused, convolution_reference
from ratoon_kernels.gated_delta import fused as gated_delta_fused
from ratoon_kernels.gated_delta import operands as gated_delta
from ratoon_kernels.gated_delta import reference as gated_delta_reference
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.tiles import Span
from ratoon_kernels.token_logprobs import fused
from ratoon_kernels.token_logprobs import operands as logprobs
from ratoon_kernels.token_logprobs import reference as logprobs_reference
from ratoon_kernels.tree_attention import block_plan, cuda, flash, flex, reference
from ratoon_kernels.tree_attention import operands as attention

TREE_ATTENTION: Final = "tree_attention"
TOKEN_LOGPROBS: Final = "token_logprobs"
GATED_DELTA: Final = "gated_delta"
CAUSAL_CONVOLUTION: Final = "causal_convolution"

_logger = logging.getLogger(__name__)


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


class TreeAttentionBackend(Backend, Protocol):
    """A backend module of this op."""

    def unsupported_reason(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        is_deterministic: bool,
        value_dim: int | None = None,
        window: int | None = None,
        /,
    ) -> str | None:
        """Returns why the backend does not serve such a call, or None.

        Values have the head size of queries and keys where `value_dim` is None.
        """
        ...

    def plan(self, layout: TreeLayout, window: int | None = None, /) -> list[Tensor]:
        """Returns the tensors of a layout that the whole form reads beside `end_T`.

        torch.compile traces it: it only picks what the layout holds already.
        """
        ...

    def partial_plan(
        self, layout: TreeLayout, queries: Span, keys: Span, window: int | None = None, /
    ) -> list[Tensor]:
        """Returns those of the partial form; never traced, so it may build them."""
        ...

    def forward(self, operands: attention.Operands, /) -> tuple[Tensor, Tensor]:
        """Returns out_TNV (dtype of q) and lse_NT of the whole forest, contiguous."""
        ...

    def backward(
        self, operands: attention.Operands, upstream: attention.Upstream, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq_TNH, dk_TKH and dv_TKV of the whole forest, contiguous."""
        ...

    def partial_forward(self, operands: attention.Operands, /) -> tuple[Tensor, Tensor]:
        """Returns out_QNV and lse_NQ over the keys at hand, in the accumulation dtype."""
        ...

    def partial_backward(
        self,
        operands: attention.Operands,
        upstream: attention.Upstream,
        dk_acc_SKH: Tensor,
        dv_acc_SKH: Tensor,
        /,
    ) -> Tensor:
        """Adds to the two buffers and returns dq_QNH, all in the accumulation dtype."""
        ...


class TokenLogprobsBackend(Backend, Protocol):
    """A backend module of this op."""

    def forward(self, operands: logprobs.Operands, /) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logprob_M, entropy_R and lse_R in the accumulation dtype."""
        ...

    def backward(
        self, operands: logprobs.Operands, upstream: logprobs.Upstream, /
    ) -> tuple[Tensor, Tensor, logprobs.LowRankTerm | None]:
        """Returns dhidden_RD, dlm_head_VD, without rows where not asked for, and the gradient of
        the term, if there is one."""
        ...

    def forward_backward(
        self, operands: logprobs.Operands, seeds_of: logprobs.SeedsOfRows, /, *, needs_lm_head: bool
    ) -> logprobs.DifferentiatedLogprobs:
        """Returns both in the bits of `forward` and `backward`; logits are computed once."""
        ...


class GatedDeltaBackend(Backend, Protocol):
    """A backend module of this op."""

    def plan(self, layout: TreeLayout, /) -> list[Tensor]:
        """Returns the tensors of a layout that it reads.

        torch.compile traces it: it only picks what the layout holds already.
        """
        ...

    def forward(self, operands: gated_delta.Operands, /) -> tuple[Tensor, Tensor]:
        """Returns out_TNV (dtype of q) and end_ENDV of the handed nodes (accumulation dtype)."""
        ...

    def backward(
        self, operands: gated_delta.Operands, dout_TNV: Tensor, dend_ENDV: Tensor | None, /
    ) -> gated_delta.Gradients:
        """Returns all gradients; `dend_ENDV` None: no node is handed on."""
        ...


class CausalConvolutionBackend(Backend, Protocol):
    """A backend module of this op; `head_dim` of a call is its number of taps."""

    def plan(self, layout: TreeLayout, /) -> list[Tensor]:
        """Returns the tensors of a layout that it reads; see `GatedDeltaBackend.plan`."""
        ...

    def forward(self, operands: gated_delta.ConvolutionOperands, /) -> tuple[Tensor, Tensor]:
        """Returns out_TC and last_ERC of the handed nodes, both in the dtype of x."""
        ...

    def backward(
        self,
        operands: gated_delta.ConvolutionOperands,
        dout_TC: Tensor,
        dlast_ERC: Tensor | None,
        /,
    ) -> gated_delta.ConvolutionGradients:
        """Returns all gradients; `dlast_ERC` None: no node is handed on."""
        ...


TREE_ATTENTION_BACKENDS: Final[Mapping[str, TreeAttentionBackend]] = MappingProxyType(
    {"cuda": cuda, "flash": flash, "flex": flex, "reference": reference}
)
TOKEN_LOGPROBS_BACKENDS: Final[Mapping[str, TokenLogprobsBackend]] = MappingProxyType(
    {"fused": fused, "reference": logprobs_reference}
)
GATED_DELTA_BACKENDS: Final[Mapping[str, GatedDeltaBackend]] = MappingProxyType(
    {"fused": gated_delta_fused, "reference": gated_delta_reference}
)
CAUSAL_CONVOLUTION_BACKENDS: Final[Mapping[str, CausalConvolutionBackend]] = MappingProxyType(
    {"fused": convolution_fused, "reference": convolution_reference}
)
_BACKENDS: Final[Mapping[str, Mapping[str, Backend]]] = MappingProxyType(
    {
        TREE_ATTENTION: TREE_ATTENTION_BACKENDS,
        TOKEN_LOGPROBS: TOKEN_LOGPROBS_BACKENDS,
        GATED_DELTA: GATED_DELTA_BACKENDS,
        CAUSAL_CONVOLUTION: CAUSAL_CONVOLUTION_BACKENDS,
    }
)
# Tokens at a time, queries or keys, of the backends that do not serve any number.
_MAX_TOKENS: Final[Mapping[str, int]] = MappingProxyType(
    {"flash": block_plan.MAX_TOKENS, "flex": block_plan.MAX_TOKENS}
)
# Backends of tree attention whose whole form applies sinks, and gives their gradient, itself.
_SINK_BACKENDS: Final = frozenset({"cuda"})


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
    value_dim: int | None = None,
    window: int | None = None,
    deterministic: bool = False,
) -> str:
    """Returns the backend for a call: the one asked for, else the best that can serve it.

    The first choice of each backend is logged once per process.

    Args:
        op: "tree_attention", "token_logprobs", "gated_delta" or "causal_convolution".
        requested: A backend's name, or None for the best one.
        device: Device of the call's tensors.
        dtype: Dtype of the call's tensors.
        head_dim: Their innermost size: the hidden size for token_logprobs, a key's for gated_delta,
            the number of taps for causal_convolution.
        value_dim: Head size of the values where it is another one (tree_attention, gated_delta).
        window: Tokens of its path that a query sees, or None for all (tree_attention).
        deterministic: Require a backend whose forward and backward repeat their bits.

    Raises:
        BackendUnavailableError: The one asked for cannot serve the call, or none can.
    """
    backends = _BACKENDS[op]
    if requested is not None and requested not in backends:
        reason = f"there is none of that name, only {list(backends)}"
        raise BackendUnavailableError(op, requested, reason)
    # Ops without such forms have backends that are not asked about them.
    value_dim = None if value_dim == head_dim else value_dim
    form = () if value_dim is None and window is None else (value_dim, window)
    refusals: list[str] = []
    for name in backends if requested is None else [requested]:
        backend = backends[name]
        why_not: Callable[..., str | None] = backend.unsupported_reason
        reason = backend.unavailable_reason() or why_not(
            device, dtype, head_dim, deterministic, *form
        )
        if reason is None:
            _log_choice(op, name)
            return name
        refusals.append(reason if requested is not None else f"{name}: {reason}")
    raise BackendUnavailableError(op, requested or "any", "; ".join(refusals))


def max_tokens(backend: str) -> int | None:
    """Returns the most packed tokens that a backend of tree attention serves; None: any number."""
    return _MAX_TOKENS.get(backend)


def applies_sinks(backend: str) -> bool:
    """Returns whether a backend of tree attention takes the operands' sinks in its whole form."""
    return backend in _SINK_BACKENDS


@functools.cache
def _log_choice(op: str, name: str) -> None:
    _logger.info("kernel backend chosen: op=%s backend=%s", op, name)
