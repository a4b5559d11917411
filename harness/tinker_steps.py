"""Models that are trained at once by the SDK of the Tinker API, each by a client of its own.

It knows nothing of a service but URL and key.

    python tinker_steps.py BASE_MODEL STEPS SEED...

A seed decides its model, its samples and so all of its batches. Each step prints a JSON object:
`seed`, `step`, `model_id`, the `loss`, and a `digest` of the samples and of the log-probs of both
sampler and trainer. Equal seeds print equal losses and digests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any

import numpy as np
import tinker  # pyright: ignore[reportMissingImports]  # in a folder of its own
from tinker import types  # pyright: ignore[reportMissingImports]

PROMPTS, SAMPLES, PROMPT, RESPONSE = 4, 4, 12, 6
# A sample's reward is what part of its tokens are below it; a random model's is the baseline.
BOUND, BASELINE = 16, 0.25
ADAM = types.AdamParams(learning_rate=1e-2)


async def train(base_model: str, steps: int, seed: int) -> None:
    service = tinker.ServiceClient()
    client = await service.create_lora_training_client(base_model, rank=8, seed=seed)
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, 64, PROMPT).tolist() for _ in range(PROMPTS)]
    for step in range(steps):
        sampler = await client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=RESPONSE, seed=step, stop=[])
        answers = await asyncio.gather(
            *(sampler.sample(types.ModelInput.from_ints(p), SAMPLES, params) for p in prompts)
        )
        data: list[Any] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            rewards = [float(np.mean(np.array(s.tokens) < BOUND)) for s in answer.sequences]
            data += map(_datum, [prompt] * SAMPLES, answer.sequences, rewards)
        both = client.forward_backward(data, "cispo")
        stepped = client.optim_step(ADAM)
        trained = await both
        await stepped
        told = {
            "seed": seed,
            "step": step,
            "model_id": client.model_id,
            "loss": trained.metrics["loss:sum"],
            "digest": _digest(answers, trained),
        }
        print(json.dumps(told), flush=True)


def _datum(prompt: list[int], sequence: Any, reward: float) -> Any:
    zeros = np.zeros(len(prompt) - 1, np.float32)
    tokens = [*prompt, *sequence.tokens]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "logprobs": np.append(zeros, np.array(sequence.logprobs, np.float32)),
            "advantages": np.append(zeros, np.full(RESPONSE, reward - BASELINE, np.float32)),
        },
    )


def _digest(answers: list[Any], trained: Any) -> str:
    digest = hashlib.sha256()
    for sequence in (each for answer in answers for each in answer.sequences):
        digest.update(np.array(sequence.tokens, "<i4").tobytes())
        digest.update(np.array(sequence.logprobs, "<f4").tobytes())
    for output in trained.loss_fn_outputs:
        digest.update(np.array(output["logprobs"].data, "<f4").tobytes())
    return digest.hexdigest()


async def main(base_model: str, steps: int, seeds: list[int]) -> None:
    await asyncio.gather(*(train(base_model, steps, seed) for seed in seeds))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), [*map(int, sys.argv[3:])]))
