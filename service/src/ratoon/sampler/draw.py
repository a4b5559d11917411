"""The next token of each row, drawn by a number that the caller gives: equal numbers, equal tokens.

R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ratoon_proto.types import SamplingParams

# Elements of float64 tables at a time.
_MOST_ELEMENTS = 2**22


def draw(
    logits_RV: Tensor, rows: Sequence[SamplingParams], draws: Sequence[float]
) -> tuple[list[int], list[float]]:
    """A token of each row, and its log-prob at the row's temperature over the whole vocabulary.

    `draws`: a number in [0, 1) for each row, at which the row's cumulative distribution is read.
    """
    tokens, logprobs = list[int](), list[float]()
    step = max(1, _MOST_ELEMENTS // logits_RV.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        found = _draw(logits_RV[part].float(), rows[part], draws[part])
        tokens += found[0].tolist()
        logprobs += found[1].tolist()
    return tokens, logprobs


def _draw(
    logits_RV: Tensor, rows: Sequence[SamplingParams], draws: Sequence[float]
) -> tuple[Tensor, Tensor]:
    temperature_R1 = logits_RV.new_tensor([row.temperature or 1.0 for row in rows])[:, None]
    logprobs_RV = (logits_RV / temperature_R1).log_softmax(-1)
    probs_RV = logprobs_RV.double().exp()
    cut = [index for index, row in enumerate(rows) if row.top_k or row.top_p < 1]
    if cut:
        probs_RV[cut] = truncated(
            probs_RV[cut], [rows[i].top_k for i in cut], [rows[i].top_p for i in cut]
        )
    sums_RV = probs_RV.cumsum(-1)
    at_R1 = sums_RV.new_tensor(draws)[:, None] * sums_RV[:, -1:]
    token_R1 = torch.searchsorted(sums_RV, at_R1, right=True).clamp_(max=logits_RV.shape[1] - 1)
    is_greedy = [row.temperature == 0 for row in rows]
    if any(is_greedy):
        greedy_R1 = torch.tensor(is_greedy, device=token_R1.device)[:, None]
        token_R1 = torch.where(greedy_R1, logits_RV.argmax(-1, keepdim=True), token_R1)
    return token_R1[:, 0], logprobs_RV.gather(1, token_R1)[:, 0]


def truncated(probs_RV: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Zeros at what a row's top_k, and then its top_p, leave out; the others stay as they are.

    A row's top_p is of the sum of what top_k has left, and the token that reaches it stays.
    """
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_RV.shape[1], device=probs_RV.device)
    most_R1 = torch.tensor([k or probs_RV.shape[1] for k in top_k], device=probs_RV.device)[:, None]
    sorted_RV = sorted_RV.masked_fill(rank_V >= most_R1, 0.0)
    sums_RV = sorted_RV.cumsum(-1)
    wanted_R1 = probs_RV.new_tensor(top_p)[:, None] * sums_RV[:, -1:]
    # A top_p of 1 leaves out nothing, whatever the last bits of the sums are.
    is_out_RV = (sums_RV - sorted_RV >= wanted_R1) & (probs_RV.new_tensor(top_p)[:, None] < 1)
    return torch.zeros_like(probs_RV).scatter_(-1, order_RV, sorted_RV.masked_fill(is_out_RV, 0.0))
