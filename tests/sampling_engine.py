"""An inference engine that samples: vLLM's completions by token ids over a transformers model.

Its pause and load routes are the fake engine's. Requests are answered one at a time; those that
come while it is paused wait, as vLLM's do.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.client.fake_engine import FILE, ROOT, FakeEngine


class SamplingEngine(FakeEngine):
    """Started on the version in `folder`; `url` is whoever's serves it.

    `stop`: the token that ends a response; None: none does.
    """

    url = ""

    def __init__(self, folder: Path, stop: int | None = None) -> None:
        self.folder = folder
        self._stop = stop
        # generate() is typed as a tensor.
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self._generator = torch.Generator().manual_seed(0)
        self._turn = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        super().__init__()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/completions":
            return 200, {"choices": self._in_turn(body)}
        if path == "/pause?mode=wait":
            self._open.clear()
        answer = super().answer(path, body)
        if not self.is_paused:
            self._open.set()
        return answer

    def _in_turn(self, body: Any) -> list[dict[str, Any]]:
        """A pause waits for the one that is being answered alone, as it does for what runs."""
        with self._turn:
            while True:
                self._open.wait()
                with self.lock:
                    if self.sample() is not None:
                        return self._complete(body)

    def _load(self, path: str, *, is_whole: bool) -> None:
        super()._load(path, is_whole=is_whole)
        if is_whole:
            folder = self.folder if path == ROOT else Path(path)
            # A tied head is no tensor of the file.
            self._model.load_state_dict(load_file(folder / FILE), strict=False)

    @torch.inference_mode()
    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Responses of the whole distribution at the temperature; at 0 the likeliest tokens."""
        assert (body["top_p"], body["top_k"], body["logprobs"]) == (1.0, 0, 0)
        assert body["return_token_ids"] is True
        generator = self._generator
        is_greedy = body["temperature"] == 0
        if body.get("seed") is not None:
            generator = torch.Generator().manual_seed(body["seed"])
        cache, inputs = None, torch.tensor([body["prompt"]])
        drawn: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        for _ in range(body["max_tokens"]):
            out = self._model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows = (out.logits[:, -1].float() / (body["temperature"] or 1.0)).log_softmax(-1)
            if not drawn:
                cache.batch_repeat_interleave(body["n"])
                rows = rows.expand(body["n"], -1)
            if is_greedy:
                inputs = rows.argmax(-1, keepdim=True)
            else:
                inputs = torch.multinomial(rows.exp(), 1, generator=generator)
            drawn.append(inputs)
            logprobs.append(rows.gather(1, inputs))
        responses, values = torch.cat(drawn, 1).tolist(), torch.cat(logprobs, 1).tolist()
        return [self._choice(*pair) for pair in zip(responses, values, strict=True)]

    def _choice(self, tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
        length = tokens.index(self._stop) + 1 if self._stop in tokens else len(tokens)
        return {
            "token_ids": tokens[:length],
            "logprobs": {"token_logprobs": logprobs[:length]},
            "finish_reason": "stop" if self._stop in tokens else "length",
        }
