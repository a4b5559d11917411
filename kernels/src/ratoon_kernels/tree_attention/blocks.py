"""The reference backend's blocks of queries times keys: their cut, and one of them on any device.

The attended pairs within the two ranges are in exactly one block each, and every query of a block
attends at least one key of it.

The keys [start, stop) of a node are attended by the queries [start, end) of its subtree, causally
counted from the upper left corner: one block does the node's own triangle and all its descendants.
Subtrees that are small together share one block with an explicit mask, or a forest of one-token
nodes would cost one launch for each.

A window cuts by depth: of a node's subtree, the tokens within reach of its last key are taken as
the packed ranges that they are, chunk by chunk, each against those of the node's keys that are
within reach of its shallowest token.

A block is plain matrix products in the accumulation dtype. Scores exist for one chunk of queries at
a time, within `SCORE_BYTES`. The query heads of one kv head are folded into the rows R, so a
product is [K, R, H] @ [K, H, S] with R = (N / K) * the chunk's queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch
from torch import Tensor

from ratoon_kernels.tiles import Span
from ratoon_kernels.tree_attention.operands import Operands, Upstream

# Measured in docs/decisions/0002: above it the masked half of the block costs more than launches.
GROUP_TOKENS: Final = 64
SCORE_BYTES: Final = 256 * 2**20
# Queries of a chunk under a window, unless the window is shorter: what bounds a chunk's mask.
WINDOW_QUERIES: Final = 256


class BlockMask(Enum):
    """Kinds of visibility of a block's keys to its queries."""

    FULL = "full"
    CAUSAL = "causal"  # query_start == key_start; aligned at the upper left corner
    PAIRS = "pairs"  # each pair is looked at: `attended_pairs`


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of one packed span against keys of another."""

    queries: Span
    keys: Span
    mask: BlockMask


@dataclass(frozen=True, slots=True)
class _Rows:
    """Packed queries, and the least and greatest depth of any of them."""

    tokens: Span
    min_depth: int
    max_depth: int


def cut_into_blocks(
    node_table_M4: Tensor, queries: Span, keys: Span, window: int | None
) -> list[Block]:
    """Cuts the attended pairs of queries times keys into blocks.

    Args:
        node_table_M4: int64 on the CPU; start, stop, end and parent of each node in packed order.
        queries: Packed range of the queries at hand.
        keys: Packed range of the keys at hand.
        window: Tokens of its path that a query sees, or None.
    """
    nodes: list[list[int]] = node_table_M4.tolist()
    depths: list[int] = []
    longest = 0
    if window is not None:
        depths = _first_depths(nodes)
        ends = (d + node[1] - node[0] for d, node in zip(depths, nodes, strict=True))
        longest = max(ends, default=0)
    both = Span(max(queries.start, keys.start), min(queries.stop, keys.stop))
    blocks: list[Block] = []
    node = 0
    while node < len(nodes):
        next_node, group = _group_small_subtrees(nodes, node, both)
        if next_node > node + 1:
            blocks.append(Block(group, group, BlockMask.PAIRS))
            node = next_node
        else:
            if window is None or longest <= window:
                start, stop, end, _ = nodes[node]
                blocks.extend(_blocks_of_node(Span(start, stop), end, queries, keys))
            else:
                blocks.extend(_windowed_blocks_of_node(nodes, depths, node, queries, keys, window))
            node += 1
    return blocks


def _first_depths(nodes: list[list[int]]) -> list[int]:
    """Returns the depth of each node's first token."""
    depths: list[int] = []
    for _, _, _, parent in nodes:
        above = nodes[parent]
        depths.append(depths[parent] + above[1] - above[0] if parent >= 0 else 0)
    return depths


def _group_small_subtrees(nodes: list[list[int]], node: int, both: Span) -> tuple[int, Span]:
    """Takes whole subtrees from `node` on while they fit; returns the next node and their span."""
    start = nodes[node][0]
    stop = start
    limit = min(start + GROUP_TOKENS, both.stop) if start >= both.start else start
    while node < len(nodes) and nodes[node][2] <= limit:
        stop = nodes[node][2]
        while node < len(nodes) and nodes[node][0] < stop:
            node += 1
    return node, Span(start, stop)


def _blocks_of_node(node: Span, end: int, queries: Span, keys: Span) -> list[Block]:
    """Cuts what the two ranges leave of a node's keys and its subtree's queries."""
    key_start, key_stop = max(node.start, keys.start), min(node.stop, keys.stop)
    query_start, query_stop = max(key_start, queries.start), min(end, queries.stop)
    if key_start >= key_stop or query_start >= query_stop:
        return []
    attending = Span(query_start, query_stop)
    blocks: list[Block] = []
    if key_start < query_start:
        before = Span(key_start, min(key_stop, query_start))
        blocks.append(Block(attending, before, BlockMask.FULL))
    if query_start < key_stop:
        # Keys past the last query at hand have no query here.
        own = Span(query_start, min(key_stop, query_stop))
        blocks.append(Block(attending, own, BlockMask.CAUSAL))
    return blocks


def _windowed_blocks_of_node(
    nodes: list[list[int]],
    depths: list[int],
    node: int,
    queries: Span,
    keys: Span,
    window: int,
) -> list[Block]:
    """Cuts what the ranges and the window leave of a node's keys and its subtree's queries."""
    start, stop, end, _ = nodes[node]
    own = Span(max(start, keys.start), min(stop, keys.stop))
    attending = Span(max(own.start, queries.start), min(end, queries.stop))
    if own.start >= own.stop or attending.start >= attending.stop:
        return []
    first_depth = depths[node] - start  # plus a key's packed index: its depth
    num_depths = first_depth + own.stop - 1 + window
    blocks: list[Block] = []
    for rows in _rows_above(nodes, depths, node, attending, num_depths, window):
        first_key = max(own.start, rows.min_depth - window + 1 - first_depth)
        seen = Span(first_key, min(own.stop, rows.tokens.stop))
        is_full = (
            seen.stop <= rows.tokens.start + 1 and rows.max_depth - first_depth - first_key < window
        )
        blocks.append(Block(rows.tokens, seen, BlockMask.FULL if is_full else BlockMask.PAIRS))
    return blocks


def _rows_above(
    nodes: list[list[int]],
    depths: list[int],
    node: int,
    attending: Span,
    num_depths: int,
    window: int,
) -> Iterator[_Rows]:
    """Lists the tokens of a node's subtree that lie in `attending` and at depths below
    `num_depths`, in chunks of adjacent ones."""
    most = max(GROUP_TOKENS, min(window, WINDOW_QUERIES))
    chunk: _Rows | None = None
    while node < len(nodes) and nodes[node][0] < attending.stop:
        start, stop, end, _ = nodes[node]
        if depths[node] >= num_depths:
            # Nothing below is within reach either.
            while node < len(nodes) and nodes[node][0] < end:
                node += 1
            continue
        first, last = max(start, attending.start), min(stop, attending.stop)
        last = min(last, start + num_depths - depths[node])
        while first < last:
            if chunk is not None and (chunk.tokens.stop < first or len(chunk.tokens) >= most):
                yield chunk
                chunk = None
            taken = min(last, first + most - (len(chunk.tokens) if chunk else 0))
            bounds = (depths[node] + first - start, depths[node] + taken - 1 - start)
            chunk = (
                _Rows(Span(first, taken), *bounds)
                if chunk is None
                else _Rows(
                    Span(chunk.tokens.start, taken),
                    min(chunk.min_depth, bounds[0]),
                    max(chunk.max_depth, bounds[1]),
                )
            )
            first = taken
        node += 1
    if chunk is not None:
        yield chunk


def attended_pairs(block: Operands, queries: Span) -> Tensor:
    """Returns bool [Q, S]: which of the block's keys each of some of its queries attends."""
    device = block.end_T.device
    query_Q1 = torch.arange(queries.start, queries.stop, dtype=torch.int32, device=device)[:, None]
    key_S = torch.arange(block.keys.start, block.keys.stop, dtype=torch.int32, device=device)
    end_S = block.end_T[block.keys.start : block.keys.stop]
    is_attended_QS = (key_S <= query_Q1) & (query_Q1 < end_S)
    if block.window is not None:
        _, depth_T = block.plan
        depth_Q1 = depth_T[queries.start : queries.stop, None]
        depth_S = depth_T[block.keys.start : block.keys.stop]
        is_attended_QS &= depth_Q1 - depth_S < block.window
    return is_attended_QS


def block_forward(block: Operands, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Returns out_QNV and lse_NQ of one block, both in the accumulation dtype."""
    q_QNH, dtype = block.q_QNH, block.accumulation_dtype
    num_queries, num_heads, _ = q_QNH.shape
    k_KSH, v_KSV = (x.transpose(0, 1).to(dtype) for x in (block.k_SKH, block.v_SKH))
    out_QNV = torch.empty(block.out_shape, dtype=dtype, device=q_QNH.device)
    lse_NQ = torch.empty((num_heads, num_queries), dtype=dtype, device=q_QNH.device)
    for rows in _query_chunks(block):
        q_KRH = _fold(q_QNH[rows].to(dtype), len(k_KSH))
        scores_KRS = _scores(q_KRH, k_KSH, block, mask, rows)
        lse_KR = scores_KRS.logsumexp(dim=-1)
        out_KRV = torch.bmm(scores_KRS.sub_(lse_KR[..., None]).exp_(), v_KSV)
        out_QNV[rows] = _unfold(out_KRV, num_heads)
        lse_NQ[:, rows] = lse_KR.reshape(num_heads, -1)
    return out_QNV, lse_NQ


def block_backward(
    block: Operands, upstream: Upstream, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq_QNH, dk_SKH and dv_SKV of one block, in the accumulation dtype."""
    q_QNH, dtype = block.q_QNH, block.accumulation_dtype
    k_KSH, v_KSV = (x.transpose(0, 1).to(dtype) for x in (block.k_SKH, block.v_SKH))
    dq_QNH = torch.empty(q_QNH.shape, dtype=dtype, device=q_QNH.device)
    dk_KSH, dv_KSV = torch.zeros_like(k_KSH), torch.zeros_like(v_KSV)
    delta_QN = (upstream.dout_QNH.to(dtype) * upstream.out_QNH.to(dtype)).sum(dim=-1)
    if upstream.dlse_NQ is not None:
        delta_QN -= upstream.dlse_NQ.T
    for rows in _query_chunks(block):
        q_KRH = _fold(q_QNH[rows].to(dtype), len(k_KSH))
        dout_KRV = _fold(upstream.dout_QNH[rows].to(dtype), len(k_KSH))
        lse_KR1 = upstream.lse_NQ[:, rows].reshape(len(k_KSH), -1, 1)
        delta_KR1 = delta_QN[rows].T.reshape(len(k_KSH), -1, 1)
        p_KRS = _scores(q_KRH, k_KSH, block, mask, rows).sub_(lse_KR1).exp_()
        dv_KSV.baddbmm_(p_KRS.mT, dout_KRV)
        ds_KRS = torch.bmm(dout_KRV, v_KSV.mT).sub_(delta_KR1).mul_(p_KRS)
        dk_KSH.baddbmm_(ds_KRS.mT, q_KRH, alpha=block.scale)
        dq_QNH[rows] = _unfold(torch.bmm(ds_KRS, k_KSH).mul_(block.scale), q_QNH.shape[1])
    return dq_QNH, dk_KSH.transpose(0, 1), dv_KSV.transpose(0, 1)


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
    first = block.queries.start
    is_attended_QS = attended_pairs(block, Span(first + rows.start, first + rows.stop))
    # The rows R are (heads of the group) x (queries of the chunk).
    by_query = scores_KRS.unflatten(1, (-1, rows.stop - rows.start))
    by_query.masked_fill_(~is_attended_QS, -torch.inf)
    return scores_KRS
