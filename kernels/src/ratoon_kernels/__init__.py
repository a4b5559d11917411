"""Tree attention, gated DeltaNet and token log-probs as torch custom ops, for packed forests.

What a backend cannot serve is an error with its reason, never another result.
"""

from ratoon_kernels.errors import BackendUnavailableError, KernelArgumentError
from ratoon_kernels.gated_delta.convolution import (
    causal_convolution,
    causal_convolution_partial_backward,
    causal_convolution_partial_forward,
)
from ratoon_kernels.gated_delta.op import (
    gated_delta_partial_backward,
    gated_delta_partial_forward,
    gated_delta_rule,
)
from ratoon_kernels.gated_delta.operands import Handover
from ratoon_kernels.layout import TreeLayout, build_layout
from ratoon_kernels.registry import BackendStatus, list_backends, max_tokens, select_backend
from ratoon_kernels.tiles import Span
from ratoon_kernels.token_logprobs.best import best_tokens
from ratoon_kernels.token_logprobs.op import token_logprobs, token_logprobs_forward_backward
from ratoon_kernels.token_logprobs.operands import (
    DifferentiatedLogprobs,
    LowRankTerm,
    SamplingMask,
)
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
    "Handover",
    "KernelArgumentError",
    "LowRankTerm",
    "SamplingMask",
    "Span",
    "TreeLayout",
    "best_tokens",
    "build_layout",
    "causal_convolution",
    "causal_convolution_partial_backward",
    "causal_convolution_partial_forward",
    "gated_delta_partial_backward",
    "gated_delta_partial_forward",
    "gated_delta_rule",
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
