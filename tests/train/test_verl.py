"""RatoonEngine beside verl's own losses over transformers' log-probs and torch's AdamW.

The policy is a trainer of this process: the client's messages go in, and weights come back.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ratoon_client import InvalidArgumentError
from ratoon_client.verl_config import adamw_of
from tests.tiny_models import write_folder
from tests.train.test_trl import LocalPolicy
from tests.train.trainer_runs import weights_of

SITE = Path(__file__).parents[2] / ".venv-verl"
pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(not (SITE / "verl").is_dir(), reason="verl is not installed"),
]
# No row has the padding token, whose embedding has no gradient in transformers.
ROWS = [((25, 26, 27), 4), ((25, 26, 27), 6), ((29, 28), 3), ((25, 26, 27), 2)]
WIDTH = 6


@pytest.fixture(scope="module", autouse=True)
def _site() -> Iterator[None]:
    sys.path.append(str(SITE))
    try:
        yield
    finally:
        sys.path.remove(str(SITE))


def _batch(seed: int) -> Any:
    from tensordict import TensorDict

    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length for _, length in ROWS])
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    ids = [
        torch.cat([torch.tensor(prompt), torch.randint(12, 60, (length,), generator=draw)])
        for prompt, length in ROWS
    ]
    responses = torch.zeros(len(ROWS), WIDTH, dtype=torch.long)
    for index, (_, length) in enumerate(ROWS):
        responses[index, :length] = ids[index][-length:]

    def normal() -> torch.Tensor:
        return torch.randn(len(ROWS), WIDTH, generator=draw)

    data = TensorDict(
        {
            "responses": responses,
            "attention_mask": torch.cat([torch.ones(len(ROWS), 3, dtype=torch.long), mask], 1),
            "response_mask": mask,
            "advantages": normal()[:, :1].expand(-1, WIDTH) * mask,
            "old_log_probs": -4.1 + 0.3 * normal(),
            "ref_log_prob": -4.1 + 0.3 * normal(),
        },
        batch_size=len(ROWS),
    )
    data["input_ids"] = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    return data


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
}


def _actor(mode: str = "vanilla", **changes: Any) -> Any:
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    return FSDPActorConfig(
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(loss_mode=mode),
        **changes,
    )


def _engine(folder: Path) -> Any:
    from verl.workers.config import FSDPOptimizerConfig

    from ratoon_client.verl import RatoonEngine

    optim = FSDPOptimizerConfig(lr=1e-3)
    engine = RatoonEngine(
        SimpleNamespace(local_path=str(folder)), SimpleNamespace(dtype="float32"), optim, None
    )
    engine._session = LocalPolicy(folder, adamw_of(optim))
    return engine, optim


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
    copy = data.copy()
    copy["prompts"] = torch.zeros(len(ROWS), 3, dtype=torch.long)
    # Prompts are padded on the left.
    for index, (prompt, _) in enumerate(ROWS):
        copy["attention_mask"][index, :3] = torch.arange(3) >= 3 - len(prompt)
    from verl.utils import tensordict_utils

    tensordict_utils.assign_non_tensor(
        copy,
        dp_size=1,
        batch_num_tokens=int(data["response_mask"].sum()),
        global_batch_size=len(ROWS),
    )
    loss, _ = ppo_loss(actor, nested, copy)
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
    engine, _ = _engine(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    begun = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    actor = _actor(**LOSSES[name])
    for seed in range(3):
        data = _batch(seed)
        expected = _verl_step(model, optimizer, data, actor)
        out = engine.train_batch(data, partial(ppo_loss, config=actor))
        got = (out["loss"][0], out["metrics"]["grad_norm"])
        assert got == pytest.approx(expected, rel=5e-6, abs=1e-6)
        assert got[1] > 0.01
    ours = weights_of(engine._session.trainer)
    flat = lambda found: torch.cat([found[key].flatten() for key in sorted(begun)])  # noqa: E731
    wanted = flat(dict(model.named_parameters())).detach()
    assert (flat(ours) - wanted).norm() / (wanted - flat(begun)).norm() <= 5e-5


def test_what_has_no_counterpart_is_refused_by_name() -> None:
    from verl.workers.utils.losses import ppo_loss

    from ratoon_client.verl import _actor_config
    from ratoon_client.verl_config import loss_of

    for mode in ("dppo_tv", "clip_cov", "kl_cov", "geo_mean", "dro", "bypass_mode"):
        with pytest.raises(InvalidArgumentError, match="loss_mode"):
            loss_of(_actor(mode))
    for field, changes in (
        ("loss_scale_factor", {"loss_agg_mode": "seq-mean-token-sum-norm"}),
        ("kl_loss_type", {"use_kl_loss": True, "kl_loss_type": "abs"}),
        ("clip_ratio_c", {"clip_ratio_c": 1.1}),
        ("loss_agg_mode", {"mode": "sapo"}),
    ):
        with pytest.raises(InvalidArgumentError, match=field):
            loss_of(_actor(**changes))
    with pytest.raises(InvalidArgumentError, match="loss_fn"):
        _actor_config(lambda **_: None)
    actor = _actor()
    assert _actor_config(partial(ppo_loss, config=actor)) is actor
