"""Libraries' gated delta rule over forests, level by level; and a switch that puts one in the
place of ours.

A level is all nodes of one depth: one call with the states at their parents' ends. Replicated
rollouts are one level. In: packed tensors, the host's node table. Out: as our op's. Gradients are
those of the library's own autograd, through the states.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ratoon_kernels import TreeLayout, registry
from ratoon_kernels.gated_delta import op
from ratoon_kernels.gated_delta.operands import Gradients, Operands

FLA, FLASH_QLA = "fla", "flash-qla"


class Chunked(Protocol):
    """A library's call over sequences: rows [1, T, ...], offsets int64 [n + 1] and first states
    [n, N, D, V] or None in; out [1, T, N, V] and the states at the ends."""

    def __call__(
        self,
        rows: tuple[Tensor, ...],
        offsets: Tensor,
        first: Tensor | None,
        *,
        scale: float,
        has_ends: bool,
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Nodes of one depth, in packed order.

    Attributes:
        rows: Their packed rows: a range where they are one, else int64 on the device.
        offsets: int64 on the device; first row of each node, and one past the last.
        parents: int64 on the device; each node's parent within the level before; None for roots.
    """

    rows: slice | Tensor
    offsets: Tensor
    parents: Tensor | None


def library(name: str) -> Chunked:
    """The call of `fla` or `flash-qla`, by fla-core's own dispatch.

    Raises:
        ImportError: It is not installed.
    """
    os.environ["FLA_FLASH_QLA"] = "1" if name == FLASH_QLA else "0"
    from fla.ops.common import chunk_o  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule,
    )

    if name == FLASH_QLA:
        import flash_qla  # noqa: F401  # pyright: ignore[reportMissingImports]
    # It refuses its backward on Hopper with this Triton. How far its gradients are from ours is in
    # each row, so that its time may be compared.
    chunk_o.TRITON_ABOVE_3_7_1 = True

    def run(
        rows: tuple[Tensor, ...],
        offsets: Tensor,
        first: Tensor | None,
        *,
        scale: float,
        has_ends: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return chunk_gated_delta_rule(
            *rows,
            scale=scale,
            initial_state=first,
            output_final_state=has_ends,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=offsets,
        )

    return run


def by_level(
    call: Chunked, rows: tuple[Tensor, ...], node_table_M4: Tensor, scale: float
) -> Tensor:
    """out_TNV of q, k, v, g and beta over a forest; differentiable."""
    levels, order_T = _levels(node_table_M4.numpy().tobytes(), rows[0].device)
    outs: list[Tensor] = []
    ends: Tensor | None = None
    for index, level in enumerate(levels):
        first = None if ends is None or level.parents is None else ends[level.parents]
        taken = tuple(x[level.rows][None] for x in rows)
        has_ends = index + 1 < len(levels)
        out, ends = call(taken, level.offsets, first, scale=scale, has_ends=has_ends)
        outs.append(out[0])
    out_TNV = torch.cat(outs) if len(outs) > 1 else outs[0]
    return out_TNV if order_T is None else out_TNV[order_T]


@lru_cache(maxsize=64)
def _levels(node_table: bytes, device: torch.device) -> tuple[list[Level], Tensor | None]:
    """Levels of a forest, and where each packed row is among theirs; None: where it was."""
    start, stop, _, parent = np.frombuffer(node_table, np.int64).reshape(-1, 4).T
    depth = np.zeros(len(start), np.int64)
    for node, above in enumerate(parent.tolist()):
        depth[node] = depth[above] + 1 if above >= 0 else 0
    levels, taken, place = list[Level](), list[Any](), np.zeros(len(start), np.int64)
    for number in range(int(depth.max()) + 1):
        nodes = np.flatnonzero(depth == number)
        place[nodes] = np.arange(len(nodes))
        rows = np.concatenate([np.arange(start[node], stop[node]) for node in nodes])
        is_range = int(rows[-1]) - int(rows[0]) + 1 == len(rows)
        offsets = np.concatenate([[0], np.cumsum(stop[nodes] - start[nodes])])
        levels.append(
            Level(
                rows=slice(int(rows[0]), int(rows[-1]) + 1) if is_range else _put(rows, device),
                offsets=_put(offsets, device),
                parents=_put(place[parent[nodes]], device) if number else None,
            )
        )
        taken.append(rows)
    order = np.argsort(np.concatenate(taken))
    is_packed = bool((order == np.arange(len(order))).all())
    return levels, None if is_packed else _put(order, device)


def _put(values: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)


@contextmanager
def recording() -> Iterator[None]:
    """Within the context, autograd records although an op of ours is running, which is below it."""
    of_torch: Any = torch._C
    excluded = of_torch._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(of_torch.DispatchKey, name))
    included = of_torch._dispatch_tls_local_include_set()
    with torch.enable_grad(), of_torch._ForceDispatchKeyGuard(included, excluded):
        yield


class Switch:
    """Stands in the registry for a backend of ours, and runs a library while one is chosen.

    The library's graph of a forward waits for its backward, with copies of its operands: compiled
    layers use an operand's memory again after the op's last read. Backwards come in reverse order,
    as layers keep the op's results.
    """

    def __init__(self, ours: registry.GatedDeltaBackend) -> None:
        self._ours = ours
        self._chosen: Chunked | None = None
        self._graphs: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self.unavailable_reason = ours.unavailable_reason
        self.unsupported_reason = ours.unsupported_reason

    def choose(self, call: Chunked | None) -> None:
        """None: ours."""
        self._chosen = call
        self._graphs.clear()

    def plan(self, layout: TreeLayout) -> list[Tensor]:
        """See `GatedDeltaBackend`; the node table, which a library needs, is the last."""
        return [*self._ours.plan(layout), layout.node_table_M4]

    def forward(self, operands: Operands) -> tuple[Tensor, Tensor]:
        """See `GatedDeltaBackend`."""
        own, table = self._split(operands)
        if self._chosen is None:
            return self._ours.forward(own)
        with recording():
            rows = tuple(x.detach().clone().requires_grad_() for x in _rows(own))
            out_TNV = by_level(self._chosen, rows, table, own.scale)
        self._graphs.append((out_TNV, rows))
        return out_TNV.detach(), out_TNV.new_empty(0)

    def backward(self, operands: Operands, dout_TNV: Tensor, dend_ENDV: Tensor | None) -> Gradients:
        """See `GatedDeltaBackend`."""
        own, _ = self._split(operands)
        if self._chosen is None:
            return self._ours.backward(own, dout_TNV, dend_ENDV)
        out_TNV, rows = self._graphs.pop()
        grads = torch.autograd.grad(out_TNV, rows, dout_TNV)
        dq, dk, dv, dg, dbeta = (
            grad.to(x.dtype).contiguous() for grad, x in zip(grads, rows, strict=True)
        )
        return Gradients(dq_TKD=dq, dk_TKD=dk, dv_TNV=dv, dg_TN=dg, dbeta_TN=dbeta)

    def _split(self, operands: Operands) -> tuple[Operands, Tensor]:
        *plan, table = operands.plan
        return replace(operands, plan=plan), table


def _rows(operands: Operands) -> tuple[Tensor, ...]:
    return operands.q_TKD, operands.k_TKD, operands.v_TNV, operands.g_TN, operands.beta_TN


@contextmanager
def switches() -> Iterator[Callable[[str], None]]:
    """Within the context, the call chooses the library that runs recurrences by its name, or ours
    by an empty one."""
    ours = registry.GATED_DELTA_BACKENDS
    held = {name: Switch(backend) for name, backend in ours.items()}

    def choose(name: str) -> None:
        call = library(name) if name else None
        for switch in held.values():
            switch.choose(call)

    _install(MappingProxyType(held))
    try:
        yield choose
    finally:
        _install(ours)


@contextmanager
def reference_alone() -> Iterator[None]:
    """Within the context, what is compiled anew runs recurrences by the reference backend."""
    backends = registry.GATED_DELTA_BACKENDS
    _install(MappingProxyType({"reference": backends["reference"]}))
    try:
        yield
    finally:
        _install(backends)


def _install(backends: Mapping[str, registry.GatedDeltaBackend]) -> None:
    of_op: Any = op
    of_registry: Any = registry
    of_op.GATED_DELTA_BACKENDS = backends
    of_registry.GATED_DELTA_BACKENDS = backends
    held = {**of_registry._BACKENDS, registry.GATED_DELTA: backends}
    of_registry._BACKENDS = MappingProxyType(held)
