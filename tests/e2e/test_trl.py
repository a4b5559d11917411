"""RatoonGRPOTrainer beside TRL's own trainer: the same batches, losses, norms and weights."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

from ratoon_client import InvalidArgumentError, RatoonClient
from ratoon_client.grpo_config import KEPT, MAPPED, REFUSED, adamw_of
from tests.running_service import Service

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".venv-trl"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.more,
    pytest.mark.skipif(not (SITE / "trl").is_dir(), reason="TRL is not installed: make env-trl"),
]
POLICY = "trl-rows"
PROMPTS = [f"{'Say a number. ' * (1 + index % 3)}{index}" for index in range(32)]


@pytest.fixture(scope="module", autouse=True)
def site() -> Iterator[None]:
    """TRL behind everything else, for these tests alone: torch and transformers are those of .venv,
    and what Ray starts elsewhere does not see its packages."""
    sys.path.append(str(SITE))
    yield
    sys.path.remove(str(SITE))


@dataclass
class Steps:
    """What a trainer's windows had: losses, norms and completions."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    # Token ids of each micro-batch.
    completions: list[list[list[int]]] = field(default_factory=list)


@dataclass
class Ground:
    """`trl`: its own trainer; `ratoon`: ours on a policy that all rows share."""

    folder: Path
    url: str
    trl: type
    ratoon: type

    def config(self, output: Path, **changes: Any) -> Any:
        from trl import GRPOConfig

        settings: dict[str, Any] = {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_steps": 1,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "seed": 3,
        }
        return GRPOConfig(output_dir=str(output), **(settings | changes))

    def trained(self, kind: type, output: Path, **changes: Any) -> tuple[Any, Steps]:
        """A trainer after its steps, from the folder's weights."""
        from datasets import Dataset

        steps = Steps()
        reward = changes.pop("reward", _reward)

        class Recorded(kind):  # pyright: ignore[reportGeneralTypeIssues]
            pending = 0.0

            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                loss = super().training_step(*args, **kwargs)
                self.pending += float(loss)
                if self.accelerator.sync_gradients:
                    steps.losses.append(self.pending)
                    self.pending = 0.0
                return loss

            def _prepare_inputs(self, generation_batch: Any) -> Any:
                inputs = super()._prepare_inputs(generation_batch)
                steps.completions.append(inputs["completion_ids"].tolist())
                return inputs

            def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
                norm = super()._get_grad_norm(model, grad_norm=grad_norm)
                steps.norms.append(float(norm))
                return norm

        trainer = Recorded(
            model=str(self.folder),
            reward_funcs=reward,
            args=self.config(output, **changes),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            **({"ratoon_url": self.url} if kind is self.ratoon else {}),
        )
        trainer.train()
        return trainer, steps


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def _equal_at_last(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """Rewards without a signal after the first step."""
    if trainer_state.global_step:
        return [1.0] * len(completion_ids)
    return _reward(completion_ids)


@pytest.fixture(scope="module")
def ground(
    site: None, service: Service, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ground]:
    from trl import GRPOTrainer

    from ratoon.model.presets import byte_tokenizer
    from ratoon_client.trl import RatoonGRPOTrainer
    from tests.tiny_models import write_folder

    folder = write_folder(tmp_path_factory.mktemp("trl") / "model", "llama", vocab_size=260)
    byte_tokenizer().save_pretrained(folder)
    # Many tokens end a completion, so that lengths differ and some are not truncated.
    ends = {"eos_token_id": [258, *range(40)], "pad_token_id": 256}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    url = f"grpc://{service.addresses.grpc}"

    class Shared(RatoonGRPOTrainer):
        """Begins with the policy's first state, in place of a policy of its own."""

        def _begin(self) -> None:
            if self._session is None:
                self._policy_id = POLICY
                loading = self._client.policy(POLICY).load_checkpoint("first")
                self._attach(loading.result().version)

    ground = Ground(folder, url, GRPOTrainer, Shared)
    with RatoonClient(url) as client:
        optimizer = adamw_of(ground.config(folder / "out"))
        client.create_policy(POLICY, send_folder=folder, optimizer=optimizer).result()
        client.policy(POLICY).save_checkpoint("first").result()
        yield ground
        client.delete_policy(POLICY).result()


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
ROWS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "dapo, 8 steps": {"max_steps": 8},
    "dapo, generated for two windows": {"steps_per_generation": 4, "max_steps": 2},
    "grpo, 8 steps": {"loss_type": "grpo", "max_steps": 8},
    "grpo, beta": {"loss_type": "grpo", "beta": 0.04, "max_steps": 2},
    "grpo, beta, uncorrected": {
        "loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False, "max_steps": 2
    },
    "grpo, two iterations": {"loss_type": "grpo", "num_iterations": 2, "max_steps": 2},
    "dapo, two-sided clip": {"delta": 1.3, "epsilon": 0.1, "num_iterations": 2, "max_steps": 2},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo", "gradient_accumulation_steps": 1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "grpo by sequences": {"loss_type": "grpo", **SEQUENCE},
    "luspo by sequences": {"loss_type": "luspo", **SEQUENCE},
    "temperature": {"temperature": 0.7},
    "truncated masked, grpo": {"loss_type": "grpo", "mask_truncated_completions": True},
    "truncated masked, dapo": {"mask_truncated_completions": True},
    "weight decay": {"weight_decay": 0.1, "max_steps": 2},
    "rewards without a signal": {"reward": _equal_at_last, "max_steps": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_an_update_is_trls_own(ground: Ground, tmp_path: Path, name: str) -> None:
    """The rest is AdamW's first steps, which divide tiny gradients by themselves."""
    import torch
    from safetensors.torch import load_file

    theirs, expected = ground.trained(ground.trl, tmp_path / "trl", **ROWS[name])
    ours, got = ground.trained(ground.ratoon, tmp_path / "ratoon", **ROWS[name])
    assert got.completions == expected.completions
    assert got.losses == pytest.approx(expected.losses, rel=2e-6, abs=3e-7)
    assert got.norms == pytest.approx(expected.norms, rel=2e-6, abs=1e-7)
    assert max(got.norms) > 0.1

    def flat(weights: dict[str, Any]) -> torch.Tensor:
        return torch.cat([weights[key].flatten() for key in sorted(begun)])

    begun = load_file(ground.folder / "model.safetensors")
    wanted = flat(theirs.model.state_dict())
    off = (flat(ours.model.state_dict()) - wanted).norm() / (wanted - flat(begun)).norm()
    assert off <= 5e-5


# A configuration that has no counterpart, and the field that is named.
REFUSALS: list[tuple[str, dict[str, Any]]] = [
    ("loss_type", {"loss_type": "vespo"}),
    ("loss_type", {"loss_type": "bnpo"}),
    ("off_policy_mask_threshold", {"off_policy_mask_threshold": 0.5}),
    ("top_entropy_quantile", {"top_entropy_quantile": 0.2}),
    ("entropy_coef", {"entropy_coef": 0.01}),
    ("use_adaptive_entropy", {"use_adaptive_entropy": True}),
    ("optim", {"optim": "sgd"}),
    ("optim_args", {"optim_args": "a=1"}),
    ("cast_lm_head_to_fp32", {"cast_lm_head_to_fp32": True}),
    ("neftune_noise_alpha", {"neftune_noise_alpha": 5.0}),
    ("importance_sampling_level", {"loss_type": "sapo", "importance_sampling_level": "sequence"}),
    ("use_bias_correction_kl", {"importance_sampling_level": "sequence", "beta": 0.1}),
    ("delta", {"importance_sampling_level": "sequence", "delta": 2.0}),
    ("delta", {"delta": 1.1}),
    ("epsilon_high", {"loss_type": "cispo"}),
]


def test_what_has_no_counterpart_is_refused_by_name(ground: Ground, tmp_path: Path) -> None:
    """Before anything is sent: the service is asked for nothing."""
    from ratoon_client.grpo_config import check_config

    for name, changes in REFUSALS:
        config = ground.config(tmp_path, **changes)
        with pytest.raises(InvalidArgumentError, match=f"^{name}: ") as caught:
            check_config(config, num_processes=1)
        assert caught.value.field == name
    check_config(ground.config(tmp_path), num_processes=1)


def test_every_field_of_a_grpo_config_is_mapped_refused_or_trls_own() -> None:
    """A field of a newer TRL would be passed over."""
    from trl import GRPOConfig

    tables = [set(MAPPED), set(REFUSED), set(KEPT)]
    names = {one.name for one in fields(GRPOConfig) if one.init}
    assert set[str]().union(*tables) == names
    assert sum(map(len, tables)) == len(names)


def test_a_model_is_sent_trained_saved_and_resumed(ground: Ground, tmp_path: Path) -> None:
    """The script of docs/trl.md, and then from its checkpoint to the same weights."""
    import torch

    (script,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "trl.md").read_text(encoding="utf-8"), re.DOTALL
    )
    changes = {
        "my-sft-model": str(ground.folder),
        "trl-out": str(tmp_path / "out"),
        "grpc://127.0.0.1:8443": ground.url,
    }
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    names: dict[str, Any] = {}
    exec(compile(script, "docs/trl.md", "exec"), names)  # noqa: S102 - the page's own script
    first = names["trainer"]
    assert first.state.global_step == 4
    saved = json.loads((tmp_path / "out" / "checkpoint-2" / "ratoon.json").read_text())
    assert saved == {"policy_id": first.policy_id, "checkpoint_id": "step-2"}
    done = {key: value.clone() for key, value in first.model.state_dict().items()}

    make: Callable[..., Any] = names["make_trainer"]
    again = make(policy_id=first.policy_id)
    with pytest.raises(InvalidArgumentError, match=r"^policy_id: "):
        again.train()
    other = make(policy_id="another")
    with pytest.raises(InvalidArgumentError, match=r"as saved$"):
        other.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert resumed.policy_id == first.policy_id
    assert resumed.state.global_step == 4
    for key, value in resumed.model.state_dict().items():
        assert torch.equal(value, done[key]), key
    with RatoonClient(ground.url) as client:
        client.delete_policy(first.policy_id).result()


def test_rows_are_what_trl_trains_of_each_completion() -> None:
    """Tools' tokens are masked, padding is gone, and a log-prob that vLLM has not weighs 1."""
    import numpy as np

    from ratoon_client.trl import groups_of, rows_of

    old = np.array([[-1.0, -2.0, -3.0, 0.0], [-1.0, -1.0, 0.0, 0.0], [-4.0, 0.0, 0.0, 0.0]])
    inputs = {
        "prompt_ids": np.array([[9, 9, 5], [9, 4, 5], [9, 9, 5]]),
        "prompt_mask": np.array([[0, 0, 1], [0, 1, 1], [0, 0, 1]]),
        "completion_ids": np.array([[1, 2, 3, 9], [1, 2, 9, 9], [7, 8, 8, 8]]),
        "completion_mask": np.array([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]),
        "tool_mask": np.array([[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]),
        "advantages": np.array([0.5, -1.0, 2.0]),
        "old_per_token_logps": old,
        "sampling_per_token_logps": np.where(old == -2.0, np.nan, old - 0.25),
    }
    rows = rows_of(inputs, {"temperature": 0.7, "top_p": 0.9})
    assert [prompt for prompt, _ in rows] == [(5,), (4, 5), (5,)]
    first, second, masked = (made for _, made in rows)
    assert first.content.tolist() == [1, 2, 3]
    assert first.loss_mask.tolist() == [True, False, True]
    assert first.outcome.tolist() == [0.5] * 3
    assert first.sampler_logprobs.tolist() == [-1.25, -2.0, -3.25]
    assert (first.sampler_logprobs_kind, first.temperature, first.top_p) == ("processed", 0.7, 0.9)
    assert second.content.tolist() == [1, 2]
    assert (masked.content.tolist(), masked.loss_mask.tolist()) == ([7], [False])
    groups = groups_of(rows, name="3")
    assert [(one.group_id, len(one.rollouts)) for one in groups] == [("3-0", 2), ("3-1", 1)]
    del inputs["old_per_token_logps"]
    (_, unknown), *_ = rows_of(inputs, {})
    assert unknown.sampler_logprobs is None
