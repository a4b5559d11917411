"""Cases of log-probs and gradients in one pass, and the same in two."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratoon_kernels import (
    DifferentiatedLogprobs,
    LowRankTerm,
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
    term: LowRankTerm | None = None

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
            term=self.term,
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


def with_term(case: Case, rank: int = 3) -> Case:
    """The case with a term of an adapter, of variance 1 in each logit."""
    generator = torch.Generator().manual_seed(rank)
    sizes = (len(case.hidden_RD), rank), (len(case.lm_head_VD), rank)
    u_RA, b_VA = (
        torch.randn(size, generator=generator, dtype=torch.float64) * rank**-0.25 for size in sizes
    )
    term = LowRankTerm(u_RA=u_RA.to(case.hidden_RD), b_VA=b_VA.to(case.hidden_RD))
    return replace(case, term=term)


def leaves_of(case: Case) -> tuple[Case, dict[str, Tensor]]:
    """The case with new leaves, and these by the names of their gradients."""
    hidden_RD, lm_head_VD = (
        each.clone().requires_grad_() for each in (case.hidden_RD, case.lm_head_VD)
    )
    leaves, term = {"dhidden_RD": hidden_RD, "dlm_head_VD": lm_head_VD}, case.term
    if term is not None:
        u_RA, b_VA = (each.clone().requires_grad_() for each in (term.u_RA, term.b_VA))
        leaves |= {"du_RA": u_RA, "db_VA": b_VA}
        term = LowRankTerm(u_RA=u_RA, b_VA=b_VA)
    return replace(case, hidden_RD=hidden_RD, lm_head_VD=lm_head_VD, term=term), leaves


def results_of(found: DifferentiatedLogprobs) -> dict[str, Tensor]:
    """By the names that `in_two_passes` has."""
    names = ("logprob_M", "entropy_R", "dhidden_RD", "dlm_head_VD")
    results = {name: getattr(found, name) for name in names}
    if found.dterm is not None:
        results |= {"du_RA": found.dterm.u_RA, "db_VA": found.dterm.b_VA}
    return results


def in_two_passes(case: Case, *, has_entropy: bool = True) -> dict[str, Tensor]:
    """By the differentiable op and autograd."""
    case, leaves = leaves_of(case)
    logprob_M, entropy_R = token_logprobs(
        case.hidden_RD, case.lm_head_VD, *case.rest, mask=case.mask, term=case.term
    )
    heads, grads = [logprob_M], [case.dlogprob_M]
    if has_entropy:
        heads.append(entropy_R)
        grads.append(case.dentropy_R)
    gradients = torch.autograd.grad(heads, list(leaves.values()), grads)
    results = {"logprob_M": logprob_M.detach(), "entropy_R": entropy_R.detach()}
    return results | dict(zip(leaves, gradients, strict=True))
