"""The fused backend as far as a CPU goes: refusals, chunks, sorted targets, scales, accumulation.

Its two Triton kernels stand in as functions of torch that compute the same; the rest of the
backend is what runs on a GPU.
"""

import itertools
import math
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ratoon_kernels import BackendUnavailableError, list_backends, select_backend
from ratoon_kernels.token_logprobs import fused, reference
from ratoon_kernels.token_logprobs.operands import (
    LowRankTerm,
    Operands,
    SamplingMask,
    Upstream,
    assert_in_range,
    sort_targets,
)

GPU = torch.device("cuda")
VOCAB = 37


def reduce_rows_twin(
    logits_CV: Tensor,
    temperature_C: Tensor,
    first_target_C1: Tensor,
    token_M: Tensor,
    order_M: Tensor,
    logprob_M: Tensor,
    entropy_C: Tensor,
    lse_C: Tensor,
) -> None:
    logp_CV = (logits_CV / temperature_C[:, None]).log_softmax(dim=-1)
    entropy_C.copy_(-(logp_CV.exp() * logp_CV).sum(dim=-1))
    lse_C.copy_((logits_CV / temperature_C[:, None]).logsumexp(dim=-1))
    for row, (start, stop) in enumerate(itertools.pairwise(first_target_C1.tolist())):
        logprob_M[order_M[start:stop]] = logp_CV[row, token_M[start:stop]]


def differentiate_logits_twin(
    logits_CV: Tensor,
    dlogits_CV: Tensor,
    temperature_C: Tensor,
    scale_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    dentropy_C: Tensor | None,
    first_target_C1: Tensor,
    token_M: Tensor,
    dlogprob_M: Tensor | None,
) -> None:
    logp_CV = logits_CV / temperature_C[:, None] - lse_C[:, None]
    dlogits = torch.zeros_like(logp_CV)
    for row, (start, stop) in enumerate(itertools.pairwise(first_target_C1.tolist())):
        if dlogprob_M is not None:
            dlogits[row].index_add_(0, token_M[start:stop], dlogprob_M[start:stop])
            dlogits[row] -= logp_CV[row].exp() * dlogprob_M[start:stop].sum()
    if dentropy_C is not None:
        dlogits -= logp_CV.exp() * dentropy_C[:, None] * (logp_CV + entropy_C[:, None])
    dlogits_CV.copy_(dlogits * scale_C[:, None])


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("fused_kernels")
    module.__dict__.update(
        reduce_rows=reduce_rows_twin, differentiate_logits=differentiate_logits_twin
    )
    name = "ratoon_kernels.token_logprobs.fused_kernels"
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        sys.modules["ratoon_kernels.token_logprobs"], "fused_kernels", module, False
    )


def _operands(rows: int, targets: int, *, dtype: torch.dtype = torch.float32) -> Operands:
    generator = torch.Generator().manual_seed(rows + targets)
    return Operands(
        hidden_RD=torch.randn((rows, 12), generator=generator).to(dtype),
        lm_head_VD=torch.randn((VOCAB, 12), generator=generator).to(dtype),
        targets_M=torch.randint(0, VOCAB, (targets,), generator=generator),
        row_of_target_M=torch.randint(0, max(rows, 1), (targets,), generator=generator),
        temperature_R=torch.rand(rows, generator=generator) + 0.3,
    )


def _mask(operands: Operands) -> SamplingMask:
    """A third of the vocabulary and the targets, at every other row."""
    is_kept_RV = torch.arange(len(operands.hidden_RD))[:, None] % 2 > torch.arange(VOCAB) % 3
    is_kept_RV[operands.row_of_target_M, operands.targets_M] = True
    is_kept_RV[0::2] = False
    row_N, token_N = is_kept_RV.nonzero(as_tuple=True)
    first_R1 = torch.cat([torch.zeros(1, dtype=torch.int64), is_kept_RV.sum(1).cumsum(0)])
    return SamplingMask(token_N=token_N.int(), row_N=row_N.int(), first_R1=first_R1)


def _term(operands: Operands) -> LowRankTerm:
    generator = torch.Generator().manual_seed(1)
    sizes = (len(operands.hidden_RD), 5), (VOCAB, 5)
    u_RA, b_VA = (torch.randn(size, generator=generator) for size in sizes)
    return LowRankTerm(u_RA=u_RA, b_VA=b_VA)


def _wide(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def _truth(
    operands: Operands, dlogprob_M: Tensor | None, dentropy_R: Tensor | None
) -> list[Tensor]:
    term = operands.term
    if term is not None:
        term = LowRankTerm(u_RA=term.u_RA.double(), b_VA=term.b_VA.double())
    wide = replace(
        operands,
        term=term,
        hidden_RD=operands.hidden_RD.double(),
        lm_head_VD=operands.lm_head_VD.double(),
        temperature_R=operands.temperature_R.double(),
    )
    logprob_M, entropy_R, lse_R = reference.forward(wide)
    upstream = Upstream(
        dlogprob_M=_wide(dlogprob_M),
        dentropy_R=_wide(dentropy_R),
        entropy_R=entropy_R,
        lse_R=lse_R,
        needs_lm_head=True,
    )
    dhidden_RD, dlm_head_VD, dterm = reference.backward(wide, upstream)
    factors = [] if dterm is None else [dterm.u_RA, dterm.b_VA]
    return [logprob_M, entropy_R, lse_R, dhidden_RD, *factors, dlm_head_VD]


@pytest.mark.usefixtures("twins", "poisoned_memory")
@pytest.mark.parametrize(("chunk_rows", "group_rows"), [(1, 1), (2, 8), (8, 2), (4, 4), (64, 64)])
@pytest.mark.parametrize("reads", ["both", "logprob", "entropy"])
@pytest.mark.parametrize(
    ("has_mask", "has_term"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_chunks_and_groups_of_any_size_give_what_the_reference_gives(
    reads: str,
    chunk_rows: int,
    group_rows: int,
    has_mask: bool,
    has_term: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "LOGIT_BYTES", chunk_rows * VOCAB * 4)
    monkeypatch.setattr(fused, "DLOGIT_BYTES", group_rows * VOCAB * 4)
    torch.manual_seed(0)
    for rows, targets in ((1, 1), (13, 40), (16, 7), (9, 0)):
        operands = _operands(rows, targets)
        # Rows of a wider matrix, and gradients that autograd expands from one number.
        operands = replace(operands, hidden_RD=operands.hidden_RD.repeat(1, 2)[:, :12])
        if has_mask:
            operands = replace(operands, mask=_mask(operands))
        if has_term:
            operands = replace(operands, term=_term(operands))
        dlogprob_M = None if reads == "entropy" else torch.randn(targets)
        dentropy_R = None if reads == "logprob" else torch.tensor(0.7).expand(rows)
        truth = _truth(operands, dlogprob_M, dentropy_R)
        logprob_M, entropy_R, lse_R = fused.forward(operands)
        for needs_lm_head in (True, False):
            upstream = Upstream(
                dlogprob_M=dlogprob_M,
                dentropy_R=dentropy_R,
                entropy_R=entropy_R,
                lse_R=lse_R,
                needs_lm_head=needs_lm_head,
            )
            dhidden_RD, dlm_head_VD, dterm = fused.backward(operands, upstream)
            assert (dterm is not None) == has_term
            factors = [] if dterm is None else [dterm.u_RA, dterm.b_VA]
            got = [logprob_M, entropy_R, lse_R, dhidden_RD, *factors, dlm_head_VD]
            if not needs_lm_head:
                assert got.pop().shape == (0, 12)
            for value, expected in zip(got, truth, strict=False):
                assert value.shape == expected.shape
                assert (value - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.usefixtures("twins", "poisoned_memory")
def test_no_rows_give_empty_results_and_a_zero_gradient_of_the_head() -> None:
    operands = _operands(0, 0)
    operands = replace(operands, term=_term(operands))
    logprob_M, entropy_R, lse_R = fused.forward(operands)
    assert logprob_M.shape == entropy_R.shape == lse_R.shape == (0,)
    upstream = Upstream(
        dlogprob_M=logprob_M,
        dentropy_R=entropy_R,
        entropy_R=entropy_R,
        lse_R=lse_R,
        needs_lm_head=True,
    )
    dhidden_RD, dlm_head_VD, dterm = fused.backward(operands, upstream)
    assert dhidden_RD.shape == (0, 12)
    assert torch.equal(dlm_head_VD, torch.zeros(VOCAB, 12))
    assert dterm is not None
    assert dterm.u_RA.shape == (0, 5)
    assert torch.equal(dterm.b_VA, torch.zeros(VOCAB, 5))


def test_targets_are_sorted_by_row_and_token_and_equal_ones_keep_their_order() -> None:
    operands = _operands(20, 600)
    targets = sort_targets(operands)
    for row in range(20):
        span = slice(int(targets.first_R1[row]), int(targets.first_R1[row + 1]))
        mine = (operands.row_of_target_M == row).nonzero()[:, 0]
        mine = mine[operands.targets_M[mine].argsort(stable=True)]
        assert torch.equal(targets.order_M[span], mine)
        assert torch.equal(targets.token_M[span], operands.targets_M[mine])
    assert targets.first_R1[0] == 0
    assert targets.first_R1[20] == 600


@pytest.mark.parametrize(
    ("token", "row", "name"),
    [(VOCAB, 0, "targets_M"), (-1, 0, "targets_M"), (0, 3, "row_of"), (0, -1, "row_of")],
)
def test_an_index_out_of_range_stops_the_device(token: int, row: int, name: str) -> None:
    """A kernel would read whatever memory lies there."""
    operands = replace(
        _operands(3, 2),
        targets_M=torch.tensor([1, token]),
        row_of_target_M=torch.tensor([row, 2]),
    )
    with pytest.raises(RuntimeError, match=name):
        assert_in_range(sort_targets(operands), 3, VOCAB)
    assert_in_range(sort_targets(_operands(3, 2)), 3, VOCAB)


def test_a_chunk_fits_its_bytes_and_is_a_power_of_two() -> None:
    for vocab_size in (1, 37, 32_000, 128_256, 151_936, 262_144, 5 * 10**8):
        for size_bytes, dtype in (
            (fused.LOGIT_BYTES, torch.float32),
            (fused.DLOGIT_BYTES, torch.bfloat16),
        ):
            rows = fused.rows_within(size_bytes, vocab_size, dtype)
            row_bytes = vocab_size * dtype.itemsize
            assert rows & (rows - 1) == 0
            assert rows == 1 or rows * row_bytes <= size_bytes < 2 * rows * row_bytes
    assert list(fused.spans(3, 10, 4)) == [slice(3, 7), slice(7, 10)]
    assert list(fused.spans(5, 5, 4)) == []


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 1e6])
@pytest.mark.parametrize("reads", ["both", "logprob", "entropy"])
def test_scaled_fp16_gradients_use_the_range_and_never_overflow(reads: str, size: float) -> None:
    """Trap: the gradient of a mean over a million tokens is zero in fp16."""
    torch.manual_seed(0)
    operands = _operands(11, 40)
    dlogprob_M = None if reads == "entropy" else torch.randn(40) * size
    dentropy_R = None if reads == "logprob" else torch.randn(11) * size
    targets = sort_targets(operands)
    scale = fused.dlogit_scale(torch.float16, dlogprob_M, dentropy_R, operands, targets)
    wide = replace(operands, hidden_RD=operands.hidden_RD * 3)
    logits_RV = torch.mm(wide.hidden_RD, wide.lm_head_VD.T)
    logprob_M, entropy_R, lse_R = torch.empty(40), torch.empty(11), torch.empty(11)
    temperature_R = operands.temperature_R
    sorted_targets = (targets.first_R1, targets.token_M)
    reduce_rows_twin(
        logits_RV, temperature_R, *sorted_targets, targets.order_M, logprob_M, entropy_R, lse_R
    )
    dlogits_RV = torch.empty_like(logits_RV)
    differentiate_logits_twin(
        logits_RV,
        dlogits_RV,
        temperature_R,
        scale / temperature_R,
        lse_R,
        entropy_R,
        dentropy_R,
        *sorted_targets,
        None if dlogprob_M is None else dlogprob_M[targets.order_M],
    )
    greatest = dlogits_RV.abs().max().item()
    assert 2**6 < greatest <= 2**15
    assert math.frexp(scale.item())[0] == 0.5


def test_only_fp16_gradients_are_scaled() -> None:
    operands = _operands(5, 9)
    targets = sort_targets(operands)
    for dtype in (torch.bfloat16, torch.float32):
        scale = fused.dlogit_scale(dtype, torch.randn(9) * 1e-9, None, operands, targets)
        assert scale == 1
    zero = fused.dlogit_scale(torch.float16, torch.zeros(9), torch.zeros(5), operands, targets)
    assert zero.isfinite()
    assert (1 / zero).isfinite()
    none = _operands(4, 0)
    scale = fused.dlogit_scale(torch.float16, torch.zeros(0), None, none, sort_targets(none))
    assert scale.isfinite()


def test_calls_that_it_does_not_serve_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BackendUnavailableError, match=r"'fused'.*without CUDA"):
        select_backend("token_logprobs", "fused", GPU, torch.bfloat16, 64)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(fused, "_has_triton", lambda: False)
    with pytest.raises(BackendUnavailableError, match="triton is not installed"):
        select_backend("token_logprobs", "fused", GPU, torch.bfloat16, 64)
    monkeypatch.setattr(fused, "_has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    statuses = {s.name: s for s in list_backends() if s.op == "token_logprobs"}
    assert list(statuses) == ["fused", "reference"]
    assert statuses["fused"].reason == "no NVIDIA GPU is visible"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    with pytest.raises(BackendUnavailableError, match="no support for cpu tensors"):
        select_backend("token_logprobs", "fused", torch.device("cpu"), torch.bfloat16, 64)
    with pytest.raises(BackendUnavailableError, match=r"no support for dtype torch\.float64"):
        select_backend("token_logprobs", "fused", GPU, torch.float64, 64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert select_backend("token_logprobs", None, GPU, dtype, 64) == "fused"
    assert select_backend("token_logprobs", None, GPU, torch.float64, 64) == "reference"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    with pytest.raises(BackendUnavailableError, match=r"7\.5, needs 8\.0"):
        select_backend("token_logprobs", "fused", GPU, torch.bfloat16, 64)
