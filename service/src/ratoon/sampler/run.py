"""Runs one wave: each prompt once, then all of its sequences token by token until each has ended.

N prompts, R rows, T tokens of a row, D features, V vocabulary, I targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ratoon.model.tokenizer import TextStream
from ratoon.sampler.draw import draw
from ratoon.sampler.model import SampledModel
from ratoon.sampler.waves import Job, Share, draws
from ratoon_proto.types import SampledSequence, StopReason

# Places of a prompt whose log-probs are computed at a time.
_PLACES = 256


class _Row:
    """A sequence while it grows."""

    def __init__(self, job: Job, sample: int, model: SampledModel) -> None:
        self.job, self.sample = job, sample
        self.draws: Iterator[float] = draws(job, sample)
        self._tokens, self._logprobs = list[int](), list[float]()
        params = job.sampling
        own = frozenset[int]() if params.ignore_eos else model.end_tokens
        self._ends = own.union(params.stop_token_ids)
        self._text, self._stream = "", None
        if params.stop:
            tokenizer = model.tokenizer()
            assert tokenizer is not None, "asked for by whoever validates"
            self._stream = TextStream(tokenizer)

    def add(self, token: int, logprob: float) -> bool:
        """Append a token; whether the sequence goes on. One that has ended is the job's."""
        self._tokens.append(token)
        self._logprobs.append(logprob)
        reason = None
        if token in self._ends or self._is_stopped(token):
            reason = StopReason.STOP
        elif len(self._tokens) == self.job.sampling.max_tokens:
            reason = StopReason.LENGTH
        if reason is not None:
            self.job.done[self.sample] = SampledSequence(
                tokens=tuple(self._tokens), logprobs=tuple(self._logprobs), stop_reason=reason
            )
        return reason is None

    def _is_stopped(self, token: int) -> bool:
        if self._stream is None:
            return False
        stop = self.job.sampling.stop
        try:
            piece = self._stream.step(token)
        except ValueError:
            return False
        # A text that ends here may have begun in earlier tokens.
        self._text = self._text[-max(map(len, stop)) :] + piece
        return any(text in self._text for text in stop)


@torch.inference_mode()
def run_wave(model: SampledModel, wave: Sequence[Share]) -> None:
    """Sample all of the wave, into its jobs; those that are cancelled meanwhile are left.

    The model has the wave's weights.
    """
    rows = [_Row(share.job, sample, model) for share in wave for sample in share.samples]
    tokens_NT, mask_NT = _padded([share.job.prompt for share in wave], model.device)
    cache = model.make_cache()
    position_NT = (mask_NT.cumsum(1) - 1).clamp_(min=0)
    hidden_NTD = model.hidden(tokens_NT, mask_NT, position_NT, cache)
    for share, hidden_TD in zip(wave, hidden_NTD, strict=True):
        if share.samples.start == 0:
            _read_prompt(model, share.job, hidden_TD[-len(share.job.prompt) :])
    share_R = [index for index, share in enumerate(wave) for _ in share.samples]
    # A cache wants torch.LongTensor, which no device has.
    kept: Any = torch.tensor(share_R, device=model.device)
    cache.reorder_cache(kept)
    hidden_RD, mask_RT, position_R1 = hidden_NTD[kept, -1], mask_NT[kept], position_NT[kept, -1:]
    while True:
        token_R, logprob_R = draw(
            model.logits(hidden_RD),
            [row.job.sampling for row in rows],
            [next(row.draws) for row in rows],
        )
        # `add` comes first: a row that ends with its job's cancellation is still whole.
        goes_on = [
            row.add(token, logprob) and not row.job.is_cancelled
            for row, token, logprob in zip(rows, token_R, logprob_R, strict=True)
        ]
        if not any(goes_on):
            return
        kept = torch.tensor([i for i, go in enumerate(goes_on) if go], device=model.device)
        next_R1 = torch.tensor(token_R, device=model.device)[kept, None]
        if not all(goes_on):
            rows = [row for row, go in zip(rows, goes_on, strict=True) if go]
            cache.reorder_cache(kept)
            mask_RT, position_R1 = mask_RT[kept], position_R1[kept]
        mask_RT = torch.cat([mask_RT, mask_RT.new_ones(len(rows), 1)], dim=1)
        position_R1 = position_R1 + 1
        hidden_RD = model.hidden(next_R1, mask_RT, position_R1, cache)[:, -1]


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens [N, T], zeros at the left of shorter prompts, and a mask [N, T] that is 0 there."""
    most = max(map(len, prompts))
    tokens = [[0] * (most - len(prompt)) + [*prompt] for prompt in prompts]
    mask = [[0] * (most - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _read_prompt(model: SampledModel, job: Job, hidden_TD: Tensor) -> None:
    """The log-probs of the prompt's tokens, of the most likely ones and of targets, where they are
    asked for."""
    k, is_asked = job.sampling.topk_prompt_logprobs, job.sampling.prompt_logprobs
    places, targets = job.sampling.target_places, job.sampling.target_tokens
    if not (k or is_asked or targets):
        return
    nan = float("nan")
    # Each target's row of hidden states: the one before its place.
    row_I = torch.tensor(places, dtype=torch.long, device=model.device) - 1
    target_I = torch.tensor(targets, dtype=torch.long, device=model.device)
    logprob_I = torch.zeros(len(targets), device=model.device)
    own, top_tokens, top_logprobs = [nan], [0] * k, [nan] * k
    for start in range(0, len(job.prompt) - 1, _PLACES):
        stop = min(start + _PLACES, len(job.prompt) - 1)
        logprobs_TV = model.logits(hidden_TD[start:stop]).log_softmax(-1)
        next_T1 = torch.tensor(job.prompt[start + 1 : stop + 1], device=model.device)[:, None]
        own += logprobs_TV.gather(1, next_T1)[:, 0].tolist()
        here_I = (start <= row_I) & (row_I < stop)
        logprob_I[here_I] = logprobs_TV[row_I[here_I] - start, target_I[here_I]]
        values_Tk, tokens_Tk = logprobs_TV.topk(k, dim=-1)
        top_tokens += tokens_Tk.flatten().tolist()
        top_logprobs += values_Tk.flatten().tolist()
    job.prompt_logprobs = tuple(own) if is_asked else ()
    job.topk_tokens, job.topk_logprobs = tuple(top_tokens), tuple(top_logprobs)
    job.target_logprobs = tuple(logprob_I.tolist())
