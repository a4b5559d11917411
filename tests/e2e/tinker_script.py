"""A script for the Tinker API, by its SDK: it knows nothing of this service but URL and key.

Every loss is compared with its published formula over the log-probs that came back.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tinker  # pyright: ignore[reportMissingImports]  # in an environment of its own
from tinker import types  # pyright: ignore[reportMissingImports]

ADAM = types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
RNG = np.random.default_rng(0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CLIPS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def datum(tokens: list[int], **columns: np.ndarray) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:], np.int64)}
        | {name: values.astype(np.float32) for name, values in columns.items()},
    )


def logprobs_of(answer: Any) -> list[np.ndarray]:
    outputs = answer.loss_fn_outputs
    return [np.array(output["logprobs"].data, np.float64) for output in outputs]


def sampled() -> list[list[int]]:
    """32 answers to 4 prompts, shuffled as a flat wire has them."""
    prompts = [[*PROMPT, prompt] * 3 for prompt in range(4)]
    rows = [[*prompt, *RNG.integers(0, 200, 4).tolist()] for prompt in prompts for _ in range(8)]
    return [rows[index] for index in RNG.permutation(32)]


def ppo(z: np.ndarray, q: np.ndarray, a: np.ndarray) -> np.ndarray:
    r = np.exp(z - q)
    return -np.minimum(r * a, np.clip(r, 0.9, 1.1) * a)


def importance_sampling(z: np.ndarray, q: np.ndarray, a: np.ndarray) -> np.ndarray:
    return -np.exp(z - q) * a


def cispo(z: np.ndarray, q: np.ndarray, a: np.ndarray) -> np.ndarray:
    return -np.clip(np.exp(z - q), 0.9, 1.1) * a * z


def dro(z: np.ndarray, q: np.ndarray, a: np.ndarray) -> np.ndarray:
    return -(z * a - 0.05 / 2 * (z - q) ** 2)


Term = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
TERMS: dict[str, tuple[Term, dict[str, float]]] = {
    "importance_sampling": (importance_sampling, {}),
    "ppo": (ppo, CLIPS),
    "cispo": (cispo, CLIPS),
    "dro": (dro, {"beta": 0.05}),
}


async def supervised(client: tinker.TrainingClient) -> list[float]:
    """A few steps on one text: its loss falls, and is the sum over the log-probs."""
    tokens = [*PROMPT, *PROMPT]
    weights = np.array([0.0] * 7 + [1.0] * 8)
    data = [datum(tokens, weights=weights), datum(tokens[::-1], weights=0.5 * weights)]
    losses: list[float] = []
    for step in range(4):
        alone = await (await client.forward_async(data, "cross_entropy")).result_async()
        both = await client.forward_backward_async(data, "cross_entropy")
        stepped = await client.optim_step_async(ADAM)
        answer = await both.result_async()
        metrics = (await stepped.result_async()).metrics
        assert metrics["grad_norm"] > 0
        z = logprobs_of(answer)
        for before, same in zip(logprobs_of(alone), z, strict=True):
            np.testing.assert_allclose(before, same, atol=1e-5)
        expected = -(weights @ z[0]) - 0.5 * (weights @ z[1])
        assert abs(answer.metrics["loss:sum"] - expected) < 1e-3, (step, answer.metrics, expected)
        assert abs(alone.metrics["loss:sum"] - expected) < 1e-3
        losses.append(answer.metrics["loss:sum"])
    assert losses == sorted(losses, reverse=True), losses
    return losses


async def reinforced(client: tinker.TrainingClient) -> dict[str, float]:
    """Each loss on answers of an earlier version, against its formula; rho of the flat batch."""
    rows = sampled()
    zero = [datum(row, weights=np.zeros(len(row) - 1)) for row in rows]
    q = logprobs_of(await (await client.forward_async(zero, "cross_entropy")).result_async())
    start = len(rows[0]) - 5
    for each in q:
        each[:start] = 0
    a = [np.append(np.zeros(start), RNG.normal() * np.ones(4)) for _ in rows]
    a[3][:] = 0
    data = [datum(row, advantages=a[i], logprobs=q[i]) for i, row in enumerate(rows)]
    found: dict[str, float] = {}
    for name, (term, config) in TERMS.items():
        both = await client.forward_backward_async(data, name, config or None)
        stepped = await client.optim_step_async(ADAM)
        answer = await both.result_async()
        await stepped.result_async()
        z = logprobs_of(answer)
        assert [len(each) for each in z] == [len(row) - 1 for row in rows]
        expected = sum(float(term(z[i], q[i], a[i]).sum()) for i in range(len(rows)))
        got = answer.metrics["loss:sum"]
        assert abs(got - expected) <= 2e-5 * max(1.0, abs(expected)), (name, got, expected)
        found[name] = got
        found["rho"] = answer.metrics["rho:mean"]
    assert found["rho"] > 4, found
    return found


async def refused(client: tinker.TrainingClient) -> list[str]:
    """What is refused fails, its step too, and the next pair is right."""
    good = [datum([*PROMPT, 7], weights=np.ones(8))]
    far = [datum([*PROMPT, 10**6], weights=np.ones(8))]
    told: list[str] = []
    for data, loss in ((good, "gspo"), (good, "stable_reinforce"), (far, "cross_entropy")):
        with_error = client.forward_backward_async(data, loss)
        try:
            await (await with_error).result_async()
        except tinker.APIError as error:
            told.append(str(error))
        else:
            raise AssertionError(loss)
        try:
            await (await client.optim_step_async(ADAM)).result_async()
        except tinker.RequestFailedError as error:
            told.append(str(error))
        else:
            raise AssertionError("a step on a refused batch was taken")
        both = await client.forward_backward_async(good, "cross_entropy")
        stepped = await client.optim_step_async(ADAM)
        await both.result_async()
        assert (await stepped.result_async()).metrics["skipped"] == 0
    return told


async def saved(service: tinker.ServiceClient, client: tinker.TrainingClient) -> str:
    """Weights are saved once under a name, make another model, and can be deleted."""
    data = [datum([*PROMPT, 7], weights=np.ones(8))]

    async def logprobs(client: tinker.TrainingClient) -> np.ndarray:
        future = await client.forward_async(data, "cross_entropy")
        return logprobs_of(await future.result_async())[0]

    before = await logprobs(client)
    path = (await (await client.save_state_async("first")).result_async()).path
    try:
        await (await client.save_state_async("first")).result_async()
    except tinker.RequestFailedError:
        pass
    else:
        raise AssertionError("a name was taken twice")
    await (await client.forward_backward_async(data, "cross_entropy")).result_async()
    await (await client.optim_step_async(ADAM)).result_async()
    assert np.abs(await logprobs(client) - before).max() > 1e-3
    other = await service.create_training_client_from_state_with_optimizer_async(path)
    np.testing.assert_allclose(await logprobs(other), before, atol=1e-5)
    await (await other.optim_step_async(ADAM)).result_async()
    rest = service.create_rest_client()
    runs = await rest.list_training_runs_async(limit=10)
    newest = [each.training_run_id for each in runs.training_runs[:2]]
    assert newest == [other.model_id, client.model_id], newest
    listed = await rest.list_user_checkpoints_async()
    assert listed.checkpoints[0].tinker_path == path, listed
    await rest.delete_checkpoint_from_tinker_path_async(path)
    listed = await rest.list_user_checkpoints_async()
    assert path not in [each.tinker_path for each in listed.checkpoints]
    return path


async def main(base_model: str) -> None:
    service = tinker.ServiceClient()
    client = await service.create_lora_training_client_async(base_model, rank=8, seed=3)
    info = await client.get_info_async()
    assert (info.is_lora, info.lora_rank) == (True, 8)
    losses = await supervised(client)
    found = await reinforced(client)
    told = await refused(client)
    path = await saved(service, client)
    print(json.dumps({"losses": losses, "reinforced": found, "told": told, "path": path}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
