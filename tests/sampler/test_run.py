"""A wave against the trainer's own forward over the same tokens, and against itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ratoon.model.export import export_weights
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import ModelDtype, PresetBase
from ratoon.sampler.model import SampledModel
from ratoon.sampler.port import Weights
from ratoon.sampler.run import run_wave
from ratoon.sampler.waves import Job, Share
from ratoon_proto.types import FullTuning, LoraTuning, SamplingParams
from tests.model.builders import FULL, load
from tests.model.packing import pack
from tests.tiny_models import ARCHITECTURES, write_folder

CPU = torch.device("cpu")
PROMPTS = ((5, 9, 2, 7, 7, 1), (3,), (8, 4, 6, 1, 2, 3, 9, 9, 5, 1, 0, 2))


def weights_of(
    model: PolicyModel, folder: Path | None, version: int | None, digest: str = ""
) -> Weights:
    return Weights(
        policy_id="p",
        base="base",
        model=model.spec,
        version=version,
        folder=folder,
        digest=digest,
    )


def published(model: PolicyModel, folder: Path, seed: int) -> Weights:
    """A version with other weights than the base's, which `model` has from then on."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.named_trainable().values():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    folder.mkdir()
    export_weights(model, folder)
    return weights_of(model, folder, seed, f"digest {seed}")


def sampled(model: SampledModel, weights: Weights, *jobs: Job) -> list[Job]:
    with model.become(weights):
        run_wave(model, [Share(job=job, samples=range(job.sampling.num_samples)) for job in jobs])
    return list(jobs)


def job_of(weights: Weights, prompt: tuple[int, ...], **params: object) -> Job:
    sampling = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **params})  # type: ignore[arg-type]
    return Job(weights=weights, prompt=prompt, sampling=sampling)


def forward_logprobs(model: PolicyModel, tokens: list[int], temperature: float) -> np.ndarray:
    """By the trainer's packed forward; one value for each token but the first."""
    packed = pack([tokens])
    with torch.no_grad():
        hidden = model.forward_hidden(packed.tokens_T, packed.position_T, packed.layout)
        logits = (hidden @ model.lm_head_VD.T / temperature).log_softmax(-1)
    found = logits[:-1].gather(1, packed.tokens_T[1:, None])[:, 0]
    return found.numpy()


def tunings(architecture: str) -> list[FullTuning | LoraTuning]:
    return [FULL]


@pytest.mark.parametrize("temperature", [0.7])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_run_logprobs_are_the_trainers(
    architecture: str, temperature: float, tmp_path: Path
) -> None:
    """Prompts of several lengths, in one wave, of a full version of every family."""
    base = write_folder(tmp_path / "base", architecture, seed=3)
    check_against_forward(base, FULL, temperature, tmp_path)


def check_against_forward(
    base: Path | PresetBase, tuning: FullTuning | LoraTuning, temperature: float, tmp_path: Path
) -> None:
    policy = load(base, tuning=tuning, dtype=ModelDtype.FLOAT32)
    model = SampledModel(policy.spec, tmp_path, CPU)
    versions = [published(policy, tmp_path / f"version-{seed}", seed) for seed in (1, 2)]
    for weights in (versions[0], versions[1], versions[1]):
        jobs = [
            job_of(weights, prompt, num_samples=2, temperature=temperature, topk_prompt_logprobs=2)
            for prompt in PROMPTS
        ]
        sampled(model, weights, *jobs)
        if weights is versions[0]:
            continue
        for job in jobs:
            assert sorted(job.done) == [0, 1]
            for sequence in job.done.values():
                tokens = [*job.prompt, *sequence.tokens]
                want = forward_logprobs(policy, tokens, temperature)[len(job.prompt) - 1 :]
                assert np.abs(np.array(sequence.logprobs) - want).max() <= 1e-5
