"""Subjects that compute token log-probs in the benchmark: ours, plain torch, compiled torch, Liger.

All take the same call, one target per row at temperature 1: the only call that all of them
support.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.utils.checkpoint import checkpoint

from ratoon_kernels import token_logprobs

OURS = "fused"
COMPILED_ROWS = 1024
MAX_COMPILATIONS = 64
IGNORED_TARGET = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """R rows that each predict one target.

    Attributes:
        hidden_RD: Hidden states.
        lm_head_VD: LM head.
        target_R: int64 tokens.
        temperature_R: fp32, all 1.
        dlogprob_R: fp32 gradient with respect to the log-probs.
    """

    hidden_RD: Tensor
    lm_head_VD: Tensor
    target_R: Tensor
    temperature_R: Tensor
    dlogprob_R: Tensor


Function = Callable[[Problem], Tensor]
"""Returns logprob_R. Entropies are computed on the way by those that can."""


def make_problem(
    num_rows: int, head_VD: Tensor, generator: torch.Generator, scale: float = 1.0
) -> Problem:
    """Random rows whose logits have a standard deviation of about 2 * `scale`."""
    vocab_size, width = head_VD.shape
    device = head_VD.device
    hidden = torch.randn((num_rows, width), generator=generator, device=device)
    return Problem(
        hidden_RD=(hidden * scale).to(head_VD.dtype),
        lm_head_VD=head_VD,
        target_R=torch.randint(0, vocab_size, (num_rows,), generator=generator, device=device),
        temperature_R=torch.ones(num_rows, device=device),
        dlogprob_R=torch.randn(num_rows, generator=generator, device=device),
    )


def make_head(
    vocab_size: int, width: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """A random LM head; with unit hidden states its logits have a standard deviation of 2."""
    weight = torch.randn((vocab_size, width), generator=generator, device=generator.device)
    return weight.mul_(2 * width**-0.5).to(dtype)


def find(name: str) -> Function:
    """The function of a subject.

    Raises:
        ImportError: A library that it needs is missing; the message says which.
    """
    return _SUBJECTS[name]()


def _of_backend(name: str) -> Function:
    def run(problem: Problem) -> Tensor:
        rows = torch.arange(len(problem.target_R), device=problem.target_R.device)
        logprob_R, _ = token_logprobs(
            problem.hidden_RD,
            problem.lm_head_VD,
            problem.target_R,
            rows,
            problem.temperature_R,
            backend=name,
        )
        return logprob_R

    return run


def _dense(
    hidden_RD: Tensor, lm_head_VD: Tensor, target_R: Tensor, temperature_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes as common training code does: a 16-bit product, upcast, with entropies."""
    logits_RV = (hidden_RD @ lm_head_VD.T).float() / temperature_R[:, None]
    logp_RV = torch.log_softmax(logits_RV, dim=-1)
    entropy_R = -(logp_RV.exp() * logp_RV).sum(dim=-1)
    return logp_RV.gather(1, target_R[:, None])[:, 0], entropy_R


def _torch_full() -> Function:
    return lambda p: _dense(p.hidden_RD, p.lm_head_VD, p.target_R, p.temperature_R)[0]


def _torch_compiled() -> Function:
    # Otherwise everything after eight shapes and modes would run uncompiled.
    dynamo_config.recompile_limit = MAX_COMPILATIONS
    compiled: Any = torch.compile(_dense, dynamic=False)

    def run(problem: Problem) -> Tensor:
        parts: list[Tensor] = []
        for start in range(0, len(problem.target_R), COMPILED_ROWS):
            rows = slice(start, start + COMPILED_ROWS)
            args = (problem.hidden_RD[rows], problem.lm_head_VD, problem.target_R[rows])
            temperature_R = problem.temperature_R[rows]
            part: Any = checkpoint(
                compiled, *args, temperature_R, use_reentrant=False, preserve_rng_state=False
            )
            parts.append(part[0])
        return torch.cat(parts)

    return run


def _liger(budget_multiplier: int) -> Function:
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    op: Any = module.LigerFusedLinearCrossEntropyFunction

    def run(problem: Problem) -> Tensor:
        # No bias, class weights, z-loss, label smoothing or soft cap; the head's gradient is
        # accumulated in fp32; the last argument multiplies the memory for logits.
        loss_R, *_ = op.apply(
            problem.hidden_RD, problem.lm_head_VD, problem.target_R,
            None, None, IGNORED_TARGET, 0.0, 0.0, "none", None, False, torch.float32,
            False, False, False, None, None, budget_multiplier,
        )  # fmt: skip
        return -loss_R

    return run


def _liger_sm90() -> Function:
    importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    op: Any = module.LigerFusedLinearScaledCrossEntropyFunction

    def run(problem: Problem) -> Tensor:
        loss_R, _ = op.apply(
            problem.hidden_RD, problem.lm_head_VD, problem.target_R, 1.0, IGNORED_TARGET, 1, True
        )
        return -loss_R

    return run


_SUBJECTS: dict[str, Callable[[], Function]] = {
    OURS: functools.partial(_of_backend, OURS),
    "reference": functools.partial(_of_backend, "reference"),
    "torch-full": _torch_full,
    "torch-compiled": _torch_compiled,
    "liger": functools.partial(_liger, 1),
    "liger-4x": functools.partial(_liger, 4),
    "liger-sm90": _liger_sm90,
}
SUBJECTS = tuple(_SUBJECTS)
