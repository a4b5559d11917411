"""Log-probs and gradients in one pass over the logits, by the reference backend."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon_kernels import KernelArgumentError, token_logprobs_forward_backward
from ratoon_kernels.token_logprobs import reference
from tests.kernels.one_pass import in_two_passes, make_case


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_a_chunk", [1, 3, 100])
@pytest.mark.parametrize("has_entropy", [False, True])
def test_bits_are_those_of_two_passes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows_a_chunk: int, has_entropy: bool
) -> None:
    case = make_case(13, 37, 29, dtype, "cpu")
    accumulated = torch.promote_types(dtype, torch.float32)
    monkeypatch.setattr(reference, "LOGIT_BYTES", rows_a_chunk * 37 * accumulated.itemsize)
    expected = in_two_passes(case, has_entropy=has_entropy)
    found = case.in_one_pass(case.late_seeds(has_entropy=has_entropy))
    for name, value in expected.items():
        assert torch.equal(getattr(found, name), value), name


def test_each_run_of_rows_is_asked_for_once_and_its_results_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(13, 37, 29, torch.float32, "cpu")
    # For both: how many rows a product has may change its bits.
    monkeypatch.setattr(reference, "LOGIT_BYTES", 5 * 37 * 4)
    truth = in_two_passes(case)
    seen: list[slice] = []

    def seeds_of(rows: slice, logprob_M: Tensor, entropy_R: Tensor) -> Any:
        seen.append(rows)
        is_here_M = (case.row_of_target_M >= rows.start) & (case.row_of_target_M < rows.stop)
        assert torch.equal(logprob_M[is_here_M], truth["logprob_M"][is_here_M])
        assert torch.equal(entropy_R[rows], truth["entropy_R"][rows])
        return None, None

    found = case.in_one_pass(seeds_of)
    assert [(rows.start, rows.stop) for rows in seen] == [(0, 5), (5, 10), (10, 13)]
    assert not found.dhidden_RD.any()
    assert not found.dlm_head_VD.any()


def test_a_loss_that_differentiates_is_not_recorded() -> None:
    """The caller's function may use autograd; what it is given and what comes back is outside."""
    case = make_case(5, 11, 7, torch.float32, "cpu")

    def seeds_of(_rows: slice, logprob_M: Tensor, _entropy_R: Tensor) -> Any:
        leaf_M = logprob_M.clone().requires_grad_()
        (gradient_M,) = torch.autograd.grad(leaf_M.exp().sum(), [leaf_M])
        return gradient_M, None

    hidden_RD = case.hidden_RD.clone().requires_grad_()
    found = token_logprobs_forward_backward(
        hidden_RD, case.lm_head_VD.requires_grad_(), *case.rest, seeds_of, needs_lm_head=True
    )
    assert found.dhidden_RD.abs().sum() > 0
    assert not found.logprob_M.requires_grad
    assert not found.dhidden_RD.requires_grad


def test_a_frozen_head_has_no_gradient() -> None:
    case = make_case(5, 11, 7, torch.float32, "cpu")
    found = case.in_one_pass(case.late_seeds(), needs_lm_head=False)
    assert found.dlm_head_VD.shape == (0, 12)
    assert torch.equal(found.dhidden_RD, in_two_passes(case)["dhidden_RD"])


def test_no_rows_give_zeros() -> None:
    case = make_case(0, 11, 0, torch.float32, "cpu")

    def never(*_: Any) -> Any:
        raise AssertionError

    found = case.in_one_pass(never)
    assert found.logprob_M.shape == found.entropy_R.shape == (0,)
    assert not found.dlm_head_VD.any()


def _nothing(_rows: slice, _logprob_M: Tensor, _entropy_R: Tensor) -> tuple[None, None]:
    return None, None


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"hidden_RD": torch.zeros(5, 12, dtype=torch.float16)}, "lm_head_VD"),
        ({"targets_M": torch.full((7,), 11)}, "targets_M"),
        ({"temperature_R": torch.zeros(5)}, "temperature_R"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], argument: str) -> None:
    case = make_case(5, 11, 7, torch.float32, "cpu")
    with pytest.raises(KernelArgumentError, match=argument):
        replace(case, **change).in_one_pass(_nothing)


def test_half_precision_is_refused_for_its_scale() -> None:
    case = make_case(5, 11, 7, torch.float16, "cpu")
    with pytest.raises(KernelArgumentError, match=r"hidden_RD.*float16"):
        case.in_one_pass(_nothing)
