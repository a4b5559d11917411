"""verl's `main_ppo` as a whole, with the settings of docs/verl.md: its trainer, data, rewards and
agent loops, our actor and checkpoint engine, and a replica that samples on a CPU."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.verl_site import SITE
from ratoon_client import RatoonClient
from tests.running_service import Service
from tests.train.test_verl import NEEDS_VERL, PAGE
from tests.trl_site import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.more, NEEDS_VERL]
ROOT = Path(__file__).parents[2]
NUM_STEPS, NUM_PROMPTS, NUM_RESPONSES, RESPONSE_TOKENS = 10, 4, 16, 8
TIMEOUT_S = 600.0
# How much of a response is ASCII.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(map(str.isascii, solution_str)) / max(len(solution_str), 1)
"""


@pytest.mark.parametrize("own_gpus", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rewards_of_a_whole_run_rise_over_published_versions(
    service: Service, tmp_path: Path, *, own_gpus: bool
) -> None:
    """verl's rollouts sample from the very bytes of each version, whichever way these take."""
    url = f"grpc://{service.addresses.grpc}"
    model = write_model(tmp_path / "model")
    synced = tmp_path / "synced"
    (tmp_path / "reward.py").write_text(REWARD)
    _write_prompts(tmp_path / "prompts.jsonl")
    with RatoonClient(url) as client:
        others = {policy.spec.policy_id for policy in client.list_policies()}
    rows = _main_ppo(
        tmp_path,
        *_page_settings(url, own_gpus=own_gpus),
        f"actor_rollout_ref.model.path={model}",
        f"+actor_rollout_ref.rollout.custom.folder={synced}",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        f"data.train_files={tmp_path / 'prompts.jsonl'}",
        f"data.val_files={tmp_path / 'prompts.jsonl'}",
    )
    assert [row["training/global_step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    rewards = [row["critic/rewards/mean"] for row in rows]
    assert min(rewards[-2:]) > max(rewards[:2]) + 0.2, rewards
    # Otherwise rollouts are a step behind the actor whose log-probs theirs are compared with.
    for row in rows[:1] if own_gpus else rows:
        assert row["training/rollout_probs_diff_max"] <= 1e-5
    if own_gpus:
        assert [row["ratoon/version"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert rows[-1]["val-core/ascii/acc/mean@1"] > 0.8
    _assert_same(synced / "step-0", model)
    (saved,) = tmp_path.glob("checkpoints/*/actor/ratoon.json")
    policy_id = json.loads(saved.read_text())["policy_id"]
    with RatoonClient(url) as client:
        for version in (NUM_STEPS - 1, NUM_STEPS):
            folder = client.pull_weights(policy_id, tmp_path / "pulled", version).folder
            _assert_same(synced / f"step-{version}", folder)
        for policy in client.list_policies():
            if policy.spec.policy_id not in others:
                client.delete_policy(policy.spec.policy_id).result()


def _page_settings(url: str, *, own_gpus: bool) -> list[str]:
    """Settings of the page, with this service's URL: those of rollouts with GPUs of their own, or
    those of a run with a reference model."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"-m verl\.trainer\.main_ppo .*?\n\n", page, re.DOTALL)
    actor, rollouts = (re.findall(r"^ {8}(\+?[a-z_]+\.\S+=\S+)", b, re.MULTILINE) for b in blocks)
    settings = [setting.replace("grpc://127.0.0.1:8443", url) for setting in actor]
    assert sum(url in setting for setting in settings) == 2
    if not own_gpus:
        return [*settings, "actor_rollout_ref.actor.use_kl_loss=True"]
    return [setting for setting in settings if "actor_rollout_ref.ref" not in setting] + rollouts


def _main_ppo(folder: Path, *settings: str) -> list[dict[str, Any]]:
    """Metrics of each step. Two GPUs that Ray is told of stand for the trainer's and a rollout's;
    processes of which verl has several are one each."""
    ray_init = "ray_kwargs.ray_init"
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        *settings,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.optim.lr=5e-2",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.name=ratoon",
        f"actor_rollout_ref.rollout.n={NUM_RESPONSES}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "data.dataloader_num_workers=0",
        "data.max_prompt_length=64",
        f"data.max_response_length={RESPONSE_TOKENS}",
        f"data.train_batch_size={NUM_PROMPTS}",
        "data.val_max_samples=4",
        "reward.num_workers=1",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        f"trainer.save_freq={NUM_STEPS}",
        f"trainer.test_freq={NUM_STEPS}",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.val_before_train=False",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"+{ray_init}.address=local",
        f"{ray_init}.num_cpus=8",
        f"+{ray_init}.num_gpus=2",
        f"+{ray_init}.include_dashboard=False",
    ]
    log = folder / "metrics.jsonl"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(SITE))),
        "VERL_USE_EXTERNAL_MODULES": "harness.verl_rollout",
        "VERL_LOGGING_LEVEL": "WARNING",
        "VERL_FILE_LOGGER_PATH": str(log),
        "TMPDIR": str(folder),
        "RAY_TMPDIR": "/tmp",
    }
    with (folder / "run.log").open("wb") as output:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, (folder / "run.log").read_text(errors="replace")[-6000:]
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


def _write_prompts(path: Path) -> None:
    rows = [
        {
            "data_source": "ascii",
            "prompt": [{"role": "user", "content": f"say {number}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(NUM_PROMPTS * (NUM_STEPS + 2))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _assert_same(got: Path, wanted: Path) -> None:
    from ratoon_client.weights.hf_module import read_tensors

    ours, theirs = read_tensors(got), read_tensors(wanted)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.equal(theirs[name]), name
