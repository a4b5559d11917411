"""Correctness gate: a backend is reported only if it is right on the tensors it is timed on.

Every row of the output, the log-sum-exp and all three gradients is compared with the fp32
reference, for replicated subjects too: only the replica that owns a token gets the output's
gradient, so gradients summed over replicas are those of the packed forest.

A backward computes delta = dout . out from an output that was rounded to 16 bits. In the first few
rows of a sequence, where dP - delta cancels, that rounding is most of dQ's error in every backend.
dQ is linear in delta, so it is compared with the exact gradient for the delta of the output that
the backend returned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.attention_inputs import Geometry, Tensors
from benchmarks.kernels.attention_subjects import Results, Subject
from ratoon_kernels import (
    TreeLayout,
    tree_attention_partial_backward,
    tree_attention_partial_forward,
)

# 16-bit results against fp32: probabilities and outputs are rounded to 16 bits.
MAX_RELATIVE_ERROR = 0.01
MAX_ROW_ERROR = 0.05
MAX_LSE_ERROR = 2e-3
# A row's error is relative to its norm plus this share of the usual norm: the gradient of a token
# that attends only to itself is exactly 0.
ROW_FLOOR = 0.25


class GateError(RuntimeError):
    """A backend's results are wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The fp32 reference on the packed forest: T rows, all fp32.

    `dq_by_delta_TNH` is the derivative of a row of dQ with respect to its delta: minus the scale
    times the P-weighted mean of the keys that the row attends to.
    """

    out_TNH: Tensor
    lse_NT: Tensor
    dq_TNH: Tensor
    dk_TKH: Tensor
    dv_TKH: Tensor
    dq_by_delta_TNH: Tensor


def compute_truth(tensors: Tensors, layout: TreeLayout, geometry: Geometry) -> Truth:
    """Forward and backward of the reference backend on the same inputs in fp32."""
    assert not torch.backends.cuda.matmul.allow_tf32, "the truth needs fp32 products"
    q, k, v, dout = (
        x.float() for x in (tensors.q_TNH, tensors.k_TKH, tensors.v_TKH, tensors.dout_TNH)
    )
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    scale = geometry.scale
    out, lse = tree_attention_partial_forward(
        q, k, v, layout, scale, query_start=0, key_start=0, backend="reference"
    )
    dq = tree_attention_partial_backward(
        *(dout, q, k, v, out, lse, layout, scale),
        query_start=0,
        key_start=0,
        dk_acc_SKH=dk,
        dv_acc_SKH=dv,
        backend="reference",
    )
    mean_key, _ = tree_attention_partial_forward(
        q, k, k, layout, scale, query_start=0, key_start=0, backend="reference"
    )
    return Truth(
        out_TNH=out, lse_NT=lse, dq_TNH=dq, dk_TKH=dk, dv_TKH=dv,
        dq_by_delta_TNH=mean_key.mul_(-scale),
    )  # fmt: skip


def check(subject: Subject, tensors: Tensors, truth: Truth) -> dict[str, float]:
    """Runs a subject once and compares all its results with the reference.

    Returns:
        Per result, the relative error over all rows, and as `*_row` that of the worst row; for
        `lse`, the largest difference.

    Raises:
        GateError: An error is above its bound, or NaN.
    """
    errors: dict[str, float] = {}
    dq, dk, dv = (torch.zeros_like(x) for x in (truth.dq_TNH, truth.dk_TKH, truth.dv_TKH))
    delta_error_TN = torch.zeros(truth.dq_TNH.shape[:2], device=dq.device)
    for part in subject.parts:
        inputs = tensors if subject.is_packed else tensors.gather(part.source_T)
        dout = inputs.dout_TNH.where(part.is_owner_T[:, None, None], 0)
        owned = Tensors(q_TNH=inputs.q_TNH, k_TKH=inputs.k_TKH, v_TKH=inputs.v_TKH, dout_TNH=dout)
        call = subject.load(owned, part)
        call.forward()
        call.backward()
        results = call.results()
        delta_error = dout.float().mul_(results.out_TNH.float() - truth.out_TNH[part.source_T])
        delta_error_TN.index_add_(0, part.source_T, delta_error.sum(dim=-1))
        del call, inputs, dout, owned, delta_error
        _keep_worst(errors, _forward_errors(results, truth, part.source_T))
        dq.index_add_(0, part.source_T, results.dq_TNH.float())
        dk.index_add_(0, part.source_T, results.dk_TKH.float())
        dv.index_add_(0, part.source_T, results.dv_TKH.float())
    dq -= delta_error_TN[..., None] * truth.dq_by_delta_TNH
    wanted = {"dq": (dq, truth.dq_TNH), "dk": (dk, truth.dk_TKH), "dv": (dv, truth.dv_TKH)}
    for name, (got, want) in wanted.items():
        error, row_error = _relative_errors(got, want)
        errors |= {name: error, f"{name}_row": row_error}
    _refuse(errors)
    return errors


def check_repeats(subject: Subject, tensors: Tensors) -> None:
    """Runs a deterministic subject twice.

    Raises:
        GateError: The two runs differ in some bit.
    """
    (part,) = subject.parts
    runs: list[Results] = []
    for _ in range(2):
        call = subject.load(tensors, part)
        call.forward()
        call.backward()
        runs.append(call.results())
    for name in ("out_TNH", "lse_NT", "dq_TNH", "dk_TKH", "dv_TKH"):
        first, second = (getattr(run, name) for run in runs)
        if not torch.equal(first, second):
            raise GateError(f"{name} has other bits in a second run")


def _forward_errors(results: Results, truth: Truth, source_T: Tensor) -> dict[str, float]:
    error, row_error = _relative_errors(results.out_TNH.float(), truth.out_TNH[source_T])
    errors = {"out": error, "out_row": row_error}
    if results.lse_NT is not None:
        difference = (results.lse_NT - truth.lse_NT[:, source_T]).abs()
        errors["lse"] = float(difference.amax())
    return errors


def _relative_errors(got_THD: Tensor, want_THD: Tensor) -> tuple[float, float]:
    """Error over all rows, and of the worst row; a row is one token and head."""
    row = torch.linalg.vector_norm(got_THD - want_THD, dim=-1)
    want_row = torch.linalg.vector_norm(want_THD, dim=-1)
    usual = want_row.median()
    worst = (row / (want_row + ROW_FLOOR * usual)).amax()
    return float(row.norm() / want_row.norm()), float(worst)


def _keep_worst(errors: dict[str, float], more: dict[str, float]) -> None:
    for name, value in more.items():
        # max() would drop a NaN.
        if not value <= errors.get(name, -1.0):
            errors[name] = value


def _refuse(errors: dict[str, float]) -> None:
    wrong: list[str] = []
    for name, value in errors.items():
        bound = MAX_ROW_ERROR if name.endswith("_row") else MAX_RELATIVE_ERROR
        bound = MAX_LSE_ERROR if name == "lse" else bound
        if not value <= bound:
            wrong.append(f"{name} {value:.3g} > {bound:g}")
    if wrong:
        raise GateError("wrong results: " + ", ".join(wrong))
