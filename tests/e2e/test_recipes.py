"""docs/recipes.md as it stands, run against the real service and a stand-in for the samplers."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from ratoon.model.presets import EOS_TOKEN
from tests.running_service import Service

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
DIGITS = b"0123456789"
# The second sampler, in the same words. A turn that is cut ends its path; after the other one come
# the tool's answer, framed by the template of the presets, and two turns.
CHECKS = """
assert graded("1+1=?", "2", 0, sglang_samples).rollouts
context = [*b"\\n", 257, *b"tool\\n4", 258, *b"\\n", 257, *b"assistant\\n"]
assert between_turns({"role": "tool", "content": "4"}) == context
rollouts = played("1+1=?", "2", 0).rollouts
assert [[run.trained for run in each.content] for each in rollouts] == [
    [True], [True, False, True], [True, False, True]
]
assert rollouts[1].content[0].tokens.tolist() == rollouts[2].content[0].tokens.tolist()
"""


class Samplers(BaseHTTPRequestHandler):
    """Answers as vLLM's completions and SGLang's generate do: digits, then an end of turn.

    A request that is not of token ids, or asks for another distribution, has no answer.
    """

    random = random.Random(0)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body: dict[str, Any] = json.loads(self.rfile.read(length))
        answers = {"/v1/completions": self._vllm, "/generate": self._sglang}
        data = json.dumps(answers[self.path](body)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _vllm(self, body: dict[str, Any]) -> dict[str, Any]:
        self._check(body["prompt"], body)
        assert body["logprobs"] == 0
        assert body["return_token_ids"] is True
        return {
            "choices": [
                {
                    "token_ids": tokens,
                    "logprobs": {"token_logprobs": logprobs},
                    "finish_reason": "stop" if tokens[-1] == EOS_TOKEN else "length",
                }
                for tokens, logprobs in self._samples(body["n"])
            ]
        }

    def _sglang(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        sampling = body["sampling_params"]
        self._check(body["input_ids"], sampling)
        assert body["return_logprob"] is True
        return [
            {
                "meta_info": {
                    "output_token_logprobs": [
                        [logprob, token, None]
                        for token, logprob in zip(tokens, logprobs, strict=True)
                    ],
                    "finish_reason": {"type": "stop" if tokens[-1] == EOS_TOKEN else "length"},
                }
            }
            for tokens, logprobs in self._samples(sampling["n"])
        ]

    def _check(self, prompt: list[int], sampling: dict[str, Any]) -> None:
        assert prompt
        assert all(isinstance(token, int) for token in prompt)
        assert (sampling["temperature"], sampling["top_p"]) == (1.0, 1.0)
        assert sampling["top_k"] <= 0

    def _samples(self, count: int) -> Iterator[tuple[list[int], list[float]]]:
        for index in range(count):
            last = EOS_TOKEN if index % 4 else self.random.choice(DIGITS)
            tokens = [*self.random.choices(DIGITS, k=3), last]
            yield tokens, [-math.log(260)] * len(tokens)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Not to the tests' output."""


@pytest.fixture
def sampler() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Samplers)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


@pytest.mark.e2e
@pytest.mark.more
def test_every_recipe_runs(service: Service, sampler: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == PAGE.read_text(encoding="utf-8").count("```") // 2 >= 7
    code = "\n".join(blocks)
    for address, own in (
        ("grpc://127.0.0.1:8443", f"grpc://{service.addresses.grpc}"),
        ("http://127.0.0.1:8100", sampler),
    ):
        assert code.count(address) == 1
        code = code.replace(address, own)
    code += CHECKS
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for recipe in ("grpo", "turns", "asynchronous", "dapo", "gspo", "kl", "lora", "custom"):
        assert f"{recipe}: " in done.stdout, done.stdout
