"""The examples, run as they stand against the real service."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples import hf_loop
from ratoon_client import RatoonClient
from tests.running_service import Service

NUM_UPDATES = 40


@pytest.mark.e2e
@pytest.mark.more
def test_a_transformers_sampler_learns_with_the_newest_weights(
    service: Service, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    url = f"grpc://{service.addresses.grpc}"
    sampler, reports = hf_loop.run(
        url, policy_id="hf-loop", num_updates=NUM_UPDATES, folder=tmp_path
    )
    with RatoonClient(url) as client:
        newest = client.pull_weights("hf-loop", tmp_path / "newest")
    assert (sampler.version, newest.version) == (NUM_UPDATES, NUM_UPDATES)
    state = sampler.model.state_dict()
    files = load_file(newest.folder / "model.safetensors")
    assert len(files) > 40
    assert all(torch.equal(state[name], value) for name, value in files.items())
    # What the sampler said of its tokens is what the trainer says of them.
    assert all(report.sampler_kl is not None for report in reports)
    assert max(abs(report.sampler_kl or 0.0) for report in reports) < 1e-4
    rewards = [report.reward_mean or 0.0 for report in reports]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
