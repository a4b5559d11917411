"""GRPO with a transformers sampler: groups go to Ratoon, versions come back into the module.

    source .venv/bin/activate          # in both shells
    ratoon serve                       # in one shell
    python examples/hf_loop.py         # in another; minutes on two CPU cores

The task: answer in the case that the prompt asks for. A byte is a token of the preset `tiny`, whose
weights are random at first.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from ratoon_client import Group, Loss, Optim, RatoonClient, StepReport, group, rollout
from ratoon_client.weights.hf_module import ModuleAdapter

PROMPTS = ("in upper case:", "in lower case:")
NUM_RESPONSES = 32
RESPONSE_TOKENS = 4
GENERATION = GenerationConfig(
    do_sample=True,
    temperature=1.0,
    top_k=0,  # the whole distribution, as the trainer has it
    top_p=1.0,
    max_new_tokens=RESPONSE_TOKENS,
    eos_token_id=None,
    pad_token_id=0,
    return_dict_in_generate=True,
    output_logits=True,
)


def reward(prompt: str, response: Sequence[int]) -> float:
    """The share of the response's tokens that are letters of the case asked for."""
    letters = range(ord("A"), ord("Z") + 1) if "upper" in prompt else range(ord("a"), ord("z") + 1)
    return sum(token in letters for token in response) / len(response)


class Sampler:
    """A module that generates, and that a receiver writes to."""

    def __init__(self, folder: Path, version: int) -> None:
        # generate() is typed as a tensor.
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.lock = threading.Lock()
        self.version = version

    @torch.inference_mode()
    def sample(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Responses [N, R], and the log-probs that their tokens had."""
        tokens = torch.tensor([list(prompt.encode())] * NUM_RESPONSES)
        with self.lock:
            sampled = self.model.generate(
                tokens, attention_mask=torch.ones_like(tokens), generation_config=GENERATION
            )
        responses = sampled.sequences[:, tokens.shape[1] :]
        logprobs = torch.stack(sampled.logits, dim=1).float().log_softmax(-1)
        return responses, logprobs.gather(2, responses[..., None])[..., 0]


def sample_group(sampler: Sampler, prompt: str, group_id: str) -> Group:
    responses, logprobs = sampler.sample(prompt)
    rollouts = [
        rollout(
            response=response,
            sampler_logprobs=row,
            reward=reward(prompt, response),
            policy_version=sampler.version,
        )
        for response, row in zip(responses.tolist(), logprobs.tolist(), strict=True)
    ]
    return group(group_id, list(prompt.encode()), rollouts)


def run(
    url: str, *, policy_id: str, num_updates: int, folder: Path
) -> tuple[Sampler, list[StepReport]]:
    """The sampler with the newest version, and what each update reported."""
    reports: list[StepReport] = []
    with RatoonClient(url) as client:
        client.create_policy(policy_id, preset="tiny", seed=7).result()
        session = client.policy(policy_id)
        # Version 0, or where an earlier run ended, and the model's configuration with it.
        pulled = client.pull_weights(policy_id, folder / "start")
        sampler = Sampler(pulled.folder, pulled.version)
        adapter = ModuleAdapter(sampler.model, lock=sampler.lock)
        receiver = client.weight_receiver(policy_id, folder / "mirror", adapter)
        for step in range(num_updates):
            groups = [sample_group(sampler, prompt, f"{step} {prompt}") for prompt in PROMPTS]
            update = session.update(
                groups,
                loss=Loss("grpo", entropy_coefficient=0.01),
                optim=Optim(learning_rate=2e-3),
            )
            reports.append(update.result().report)
            received = receiver.sync_once()
            assert received is not None, "the step was skipped: there is no new version"
            sampler.version = received.version
            print(
                f"version {received.version}, {reports[-1]}, copied in"
                f" {received.pause_s * 1e3:.1f} ms"
            )
    return sampler, reports


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with a transformers sampler.")
    parser.add_argument("--url", default="grpc://127.0.0.1:8443")
    parser.add_argument("--policy", default="hf-loop")
    parser.add_argument("--updates", type=int, default=60)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        run(
            arguments.url,
            policy_id=arguments.policy,
            num_updates=arguments.updates,
            folder=Path(folder),
        )


if __name__ == "__main__":
    main()
