"""The demo's rollout system: transformers on weights pulled and verified through the public client.

It samples at temperature 1 from the full distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
)

from ratoon.demo.task import Query, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Response token ids int32 [R] and their log-probs float32 [R] at temperature 1."""

    query: Query
    response: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @property
    def text(self) -> bytes:
        """The response as bytes; tokens that are not bytes are dropped."""
        return bytes(int(token) for token in self.response if token < 256)


class Sampler:
    """Owns one model and the random state of sampling; not safe across threads."""

    def __init__(
        self, *, preamble: str, max_new_tokens: int, seed: int, device: str = "cpu"
    ) -> None:
        self._preamble = torch.tensor([tokens(preamble)], device=device)
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._num_draws = 0
        # transformers types generate() as a Tensor.
        self._model: Any = None
        self.version = -1

    def load(self, folder: Path, version: int) -> None:
        """Replace the weights by those in `folder` (config.json and safetensors files).

        Raises `RuntimeError` where none of the files has a parameter of the model.
        """
        if self._model is None:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            with self._preamble.device:
                self._model = AutoModelForCausalLM.from_config(config).eval()
        state: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            state.update(load_file(file))
        if self._model.config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self._model.load_state_dict(state, strict=True)
        self.version = version

    @torch.inference_mode()
    def sample(self, queries: Sequence[Query], num_samples: int) -> list[list[Sample]]:
        """`num_samples` responses to each query; the preamble's keys and values are computed once.

        All queries must be of one length.
        """
        model = self._model
        assert model is not None, "load a version first"
        device = self._preamble.device
        query_ids = torch.tensor([tokens(query.text) for query in queries], device=device)
        query_ids = query_ids.repeat_interleave(num_samples, dim=0)
        prompt_ids = torch.cat([self._preamble.expand(len(query_ids), -1), query_ids], dim=1)
        cache = DynamicCache(config=model.config)
        model(input_ids=self._preamble, past_key_values=cache, use_cache=True)
        # Not every kind of layer repeats its state otherwise.
        first_row: Any = torch.zeros(len(query_ids), dtype=torch.int64, device=device)
        cache.reorder_cache(first_row)
        self._num_draws += 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed * 1_000_003 + self._num_draws)
            output = model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                past_key_values=cache,
                generation_config=GenerationConfig(
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=self._max_new_tokens,
                    eos_token_id=None,
                    pad_token_id=0,
                    return_dict_in_generate=True,
                    output_logits=True,
                ),
            )
        response_ids = output.sequences[:, prompt_ids.shape[1] :]
        logprobs = _chosen_logprobs(output.logits, response_ids).cpu()
        response_ids = response_ids.cpu()
        rows = [
            Sample(
                query=queries[row // num_samples],
                response=response_ids[row].numpy().astype(np.int32),
                logprobs=logprobs[row].numpy(),
            )
            for row in range(len(response_ids))
        ]
        return [rows[start : start + num_samples] for start in range(0, len(rows), num_samples)]


def _chosen_logprobs(logits: Sequence[Tensor], chosen: Tensor) -> Tensor:
    """float32 [batch, R] log-probs of the chosen tokens; logits are R tensors [batch, V]."""
    stacked = torch.stack([step.float().log_softmax(dim=-1) for step in logits], dim=1)
    return stacked.gather(2, chosen[..., None])[..., 0]
