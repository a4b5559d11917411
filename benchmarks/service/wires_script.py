"""What `wires.py` runs in processes of their own, which have the SDK and the cookbook.

    python wires_script.py shares MODEL
    python wires_script.py learns MODEL FOLDER STEPS SEED true|false

`shares` prints rho of the same datums in order and shuffled. `learns` is the cookbook's own loop on
an environment whose reward is the share of lower-case letters in a sample; it prints the reward
of held-out questions before and after. With `true` the rewards of each group are shuffled.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import chz  # pyright: ignore[reportMissingImports]  # in a folder of its own, as the others
import numpy as np
import tinker  # pyright: ignore[reportMissingImports]
from tinker import types  # pyright: ignore[reportMissingImports]
from tinker_cookbook import renderers  # pyright: ignore[reportMissingImports]
from tinker_cookbook.rl import problem_env, train  # pyright: ignore[reportMissingImports]
from tinker_cookbook.rl.types import (  # pyright: ignore[reportMissingImports]
    RLDataset,
    RLDatasetBuilder,
)
from tinker_cookbook.tokenizer_utils import get_tokenizer  # pyright: ignore[reportMissingImports]

PROMPTS, SAMPLES, PROMPT, RESPONSE = 4, 8, 90, 11
GROUPS, GROUP, MAX_TOKENS = 4, 8, 8
HELD_OUT, FIRST_HELD_OUT = 8, 10_000
RENDERER = "role_colon"


def shares(base_model: str) -> dict[str, float]:
    client = tinker.ServiceClient().create_lora_training_client(base_model, rank=16, seed=1)
    draw = np.random.default_rng(0)
    data: list[Any] = []
    for _ in range(PROMPTS):
        prompt = draw.integers(0, 256, PROMPT)
        data += [
            _datum(prompt, draw.integers(0, 256, RESPONSE), draw.normal()) for _ in range(SAMPLES)
        ]
    found: dict[str, float] = {}
    for name in ("in order", "shuffled"):
        answer = client.forward_backward(data, "importance_sampling").result()
        found[name] = answer.metrics["rho:mean"]
        random.Random(0).shuffle(data)
    return found


def _datum(prompt: Any, response: Any, advantage: float) -> Any:
    """A sample as recipes make it: targets, log-probs and advantages are 0 over the prompt."""
    zeros = np.zeros(len(prompt) - 1)
    tokens = np.concatenate([prompt, response])
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": np.concatenate([zeros, response]).astype(np.int64),
            "logprobs": np.concatenate([zeros, np.full(len(response), -5.5)]).astype(np.float32),
            "advantages": np.concatenate([zeros, np.full(len(response), advantage)]).astype(
                np.float32
            ),
        },
    )


class Letters(problem_env.ProblemEnv):
    """Asks for letters; a sample's reward is the share of lower-case letters in it."""

    def __init__(self, number: int, renderer: Any) -> None:
        super().__init__(renderer, format_coef=0.0)
        self.number = number

    def get_question(self) -> str:
        return f"Write letters, number {self.number}."

    def check_answer(self, sample_str: str) -> float:
        letters = sum(each in string.ascii_lowercase for each in sample_str)
        return letters / max(len(sample_str), 1)

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "letters"


@dataclass(frozen=True)
class LettersGroup(problem_env.ProblemGroupBuilder):
    """Where rewards are shuffled, each sample of the group gets another's, drawn by `draw`."""

    draw: random.Random | None = None

    async def compute_group_rewards(
        self,
        trajectory_group: list[Any],
        env_group: Sequence[Any],
    ) -> list[tuple[float, dict[str, Any]]]:
        own = [sum(each.reward for each in one.transitions) for one in trajectory_group]
        given = own if self.draw is None else self.draw.sample(own, len(own))
        return [(new - old, {}) for new, old in zip(given, own, strict=True)]


class LettersDataset(RLDataset):
    def __init__(self, renderer: Any, first: int, size: int, draw: random.Random | None) -> None:
        self.renderer, self.first, self.size, self.draw = renderer, first, size, draw

    def get_batch(self, index: int) -> list[LettersGroup]:
        start = self.first + index * GROUPS
        return [
            LettersGroup(partial(Letters, number, self.renderer), GROUP, draw=self.draw)
            for number in range(start, start + GROUPS)
        ]

    def __len__(self) -> int:
        return self.size


@chz.chz
class Builder(RLDatasetBuilder):
    base_model: str
    steps: int
    seed: int
    is_shuffled: bool

    async def __call__(self) -> tuple[LettersDataset, LettersDataset]:
        renderer = renderers.get_renderer(RENDERER, get_tokenizer(self.base_model))
        draw = random.Random(self.seed) if self.is_shuffled else None
        return (
            LettersDataset(renderer, self.seed * 1000, self.steps + 1, draw),
            LettersDataset(renderer, FIRST_HELD_OUT, HELD_OUT // GROUPS, None),
        )


def learns(
    base_model: str, folder: str, steps: int, seed: int, *, is_shuffled: bool
) -> dict[str, float]:
    """Held-out rewards of step 0 and of `steps`; one step more, as the loop evaluates before it."""
    config = train.Config(
        learning_rate=2e-2,
        dataset_builder=Builder(
            base_model=base_model, steps=steps, seed=seed, is_shuffled=is_shuffled
        ),
        model_name=base_model,
        recipe_name="letters",
        renderer_name=RENDERER,
        lora_rank=16,
        max_tokens=MAX_TOKENS,
        log_path=folder,
        eval_every=steps,
        save_every=0,
    )
    asyncio.run(train.main(config))
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = [
        found["test/env/all/reward/total"]
        for found in map(json.loads, lines)
        if "test/env/all/reward/total" in found
    ]
    return {"before": held_out[0], "after": held_out[-1], "evaluations": len(held_out)}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["shares", model]:
            print(json.dumps(shares(model)))
        case ["learns", model, path, count, number, ("true" | "false") as is_so]:
            told = learns(model, path, int(count), int(number), is_shuffled=is_so == "true")
            print(json.dumps(told))
        case _:
            sys.exit(__doc__)
