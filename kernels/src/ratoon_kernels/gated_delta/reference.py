"""The reference backend of the gated delta rule: eager torch, any device, the truth for the others.

Nodes of one depth and length run at once, chunks of a node one after the other, and each sum has
one order, in the accumulation dtype. A parent's end takes its gradients from its children, the last
one in packed order first.

Shapes: L rows of a chunk, N heads (of each node that runs at once, in a chunk), D elements of a
key, V of a value, M nodes, G of them at once. README.md has the formulas.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ratoon_kernels.gated_delta.operands import Gradients, Operands
from ratoon_kernels.layout import TreeLayout
from ratoon_kernels.precision import ACCUMULATION_DTYPES

CHUNK_TOKENS = 64
# Bound on what a chunk of nodes that run at once makes of pairs of tokens.
GROUP_TOKENS = 4096
NORM_EPSILON = 1e-6


def unavailable_reason() -> str | None:
    """Returns None: torch is all that it needs."""
    return None


def unsupported_reason(
    _device: torch.device,
    dtype: torch.dtype,
    _key_dim: int,
    _is_deterministic: bool,
    _value_dim: int | None = None,
    _window: int | None = None,
) -> str | None:
    """Returns why it does not serve such a call, or None."""
    return None if dtype in ACCUMULATION_DTYPES else f"no support for dtype {dtype}"


def plan(layout: TreeLayout) -> list[Tensor]:
    """Returns what it reads of a layout: the host node table."""
    return [layout.node_table_M4]


def forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_TNV (dtype of q) and the handed ends, end_ENDV (accumulation dtype)."""
    rows, nodes = _Rows.of(operands), _Nodes.of(operands)
    out_NTV = torch.empty_like(rows.v_NTV)
    ends_MNDV = rows.states(len(nodes.start))
    for group in nodes.groups():
        state = _starts(operands, nodes, ends_MNDV, group)
        for tokens_GL in nodes.chunks(group, out_NTV.device):
            out_NLV, state = rows.chunk(tokens_GL).forward(state)
            _put(out_NTV, tokens_GL, out_NLV)
        ends_MNDV[group] = state.unflatten(0, (len(group), -1))
    return out_NTV.transpose(0, 1).to(operands.q_TKD.dtype, copy=True), ends_MNDV[nodes.handed]


def backward(operands: Operands, dout_TNV: Tensor, dend_ENDV: Tensor | None) -> Gradients:
    """Returns the gradients; `dend_ENDV`, of the handed ends, in the accumulation dtype."""
    rows, nodes = _Rows.of(operands), _Nodes.of(operands)
    dout_NTV = dout_TNV.transpose(0, 1).to(operands.accumulation_dtype)
    ends_MNDV = rows.states(len(nodes.start))
    kept: list[tuple[list[int], list[tuple[Tensor, Tensor]]]] = []
    for group in nodes.groups():
        state = _starts(operands, nodes, ends_MNDV, group)
        chunks: list[tuple[Tensor, Tensor]] = []
        for tokens_GL in nodes.chunks(group, dout_NTV.device):
            chunks.append((tokens_GL, state))
            state = rows.chunk(tokens_GL).end(state)
        ends_MNDV[group] = state.unflatten(0, (len(group), -1))
        kept.append((group, chunks))
    sums = rows.zeros()
    dends_MNDV, dstarts_MNDV = torch.zeros_like(ends_MNDV), torch.empty_like(ends_MNDV)
    if dend_ENDV is not None:
        dends_MNDV[nodes.handed] = dend_ENDV
    children = nodes.children()
    for group, chunks in reversed(kept):
        # What was handed on, then the children, the last one first.
        for turn in range(max(len(children[node]) for node in group)):
            parents = [node for node in group if len(children[node]) > turn]
            dends_MNDV[parents] += dstarts_MNDV[[children[node][-1 - turn] for node in parents]]
        dstate = dends_MNDV[group].flatten(0, 1)
        for tokens_GL, state in reversed(chunks):
            dout_NLV = _pick(dout_NTV, tokens_GL)
            dstate, dchunk = rows.chunk(tokens_GL).backward(state, dout_NLV, dstate)
            sums.put(tokens_GL, dchunk)
        dstarts_MNDV[group] = dstate.unflatten(0, (len(group), -1))
    first = operands.first_SNDV
    dfirst = None if first is None else torch.zeros_like(first)
    for node in reversed(range(len(nodes.start))):
        if dfirst is not None and nodes.parent[node] < 0 and nodes.first[node] >= 0:
            # Several roots may continue one node.
            dfirst[nodes.first[node]] += dstarts_MNDV[node]
    return _gradients(operands, sums, dfirst)


def _starts(operands: Operands, nodes: "_Nodes", ends_MNDV: Tensor, group: list[int]) -> Tensor:
    """First states of nodes of one depth, [G * N, D, V]."""
    parents = [nodes.parent[node] for node in group]
    if parents[0] >= 0:
        return ends_MNDV[parents].flatten(0, 1)
    starts_GNDV = ends_MNDV.new_zeros((len(group), *ends_MNDV.shape[1:]))
    continued = [place for place, node in enumerate(group) if nodes.first[node] >= 0]
    if continued:
        assert operands.first_SNDV is not None
        known = [nodes.first[group[place]] for place in continued]
        starts_GNDV[continued] = operands.first_SNDV[known]
    return starts_GNDV.flatten(0, 1)


def _pick(x_NT: Tensor, tokens_GL: Tensor) -> Tensor:
    """[G * N, L, ...]: rows of each node, by head."""
    return x_NT[:, tokens_GL].transpose(0, 1).flatten(0, 1)


def _put(x_NT: Tensor, tokens_GL: Tensor, rows: Tensor) -> None:
    """Writes back what `_pick` takes."""
    x_NT[:, tokens_GL] = rows.unflatten(0, (len(tokens_GL), -1)).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Nodes:
    start: list[int]
    stop: list[int]
    parent: list[int]
    first: list[int]
    handed: list[int]

    @staticmethod
    def of(operands: Operands) -> "_Nodes":
        table_M4 = operands.plan[0]
        start, stop, _, parent = (table_M4[:, column].tolist() for column in range(4))
        handover = operands.handover
        if handover is None:
            return _Nodes(start, stop, parent, [-1] * len(start), [])
        return _Nodes(start, stop, parent, handover.first_M.tolist(), handover.handed_E.tolist())

    def groups(self) -> list[list[int]]:
        """Nodes that run at once, of one depth and length; parents before their children."""
        depth: list[int] = []
        found: dict[tuple[int, int, int], list[int]] = {}
        count: Counter[tuple[int, int]] = Counter()
        for node, parent in enumerate(self.parent):
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
            length = self.stop[node] - self.start[node]
            most = max(GROUP_TOKENS // max(min(length, CHUNK_TOKENS), 1), 1)
            kind = depth[node], length
            found.setdefault((*kind, count[kind] // most), []).append(node)
            count[kind] += 1
        return [found[key] for key in sorted(found)]

    def chunks(self, group: list[int], device: torch.device) -> Iterator[Tensor]:
        """Tokens of each chunk of a group's nodes, [G, L]."""
        start_G1 = torch.tensor([self.start[node] for node in group], device=device)[:, None]
        length = self.stop[group[0]] - self.start[group[0]]
        for first in range(0, length, CHUNK_TOKENS):
            last = min(first + CHUNK_TOKENS, length)
            yield start_G1 + torch.arange(first, last, device=device)

    def children(self) -> list[list[int]]:
        """Children of each node, in packed order."""
        found: list[list[int]] = [[] for _ in self.parent]
        for node, parent in enumerate(self.parent):
            if parent >= 0:
                found[parent].append(node)
        return found


@dataclass(frozen=True, slots=True)
class _Rows:
    """All tokens by head, in the accumulation dtype; queries and keys normalised, and repeated for
    the heads of values that read them. Or their gradients."""

    q_NTD: Tensor
    k_NTD: Tensor
    v_NTV: Tensor
    g_NT: Tensor
    beta_NT: Tensor

    @staticmethod
    def of(operands: Operands) -> "_Rows":
        dtype, group = operands.accumulation_dtype, _group(operands)
        q_TKD = operands.q_TKD.to(dtype)
        k_TKD = operands.k_TKD.to(dtype)
        q_TKD = q_TKD * _inverse_norm(q_TKD) * operands.scale
        k_TKD = k_TKD * _inverse_norm(k_TKD)
        return _Rows(
            q_TKD.repeat_interleave(group, dim=1).transpose(0, 1),
            k_TKD.repeat_interleave(group, dim=1).transpose(0, 1),
            operands.v_TNV.to(dtype).transpose(0, 1),
            operands.g_TN.T,
            operands.beta_TN.to(dtype).T,
        )

    def chunk(self, tokens_GL: Tensor) -> "_Chunk":
        return _Chunk(
            _pick(self.q_NTD, tokens_GL),
            _pick(self.k_NTD, tokens_GL),
            _pick(self.v_NTV, tokens_GL),
            _pick(self.g_NT, tokens_GL),
            _pick(self.beta_NT, tokens_GL),
        )

    def put(self, tokens_GL: Tensor, chunk: "_Chunk") -> None:
        _put(self.q_NTD, tokens_GL, chunk.q_NLD)
        _put(self.k_NTD, tokens_GL, chunk.k_NLD)
        _put(self.v_NTV, tokens_GL, chunk.v_NLV)
        _put(self.g_NT, tokens_GL, chunk.g_NL)
        _put(self.beta_NT, tokens_GL, chunk.beta_NL)

    def zeros(self) -> "_Rows":
        return _Rows(
            *(
                torch.zeros_like(x)
                for x in (self.q_NTD, self.k_NTD, self.v_NTV, self.g_NT, self.beta_NT)
            )
        )

    def states(self, num_nodes: int) -> Tensor:
        """A state of each node, not initialised."""
        num_heads, _, key_dim = self.k_NTD.shape
        return self.v_NTV.new_empty((num_nodes, num_heads, key_dim, self.v_NTV.shape[2]))


def _group(operands: Operands) -> int:
    return operands.v_TNV.shape[1] // operands.q_TKD.shape[1]


def _inverse_norm(x_TKD: Tensor) -> Tensor:
    return torch.rsqrt((x_TKD * x_TKD).sum(-1, keepdim=True) + NORM_EPSILON)


class _Inner(NamedTuple):
    """What a chunk computes of its own tokens, and of the first state through the updates."""

    decay_NL: Tensor
    rest_NL: Tensor
    pairs_NLL: Tensor
    keys_NLL: Tensor
    lower_NLL: Tensor
    seen_NLV: Tensor
    update_NLV: Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    q_NLD: Tensor
    k_NLD: Tensor
    v_NLV: Tensor
    g_NL: Tensor
    beta_NL: Tensor

    def inner(self, state_NDV: Tensor) -> _Inner:
        total_NL = self.g_NL.cumsum(1)
        difference_NLL = total_NL[:, :, None] - total_NL[:, None, :]
        # Pairs above the diagonal could overflow.
        pairs_NLL = difference_NLL.tril().exp().tril()
        keys_NLL = self.k_NLD @ self.k_NLD.mT
        lower_NLL = (self.beta_NL[:, :, None] * keys_NLL * pairs_NLL).tril(-1)
        decay_NL = total_NL.exp()
        seen_NLV = self.k_NLD @ state_NDV
        wanted_NLV = self.v_NLV - decay_NL[:, :, None] * seen_NLV
        return _Inner(
            decay_NL=decay_NL,
            rest_NL=(total_NL[:, -1:] - total_NL).exp(),
            pairs_NLL=pairs_NLL,
            keys_NLL=keys_NLL,
            lower_NLL=lower_NLL,
            seen_NLV=seen_NLV,
            update_NLV=_solve(lower_NLL, self.beta_NL[:, :, None] * wanted_NLV),
        )

    def forward(self, state_NDV: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs and the state behind the chunk."""
        inner = self.inner(state_NDV)
        scores_NLL = (self.q_NLD @ self.k_NLD.mT) * inner.pairs_NLL
        out_NLV = inner.decay_NL[:, :, None] * (self.q_NLD @ state_NDV)
        return out_NLV + scores_NLL @ inner.update_NLV, self._end(state_NDV, inner)

    def end(self, state_NDV: Tensor) -> Tensor:
        """Returns the state behind the chunk, in the bits of `forward`."""
        return self._end(state_NDV, self.inner(state_NDV))

    def _end(self, state_NDV: Tensor, inner: _Inner) -> Tensor:
        kept_NDV = inner.decay_NL[:, -1, None, None] * state_NDV
        return kept_NDV + (inner.rest_NL[:, :, None] * self.k_NLD).mT @ inner.update_NLV

    def backward(
        self, state_NDV: Tensor, dout_NLV: Tensor, dend_NDV: Tensor
    ) -> tuple[Tensor, "_Chunk"]:
        """Returns the gradients of the first state and of the rows."""
        inner = self.inner(state_NDV)
        decay_NL1, rest_NL1 = inner.decay_NL[:, :, None], inner.rest_NL[:, :, None]
        beta_NL1, update_NLV = self.beta_NL[:, :, None], inner.update_NLV
        products_NLL = self.q_NLD @ self.k_NLD.mT
        # Outputs.
        dscores_NLL = (dout_NLV @ update_NLV.mT).tril()
        dproducts_NLL = dscores_NLL * inner.pairs_NLL
        dpairs_NLL = dscores_NLL * products_NLL
        dread_NLV = decay_NL1 * dout_NLV
        dq_NLD = dread_NLV @ state_NDV.mT + dproducts_NLL @ self.k_NLD
        ddecay_NL = (dout_NLV * (self.q_NLD @ state_NDV)).sum(-1)
        # The end.
        dstate_NDV = inner.decay_NL[:, -1, None, None] * dend_NDV + self.q_NLD.mT @ dread_NLV
        by_end_NLD = update_NLV @ dend_NDV.mT
        dk_NLD = dproducts_NLL.mT @ self.q_NLD + rest_NL1 * by_end_NLD
        drest_NL = (self.k_NLD * by_end_NLD).sum(-1)
        dlast_N = (dend_NDV * state_NDV).sum((-2, -1))
        dupdate_NLV = (products_NLL * inner.pairs_NLL).mT @ dout_NLV
        dupdate_NLV = dupdate_NLV + rest_NL1 * (self.k_NLD @ dend_NDV)
        # The updates.
        dright_NLV = _solve_transposed(inner.lower_NLL, dupdate_NLV)
        dlower_NLL = -(dright_NLV @ update_NLV.mT).tril(-1)
        wanted_NLV = self.v_NLV - decay_NL1 * inner.seen_NLV
        dbeta_NL = (dright_NLV * wanted_NLV).sum(-1)
        dv_NLV = beta_NL1 * dright_NLV
        ddecay_NL = ddecay_NL - (dv_NLV * inner.seen_NLV).sum(-1)
        dseen_NLV = -decay_NL1 * dv_NLV
        dk_NLD = dk_NLD + dseen_NLV @ state_NDV.mT
        dstate_NDV = dstate_NDV + self.k_NLD.mT @ dseen_NLV
        # The pairs of keys.
        by_pair_NLL = dlower_NLL * inner.keys_NLL
        dbeta_NL = dbeta_NL + (by_pair_NLL * inner.pairs_NLL).sum(-1)
        dpairs_NLL = dpairs_NLL + beta_NL1 * by_pair_NLL
        dkeys_NLL = beta_NL1 * dlower_NLL * inner.pairs_NLL
        dk_NLD = dk_NLD + (dkeys_NLL + dkeys_NLL.mT) @ self.k_NLD
        # The decays.
        dexponent_NLL = dpairs_NLL * inner.pairs_NLL
        by_rest_NL = drest_NL * inner.rest_NL
        dtotal_NL = dexponent_NLL.sum(2) - dexponent_NLL.sum(1)
        dtotal_NL = dtotal_NL + ddecay_NL * inner.decay_NL - by_rest_NL
        dtotal_NL[:, -1] += by_rest_NL.sum(1) + dlast_N * inner.decay_NL[:, -1]
        dg_NL = dtotal_NL.flip(1).cumsum(1).flip(1)
        return dstate_NDV, _Chunk(dq_NLD, dk_NLD, dv_NLV, dg_NL, dbeta_NL)


def _solve(lower_NLL: Tensor, right_NLV: Tensor) -> Tensor:
    """Solves (1 + lower) x = right, of which the diagonal is not read."""
    return torch.linalg.solve_triangular(lower_NLL, right_NLV, upper=False, unitriangular=True)


def _solve_transposed(lower_NLL: Tensor, right_NLV: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(lower_NLL.mT, right_NLV, upper=True, unitriangular=True)


def _gradients(operands: Operands, sums: _Rows, dfirst: Tensor | None) -> Gradients:
    """Gradients of the inputs from those of normalised and repeated ones."""
    group, wide = _group(operands), operands.accumulation_dtype

    def of_keys(x_TKD: Tensor, dx_NTD: Tensor, scale: float) -> Tensor:
        dnormal_TKD = scale * dx_NTD.transpose(0, 1).unflatten(1, (-1, group)).sum(2)
        inverse_TK1 = _inverse_norm(x_TKD.to(wide))
        normal_TKD = x_TKD.to(wide) * inverse_TK1
        along_TK1 = (normal_TKD * dnormal_TKD).sum(-1, keepdim=True)
        return (inverse_TK1 * (dnormal_TKD - normal_TKD * along_TK1)).to(x_TKD.dtype)

    dtype = operands.q_TKD.dtype
    return Gradients(
        dq_TKD=of_keys(operands.q_TKD, sums.q_NTD, operands.scale),
        dk_TKD=of_keys(operands.k_TKD, sums.k_NTD, 1.0),
        dv_TNV=sums.v_NTV.transpose(0, 1).to(dtype, copy=True),
        dg_TN=sums.g_NT.T.contiguous(),
        dbeta_TN=sums.beta_NT.T.to(dtype, copy=True),
        dfirst_SNDV=dfirst,
    )
