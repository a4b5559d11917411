"""One block of the reference on any device, as plain matrix products in the accumulation dtype.

Scores exist for one chunk of queries at a time, within `SCORE_BYTES`. The query heads of one kv
head are folded into the rows R, so a product is [K, R, H] @ [K, H, S] with R = (N / K) * the
chunk's queries.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ratoon_kernels.tree_attention.blocks import BlockMask
from ratoon_kernels.tree_attention.operands import Operands, Upstream

SCORE_BYTES: Final = 256 * 2**20


def block_forward(block: Operands, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Returns out_QNH and lse_NQ of one block, both in the accumulation dtype."""
    q_QNH, dtype = block.q_QNH, block.accumulation_dtype
    num_queries, num_heads, _ = q_QNH.shape
    k_KSH, v_KSH = (x.transpose(0, 1).to(dtype) for x in (block.k_SKH, block.v_SKH))
    out_QNH = torch.empty(q_QNH.shape, dtype=dtype, device=q_QNH.device)
    lse_NQ = torch.empty((num_heads, num_queries), dtype=dtype, device=q_QNH.device)
    for rows in _query_chunks(block):
        q_KRH = _fold(q_QNH[rows].to(dtype), len(k_KSH))
        scores_KRS = _scores(q_KRH, k_KSH, block, mask, rows)
        lse_KR = scores_KRS.logsumexp(dim=-1)
        out_KRH = torch.bmm(scores_KRS.sub_(lse_KR[..., None]).exp_(), v_KSH)
        out_QNH[rows] = _unfold(out_KRH, num_heads)
        lse_NQ[:, rows] = lse_KR.reshape(num_heads, -1)
    return out_QNH, lse_NQ


def block_backward(
    block: Operands, upstream: Upstream, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq_QNH, dk_SKH and dv_SKH of one block, in the accumulation dtype."""
    q_QNH, dtype = block.q_QNH, block.accumulation_dtype
    k_KSH, v_KSH = (x.transpose(0, 1).to(dtype) for x in (block.k_SKH, block.v_SKH))
    dq_QNH = torch.empty(q_QNH.shape, dtype=dtype, device=q_QNH.device)
    dk_KSH, dv_KSH = torch.zeros_like(k_KSH), torch.zeros_like(v_KSH)
    delta_QN = (upstream.dout_QNH.to(dtype) * upstream.out_QNH.to(dtype)).sum(dim=-1)
    if upstream.dlse_NQ is not None:
        delta_QN -= upstream.dlse_NQ.T
    for rows in _query_chunks(block):
        q_KRH = _fold(q_QNH[rows].to(dtype), len(k_KSH))
        dout_KRH = _fold(upstream.dout_QNH[rows].to(dtype), len(k_KSH))
        lse_KR1 = upstream.lse_NQ[:, rows].reshape(len(k_KSH), -1, 1)
        delta_KR1 = delta_QN[rows].T.reshape(len(k_KSH), -1, 1)
        p_KRS = _scores(q_KRH, k_KSH, block, mask, rows).sub_(lse_KR1).exp_()
        dv_KSH.baddbmm_(p_KRS.mT, dout_KRH)
        ds_KRS = torch.bmm(dout_KRH, v_KSH.mT).sub_(delta_KR1).mul_(p_KRS)
        dk_KSH.baddbmm_(ds_KRS.mT, q_KRH, alpha=block.scale)
        dq_QNH[rows] = _unfold(torch.bmm(ds_KRS, k_KSH).mul_(block.scale), q_QNH.shape[1])
    return dq_QNH, dk_KSH.transpose(0, 1), dv_KSH.transpose(0, 1)


def _query_chunks(block: Operands) -> Iterator[slice]:
    num_queries, num_heads, _ = block.q_QNH.shape
    row_bytes = num_heads * len(block.k_SKH) * block.accumulation_dtype.itemsize
    num_rows = max(1, SCORE_BYTES // row_bytes)
    for start in range(0, num_queries, num_rows):
        yield slice(start, min(start + num_rows, num_queries))


def _fold(x_QNH: Tensor, num_kv_heads: int) -> Tensor:
    """[Q, N, H] -> [K, R, H], the queries of one head together."""
    return x_QNH.transpose(0, 1).reshape(num_kv_heads, -1, x_QNH.shape[-1])


def _unfold(x_KRH: Tensor, num_heads: int) -> Tensor:
    """[K, R, H] -> [Q, N, H]."""
    return x_KRH.reshape(num_heads, -1, x_KRH.shape[-1]).transpose(0, 1)


def _scores(q_KRH: Tensor, k_KSH: Tensor, block: Operands, mask: BlockMask, rows: slice) -> Tensor:
    """Returns scale * q k^T of one chunk, -inf where a query does not attend a key."""
    scores_KRS = torch.bmm(q_KRH, k_KSH.mT).mul_(block.scale)
    if mask is BlockMask.FULL:
        return scores_KRS
    device, first = q_KRH.device, block.queries.start
    query_Q1 = torch.arange(first + rows.start, first + rows.stop, device=device)[:, None]
    key_S = torch.arange(block.keys.start, block.keys.stop, device=device)
    end_S = block.end_T[block.keys.start : block.keys.stop]
    is_attended_QS = (key_S <= query_Q1) & (query_Q1 < end_S)
    # The rows R are (heads of the group) x (queries of the chunk).
    by_query = scores_KRS.unflatten(1, (-1, rows.stop - rows.start))
    by_query.masked_fill_(~is_attended_QS, -torch.inf)
    return scores_KRS
