"""Tree attention and token log-probs as torch custom ops, for packed prefix forests.

What a backend cannot serve is an error with its reason, never another result.
"""

from ratoon_kernels.errors import BackendUnavailableError, KernelArgumentError
from ratoon_kernels.layout import TreeLayout, build_layout
from ratoon_kernels.registry import BackendStatus, list_backends, max_tokens, select_backend
from ratoon_kernels.tiles import Span
from ratoon_kernels.token_logprobs.op import token_logprobs, token_logprobs_forward_backward
from ratoon_kernels.token_logprobs.operands import DifferentiatedLogprobs
from ratoon_kernels.tree_attention.merging import merge_partials, sink_gradient, with_sink
from ratoon_kernels.tree_attention.op import (
    tree_attention,
    tree_attention_partial_backward,
    tree_attention_partial_forward,
)

__all__ = [
    "BackendStatus",
    "BackendUnavailableError",
    "DifferentiatedLogprobs",
    "KernelArgumentError",
    "Span",
    "TreeLayout",
    "build_layout",
    "list_backends",
    "max_tokens",
    "merge_partials",
    "select_backend",
    "sink_gradient",
    "token_logprobs",
    "token_logprobs_forward_backward",
    "tree_attention",
    "tree_attention_partial_backward",
    "tree_attention_partial_forward",
    "with_sink",
]
