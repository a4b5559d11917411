"""The fused backend of the gated delta rule: Triton kernels over all chunks, one launch a tree.

Only the recurrence over chunks is serial; what is inside a chunk, and what follows from each
chunk's state, runs over all chunks of the forest at once. Sums and states are fp32; each sum has
one order and none is atomic, so that the same inputs give the same bits. The backward computes the
states again, in the forward's bits. No synchronisation with the host.

In shape suffixes C is the chunks of the forest; L the 64 rows of one.
"""

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from ratoon_kernels.gated_delta.forest_tables import CHUNK_TOKENS, ForestTables, forest_tables
from ratoon_kernels.gated_delta.operands import Gradients, Operands
from ratoon_kernels.gated_delta.reference import NORM_EPSILON
from ratoon_kernels.layout import TreeLayout

SIZES: Final = (32, 64, 128)
MIN_CAPABILITY_MAJOR: Final = 8
_NORM_ROWS: Final = 32
# Values of a task of the recurrence: with 32 it has products of 32 rows, as all kernels here.
_STATE_VALUES: Final = 32
# How each kernel is launched: the fastest measured on an H200.
_OPTIONS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        "inverse_norms": {"num_warps": 4},
        "invert_triangles": {"num_warps": 1},
        "solve_chunks": {"num_warps": 2},
        "run_states": {"num_warps": 4, "STAGES": 3},
        "write_outputs": {"num_warps": 4, "BLOCK": 32, "STAGES": 2},
        "begin_dupdates": {"num_warps": 4, "maxnreg": 128},
        "run_dstates": {"num_warps": 4, "STAGES": 2},
        "solve_dupdates": {"num_warps": 4},
        "write_dqueries": {"num_warps": 4, "BLOCK": 32, "STAGES": 3, "maxnreg": 168},
        "write_dkeys": {"num_warps": 4, "BLOCK": 32, "STAGES": 3},
        "sum_decays": {"num_warps": 4},
    }
)


def unavailable_reason() -> str | None:
    """Returns what this machine lacks, or None."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not has_triton():
        return "the package triton is not installed"
    return None if torch.cuda.is_available() else "no NVIDIA GPU is visible"


def unsupported_reason(
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    _is_deterministic: bool,
    value_dim: int | None = None,
    _window: int | None = None,
) -> str | None:
    """Returns why it does not serve such a call, or None."""
    if device.type != "cuda":
        return f"no support for {device.type} tensors"
    if dtype is not torch.bfloat16:
        return f"no support for dtype {dtype}"
    if key_dim not in SIZES:
        return f"keys of {key_dim}, expected one of {SIZES}"
    if value_dim not in (None, *SIZES):
        return f"values of {value_dim}, expected one of {SIZES}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < MIN_CAPABILITY_MAJOR:
        return f"compute capability {major}.{minor}, needs {MIN_CAPABILITY_MAJOR}.0 or more"
    return None


@functools.cache
def has_triton() -> bool:
    """Whether the package can be imported."""
    return importlib.util.find_spec("triton") is not None


def plan(layout: TreeLayout) -> list[Tensor]:
    """Returns what it reads of a layout: the host node table."""
    return [layout.node_table_M4]


def forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """Returns out_TNV (dtype of q) and the handed ends, end_ENDV (fp32)."""
    from ratoon_kernels.gated_delta import chunk_kernels

    with torch.cuda.device_of(operands.q_TKD):
        call = _Call.of(operands)
        num_tokens, num_heads, value_dim = operands.v_TNV.shape
        out_TNV = operands.v_TNV.new_empty((num_tokens, num_heads, value_dim))
        states = _run_states(call)
        if call.tables.num_chunks:
            kernel: Any = chunk_kernels.write_outputs
            kernel[(call.tables.num_chunks * 2 * num_heads,)](
                operands.q_TKD,
                operands.k_TKD,
                call.inverse_q_TK,
                call.inverse_k_TK,
                states.total_TN,
                states.update_TNV,
                states.state_CNVD,
                out_TNV,
                call.tables.start_C,
                call.tables.length_C,
                operands.scale,
                *call.q_strides,
                *call.k_strides,
                **call.sizes,
                **_OPTIONS["write_outputs"],
            )
    return out_TNV, states.handed_ENDV


def backward(operands: Operands, dout_TNV: Tensor, dend_ENDV: Tensor | None) -> Gradients:
    """Returns the gradients; `dend_ENDV`, of the handed ends, in fp32."""
    from ratoon_kernels.gated_delta import chunk_kernels, gradient_kernels

    with torch.cuda.device_of(operands.q_TKD):
        call = _Call.of(operands)
        tables, sizes = call.tables, call.sizes
        states = _run_states(call)
        dupdate_TNV, dstate_CNVD, dfirst = _run_dstates(call, states, dout_TNV, dend_ENDV)
        q_TKD, k_TKD, v_TNV = operands.q_TKD, operands.k_TKD, operands.v_TNV
        num_tokens, num_heads, value_dim = v_TNV.shape
        grads = Gradients(
            dq_TKD=q_TKD.new_empty(q_TKD.shape),
            dk_TKD=k_TKD.new_empty(k_TKD.shape),
            dv_TNV=v_TNV.new_empty(v_TNV.shape),
            dg_TN=operands.g_TN.new_empty(operands.g_TN.shape),
            dbeta_TN=operands.beta_TN.new_empty(operands.beta_TN.shape),
            dfirst_SNDV=dfirst,
        )
        if not num_tokens:
            return grads
        dright_TNV = v_TNV.new_empty(v_TNV.shape)
        rows = (num_tokens, num_heads)
        dbeta_value_TN, dtotal_TN, dbehind_TN, dlast_TN = (call.wide(rows) for _ in range(4))
        dkept_CPN = call.wide((tables.num_chunks, 2, num_heads))
        dscore_TNL, dlower_TNL = (call.narrow((*rows, CHUNK_TOKENS)) for _ in range(2))
        kernel: Any = chunk_kernels.solve_dupdates
        kernel[(tables.num_chunks * 2 * num_heads,)](
            v_TNV,
            operands.beta_TN,
            call.inverse_q_TK,
            call.inverse_k_TK,
            states.total_TN,
            dout_TNV,
            states.update_TNV,
            states.solved_TNL,
            dupdate_TNV,
            dright_TNV,
            grads.dv_TNV,
            dbeta_value_TN,
            dscore_TNL,
            dlower_TNL,
            tables.start_C,
            tables.length_C,
            operands.scale,
            *call.v_strides,
            operands.beta_TN.stride(0),
            *dout_TNV.stride()[:2],
            K=sizes["K"],
            N=num_heads,
            V=value_dim,
            **_OPTIONS["solve_dupdates"],
        )
        kernel = gradient_kernels.write_dqueries
        kernel[(tables.num_chunks * 2 * sizes["K"],)](
            q_TKD,
            k_TKD,
            call.inverse_q_TK,
            states.total_TN,
            dout_TNV,
            states.state_CNVD,
            dscore_TNL,
            grads.dq_TKD,
            dtotal_TN,
            tables.start_C,
            tables.length_C,
            operands.scale,
            *call.q_strides,
            *call.k_strides,
            *dout_TNV.stride()[:2],
            **sizes,
            **_OPTIONS["write_dqueries"],
        )
        kernel = gradient_kernels.write_dkeys
        kernel[(tables.num_chunks * 2 * sizes["K"],)](
            q_TKD,
            k_TKD,
            operands.beta_TN,
            call.inverse_k_TK,
            states.total_TN,
            states.update_TNV,
            dright_TNV,
            states.state_CNVD,
            dstate_CNVD,
            dscore_TNL,
            dlower_TNL,
            dbeta_value_TN,
            grads.dk_TKD,
            grads.dbeta_TN,
            dbehind_TN,
            dlast_TN,
            dkept_CPN,
            tables.start_C,
            tables.length_C,
            *call.q_strides,
            *call.k_strides,
            operands.beta_TN.stride(0),
            **sizes,
            **_OPTIONS["write_dkeys"],
        )
        kernel = chunk_kernels.sum_decays
        kernel[(tables.num_chunks,)](
            dtotal_TN,
            dbehind_TN,
            dlast_TN,
            dkept_CPN,
            grads.dg_TN,
            tables.start_C,
            tables.length_C,
            N=num_heads,
            HEADS=1 << (num_heads - 1).bit_length(),
            PARTS=2,
            **_OPTIONS["sum_decays"],
        )
    return grads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What every launch of one call reads.

    Attributes:
        operands: Checked inputs.
        tables: Nodes and chunks of the forest.
        inverse_q_TK: One over the norms of queries, fp32.
        inverse_k_TK: Likewise of keys.
    """

    operands: Operands
    tables: ForestTables
    inverse_q_TK: Tensor
    inverse_k_TK: Tensor

    @staticmethod
    def of(operands: Operands) -> "_Call":
        return _Call(
            operands=operands,
            tables=forest_tables(operands.plan[0], operands.handover, operands.q_TKD.device),
            inverse_q_TK=_inverse_norms(operands.q_TKD),
            inverse_k_TK=_inverse_norms(operands.k_TKD),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Heads and head sizes, as kernels name them."""
        (_, num_key_heads, key_dim), (_, num_heads, value_dim) = (
            self.operands.q_TKD.shape,
            self.operands.v_TNV.shape,
        )
        return {"K": num_key_heads, "N": num_heads, "D": key_dim, "V": value_dim}

    @property
    def q_strides(self) -> tuple[int, ...]:
        """Strides of tokens and heads; and so are the others."""
        return self.operands.q_TKD.stride()[:2]

    @property
    def k_strides(self) -> tuple[int, ...]:
        return self.operands.k_TKD.stride()[:2]

    @property
    def v_strides(self) -> tuple[int, ...]:
        return self.operands.v_TNV.stride()[:2]

    def wide(self, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised fp32 tensor."""
        return self.operands.q_TKD.new_empty(shape, dtype=torch.float32)

    def narrow(self, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor in the dtype of q."""
        return self.operands.q_TKD.new_empty(shape)

    def flags(self) -> Tensor:
        """A ticket counter, and a flag for each task of the recurrence."""
        _, num_heads, value_dim = self.operands.v_TNV.shape
        num_tasks = self.tables.num_nodes * num_heads * (value_dim // _STATE_VALUES)
        return torch.zeros(1 + num_tasks, dtype=torch.int32, device=self.operands.q_TKD.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """What the forward recurrence leaves.

    Attributes:
        total_TN: Sums of log-decays from the first token of the chunk, fp32.
        solved_TNL: Rows of (1 + lower)^-1 of the chunk.
        seen_TND: Its products with keys: what the updates subtract times the state.
        update_TNV: The updates.
        state_CNVD: State before each chunk, transposed.
        handed_ENDV: States at the ends of the handed nodes, fp32.
    """

    total_TN: Tensor
    solved_TNL: Tensor
    seen_TND: Tensor
    update_TNV: Tensor
    state_CNVD: Tensor
    handed_ENDV: Tensor


def _present(states: Tensor | None) -> Tensor | None:
    return None if states is None or not len(states) else states.contiguous()


def _inverse_norms(x_TKD: Tensor) -> Tensor:
    from ratoon_kernels.gated_delta import chunk_kernels

    num_tokens, num_heads, size = x_TKD.shape
    inverse_TK = x_TKD.new_empty((num_tokens, num_heads), dtype=torch.float32)
    if num_tokens:
        kernel: Any = chunk_kernels.inverse_norms
        kernel[(-(-inverse_TK.numel() // _NORM_ROWS),)](
            x_TKD,
            inverse_TK,
            inverse_TK.numel(),
            *x_TKD.stride()[:2],
            NORM_EPSILON,
            K=num_heads,
            D=size,
            ROWS=_NORM_ROWS,
            **_OPTIONS["inverse_norms"],
        )
    return inverse_TK


def _run_states(call: _Call) -> _States:
    from ratoon_kernels.gated_delta import chunk_kernels, state_kernels

    operands, tables, sizes = call.operands, call.tables, call.sizes
    num_tokens, num_heads, value_dim = operands.v_TNV.shape
    key_dim = sizes["D"]
    handover = operands.handover
    state_shape = (num_heads, key_dim, value_dim)
    num_handed = 0 if handover is None else len(handover.handed_E)
    states = _States(
        total_TN=call.wide((num_tokens, num_heads)),
        solved_TNL=call.narrow((num_tokens, num_heads, CHUNK_TOKENS)),
        seen_TND=call.narrow((num_tokens, num_heads, key_dim)),
        update_TNV=call.narrow((num_tokens, num_heads, value_dim)),
        state_CNVD=call.narrow((tables.num_chunks, num_heads, value_dim, key_dim)),
        handed_ENDV=call.wide((num_handed, *state_shape)),
    )
    if not num_tokens:
        return states
    diagonal_TNH = call.wide((num_tokens, num_heads, CHUNK_TOKENS // 2))
    kernel: Any = chunk_kernels.invert_triangles
    kernel[(tables.num_chunks * 2 * num_heads,)](
        operands.k_TKD,
        operands.g_TN,
        operands.beta_TN,
        call.inverse_k_TK,
        diagonal_TNH,
        tables.start_C,
        tables.length_C,
        *call.k_strides,
        operands.g_TN.stride(0),
        operands.beta_TN.stride(0),
        K=sizes["K"],
        N=num_heads,
        D=key_dim,
        **_OPTIONS["invert_triangles"],
    )
    kernel = chunk_kernels.solve_chunks
    kernel[(tables.num_chunks * num_heads,)](
        operands.k_TKD,
        operands.v_TNV,
        operands.g_TN,
        operands.beta_TN,
        call.inverse_k_TK,
        diagonal_TNH,
        states.total_TN,
        states.solved_TNL,
        states.seen_TND,
        states.update_TNV,
        tables.start_C,
        tables.length_C,
        *call.k_strides,
        *call.v_strides,
        operands.g_TN.stride(0),
        operands.beta_TN.stride(0),
        **sizes,
        **_OPTIONS["solve_chunks"],
    )
    kernel = state_kernels.run_states
    kernel[(tables.num_nodes * num_heads * (value_dim // _STATE_VALUES),)](
        operands.k_TKD,
        call.inverse_k_TK,
        states.total_TN,
        states.seen_TND,
        states.update_TNV,
        _present(operands.first_SNDV),
        call.wide((tables.num_end_slots, *state_shape)),
        states.handed_ENDV if num_handed else None,
        states.state_CNVD,
        call.flags(),
        tables.forward_order_M,
        tables.start_M,
        tables.stop_M,
        tables.chunk_M,
        tables.parent_M,
        tables.end_slot_M,
        tables.first_M,
        tables.handed_M,
        *call.k_strides,
        **sizes,
        BLOCK=_STATE_VALUES,
        **_OPTIONS["run_states"],
    )
    return states


def _run_dstates(
    call: _Call, states: _States, dout_TNV: Tensor, dend_ENDV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns gradients of updates, of states behind chunks, and of the first states."""
    from ratoon_kernels.gated_delta import chunk_kernels, state_kernels

    operands, tables, sizes = call.operands, call.tables, call.sizes
    num_tokens, num_heads, value_dim = operands.v_TNV.shape
    dupdate_TNV = call.narrow((num_tokens, num_heads, value_dim))
    dstate_CNVD = call.narrow(tuple(states.state_CNVD.shape))
    dfirst = None if operands.first_SNDV is None else torch.zeros_like(operands.first_SNDV)
    if not num_tokens:
        return dupdate_TNV, dstate_CNVD, dfirst
    dout_strides = dout_TNV.stride()[:2]
    kernel: Any = chunk_kernels.begin_dupdates
    kernel[(tables.num_chunks * 2 * num_heads,)](
        operands.q_TKD,
        operands.k_TKD,
        call.inverse_q_TK,
        call.inverse_k_TK,
        states.total_TN,
        dout_TNV,
        dupdate_TNV,
        tables.start_C,
        tables.length_C,
        operands.scale,
        *call.q_strides,
        *call.k_strides,
        *dout_strides,
        **sizes,
        **_OPTIONS["begin_dupdates"],
    )
    dbegin = call.wide((tables.num_begin_slots, num_heads, sizes["D"], value_dim))
    kernel = state_kernels.run_dstates
    kernel[(tables.num_nodes * num_heads * (value_dim // _STATE_VALUES),)](
        operands.q_TKD,
        operands.k_TKD,
        call.inverse_q_TK,
        call.inverse_k_TK,
        states.total_TN,
        states.seen_TND,
        dout_TNV,
        dupdate_TNV,
        _present(dend_ENDV),
        dbegin,
        dstate_CNVD,
        call.flags(),
        tables.backward_order_M,
        tables.start_M,
        tables.stop_M,
        tables.chunk_M,
        tables.begin_slot_M,
        tables.handed_M,
        tables.child_M1,
        tables.children,
        operands.scale,
        *call.q_strides,
        *call.k_strides,
        *dout_strides,
        **sizes,
        BLOCK=_STATE_VALUES,
        **_OPTIONS["run_dstates"],
    )
    if dfirst is not None:
        for row, slot in tables.begins:
            dfirst[row] += dbegin[slot]
    return dupdate_TNV, dstate_CNVD, dfirst
