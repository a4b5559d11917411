"""A reinforcement learning loop for the Tinker API, by its SDK: it samples what it trains on.

It knows nothing of this service but URL and key. The reward is what part of a sample's tokens are
below a bound, which is a quarter for a random model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
import tinker  # pyright: ignore[reportMissingImports]  # in an environment of its own
from tinker import types  # pyright: ignore[reportMissingImports]

STEPS, GROUP, LENGTH, BOUND = 20, 8, 6, 16
# Samples at once; half of them are cancelled. (Two thousand: tests/api/test_tinker_wire.py.)
BURST = 400
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, number] for number in range(4)]
ADAM = types.AdamParams(learning_rate=2e-2)


def of_ints(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def params(**changes: Any) -> types.SamplingParams:
    # No end token: each sample has the same length.
    return types.SamplingParams(**{"max_tokens": LENGTH, "stop": []} | changes)


def reward_of(tokens: list[int]) -> float:
    return float(np.mean(np.array(tokens) < BOUND))


def datum(prompt: list[int], sequence: Any, advantage: float) -> types.Datum:
    whole, start = [*prompt, *sequence.tokens], len(prompt) - 1
    zeros = np.zeros(start, np.float32)
    return types.Datum(
        model_input=of_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(whole[1:], np.int64),
            "logprobs": np.concatenate([zeros, np.array(sequence.logprobs, np.float32)]),
            "advantages": np.concatenate([zeros, np.full(LENGTH, advantage, np.float32)]),
        },
    )


async def groups(sampler: tinker.SamplingClient) -> list[list[Any]]:
    """Half of the groups as one request, half as a request for each sample."""

    async def group(index: int, prompt: list[int]) -> list[Any]:
        if index % 2:
            alone = [sampler.sample_async(of_ints(prompt), 1, params()) for _ in range(GROUP)]
            return [each.sequences[0] for each in await asyncio.gather(*alone)]
        return [*(await sampler.sample_async(of_ints(prompt), GROUP, params())).sequences]

    return await asyncio.gather(*(group(index, each) for index, each in enumerate(PROMPTS)))


async def trained(client: tinker.TrainingClient) -> list[float]:
    """The mean reward of each step; log-probs of samples are those of the trainer."""
    rewards: list[float] = []
    for step in range(STEPS):
        sampler = await client.save_weights_and_get_sampling_client_async()
        data: list[types.Datum] = []
        mean = 0.0
        for prompt, sequences in zip(PROMPTS, await groups(sampler), strict=True):
            own = np.array([reward_of(each.tokens) for each in sequences])
            mean += float(own.mean()) / len(PROMPTS)
            data += [
                datum(prompt, each, float(reward - own.mean()))
                for each, reward in zip(sequences, own, strict=True)
            ]
        both = await client.forward_backward_async(data, "importance_sampling")
        stepped = await client.optim_step_async(ADAM)
        answer = await both.result_async()
        await stepped.result_async()
        for each, output in zip(data, answer.loss_fn_outputs, strict=True):
            sampled = np.array(each.loss_fn_inputs["logprobs"].data)[-LENGTH:]
            found = np.array(output["logprobs"].data)[-LENGTH:]
            np.testing.assert_allclose(found, sampled, atol=1e-4, err_msg=str(step))
        rewards.append(mean)
    return rewards


async def drawn(sampler: tinker.SamplingClient) -> None:
    """Equal requests differ without a seed, and with one repeat; a stop is the last token."""
    prompt = of_ints(PROMPTS[0])

    async def tokens(**changes: Any) -> list[list[int]]:
        answer = await sampler.sample_async(prompt, 2, params(**changes))
        return [[*each.tokens] for each in answer.sequences]

    first, second = await tokens(), await tokens()
    assert first != second
    assert first[0] != first[1]
    assert await tokens(seed=5) == await tokens(seed=5)
    greedy = (await tokens(temperature=0.0))[0]
    assert greedy == (await tokens(top_k=1))[0]
    answer = await sampler.sample_async(prompt, 1, params(temperature=0.0, stop=[greedy[1]]))
    stopped = answer.sequences[0]
    assert [*stopped.tokens] == greedy[: greedy.index(greedy[1]) + 1]
    assert stopped.stop_reason == "stop"
    logprobs = await sampler.compute_logprobs_async(of_ints([*PROMPTS[0], *greedy]))
    assert logprobs[0] is None
    sampled = await sampler.sample_async(prompt, 1, params(temperature=0.0))
    found = np.array(logprobs[-LENGTH:], np.float64)
    np.testing.assert_allclose(found, np.array(sampled.sequences[0].logprobs), atol=1e-4)
    whole = await sampler.sample_async(
        prompt, 1, params(), include_prompt_logprobs=True, topk_prompt_logprobs=3
    )
    top = whole.topk_prompt_logprobs
    assert top is not None
    assert len(top) == len(PROMPTS[0])
    assert all(len(each) == 3 for each in top[1:])


async def burst(sampler: tinker.SamplingClient) -> int:
    """Many requests at once, half of which their caller leaves: the others are all answered."""

    async def one(index: int) -> list[int]:
        prompt = of_ints([1 + index % 60, 1 + index // 60])
        answer = await sampler.sample_async(prompt, 1, params(max_tokens=2))
        return [*answer.sequences[0].tokens]

    tasks = [asyncio.create_task(one(index)) for index in range(BURST)]
    await asyncio.sleep(0.2)
    for task in tasks[::2]:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, list) and len(each) == 2 for each in found[1::2]), found[1]
    return sum(isinstance(each, asyncio.CancelledError) for each in found[::2])


async def main(base_model: str) -> None:
    service = tinker.ServiceClient()
    client = await service.create_lora_training_client_async(base_model, rank=16, seed=3)
    saved = await (await client.save_weights_for_sampler_async("start")).result_async()
    named = await service.create_sampling_client_async(model_path=saved.path)
    prompt = of_ints(PROMPTS[0])
    before = (await named.sample_async(prompt, 2, params(seed=7))).sequences
    rewards = await trained(client)
    after = (await named.sample_async(prompt, 2, params(seed=7))).sequences
    assert [[*each.tokens] for each in before] == [[*each.tokens] for each in after]
    await drawn(named)
    last = await client.save_weights_and_get_sampling_client_async()
    learned = (await last.sample_async(prompt, 16, params())).sequences
    base = await service.create_sampling_client_async(base_model=base_model)
    # An adapter that is new changes nothing: the base's most likely tokens are the first version's.
    greedy = [
        [*(await each.sample_async(prompt, 1, params(temperature=0.0))).sequences[0].tokens]
        for each in (base, named, last)
    ]
    assert greedy[0] == greedy[1] != greedy[2], greedy
    try:
        await service.create_sampling_client_async(model_path=saved.path.replace("start", "none"))
    except tinker.APIStatusError as error:
        assert error.status_code == 404, error
    else:
        raise AssertionError("weights that nobody saved were sampled from")
    told = {
        "rewards": rewards,
        "last": float(np.mean([reward_of(each.tokens) for each in learned])),
        "path": saved.path,
        "cancelled": await burst(last),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
