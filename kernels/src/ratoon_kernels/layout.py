"""The layout of one packed forest: the whole attention mask as one int32 per key.

Query q attends key k if and only if `k <= q < end_T[k]`, where `end_T[k]` is one past the subtree
of the node that holds k.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ratoon_kernels.errors import KernelArgumentError
from ratoon_kernels.schedule import TILE_SIZE, Schedule, build_schedule
from ratoon_kernels.tiles import Int64Array, Span
from ratoon_kernels.windows import Window, build_window

_MAX_TOKENS: Final = 2**31 - TILE_SIZE


@dataclass(frozen=True, slots=True)
class ScheduleTensors:
    """A packed schedule as kernels take it.

    Attributes:
        table: int32 on the device; all sections.
        header: int64 on the CPU; `ScheduleHeader.from_tensor` reads it.
    """

    table: Tensor
    header: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """One packed forest of T tokens and M nodes, as every backend needs it.

    The tensors on the device are views of one buffer, uploaded at once.

    Attributes:
        end_T: int32 on the device; see the module's invariant.
        position_T: int64 on the device; depth of a token on its path, counted from 0 at a root.
        node_table_M4: int64 on the CPU; start, stop, end and parent of each node in packed order.
        schedule: Work lists of all queries against all keys, on the host.
        schedule_table: int32 on the device; the same, packed.
        schedule_header: int64 on the CPU; where the table's sections lie.

    Under a window the work lists are others: those of the sizes that `build_layout` was given are
    held from the start, as a traced call needs them; others are built when they are asked for.
    """

    end_T: Tensor
    position_T: Tensor
    node_table_M4: Tensor
    schedule: Schedule
    schedule_table: Tensor
    schedule_header: Tensor
    _partial_schedules: dict[tuple[Span, Span, int | None], ScheduleTensors] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    _windows: dict[int, Window | None] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    _windowed_schedules: dict[int, ScheduleTensors] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )

    @property
    def num_tokens(self) -> int:
        """T, the number of packed tokens."""
        return self.end_T.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of `end_T` and `position_T`."""
        return self.end_T.device

    def windowed_schedule(self, window: int) -> ScheduleTensors:
        """Returns the packed work lists of the whole forest under a window of that many tokens.

        Raises:
            KernelArgumentError: It is not held, and torch.compile traces the call.
        """
        held = self._windowed_schedules.get(window)
        if held is None:
            if torch.compiler.is_compiling():
                reason = f"not built for windows of {window}, which a traced call needs"
                raise KernelArgumentError("layout", reason)
            whole = Span(0, self.num_tokens)
            held = self._build_schedule(whole, whole, window)
            self._windowed_schedules[window] = held
        return held

    def partial_schedule(
        self, queries: Span, keys: Span, window: int | None = None
    ) -> ScheduleTensors:
        """Returns the packed work lists of a range of queries against a range of keys.

        Built and uploaded at the first call for these ranges, then kept: every layer asks again.
        """
        whole = Span(0, self.num_tokens)
        if (queries, keys) == (whole, whole):
            if window is not None:
                return self.windowed_schedule(window)
            return ScheduleTensors(self.schedule_table, self.schedule_header)
        held = self._partial_schedules.get((queries, keys, window))
        if held is None:
            held = self._build_schedule(queries, keys, window)
            self._partial_schedules[queries, keys, window] = held
        return held

    def window(self, size: int) -> Window | None:
        """Returns what tokens see of the last `size` tokens of their paths; None where all."""
        if size not in self._windows:
            self._windows[size] = build_window(self.node_table_M4.numpy(), size)
        return self._windows[size]

    def _build_schedule(self, queries: Span, keys: Span, window: int | None) -> ScheduleTensors:
        cut = None if window is None else self.window(window)
        whole = Span(0, self.num_tokens)
        if cut is None and (queries, keys) == (whole, whole):
            return ScheduleTensors(self.schedule_table, self.schedule_header)
        # The padded `end` of the whole form is `end_T` with zeros behind it.
        end_T = self.schedule.end[: self.num_tokens]
        table, header = build_schedule(end_T, queries, keys, cut).pack()
        buffer = _host_buffer(len(table), self.device)
        buffer.numpy()[:] = table
        return ScheduleTensors(_upload(buffer, self.device), header.to_tensor())


def build_layout(
    *,
    node_start: npt.NDArray[Any],
    node_stop: npt.NDArray[Any],
    node_end: npt.NDArray[Any],
    node_parent: npt.NDArray[Any],
    device: torch.device | str,
    windows: Collection[int] = (),
) -> TreeLayout:
    """Builds the layout of a forest from its nodes in packed depth-first order.

    Node m owns the packed tokens [start, stop), at least one; its subtree is [start, end).

    Args:
        node_start: Integers of shape [M].
        node_stop: Integers of shape [M].
        node_end: Integers of shape [M].
        node_parent: Integers of shape [M]; -1 for a root.
        device: Where the model's activations will be.
        windows: Sizes of the windows that calls will ask for, in tokens; only for a GPU there is
            anything to hold.

    Raises:
        KernelArgumentError: The arrays are not the depth-first packing of a forest; it names the
            array and the first wrong node.
    """
    start = _as_nodes("node_start", node_start, len(node_start))
    stop = _as_nodes("node_stop", node_stop, len(start))
    end = _as_nodes("node_end", node_end, len(start))
    parent = _as_nodes("node_parent", node_parent, len(start))
    closes = _check_packing(start, stop, end)
    num_tokens = int(stop[-1]) if len(stop) else 0
    length = stop - start
    first_position = _check_tree(start, length, end, parent, closes)
    end_of_token = np.repeat(end.astype(np.int32), length)
    position = np.arange(num_tokens, dtype=np.int64) - np.repeat(start - first_position, length)
    tokens = Span(0, num_tokens)
    schedule = build_schedule(end_of_token, tokens, tokens)
    table, header = schedule.pack()
    buffer = _host_buffer(len(table) + 2 * num_tokens, torch.device(device))
    buffer[: len(table)].numpy()[:] = table
    # The table is a multiple of 16 bytes, so int64 behind it is aligned.
    buffer[len(table) :].view(torch.int64).numpy()[:] = position
    uploaded = _upload(buffer, torch.device(device))
    layout = TreeLayout(
        end_T=uploaded[header.end.offset :][:num_tokens],
        position_T=uploaded[len(table) :].view(torch.int64),
        node_table_M4=torch.from_numpy(np.stack((start, stop, end, parent), axis=1)),
        schedule=schedule,
        schedule_table=uploaded[: len(table)],
        schedule_header=header.to_tensor(),
    )
    if layout.device.type == "cuda":
        for window in windows:
            layout.windowed_schedule(window)
    return layout


def _host_buffer(num_ints: int, device: torch.device) -> Tensor:
    # A copy to a GPU is asynchronous only from pinned memory.
    return torch.empty(num_ints, dtype=torch.int32, pin_memory=device.type == "cuda")


def _upload(buffer: Tensor, device: torch.device) -> Tensor:
    """Copies to the device; torch keeps pinned memory until the copy on this stream is done."""
    return buffer.to(device, non_blocking=True)


def _as_nodes(name: str, values: npt.NDArray[Any], num_nodes: int) -> Int64Array:
    array = np.asarray(values)
    if array.ndim != 1 or array.shape[0] != num_nodes:
        raise KernelArgumentError(name, f"shape {array.shape}, expected ({num_nodes},)")
    if not np.issubdtype(array.dtype, np.integer):
        raise KernelArgumentError(name, f"dtype {array.dtype}, expected an integer dtype")
    return array.astype(np.int64, copy=False)


def _require(holds: npt.NDArray[np.bool_], name: str, values: Int64Array, rule: str) -> None:
    if not holds.all():
        node = int(np.argmin(holds))
        raise KernelArgumentError(name, f"node {node} has {int(values[node])}, {rule}")


def _check_packing(start: Int64Array, stop: Int64Array, end: Int64Array) -> Int64Array:
    """Checks that nodes lie one behind the other and that subtrees end between nodes.

    Returns:
        int64 of shape [M]: the first node past each node's subtree.
    """
    num_nodes = len(start)
    follows = np.ones(num_nodes, np.bool_)
    follows[:1] = start[:1] == 0
    follows[1:] = start[1:] == stop[:-1]
    _require(follows, "node_start", start, "expected the stop of the node before it")
    _require(stop > start, "node_stop", stop, "expected more than its start: no node is empty")
    _require(stop <= _MAX_TOKENS, "node_stop", stop, f"expected at most {_MAX_TOKENS} tokens")
    num_tokens = int(stop[-1]) if num_nodes else 0
    node_at = np.full(num_tokens + 1, -1, np.int32)
    node_at[start] = np.arange(num_nodes)
    node_at[num_tokens] = num_nodes
    closes = node_at[np.clip(end, 0, num_tokens)].astype(np.int64)
    is_boundary = (closes >= 0) & (end >= stop) & (end <= num_tokens)
    rule = "expected the start of a later node or the last stop"
    _require(is_boundary, "node_end", end, rule)
    return closes


def _check_tree(
    start: Int64Array, length: Int64Array, end: Int64Array, parent: Int64Array, closes: Int64Array
) -> Int64Array:
    """Checks that parents and ends tell of one and the same forest.

    An interval [start, end) that is open at a node belongs to an ancestor if, and only if, as many
    are open as the node has ancestors; so one count per node, kept by prefix sums, checks all.

    Returns:
        int64 of shape [M]: the position of each node's first token on its path.
    """
    num_nodes = len(start)
    index = np.arange(num_nodes)
    _require((parent >= -1) & (parent < index), "node_parent", parent, "expected an earlier node")
    # Node m closes what ends at its start. No node ends at the first one's.
    num_closed = np.bincount(closes, minlength=num_nodes + 1)[:num_nodes]
    # bincount sums in fp64, which is exact below 2**53.
    tokens_closed = np.bincount(closes, length, minlength=num_nodes + 1)[:num_nodes]
    depth = index - np.cumsum(num_closed)
    first_position = start - np.cumsum(tokens_closed).astype(np.int64)
    # A root's parent, -1, takes the last: what holds of all roots.
    end_above = np.append(end, _MAX_TOKENS)[parent]
    depth_above = np.append(depth, -1)[parent]
    _require(start < end_above, "node_parent", parent, "which ends before this node")
    _require(end <= end_above, "node_end", end, "which is past the end of its parent")
    rule = "but the subtrees open at this node are not its ancestors'"
    _require(depth == depth_above + 1, "node_end", end, rule)
    return first_position
