"""A request to sample, checked against the model that it is for. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ratoon.api.convert.checks import at_least, not_negative, read, required
from ratoon.errors import invalid
from ratoon.model.spec import ModelInfo
from ratoon.sampler.port import BaseFacts
from ratoon_proto.types import SamplingParams
from ratoon_proto.v1 import service_pb2

# Values of one answer: sampled tokens, and log-probs of the prompt.
MAX_VALUES = 2**20
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024


def sampling_params(
    request: service_pb2.SampleRequest, info: ModelInfo | BaseFacts
) -> SamplingParams:
    """What is asked for, with `max_tokens` set. Raises INVALID_ARGUMENT naming the field."""
    params = read(request.sampling, SamplingParams, "sampling")
    vocab_size = info.vocab_size
    if not request.prompt:
        raise required("prompt", "at least one token")
    _check_tokens("prompt", request.prompt, vocab_size)
    for name, token in info.media_tokens.items():
        if token in request.prompt:
            got = f"{token}, the {name} of the model"
            raise invalid("prompt", got, "tokens of text")
    at_least("sampling.num_samples", params.num_samples, 1)
    not_negative("sampling.temperature", params.temperature)
    at_least("sampling.top_k", params.top_k, 0)
    if not (math.isfinite(params.top_p) and 0 < params.top_p <= 1):
        raise invalid("sampling.top_p", params.top_p, "above 0 and at most 1")
    if not 0 <= params.topk_prompt_logprobs <= vocab_size:
        got = params.topk_prompt_logprobs
        raise invalid("sampling.topk_prompt_logprobs", got, f"from 0 to {vocab_size}")
    _check_targets(params, len(request.prompt), vocab_size)
    _check_tokens("sampling.stop_token_ids", params.stop_token_ids, vocab_size)
    if len(params.stop) > MAX_STOPS:
        raise invalid("sampling.stop", f"{len(params.stop)} texts", f"at most {MAX_STOPS}")
    for index, text in enumerate(params.stop):
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            expected = f"1 to {MAX_STOP_CHARACTERS} characters"
            raise invalid(f"sampling.stop[{index}]", f"{len(text)} characters", expected)
    return replace(params, max_tokens=_max_tokens(len(request.prompt), params, info))


def _max_tokens(num_prompt: int, params: SamplingParams, info: ModelInfo | BaseFacts) -> int:
    left = info.max_sequence_tokens - num_prompt
    if left < 1:
        expected = f"fewer than {info.max_sequence_tokens}, which the model takes"
        raise invalid("prompt", f"{num_prompt} tokens", expected)
    of_prompt = num_prompt * (params.topk_prompt_logprobs + params.prompt_logprobs)
    of_prompt += len(params.target_tokens)
    most = (MAX_VALUES - of_prompt) // params.num_samples
    if most < 1:
        expected = f"fewer samples, or values of the prompt: {MAX_VALUES} in all"
        raise invalid("sampling", f"{params.num_samples} samples", expected)
    asked = params.max_tokens
    if asked is None:
        return min(left, most)
    if not 1 <= asked <= min(left, most):
        field, expected = "sampling.max_tokens", f"1 to {min(left, most)} with this prompt"
        raise invalid(field, asked, f"{expected} and so many samples")
    return asked


def _check_targets(params: SamplingParams, num_prompt: int, vocab_size: int) -> None:
    places, tokens = params.target_places, params.target_tokens
    if len(places) != len(tokens):
        expected = f"{len(tokens)}, one for each of target_tokens"
        raise invalid("sampling.target_places", f"{len(places)} places", expected)
    _check_tokens("sampling.target_tokens", tokens, vocab_size)
    for index, place in enumerate(places):
        if not 1 <= place < num_prompt:
            expected = f"from 1 to {num_prompt - 1}, a place of the prompt"
            raise invalid(f"sampling.target_places[{index}]", place, expected)


def _check_tokens(field: str, tokens: Sequence[int], vocab_size: int) -> None:
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise invalid(f"{field}[{index}]", token, f"a token id in [0, {vocab_size})")
