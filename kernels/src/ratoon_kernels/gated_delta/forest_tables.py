"""What kernels over the nodes and chunks of a packed forest read, as one buffer on the device.

In: the host node table of a layout and a handover. Out: int32 sections that start at multiples of
16 bytes. Chunks never cross a node. In both task orders every node comes after those it waits for,
and nodes that become ready at one time stand together.
"""

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ratoon_kernels.gated_delta.operands import Handover

CHUNK_TOKENS: Final = 64
_ALIGNED: Final = 4
# A step of training goes over few forests at a time, once per layer and direction.
NUM_KEPT: Final = 16

_Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForestTables:
    """Sections on the device, int32; C chunks of M nodes.

    Attributes:
        start_C: First token of each chunk.
        length_C: Its tokens.
        start_M: First token of each node.
        stop_M: One past its last.
        chunk_M: Its first chunk.
        parent_M: Its parent; -1 for a root.
        forward_order_M: Nodes, parents first.
        backward_order_M: Nodes, children first.
        end_slot_M: Row of the ends that children read; -1 without children.
        begin_slot_M: Row of the gradients at beginnings; -1 where nobody reads one.
        first_M: Row of the given states from which it begins, or -1.
        handed_M: Row of the handed ends, or -1.
        child_M1: Where the children of each node start in `children`.
        children: Children of all nodes, by parent, in packed order.
        num_nodes: M.
        num_chunks: C.
        num_end_slots: Rows of the ends.
        num_begin_slots: Rows of the gradients at beginnings.
        begins: Rows of the given states with the slots whose gradients each takes, such that no row
            is there twice in one entry.
    """

    start_C: Tensor
    length_C: Tensor
    start_M: Tensor
    stop_M: Tensor
    chunk_M: Tensor
    parent_M: Tensor
    forward_order_M: Tensor
    backward_order_M: Tensor
    end_slot_M: Tensor
    begin_slot_M: Tensor
    first_M: Tensor
    handed_M: Tensor
    child_M1: Tensor
    children: Tensor
    num_nodes: int
    num_chunks: int
    num_end_slots: int
    num_begin_slots: int
    begins: list[tuple[Tensor, Tensor]]


def forest_tables(
    node_table_M4: Tensor, handover: Handover | None, device: torch.device
) -> ForestTables:
    """Returns the tables of a forest; those of the last few are kept."""
    first = handed = b""
    if handover is not None:
        first = handover.first_M.numpy().tobytes()
        handed = handover.handed_E.numpy().tobytes()
    return _build(node_table_M4.contiguous().numpy().tobytes(), first, handed, device)


@functools.lru_cache(maxsize=NUM_KEPT)
def _build(table: bytes, first: bytes, handed: bytes, device: torch.device) -> ForestTables:
    start, stop, _, parent = np.frombuffer(table, np.int64).reshape(-1, 4).T
    num_nodes = len(start)
    chunks = -(-(stop - start) // CHUNK_TOKENS)
    chunk = np.cumsum(chunks) - chunks
    node_of_chunk = np.repeat(np.arange(num_nodes), chunks)
    start_of_chunk = start[node_of_chunk]
    start_of_chunk += CHUNK_TOKENS * (np.arange(len(node_of_chunk)) - chunk[node_of_chunk])
    begin_row = np.full(num_nodes, -1, np.int64)
    if first:
        begin_row = np.frombuffer(first, np.int64)
    handed_row = np.full(num_nodes, -1, np.int64)
    nodes = np.frombuffer(handed, np.int64)
    handed_row[nodes] = np.arange(len(nodes))
    before, behind = _chunks_around(parent, chunks)
    num_children = np.bincount(parent[parent >= 0], minlength=num_nodes)
    end_slot, num_end_slots = _slots(num_children > 0)
    begin_slot, num_begin_slots = _slots((parent >= 0) | (begin_row >= 0))
    by_parent = np.argsort(parent, kind="stable")
    sections = {
        "start_C": start_of_chunk,
        "length_C": np.minimum(stop[node_of_chunk] - start_of_chunk, CHUNK_TOKENS),
        "start_M": start,
        "stop_M": stop,
        "chunk_M": chunk,
        "parent_M": parent,
        "forward_order_M": np.argsort(before, kind="stable"),
        # Nodes that become ready at one time are taken last to first: a parent is never later.
        "backward_order_M": num_nodes - 1 - np.argsort(behind[::-1], kind="stable"),
        "end_slot_M": end_slot,
        "begin_slot_M": begin_slot,
        "first_M": begin_row,
        "handed_M": handed_row,
        "child_M1": np.concatenate(([0], np.cumsum(num_children))),
        "children": by_parent[np.count_nonzero(parent < 0) :],
    }
    tensors = upload(sections, device)
    return ForestTables(
        **tensors,
        num_nodes=num_nodes,
        num_chunks=len(node_of_chunk),
        num_end_slots=num_end_slots,
        num_begin_slots=num_begin_slots,
        begins=_begins(begin_row, begin_slot, device),
    )


def _chunks_around(parent: _Int64, chunks: _Int64) -> tuple[_Int64, _Int64]:
    """Chunks of a path before each node, and of the longest path behind it."""
    before, behind = np.zeros_like(chunks), np.zeros_like(chunks)
    for node, above in enumerate(parent.tolist()):
        if above >= 0:
            before[node] = before[above] + chunks[above]
    for node in range(len(parent) - 1, -1, -1):
        above = parent[node]
        if above >= 0:
            behind[above] = max(behind[above], behind[node] + chunks[node])
    return before, behind


def _slots(has_one: npt.NDArray[np.bool_]) -> tuple[_Int64, int]:
    """Numbers the places that have one; -1 elsewhere."""
    return np.where(has_one, np.cumsum(has_one) - 1, -1), int(np.count_nonzero(has_one))


def _begins(row: _Int64, slot: _Int64, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    nodes = np.flatnonzero(row >= 0)
    entries: list[tuple[Tensor, Tensor]] = []
    while len(nodes):
        rows, places = np.unique(row[nodes], return_index=True)
        to_rows, from_slots = (
            torch.from_numpy(each.copy()).to(device) for each in (rows, slot[nodes[places]])
        )
        entries.append((to_rows, from_slots))
        nodes = np.delete(nodes, places)
    return entries


def upload(sections: dict[str, _Int64], device: torch.device) -> dict[str, Tensor]:
    """Returns int32 sections of one tensor on the device, each at a multiple of 16 bytes."""
    sizes = [-(-len(section) // _ALIGNED) * _ALIGNED for section in sections.values()]
    buffer = np.zeros(sum(sizes) + _ALIGNED, np.int32)
    offsets = np.cumsum([0, *sizes]).tolist()
    for section, offset in zip(sections.values(), offsets, strict=False):
        buffer[offset : offset + len(section)] = section
    host = torch.from_numpy(buffer)
    whole = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    return {
        name: whole[offset : offset + len(section)]
        for (name, section), offset in zip(sections.items(), offsets, strict=False)
    }
