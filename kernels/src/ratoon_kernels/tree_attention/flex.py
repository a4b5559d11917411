"""The flex backend of tree attention: torch's FlexAttention, compiled, with our block mask.

What runs is the fused kernel or an error, never FlexAttention without compilation, which makes all
scores.

Lengths are padded to buckets, so that a kernel is compiled for a bucket and not for a forest. The
padding costs copies of q, k and v and no attention: no tile of padding is listed. FlexAttention
gives its backward only through autograd, and an op keeps no graph: the backward runs the forward
again first, which makes it longer by about a third.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

from ratoon_kernels.errors import BackendUnavailableError
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.tiles import Span
from ratoon_kernels.tree_attention.block_plan import BlockGrid, BlockPlan, block_plan, plan_tensors
from ratoon_kernels.tree_attention.operands import Operands, Upstream

TILE_SIZE: Final = 128
# Buckets between two powers of two: eight for a whole forest, so that at most an eighth of the rows
# is padding; four for a part, because it has two lengths and kernels are compiled per pair.
_BUCKETS_PER_OCTAVE: Final = 8
_BUCKETS_OF_PARTS: Final = 4
_SMALLEST_BUCKET: Final = TILE_SIZE * _BUCKETS_PER_OCTAVE
# Bound on kernels of one process: buckets, or pairs of them, times head counts, head_dims, dtypes
# and scales, and twice that, because some calls differentiate and some do not. It exceeds their
# number: all pairs of parts up to `MAX_TOKENS` are 2 x 33 x 33.
MAX_KERNELS: Final = 4096
_DTYPES: Final = (torch.bfloat16, torch.float16)
_HEAD_DIMS: Final = (64, 128, 192, 256)
_LEAST_CAPABILITY: Final = (8, 0)


def unavailable_reason() -> str | None:
    """Returns why this machine cannot run it: no CUDA GPU, or no Triton to compile for it."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def unsupported_reason(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    _is_deterministic: bool,
    value_dim: int | None = None,
    _window: int | None = None,
) -> str | None:
    """Returns why it does not serve such a call, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA GPUs only, not on {device.type}"
    if dtype not in _DTYPES:
        return f"no support for dtype {dtype}, only for bfloat16 and float16"
    if head_dim not in _HEAD_DIMS:
        return f"no support for head_dim {head_dim}, only for {_HEAD_DIMS}"
    if value_dim not in (None, *_HEAD_DIMS):
        return f"no support for values of head size {value_dim}, only for {_HEAD_DIMS}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"no support for sm_{capability[0]}{capability[1]}, only from sm_80 on"
    return None


def plan(layout: TreeLayout, _window: int | None = None) -> list[Tensor]:
    """Returns what it reads of a layout beside `end_T`: the host node table.

    Raises:
        BackendUnavailableError: The forest has more than `MAX_TOKENS` tokens.
    """
    return plan_tensors("flex", layout, layout.num_tokens)


def partial_plan(
    layout: TreeLayout, queries: Span, keys: Span, _window: int | None = None
) -> list[Tensor]:
    """Returns the same; the limit is that of the ranges at hand."""
    return plan_tensors("flex", layout, len(queries), len(keys))


def forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_TNH (dtype of q) and lse_NT (fp32) of the whole forest."""
    if not (len(operands.queries) and len(operands.keys)):
        q_QNH = operands.q_QNH
        num_queries, num_heads, _ = q_QNH.shape
        lse_NQ = q_QNH.new_full((num_heads, num_queries), -torch.inf, dtype=torch.float32)
        return q_QNH.new_zeros(operands.out_shape), lse_NQ
    with _state_of_a_new_thread(), torch.no_grad():
        out_QNH, lse_NQ = _attend(operands, *_padded_inputs(operands))
        return out_QNH.contiguous(), lse_NQ.contiguous()


def backward(operands: Operands, upstream: Upstream) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq_TNH, dk_TKH and dv_TKH of the whole forest, in the dtype of q."""
    return _gradients(operands, lambda _out, _lse: (upstream.dout_QNH, upstream.dlse_NQ))


def partial_forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_QNH and lse_NQ over the keys at hand, in fp32; out has the rounding of q's dtype.

    A query that attends none of them has output 0 and log-sum-exp -inf.
    """
    out_QNH, lse_NQ = forward(operands)
    return out_QNH.float(), lse_NQ


def partial_backward(
    operands: Operands, upstream: Upstream, dk_acc_SKH: Tensor, dv_acc_SKH: Tensor
) -> Tensor:
    """Adds to the two buffers; returns dq_QNH in fp32. Each call's share is rounded once."""
    dq_QNH, dk_SKH, dv_SKH = _gradients(operands, functools.partial(_through_the_merge, upstream))
    dk_acc_SKH += dk_SKH
    dv_acc_SKH += dv_SKH
    return dq_QNH.float()


def bucket_of(num_rows: int, per_octave: int = _BUCKETS_PER_OCTAVE) -> int:
    """Returns the padded length: a power of two, or one of the steps on the way to the next."""
    octave = (num_rows - 1) // _SMALLEST_BUCKET
    step = (_SMALLEST_BUCKET // per_octave) << max(octave.bit_length() - 1, 0)
    return max(-(-num_rows // step) * step, _SMALLEST_BUCKET)


def block_mask_of(plan: BlockPlan, num_queries: int, num_keys: int) -> FlexBlockMask:
    """Returns a plan on a grid of `TILE_SIZE` as FlexAttention takes it, for padded lengths."""

    def is_attended(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_attended = (key - plan.delta_1[0] <= query) & (query < plan.end_S[key])
        return is_attended if plan.start_Q is None else is_attended & (plan.start_Q[query] <= key)

    return FlexBlockMask(
        seq_lengths=(num_queries, num_keys),
        kv_num_blocks=plan.of_queries.partial_count_11R,
        kv_indices=plan.of_queries.partial_index_11RW,
        full_kv_num_blocks=plan.of_queries.full_count_11R,
        full_kv_indices=plan.of_queries.full_index_11RW,
        q_num_blocks=plan.of_keys.partial_count_11R,
        q_indices=plan.of_keys.partial_index_11RW,
        full_q_num_blocks=plan.of_keys.full_count_11R,
        full_q_indices=plan.of_keys.full_index_11RW,
        BLOCK_SIZE=(TILE_SIZE, TILE_SIZE),
        mask_mod=is_attended,
    )


def attend(
    q_1NQH: Tensor, k_1KSH: Tensor, v_1KSH: Tensor, plan: BlockPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """FlexAttention over padded inputs; returns out_1NQH and lse_1NQ, a natural logarithm.

    Raises:
        BackendUnavailableError: It runs without being compiled, and would make all scores.
    """
    if not torch.compiler.is_dynamo_compiling():
        reason = "torch.compile is switched off in this process"
        raise BackendUnavailableError("tree_attention", "flex", reason)
    out_1NQH, aux = flex_attention(
        q_1NQH,
        k_1KSH,
        v_1KSH,
        block_mask=block_mask_of(plan, q_1NQH.shape[2], k_1KSH.shape[2]),
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None, "it was asked for"
    return out_1NQH, aux.lse


def _through_the_merge(
    upstream: Upstream, out_QNH: Tensor, lse_NQ: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a part's own output and log-sum-exp, from those of the merged ones.

    With w = exp(lse_part - lse): p = w p_part, so dS = p (dP - delta) is what the part's backward
    makes of dO_part = w dO and dLSE_part = dO_part . o_part - w (dO . o).
    """
    dout_QNH, merged_QNH = upstream.dout_QNH, upstream.out_QNH
    attends_none = lse_NQ == -torch.inf
    weight_NQ = (lse_NQ - upstream.lse_NQ).exp_().masked_fill_(attends_none, 0)
    dout_part_QNH = (dout_QNH * weight_NQ.T[..., None]).to(dout_QNH.dtype)
    delta_part_QN = (dout_part_QNH.float() * out_QNH.float()).sum(dim=-1)
    delta_QN = (dout_QNH.float() * merged_QNH.float()).sum(dim=-1)
    return dout_part_QNH, delta_part_QN.T - weight_NQ * delta_QN.T


def _gradients(
    operands: Operands, upstream_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the forward again and differentiates it, given the gradients of its two results."""
    num_queries, num_keys = len(operands.queries), len(operands.keys)
    if not (num_queries and num_keys):
        q, k, v = (x.new_zeros(x.shape) for x in (operands.q_QNH, operands.k_SKH, operands.v_SKH))
        return q, k, v
    with _state_of_a_new_thread():
        leaves = [x.requires_grad_() for x in _padded_inputs(operands)]
        out_QNH, lse_NQ = _attend(operands, *leaves)
        with torch.no_grad():
            dout_QNH, dlse_NQ = upstream_of(out_QNH, lse_NQ)
        results, grads = [out_QNH], [dout_QNH]
        if dlse_NQ is not None:
            results.append(lse_NQ)
            grads.append(dlse_NQ)
        dq, dk, dv = torch.autograd.grad(results, leaves, grads)
    return dq[:num_queries].contiguous(), dk[:num_keys].contiguous(), dv[:num_keys].contiguous()


@contextmanager
def _state_of_a_new_thread() -> Iterator[None]:
    """Lets autograd record and vmap trace, which FlexAttention needs, from inside of an op.

    An op runs below autograd, maybe in inference mode, and where a dispatch mode called it (as
    selective checkpointing does) below all other layers too.
    """
    with torch.inference_mode(mode=False), torch._C._ForceDispatchKeyGuard(*_dispatch_keys()):
        yield


@functools.cache
def _dispatch_keys() -> tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]:
    """Returns the dispatch keys that a new thread includes and excludes."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return (
            thread.submit(torch._C._dispatch_tls_local_include_set).result(),
            thread.submit(torch._C._dispatch_tls_local_exclude_set).result(),
        )


@torch.no_grad()
def _padded_inputs(operands: Operands) -> list[Tensor]:
    """Returns copies of q, k and v of the buckets' lengths, with zeros behind them."""
    inputs: list[Tensor] = []
    is_part = len(operands.queries) != len(operands.keys)
    per_octave = _BUCKETS_OF_PARTS if is_part else _BUCKETS_PER_OCTAVE
    for x in (operands.q_QNH, operands.k_SKH, operands.v_SKH):
        padded = x.new_empty((bucket_of(len(x), per_octave), *x.shape[1:]))
        padded[: len(x)] = x
        padded[len(x) :] = 0
        inputs.append(padded)
    return inputs


def _attend(operands: Operands, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Runs the compiled kernel over padded inputs; returns out_QNH and lse_NQ as views."""
    grid = BlockGrid(
        key_tile=TILE_SIZE,
        query_tile=TILE_SIZE,
        backward_query_tile=TILE_SIZE,
        padded_queries=len(q),
        padded_keys=len(k),
        is_full_width=True,
    )
    made = block_plan(operands, grid)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    limits = dynamo_config.patch(
        recompile_limit=MAX_KERNELS,
        accumulated_recompile_limit=MAX_KERNELS,
        fail_on_recompile_limit_hit=True,
        suppress_errors=False,
    )
    with limits:
        try:
            out_1NQH, lse_1NQ = compiled_attend()(*heads_first, made, operands.scale)
        except FailOnRecompileLimitHit as err:
            reason = f"this process has compiled {MAX_KERNELS} kernels, which is its limit"
            raise BackendUnavailableError("tree_attention", "flex", reason) from err
    num_queries = len(operands.queries)
    return out_1NQH[0].transpose(0, 1)[:num_queries], lse_1NQ[0, :, :num_queries]


@functools.cache
def compiled_attend() -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns `attend` compiled for the shapes of each call; nothing is compiled before one."""
    return torch.compile(attend, dynamic=False, fullgraph=True)
