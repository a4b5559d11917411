"""A wave against the trainer's own forward over the same tokens, and against itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ratoon.errors import ErrorCode
from ratoon.model.export import export_weights
from ratoon.model.loader import read_model
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec, PresetBase
from ratoon.sampler.model import SampledModel, base_facts
from ratoon.sampler.port import Weights
from ratoon.sampler.run import run_wave
from ratoon.sampler.waves import Job, Share
from ratoon_proto.types import FullTuning, LoraTuning, SampledSequence, SamplingParams, StopReason
from tests.model.builders import (
    FULL,
    LORA,
    LORA_ATTENTION,
    LORA_EXPERTS,
    LORA_HEADS,
    TINY,
    error_of,
    load,
    logits_of,
)
from tests.model.packing import pack
from tests.tiny_models import ARCHITECTURES, write_folder

CPU = torch.device("cpu")
PROMPTS = ((5, 9, 2, 7, 7, 1), (3,), (8, 4, 6, 1, 2, 3, 9, 9, 5, 1, 0, 2))


def weights_of(model: PolicyModel, folder: Path | None, version: int | None) -> Weights:
    return Weights(
        policy_id="p",
        base="base",
        model=model.spec,
        version=version,
        folder=folder,
        digest="" if folder is None else str(folder),
    )


def published(model: PolicyModel, folder: Path, seed: int) -> Weights:
    """A version with other weights than the ones before, which `model` has from then on."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.named_trainable().values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    folder.mkdir()
    export_weights(model, folder)
    return weights_of(model, folder, seed)


def test_a_critic_is_sampled_from_as_a_policy_without_a_head(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "base", "qwen3")
    answers: list[list[list[SampledSequence]]] = []
    for has_head in (False, True):
        policy = load(folder, dtype=ModelDtype.FLOAT32, value_head=has_head)
        version = published(policy, tmp_path / str(has_head), 1)
        model = SampledModel(policy.spec, tmp_path, CPU)
        answers.append(sampled(model, job_of(version, PROMPTS[0], seed=3)))
    assert answers[0] == answers[1]


def job_of(weights: Weights, prompt: tuple[int, ...], **params: Any) -> Job:
    sampling = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **params})
    return Job(weights=weights, prompt=prompt, sampling=sampling)


def sampled(model: SampledModel, *jobs: Job) -> list[list[SampledSequence]]:
    """All samples of jobs of the same weights, as one wave."""
    with model.become(jobs[0].weights):
        run_wave(model, [Share(job=job, samples=range(job.sampling.num_samples)) for job in jobs])
    return [[job.done[index] for index in range(job.sampling.num_samples)] for job in jobs]


def forward_logprobs(
    model: PolicyModel, tokens: Sequence[int], temperature: float
) -> NDArray[np.float64]:
    """The trainer's packed forward: [T - 1, V], what each token but the last predicts."""
    with torch.no_grad():
        logits = logits_of(model, pack([[*tokens]]))[:-1] / temperature
        return logits.log_softmax(-1).double().numpy()


def check_against_forward(
    base: Path | PresetBase, tuning: FullTuning | LoraTuning, folder: Path
) -> None:
    """Sampled tokens and prompts of several lengths in one wave, of the second of two versions.

    float32 rounds what the trainer computes too, by more than the bound where a layer is
    ill-conditioned: the distance to float64 says by how much.
    """
    policy = load(base, tuning=tuning, dtype=ModelDtype.FLOAT32)
    model = SampledModel(policy.spec, folder, CPU)
    first, second = (published(policy, folder / f"version-{seed}", seed) for seed in (1, 2))
    exact = load(base, tuning=tuning)
    with torch.no_grad():
        for name, parameter in policy.named_trainable().items():
            exact.named_trainable()[name].copy_(parameter)
    sampled(model, job_of(first, PROMPTS[0]))
    params = {"num_samples": 2, "temperature": 0.7, "topk_prompt_logprobs": 2}
    jobs = [
        job_of(
            second,
            prompt,
            prompt_logprobs=True,
            # Out of order, and two of a place; none of the first.
            target_places=tuple(range(1, len(prompt)))[::-1] * 2 * times,
            target_tokens=tuple(range(2 * (len(prompt) - 1) * times)),
            **params,
        )
        for times, prompt in enumerate(PROMPTS)
    ]
    for job, sequences in zip(jobs, sampled(model, *jobs), strict=True):
        start = len(job.prompt) - 1
        assert np.isnan(job.prompt_logprobs[0])
        assert np.isnan(job.topk_logprobs[:2]).all()
        assert job.topk_tokens[:2] == (0, 0)
        for sequence in sequences:
            tokens = [*job.prompt, *sequence.tokens]
            own, plain, exactly = (
                forward_logprobs(of, tokens, temperature)
                for of, temperature in ((policy, 0.7), (policy, 1.0), (exact, 0.7))
            )
            bound = max(1e-5, 2 * np.abs(own - exactly).max())
            at = np.arange(len(tokens) - 1), tokens[1:]
            assert np.abs(own[at][start:] - sequence.logprobs).max() <= bound
            given = np.abs(plain[at][:start] - np.array(job.prompt_logprobs[1:]))
            assert given.max(initial=0.0) <= bound
            best = np.sort(plain[:start], axis=1)[:, :-3:-1]
            top = np.reshape(job.topk_logprobs[2:], best.shape)
            assert np.abs(best - top).max(initial=0.0) <= bound
            places = np.array(job.sampling.target_places, np.int64)
            scored = plain[places - 1, np.array(job.sampling.target_tokens, np.int64)]
            assert len(job.target_logprobs) == len(places)
            assert np.abs(scored - job.target_logprobs).max(initial=0.0) <= bound
            ids = np.reshape(np.array(job.topk_tokens[2:], np.int64), best.shape)
            chosen = np.take_along_axis(plain[:start], ids, 1)
            assert np.abs(chosen - top).max(initial=0.0) <= bound


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_the_trainers(architecture: str, tmp_path: Path) -> None:
    """Every family: what the sampler reports is what a Forward of the version says."""
    check_against_forward(write_folder(tmp_path / "base", architecture), FULL, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "tuning"),
    [
        ("qwen3", LORA),
        ("qwen3_moe", LORA_EXPERTS),
        ("qwen3_5", LORA),
        ("gpt_oss", LORA_ATTENTION),
        ("qwen3", LORA_HEADS),
        ("llama", LORA_HEADS),
    ],
)
def test_logprobs_of_adapters_are_the_trainers(
    architecture: str, tuning: LoraTuning, tmp_path: Path
) -> None:
    check_against_forward(write_folder(tmp_path / "base", architecture), tuning, tmp_path)


@pytest.fixture(name="tiny", scope="module")
def tiny_fixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[SampledModel, Weights]:
    """The preset `tiny`, of which version 1 is published."""
    folder = tmp_path_factory.mktemp("tiny")
    policy = load(TINY, dtype=ModelDtype.FLOAT32)
    weights = published(policy, folder / "version-1", 1)
    return SampledModel(policy.spec, folder, CPU), weights


def tokens_of(sequences: list[SampledSequence]) -> list[tuple[int, ...]]:
    return [sequence.tokens for sequence in sequences]


def test_a_seed_repeats_and_none_differs(tiny: tuple[SampledModel, Weights]) -> None:
    model, weights = tiny
    prompt = (72, 101, 108)
    (seeded,) = sampled(model, job_of(weights, prompt, num_samples=3, seed=-7))
    (again,) = sampled(model, job_of(weights, prompt, num_samples=3, seed=-7))
    (other,) = sampled(model, job_of(weights, prompt, num_samples=3, seed=8))
    assert seeded == again, "to the last bit"
    assert tokens_of(seeded) != tokens_of(other)
    assert len({*tokens_of(seeded)}) == 3, "the samples of one request differ"
    first, second = sampled(model, job_of(weights, prompt), job_of(weights, prompt))
    assert first != second, "of one wave"
    assert sampled(model, job_of(weights, prompt)) != [first], "of two waves"


def test_a_sequence_ends_where_it_is_told(tiny: tuple[SampledModel, Weights]) -> None:
    """The tokens of a seed are known, so it is known where each rule has to end them."""
    model, weights = tiny
    (whole,) = sampled(model, job_of(weights, (72, 101), seed=3, max_tokens=24))[0]
    assert (len(whole.tokens), whole.stop_reason) == (24, StopReason.LENGTH)
    printable = [i for i, token in enumerate(whole.tokens[1:], 1) if token < 128]
    at = next(i for i in printable if whole.tokens[i] not in whole.tokens[:i])
    token = whole.tokens[at]
    for params in ({"stop_token_ids": (token,)}, {"stop": (chr(token),)}):
        job = job_of(weights, (72, 101), seed=3, max_tokens=24, **params)
        (ended,) = sampled(model, job)[0]
        assert ended.stop_reason is StopReason.STOP
        assert ended.tokens == whole.tokens[: at + 1]
        assert ended.logprobs == whole.logprobs[: at + 1]
    model.end_tokens, own = frozenset({token}), model.end_tokens
    try:
        job = job_of(weights, (72, 101), seed=3, max_tokens=24, ignore_eos=False)
        assert tokens_of(sampled(model, job)[0]) == [whole.tokens[: at + 1]]
    finally:
        model.end_tokens = own
    assert own == {258}


def test_rows_that_end_leave_the_others_as_they_are(tiny: tuple[SampledModel, Weights]) -> None:
    model, weights = tiny
    prompt, longest = (72, 101, 108, 108), 12
    lengths = (1, 5, longest, 3)
    jobs = [job_of(weights, prompt, max_tokens=length, seed=4) for length in lengths]
    alone = sampled(model, job_of(weights, prompt, max_tokens=longest, seed=4))[0][0]
    for length, (sequence,) in zip(lengths, sampled(model, *jobs), strict=True):
        assert sequence.tokens == alone.tokens[:length]
        gaps = np.abs(np.subtract(sequence.logprobs, alone.logprobs[:length]))
        assert gaps.max() <= 1e-5


def test_a_cancelled_job_is_left(tiny: tuple[SampledModel, Weights]) -> None:
    model, weights = tiny
    left, stays = job_of(weights, (5, 6)), job_of(weights, (5, 6))
    left.is_cancelled = True
    with model.become(weights):
        run_wave(model, [Share(job=job, samples=range(1)) for job in (left, stays)])
    assert not left.done
    assert len(stays.done[0].tokens) == 6


def test_versions_and_the_base_take_turns(tmp_path: Path) -> None:
    """A version is what it was, whatever was published or sampled after it."""
    for tuning in (FULL, LORA):
        folder = tmp_path / type(tuning).__name__
        folder.mkdir()
        policy = load(TINY, tuning=tuning, dtype=ModelDtype.FLOAT32)
        model = SampledModel(policy.spec, folder, CPU)
        base = weights_of(policy, None, None)
        versions = [base, *(published(policy, folder / str(seed), seed) for seed in (1, 2))]
        first = [sampled(model, job_of(each, (7, 8, 9), seed=1)) for each in versions]
        assert first[0] != first[1] != first[2]
        turns = (1, 0, 2, 1, 0, 0, 2)
        assert [sampled(model, job_of(versions[i], (7, 8, 9), seed=1)) for i in turns] == [
            first[i] for i in turns
        ]


def test_a_version_whose_files_are_gone_is_away(
    tiny: tuple[SampledModel, Weights], tmp_path: Path
) -> None:
    model, weights = tiny
    gone = weights_of(load(TINY, dtype=ModelDtype.FLOAT32), tmp_path / "gone", 9)
    assert error_of(lambda: sampled(model, job_of(gone, (1, 2)))).code is ErrorCode.UNAVAILABLE
    assert sampled(model, job_of(weights, (1, 2)))


def test_facts_of_a_base_are_those_of_its_loaded_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "qwen3", "qwen3")
    for base in (PresetBase(name="tiny"), FolderBase(folder=str(folder))):
        spec = ModelSpec(base=base, tuning=FullTuning(), dtype=ModelDtype.FLOAT32, seed=0)
        info = read_model(spec, models_root=tmp_path).place(torch.device("cpu")).info()
        facts = base_facts(spec, tmp_path)
        assert facts.vocab_size == info.vocab_size
        assert facts.max_sequence_tokens == info.max_sequence_tokens
        assert facts.media_tokens == info.media_tokens
