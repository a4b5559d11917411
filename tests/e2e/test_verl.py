"""verl's worker with the settings of docs/verl.md beside the same worker with its own engine."""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import pytest

from harness.verl_site import (
    ACTOR,
    FSDP,
    RATOON,
    Run,
    make_batch,
    run_config,
    verl_on_path,
    worker_group,
)
from ratoon_client import InvalidArgumentError, Parallel, RatoonApiError, RatoonClient
from ratoon_client.weights.hf_module import read_tensors
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
    first, _, rest = page.partition("## Rollouts on GPUs of their own")
    *run, options = re.findall(r"^ {4,8}(\+?[a-z_]+\.\S+=\S+)", first, re.MULTILINE)
    assert len(run) == 5
    assert rest
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


def test_adapters_reach_rollouts_merged_or_beside_their_base(
    service: Service, tmp_path: Path
) -> None:
    """Log-probs without an adapter stay the folder's; merged and in parts versions are the same."""
    url, folder = f"grpc://{service.addresses.grpc}", write_model(tmp_path / "model")
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8")
    settings = (RATOON, f"+{ACTOR}.ratoon_url={url}", *TRAINED, *lora)
    with verl_on_path(), worker_group():
        found: dict[bool, dict[str, Any]] = {}
        for is_merged in (False, True):
            merge = f"actor_rollout_ref.model.lora.merge={is_merged}"
            run = Run(run_config(folder, *settings, merge))
            run.ref_in_actor = True
            mask = _batch(0).batch["response_mask"].bool()
            first = run.log_probs(_batch(0))["old_log_probs"][mask]
            run.update(_batch(0))
            run.update(_batch(1))
            assert (run.log_probs(_batch(0))["old_log_probs"][mask] - first).abs().max() > 1e-4
            assert (run.reference(_batch(0))[mask] - first).abs().max() <= 1e-5
            engine = run.worker.actor.engine
            values, config = engine.get_per_tensor_param(base_sync_done=True)
            found[is_merged] = dict(values)
            with RatoonClient(url) as client:
                if is_merged:
                    assert config is None
                    assert engine.published().version == 4
                else:
                    assert (config["r"], config["lora_alpha"]) == (4, 8)
                    base, _ = engine.get_per_tensor_param(base_sync_done=False)
                    found[is_merged] |= dict(base)
                    with pytest.raises(InvalidArgumentError, match=r"^\S+lora\.merge: "):
                        engine.published()
                client.delete_policy(engine._policy_id).result()
    parts, whole = found[False], found[True]
    for name in ("model.layers.1.self_attn.v_proj", "model.layers.0.mlp.down_proj"):
        factors = [parts[f"base_model.model.{name}.lora_{which}.weight"] for which in "BA"]
        wanted = parts[f"{name}.base_layer.weight"] + 2 * factors[0] @ factors[1]
        assert (whole[f"{name}.weight"] - wanted).abs().max() <= 1e-6
        assert factors[0].norm() > 0
    assert whole["lm_head.weight"].equal(parts["lm_head.weight"])


def test_the_rollout_workers_of_a_host_pull_a_version_once(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each yields the version's own bytes, none of which pass through the actor."""
    url, policy_id = f"grpc://{service.addresses.grpc}", "verl-weights"
    with RatoonClient(url) as client, verl_on_path():
        from ratoon_client.verl_weights import Published, RatoonCheckpointEngine

        client.create_policy(policy_id, preset="tiny").result()
        wanted = read_tensors(client.pull_weights(policy_id, tmp_path / "pulled", 0).folder)

        class Actor:
            def published(self) -> Published:
                return Published(url=url, policy_id=policy_id, version=0)

        actor = Actor()
        RatoonCheckpointEngine.source = WeakMethod(actor.published)
        sender = RatoonCheckpointEngine(0, is_master=True)
        workers = [RatoonCheckpointEngine(0, root=tmp_path / "root") for _ in range(2)]
        sides = [sender, *workers]
        metadata = [side.prepare() for side in sides]
        to_actor, to_rollouts = RatoonCheckpointEngine.build_topology(1, 2, metadata)
        published = to_actor["published"] + to_rollouts["published"]
        for side, version in zip(sides, published, strict=True):
            side.init_process_group(version)

        async def received(worker: Any) -> dict[str, Any]:
            return {name: value async for name, value in worker.receive_weights(global_steps=1)}

        async def sync() -> list[Any]:
            return await asyncio.gather(
                sender.send_weights(_unread(), global_steps=1), *map(received, workers)
            )

        with caplog.at_level("INFO", "ratoon_client"):
            metrics, *got = asyncio.run(sync())
        assert metrics == {"ratoon/version": 0.0}
        for values in got:
            _assert_equal(values, wanted)
        fetched = re.findall(r"version 0 is served, (\d+) bytes fetched", caplog.text)
        first, second = sorted(map(int, fetched))
        assert first == 0
        assert second > sum(value.nbytes for value in wanted.values())
        client.delete_policy(policy_id).result()
        with pytest.raises(RatoonApiError, match="NOT_FOUND"):
            asyncio.run(received(workers[0]))
        del actor
        with pytest.raises(InvalidArgumentError, match=r"checkpoint_engine\.backend: "):
            sender.prepare()


def _unread() -> Generator[tuple[str, Any]]:
    pytest.fail("weights are read by the actor")
    yield ""


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
