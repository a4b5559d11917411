"""The reference backend's cut of a forest into blocks of queries times keys.

The attended pairs within the two ranges are in exactly one block each, and every query of a block
attends at least one key of it.

The keys [start, stop) of a node are attended by the queries [start, end) of its subtree, causally
counted from the upper left corner: one block does the node's own triangle and all its descendants.
Subtrees that are small together share one block with an explicit mask, or a forest of one-token
nodes would cost one launch for each.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from torch import Tensor

from ratoon_kernels.span import Span

# Measured in docs/decisions/0002: above it the masked half of the block costs more than launches.
GROUP_TOKENS: Final = 64


class BlockMask(Enum):
    """Kinds of visibility of a block's keys to its queries."""

    FULL = "full"
    CAUSAL = "causal"  # query_start == key_start; aligned at the upper left corner
    SUBTREES = "subtrees"  # queries == keys == whole subtrees; `k <= q < end[k]`


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of one packed span against keys of another."""

    queries: Span
    keys: Span
    mask: BlockMask


def cut_into_blocks(node_table_M4: Tensor, queries: Span, keys: Span) -> list[Block]:
    """Cuts the attended pairs of queries times keys into blocks.

    Args:
        node_table_M4: int64 on the CPU; start, stop, end and parent of each node in packed order.
        queries: Packed range of the queries at hand.
        keys: Packed range of the keys at hand.
    """
    nodes: list[list[int]] = node_table_M4.tolist()
    both = Span(max(queries.start, keys.start), min(queries.stop, keys.stop))
    blocks: list[Block] = []
    node = 0
    while node < len(nodes):
        next_node, group = _group_small_subtrees(nodes, node, both)
        if next_node > node + 1:
            blocks.append(Block(group, group, BlockMask.SUBTREES))
            node = next_node
        else:
            start, stop, end, _ = nodes[node]
            blocks.extend(_blocks_of_node(Span(start, stop), end, queries, keys))
            node += 1
    return blocks


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
