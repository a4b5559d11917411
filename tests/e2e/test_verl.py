"""verl's worker with the settings of docs/verl.md beside the same worker with its own engine."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.verl_site import FSDP, Run, make_batch, run_config, verl_on_path, worker_group
from ratoon_client import Parallel, RatoonClient
from tests.running_service import Service
from tests.train.test_verl import NEEDS_VERL
from tests.trl_site import write_model

pytestmark = [pytest.mark.e2e, pytest.mark.more, NEEDS_VERL]
PAGE = Path(__file__).parents[2] / "docs" / "verl.md"
FIRST, SECOND, THIRD, LAST = (25, 26, 27), (29, 28), (30, 31, 32, 33), (40, 41)
# Rollouts of a prompt are not neighbours.
ROWS = (FIRST, SECOND, FIRST, SECOND, THIRD, LAST, THIRD, LAST)
# Two mini-batches of a batch.
TRAINED = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
)


def test_verls_worker_trains_a_policy_as_it_trains_its_own(
    service: Service, tmp_path: Path
) -> None:
    with verl_on_path(), worker_group():
        _run(f"grpc://{service.addresses.grpc}", write_model(tmp_path / "model"), tmp_path / "out")


def _run(url: str, folder: Path, out: Path) -> None:
    """Log-probs, updates, weights, the reference, and a run that resumes."""
    from verl.utils.config import omega_conf_to_dataclass

    page = PAGE.read_text(encoding="utf-8")
    settings = re.findall(r"^ {4,8}(\+?[a-z_]+\.\S+=\S+)", page, re.MULTILINE)
    assert len(settings) == 6
    *run, options = settings
    run = [setting.replace("grpc://127.0.0.1:8443", url) for setting in run]
    assert sum(url in setting for setting in run) == 2
    config = run_config(folder, *run, *TRAINED, options)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_options == {"parallel": Parallel(num_workers=4)}

    def made(role: str = "actor") -> Run:
        return Run(run_config(folder, *run, *TRAINED), role)

    theirs, ours = Run(run_config(folder, *FSDP, *TRAINED)), made()
    begun = _weights(theirs)
    mask = _batch(0).batch["response_mask"].bool()
    reference = made("ref")
    for seed in range(3):
        got, expected = ours.log_probs(_batch(seed)), theirs.log_probs(_batch(seed))
        mask = _batch(seed).batch["response_mask"].bool()
        for name in ("old_log_probs", "entropys"):
            assert (got[name] - expected[name])[mask].abs().max() <= 1e-5
        if not seed:
            first = reference.reference(_batch(seed))
            assert (first - expected["old_log_probs"])[mask].abs().max() <= 1e-5
        got, expected = ours.update(_batch(seed)), theirs.update(_batch(seed))
        for name in ("loss", "pg_loss", "grad_norm", "kl_loss", "pg_clipfrac", "lr"):
            assert len(got[f"actor/{name}"]) == (1 if name == "lr" else 2)
            close = pytest.approx(expected[f"actor/{name}"], rel=1e-5, abs=1e-6)
            assert got[f"actor/{name}"] == close, name
    ended, wanted = _weights(ours), _weights(theirs)
    assert ended.keys() == wanted.keys()
    moved = sum((wanted[key] - begun[key]).square().sum() for key in wanted) ** 0.5
    off = sum((wanted[key] - ended[key]).square().sum() for key in wanted) ** 0.5
    assert moved > 0.01
    assert off / moved <= 5e-5
    _resume(ours, made, out)
    with RatoonClient(url) as client:
        for one in (ours.worker.actor, reference.worker.ref):
            client.delete_policy(one.engine._policy_id).result()


def _resume(ours: Run, made: Callable[[], Run], out: Path) -> None:
    """A worker of another run goes on from a checkpoint to the same weights, and the same rate."""
    import torch

    ours.worker.save_checkpoint(str(out), global_step=3, max_ckpt_to_keep=1)
    policy_id = ours.worker.actor.engine._policy_id
    saved = json.loads((out / "ratoon.json").read_text())
    assert saved == {"policy_id": policy_id, "checkpoint_id": "step-3", "schedule_steps": 3}
    at_save = _weights(ours)
    metrics = ours.update(_batch(7))
    wanted = _weights(ours)
    resumed = made()
    resumed.worker.load_checkpoint(str(out))
    assert resumed.worker.actor.engine._policy_id == policy_id
    _assert_equal(_weights(resumed), at_save)
    again = resumed.update(_batch(7))
    for name in ("loss", "grad_norm", "lr"):
        assert again[f"actor/{name}"] == metrics[f"actor/{name}"]
    _assert_equal(_weights(resumed), wanted)
    assert not torch.equal(wanted["lm_head.weight"], at_save["lm_head.weight"])


def _assert_equal(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in got.items():
        assert value.equal(wanted[key]), key


def _batch(seed: int) -> Any:
    return make_batch(ROWS, 1, 6, seed)


def _weights(run: Run) -> dict[str, Any]:
    values, adapter = run.worker.actor.engine.get_per_tensor_param()
    assert adapter is None
    return {name: value.detach().float().clone() for name, value in values}
