"""Cases of log-probs and gradients in one pass, and the same in two."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratoon_kernels import (
    DifferentiatedLogprobs,
    SamplingMask,
    token_logprobs,
    token_logprobs_forward_backward,
)
from ratoon_kernels.token_logprobs.operands import SeedsOfRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    hidden_RD: Tensor
    lm_head_VD: Tensor
    targets_M: Tensor
    row_of_target_M: Tensor
    temperature_R: Tensor
    dlogprob_M: Tensor
    dentropy_R: Tensor
    mask: SamplingMask | None = None

    @property
    def rest(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.targets_M, self.row_of_target_M, self.temperature_R

    def late_seeds(self, *, has_entropy: bool = True) -> SeedsOfRows:
        """The case's seeds, each known only once its rows are asked for; NaN before."""
        dlogprob_M = torch.full_like(self.dlogprob_M, torch.nan)
        dentropy_R = torch.full_like(self.dentropy_R, torch.nan)

        def seeds_of(rows: slice, _logprob_M: Tensor, _entropy_R: Tensor) -> tuple:
            is_here_M = (self.row_of_target_M >= rows.start) & (self.row_of_target_M < rows.stop)
            dlogprob_M[is_here_M] = self.dlogprob_M[is_here_M]
            dentropy_R[rows] = self.dentropy_R[rows]
            return dlogprob_M, dentropy_R if has_entropy else None

        return seeds_of

    def in_one_pass(
        self, seeds_of: SeedsOfRows, *, needs_lm_head: bool = True
    ) -> DifferentiatedLogprobs:
        return token_logprobs_forward_backward(
            self.hidden_RD,
            self.lm_head_VD,
            *self.rest,
            seeds_of,
            needs_lm_head=needs_lm_head,
            mask=self.mask,
        )


def make_case(
    rows: int,
    vocab: int,
    targets: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    width: int = 12,
    *,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(rows + vocab + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def index(stop: int) -> Tensor:
        return torch.randint(0, max(stop, 1), (targets,), generator=generator).to(device)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        hidden_RD=draw(rows, width).to(device, dtype),
        lm_head_VD=draw(vocab, width).to(device, dtype),
        targets_M=index(vocab),
        row_of_target_M=index(rows),
        temperature_R=(draw(rows).abs() + 0.3).to(device, wide),
        dlogprob_M=draw(targets).to(device, wide),
        dentropy_R=draw(rows).to(device, wide),
    )


def kept_tokens(case: Case, seed: int = 0) -> Tensor:
    """bool [R, V] on the CPU: what rows keep, their targets among it.

    By turns all of the vocabulary without a mask, the targets alone (a row without any: one token),
    about half, and all by a mask.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, vocab = len(case.hidden_RD), len(case.lm_head_VD)
    is_kept_RV = torch.rand((rows, vocab), generator=generator) < 0.5
    is_kept_RV[:, 0] = True
    is_kept_RV[1::4, 1:] = False
    is_kept_RV[0::4] = is_kept_RV[3::4] = True
    is_kept_RV[case.row_of_target_M.cpu(), case.targets_M.cpu()] = True
    return is_kept_RV


def masked(case: Case, is_kept_RV: Tensor) -> Case:
    """The case with a mask of these tokens, but at every fourth row."""
    is_named_RV = is_kept_RV.clone()
    is_named_RV[0::4] = False
    row_N, token_N = is_named_RV.nonzero(as_tuple=True)
    first_R1 = torch.cat([torch.zeros(1, dtype=torch.int64), is_named_RV.sum(1).cumsum(0)])
    device = case.hidden_RD.device
    kept = {"token_N": token_N.int().to(device), "row_N": row_N.int().to(device)}
    return replace(case, mask=SamplingMask(**kept, first_R1=first_R1))


def in_two_passes(case: Case, *, has_entropy: bool = True) -> dict[str, Tensor]:
    """By the differentiable op and autograd."""
    hidden_RD = case.hidden_RD.clone().requires_grad_()
    lm_head_VD = case.lm_head_VD.clone().requires_grad_()
    logprob_M, entropy_R = token_logprobs(hidden_RD, lm_head_VD, *case.rest, mask=case.mask)
    heads, grads = [logprob_M], [case.dlogprob_M]
    if has_entropy:
        heads.append(entropy_R)
        grads.append(case.dentropy_R)
    dhidden_RD, dlm_head_VD = torch.autograd.grad(heads, [hidden_RD, lm_head_VD], grads)
    return {
        "logprob_M": logprob_M.detach(),
        "entropy_R": entropy_R.detach(),
        "dhidden_RD": dhidden_RD,
        "dlm_head_VD": dlm_head_VD,
    }
