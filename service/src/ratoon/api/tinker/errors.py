"""Errors of the service in the terms of the Tinker wire: names of fields, and statuses.

A refusal is never 409, which its SDK takes for a reason to ask again.
"""

from __future__ import annotations

import re

from ratoon.api.tinker.names import as_unknown
from ratoon.errors import ERROR_TABLE, ErrorCode, RatoonError, shown, unsupported

_NAMES = {
    "response": "target_tokens",
    "loss_mask": "target_tokens",
    "token_weights": "weights",
    "sampler_logprobs": "logprobs",
    "reference_logprobs": "logprobs",
}
_ROLLOUT = re.compile(r"groups\[(\d+)\]\.rollouts\[0\]\.(\w+)")
_PROMPT = re.compile(r"groups\[(\d+)\]\.prompt")
_DATUM = re.compile(r"groups\[(\d+)\](?:\.rollouts\[0\])?")
_OTHERS = {
    "optim.max_grad_norm": "adam_params.grad_clip_norm",
    "optim.": "adam_params.",
    "spec.lora.": "lora_config.",
    "spec.model_folder": "base_model",
    "spec.preset": "base_model",
    "spec.from_checkpoint": "path",
    "checkpoint_id": "path",
    "ttl_s": "ttl_seconds",
    "key.seq": "seq_id",
    "sampling.num_samples": "num_samples",
    "sampling.topk_prompt_logprobs": "topk_prompt_logprobs",
    "sampling.stop_token_ids": "sampling_params.stop",
    "sampling.target_tokens": "target_prompt_logprobs",
    "sampling.": "sampling_params.",
}
# Statuses that the SDK is to read as in docs/api.md; any other refusal is 400.
_KEPT = frozenset({401, 403, 404, 405, 408, 413, 429, 500, 503})


def renamed(error: RatoonError) -> RatoonError:
    """Return `error` with fields named as a caller of this wire has sent them."""
    return RatoonError(
        error.code,
        _renamed(error.message),
        field=_renamed(error.field),
        got=error.got,
        expected=error.expected,
        details=error.details,
    )


def _renamed(text: str) -> str:
    text = _ROLLOUT.sub(
        lambda found: f"data[{found[1]}].loss_fn_inputs.{_NAMES.get(found[2], found[2])}", text
    )
    text = _DATUM.sub(r"data[\1]", _PROMPT.sub(r"data[\1].model_input", text))
    for name, own in _OTHERS.items():
        text = text.replace(name, own)
    return text


def status_of(error: RatoonError) -> int:
    """Return the HTTP status of a refusal."""
    if error.code is ErrorCode.POLICY_NOT_READY:
        return 503
    status = ERROR_TABLE[error.code].http
    return status if status in _KEPT else 400


def shown_error(error: RatoonError) -> RatoonError:
    """Return what a caller is told of `error`."""
    return as_unknown(renamed(error))


def not_forward(loss_fn: str) -> RatoonError:
    expected = "cross_entropy: the log-probs are the same"
    text = f"loss_fn: a forward alone of {loss_fn} is not served, expected {expected}"
    return unsupported("loss_fn", loss_fn, expected, text)


def no_kind(kind: str) -> RatoonError:
    expected = "snapshot or inflight"
    text = f"kind: {shown(kind)} is not served, {expected} are"
    return unsupported("kind", shown(kind), expected, text)


def not_loaded() -> RatoonError:
    expected = "create_training_client_from_state, which makes a model of any weights"
    text = (
        "path: a model loads only weights that it saved itself, with the optimizer; "
        f"write {expected}"
    )
    return unsupported("path", "other weights, or no optimizer", expected, text)
