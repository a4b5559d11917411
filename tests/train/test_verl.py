"""RatoonEngine beside verl's own losses over transformers' log-probs and torch's AdamW.

The policy is a trainer of this process: the client's messages go in, and weights come back.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.verl_site import SITE, make_batch, verl_on_path
from ratoon.train.loss.spec import ValueLoss
from ratoon.train.loss.values import value_terms
from ratoon_client import InvalidArgumentError, gae
from ratoon_client.verl_config import adamw_of, check_model, check_processes
from tests.tiny_models import write_folder
from tests.train.test_trl import LocalPolicy
from tests.train.trainer_runs import weights_of

NEEDS_VERL = pytest.mark.skipif(
    not (SITE / "verl").is_dir(), reason="verl is not installed: make env-verl"
)
pytestmark = [pytest.mark.more, NEEDS_VERL]
PAGE = Path(__file__).parents[2] / "docs" / "verl.md"
# No row has the padding token, whose embedding has no gradient in transformers.
PROMPTS = ((25, 26, 27), (29, 28))
ROWS = 2 * len(PROMPTS)


@pytest.fixture(scope="module", autouse=True)
def _site() -> Iterator[None]:
    with verl_on_path():
        yield


def _batch(seed: int, *, whole: bool) -> Any:
    """A batch as verl's trainer sends it; `whole`: one advantage of a rollout, as GRPO's."""
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import left_right_2_no_padding

    made = make_batch(PROMPTS, ROWS // len(PROMPTS), 6, seed).to_tensordict()
    if whole:
        made["advantages"] = made["advantages"][:, :1] * made["response_mask"]
    batch = left_right_2_no_padding(made)
    tensordict_utils.assign_non_tensor(
        batch,
        dp_size=1,
        batch_num_tokens=int(batch["response_mask"].sum()),
        global_batch_size=ROWS,
    )
    return batch


LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
    "seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "constant": {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 6},
    "token-sum": {"loss_agg_mode": "token-sum"},
    "gspo": {"mode": "gspo"},
    "sapo": {"mode": "sapo", "loss_agg_mode": "seq-mean-token-mean"},
    "gpg": {"mode": "gpg"},
    "cispo": {"mode": "cispo"},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "k3+": {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3+"},
    "entropy": {"entropy_coeff": 0.01},
    "warmup": {"lr_warmup_steps": 2},
}


def _actor(
    mode: str = "vanilla", *, dtype: str = "float32", engine: Any = None, **changes: Any
) -> Any:
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, PolicyLossConfig

    from ratoon_client.verl import RatoonActorConfig

    optim = {
        name: changes.pop(name)
        for name in ("optimizer", "optimizer_impl", "override_optimizer_config", "lr_warmup_steps")
        if name in changes
    }
    return RatoonActorConfig(
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(loss_mode=mode),
        optim=FSDPOptimizerConfig(lr=1e-3, **optim),
        fsdp_config=FSDPEngineConfig(dtype=dtype, **(engine or {})),
        **changes,
    )


class _Model(dict[str, Any]):
    local_path = ""


def _engine(actor: Any, folder: Path) -> Any:
    from ratoon_client.verl import RatoonEngine

    engine = RatoonEngine(_Model(), actor.engine, actor.optim, None)
    engine._session = LocalPolicy(folder, adamw_of(actor.optim))
    return engine


def _verl_step(model: Any, optimizer: Any, data: Any, actor: Any) -> tuple[float, float]:
    from verl.workers.utils.losses import ppo_loss

    outputs: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": []}
    for ids in data["input_ids"].unbind():
        logs = model(ids[None]).logits[0].log_softmax(-1)
        picked = logs[:-1].gather(1, ids[1:, None])[:, 0]
        outputs["log_probs"].append(torch.cat([picked, torch.zeros(1)]))
        outputs["entropy"].append(-(logs.exp() * logs).sum(-1))
    nested = {
        name: torch.nested.as_nested_tensor(found, layout=torch.jagged)
        for name, found in outputs.items()
    }
    loss, _ = ppo_loss(actor, nested, data.copy())
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss), float(norm)


@pytest.mark.parametrize("name", LOSSES)
def test_three_updates_are_verls_own(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM
    from verl.workers.utils.losses import ppo_loss

    folder = write_folder(tmp_path / "model", "qwen3_untied")
    actor = _actor(**LOSSES[name])
    engine = _engine(actor, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    begun = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for seed in range(3):
        if name == "warmup":
            optimizer.param_groups[0]["lr"] = 1e-3 * min(seed / 2, 1)
        data = _batch(seed, whole=name == "gspo")
        expected = _verl_step(model, optimizer, data, actor)
        out = engine.train_batch(data, partial(ppo_loss, config=actor))
        engine.lr_scheduler_step()
        got = (out["loss"][0], out["metrics"]["grad_norm"])
        assert got == pytest.approx(expected, rel=5e-6, abs=1e-6)
        assert got[1] > 0.01
    ours = weights_of(engine._session.trainer)
    flat = lambda found: torch.cat([found[key].flatten() for key in sorted(begun)])  # noqa: E731
    wanted = flat(dict(model.named_parameters())).detach()
    assert (flat(ours) - wanted).norm() / (wanted - flat(begun)).norm() <= 5e-5


# A setting that has no counterpart, and the changes that make it.
REFUSALS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("policy_loss.loss_mode", {"mode": mode})
        for mode in ("dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "geo_mean", "dro", "bypass_mode")
    ),
    ("loss_scale_factor", {"loss_agg_mode": "seq-mean-token-sum-norm"}),
    ("kl_loss_type", {"use_kl_loss": True, "kl_loss_type": "abs"}),
    ("clip_ratio_c", {"clip_ratio_c": 1.1}),
    ("loss_agg_mode", {"mode": "sapo"}),
    ("policy_options", {"policy_options": {"lora": {"rank": 8}}}),
    ("calculate_sum_pi_squared", {"calculate_sum_pi_squared": True}),
    ("freeze_vision_tower", {"freeze_vision_tower": True}),
    ("fsdp_config.dtype", {"dtype": "float16"}),
    ("optim.optimizer", {"optimizer": "Adam"}),
    ("optim.optimizer_impl", {"optimizer_impl": "torchao.optim"}),
    ("optim.override_optimizer_config", {"override_optimizer_config": {"amsgrad": True}}),
]


def test_what_has_no_counterpart_is_refused_when_the_configuration_is_made() -> None:
    from verl.workers.utils.losses import ppo_loss

    from ratoon_client.verl import _actor_config

    for name, changes in REFUSALS:
        with pytest.raises(InvalidArgumentError) as caught:
            _actor(**changes)
        assert caught.value.field == f"actor_rollout_ref.actor.{name}"
    actor = _actor()
    assert actor.engine.strategy == "ratoon"
    for name, n_gpus, model in (
        ("trainer.n_gpus_per_node", 2, {}),
        (
            "actor_rollout_ref.model.target_modules",
            1,
            {"lora_rank": 8, "target_modules": ".*_proj"},
        ),
        ("actor_rollout_ref.model.exclude_modules", 1, {"exclude_modules": "q_proj"}),
        ("actor_rollout_ref.model.lora_adapter_path", 1, {"lora_adapter_path": "adapter"}),
        ("actor_rollout_ref.model.lora.rank", 1, {"lora": {"rank": 8}}),
        ("actor_rollout_ref.model.mtp.enable", 1, {"mtp": {"enable": True}}),
        ("actor_rollout_ref.model.override_config", 1, {"override_config": {"rope_theta": 1}}),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            actor.validate(n_gpus, 8, model)
        assert caught.value.field == name
    check_processes(1)
    check_model({"override_config": {"attn_implementation": "sdpa"}})
    with pytest.raises(InvalidArgumentError, match="loss_fn"):
        _actor_config(lambda **_: None)
    assert _actor_config(partial(ppo_loss, config=actor)) is actor


def test_a_reference_needs_no_optimizer_and_a_batch_is_text() -> None:
    from verl.workers.config import OptimizerConfig

    from ratoon_client.verl import RatoonActorConfig, RatoonEngine, rows_of

    plain = _actor(engine={"forward_only": True})
    reference = RatoonActorConfig(
        rollout_n=1, use_dynamic_bsz=True, fsdp_config=plain.engine, optim=OptimizerConfig()
    )
    RatoonEngine(_Model(), reference.engine, reference.optim, None)
    several = _batch(0, whole=False)
    with pytest.raises(InvalidArgumentError, match=r"^advantages\[0\]: "):
        rows_of(several, with_values=True, kind="gspo")
    media = SimpleNamespace(shape=(ROWS,))
    several["multi_modal_inputs"] = [{"pixel_values": media}] * ROWS
    with pytest.raises(InvalidArgumentError, match=r"^multi_modal_inputs: "):
        rows_of(several, with_values=True)


def test_logprobs_of_an_older_version_than_the_last_are_refused(tmp_path: Path) -> None:
    """verl copies an actor's parameters to the host, and restores them for old log-probs."""
    from verl.utils.fsdp_utils import fsdp1_sharded_save_to_cpu
    from verl.workers.utils.losses import ppo_loss

    actor = _actor()
    engine = _engine(actor, write_folder(tmp_path / "model", "qwen3_untied"))
    data = _batch(0, whole=False)
    saved = fsdp1_sharded_save_to_cpu(engine.module)
    assert saved
    engine.train_batch(data, partial(ppo_loss, config=actor))
    for name, parameter in engine.module.named_parameters():
        parameter.data.copy_(saved[name])
    text = r"^trainer\.v1\.separate_async\.parameter_sync_step: \S+ log-probs of version 0 after 1"
    with pytest.raises(InvalidArgumentError, match=text):
        engine.forward_backward_batch(data, None, forward_only=True)


def test_weights_of_a_rollout_correction_multiply_advantages() -> None:
    from ratoon_client.verl import rows_of

    data = _batch(0, whole=False)
    plain = rows_of(data, with_values=True)
    data["rollout_is_weights"] = 2 * data["response_mask"].float()
    for (prompt, doubled), (same, once) in zip(rows_of(data, with_values=True), plain, strict=True):
        assert prompt == same
        got, before = (np.asarray(row.outcome, np.float64) for row in (doubled, once))
        assert got == pytest.approx(2 * before)


def test_the_page_names_what_is_refused() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, _ in REFUSALS:
        assert f"`{name.rpartition('.')[2]}`" in page or f"`{name}`" in page, name


def test_returns_advantages_and_value_losses_are_verls() -> None:
    """Rewards are on trained tokens, which verl alone looks at; its whitening is its own."""
    from verl.trainer.ppo import core_algos
    from verl.utils import torch_functional as verl_torch

    rng = np.random.default_rng(0)
    mask = rng.random((5, 9)) < 0.7
    value, old = rng.normal(size=(2, 5, 9)).astype(np.float32)
    reward = (rng.normal(size=(5, 9)) * mask).astype(np.float32)
    is_trained = torch.from_numpy(mask)
    advantage, expected_return = core_algos.compute_gae_advantage_return(
        *(torch.from_numpy(each) for each in (reward, value, mask.astype(np.float32))), 0.9, 0.8
    )
    found, returns = gae(list(reward), list(value), gamma=0.9, lam=0.8, loss_masks=list(mask))
    np.testing.assert_allclose(
        np.stack(returns)[mask], expected_return[is_trained], rtol=1e-5, atol=1e-6
    )
    whitened = verl_torch.masked_whiten(torch.from_numpy(np.stack(found)), is_trained)
    np.testing.assert_allclose(whitened[is_trained], advantage[is_trained], rtol=1e-4, atol=1e-5)
    expected, clipped = core_algos.compute_value_loss(
        torch.from_numpy(value), expected_return, torch.from_numpy(old), is_trained.float(), 0.3
    )
    terms = value_terms(
        ValueLoss(coefficient=1.0, clip=0.3),
        torch.from_numpy(value)[is_trained],
        expected_return[is_trained],
        torch.from_numpy(old)[is_trained],
    )
    assert 0 < terms.clipped_L.sum() < len(terms.clipped_L)
    assert float(terms.loss_L.mean()) == pytest.approx(float(expected), rel=1e-5)
    assert float(terms.clipped_L.float().mean()) == pytest.approx(float(clipped), rel=1e-5)
