"""The examples, and those of two pages, run as they stand against the real service."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples import hf_loop
from ratoon_client import RatoonClient
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.more]
ROOT = Path(__file__).parents[2]
NUM_UPDATES = 40


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
    # A second run goes on where this one ended, and says so of its samples.
    _, (again,) = hf_loop.run(url, policy_id="hf-loop", num_updates=1, folder=tmp_path / "again")
    assert again.staleness_max == 0


def test_the_page_on_custom_losses_runs(service: Service, capsys: pytest.CaptureFixture[str]):
    """Its loss goes down."""
    page = ROOT / "docs" / "custom-losses.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(code.replace("grpc://127.0.0.1:8443", service.addresses.grpc), {})  # noqa: S102
    losses = [float(text) for text in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01
    with RatoonClient(service.addresses.grpc) as client:
        client.delete_policy("preferences").result()


def test_the_example_of_the_clients_readme_runs(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    readme = ROOT / "clients" / "python" / "README.md"
    (code,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code.replace("grpc://127.0.0.1:8443", service.addresses.grpc), {})  # noqa: S102
    out = capsys.readouterr().out
    number = r"-?\d\.\d+(e-\d+)?"
    assert re.match(rf"version 1, loss {number}\nverified weights in weights/version-1\n", out)
    assert (tmp_path / "weights" / "latest" / "model.safetensors").is_file()
    with RatoonClient(service.addresses.grpc) as client:
        client.delete_policy("copy").result()
