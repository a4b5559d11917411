"""The SDK of the Tinker API against the real service, with URL and key alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.tinker_site import NEWEST, STEPS, are_installed, environment
from ratoon_client import RatoonClient
from tests.running_service import Service
from tests.tiny_models import write_folder

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.more,
    pytest.mark.skipif(
        not are_installed([NEWEST]),
        reason="the SDK of the Tinker API is not installed: make env-compat",
    ),
]
SCRIPT = Path(__file__).with_name("tinker_script.py")
SAMPLING = Path(__file__).with_name("tinker_sampling_script.py")
FOLDER = "tinker/qwen3"
SEEDS = range(1, 9)


def run_script(script: Path, url: object, *arguments: object) -> list[Any]:
    """What a script prints, a JSON value a line."""
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env=environment(str(url), [NEWEST]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_model(service: Service) -> None:
    models_root = service.config.models_root
    assert models_root is not None
    write_folder(models_root / FOLDER, "qwen3")


def test_a_script_of_the_sdk_runs(service: Service) -> None:
    """Both wires into one service: the gateway's port and, for the same script, Serve's."""
    addresses = service.addresses
    for url in (addresses.http, addresses.serve_http):
        told = run_script(SCRIPT, url, "tiny")[-1]["told"]
        assert "write loss_fn=ppo" in told[0]
        assert "data[0].loss_fn_inputs.target_tokens[7]" in told[4]


def test_a_script_learns_from_what_it_samples(service: Service) -> None:
    write_model(service)
    (told,) = run_script(SAMPLING, service.addresses.http, FOLDER)
    rewards = told["rewards"]
    assert len(rewards) >= 20
    # A step's mean over 192 tokens has a deviation of 0.035; a model that learns gets to 0.65.
    assert rewards[0] < 0.4, rewards
    assert sum(rewards[-4:]) / 4 > 0.5, rewards
    assert told["last"] > 0.4, told
    assert told["cancelled"] > 100, told


def test_scripts_at_once_have_the_bits_that_each_has_alone(service: Service) -> None:
    """Eight models on one base: losses, samples and log-probs of every step."""
    write_model(service)

    def steps(*seeds: int) -> dict[int, list[Any]]:
        lines = run_script(STEPS, service.addresses.http, FOLDER, 3, *seeds)
        with RatoonClient(f"grpc://{service.addresses.grpc}") as client:
            for model_id in {line["model_id"] for line in lines}:
                session, _, number = model_id.split(":")
                client.delete_policy(f"tinker-{session}-{number}")
        told = [(line["seed"], line["step"], line["loss"], line["digest"]) for line in lines]
        return {seed: [each for each in told if each[0] == seed] for seed in seeds}

    together = steps(*SEEDS)
    assert [len(each) for each in together.values()] == [3] * len(SEEDS)
    assert len({each[-1] for each in together.values()}) == len(SEEDS)
    for seed in SEEDS:
        assert steps(seed)[seed] == together[seed]
