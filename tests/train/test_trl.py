"""RatoonGRPOTrainer beside TRL's own trainer: the same batches, losses, norms and weights.

The policy is a trainer of this process: the client's messages go in, and weights come back.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ratoon.api.convert.checks import read
from ratoon.api.convert.groups import raw_groups
from ratoon.api.submissions import loss_request
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon.rollout.routes import RouteSizes
from ratoon.rollout.validate import BatchLimits, validate_groups
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.spec import TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_client import Group, InvalidArgumentError, Loss, Optim
from ratoon_client.grpo_config import KEPT, MAPPED, REFUSED, adamw_of, check_config
from ratoon_client.wire import group_messages, loss_message, optim_message
from ratoon_proto.types import FullTuning, OptimStepConfig, StepResult
from tests.train.trainer_runs import weights_of
from tests.trl_site import NEEDS_TRL, grpo_config, trl_on_path, write_model

pytestmark = [pytest.mark.more, NEEDS_TRL]
PROMPTS = [f"{'Say a number. ' * (1 + index % 3)}{index}" for index in range(32)]
_MOST = 2**20


@pytest.fixture(scope="module", autouse=True)
def _site() -> Iterator[None]:
    with trl_on_path():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("trl") / "model")


class LocalPolicy:
    """What a trainer's session is to it; `version` counts the steps that were taken."""

    def __init__(self, folder: Path, optimizer: Any) -> None:
        self.version = 0
        self.trainer = Trainer.create(
            TrainerSpec(
                model=ModelSpec(
                    base=FolderBase(folder=str(folder)),
                    tuning=FullTuning(),
                    dtype=ModelDtype.FLOAT32,
                    seed=0,
                ),
                optimizer=optimizer,
                deterministic=True,
                micro_batch_tokens=1024,
                keep_reference=False,
                attention_backend="",
                device="cpu",
                num_threads=1,
            )
        )

    def update(self, groups: list[Group], *, loss: Loss, optim: Optim) -> Any:
        info = self.trainer.info()
        bounds = BatchLimits(
            vocab_size=info.vocab_size,
            max_sequence_tokens=info.max_sequence_tokens,
            max_groups=_MOST,
            max_sequences=_MOST,
            max_tokens=_MOST,
            routes=RouteSizes(layers=0, num_experts=0, experts_per_token=0),
            sliding_window=0,
            media_tokens={},
        )
        batch = validate_groups(raw_groups(group_messages(groups), max_tokens=_MOST), bounds)
        asked = loss_request(loss_message(loss))
        resolved = resolve_loss(asked, batch, has_frozen_reference=False)
        config = read(optim_message(optim), OptimStepConfig, "optim")
        step = resolve_optim(config, resolved.normalisation, self.trainer.spec.optimizer)
        report = self.trainer.update(self.trainer.prepare(batch, resolved), step)
        self.version += not report.skipped
        return SimpleNamespace(result=lambda: StepResult(version=self.version, report=report))


@dataclass
class Steps:
    """What a trainer's windows had: losses, norms and completions."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    # Token ids of each micro-batch.
    completions: list[list[list[int]]] = field(default_factory=list)


def trained(kind: Any, folder: Path, output: Path, **changes: Any) -> tuple[Any, Steps]:
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
        model=str(folder),
        reward_funcs=reward,
        # By default AdamW's first steps divide tiny gradients, and their rounding, by themselves.
        args=grpo_config(output, adam_epsilon=1e-4, **changes),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    trainer.train()
    return trainer, steps


def _local() -> Any:
    from ratoon_client.trl import RatoonGRPOTrainer

    class Local(RatoonGRPOTrainer):
        def _begin(self) -> None:
            if self._session is None:
                folder = Path(self.accelerator.unwrap_model(self.model).name_or_path)
                self._session = LocalPolicy(folder, adamw_of(self.args))

        def _pull(self, version: int) -> None:
            assert version == self._session.version
            values = weights_of(self._session.trainer)
            targets = dict(self.accelerator.unwrap_model(self.model).named_parameters())
            assert values.keys() == targets.keys()
            with torch.no_grad():
                for name, target in targets.items():
                    target.copy_(values[name])

    return Local


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def _equal_at_last(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """Rewards without a signal after the first step."""
    if trainer_state.global_step:
        return [1.0] * len(completion_ids)
    return _reward(completion_ids)


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
    "grpo, two-sided clip": {
        "loss_type": "grpo", "delta": 1.02, "epsilon": 0.01, "num_iterations": 2, "max_steps": 2
    },
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
def test_an_update_is_trls_own(folder: Path, tmp_path: Path, name: str) -> None:
    from trl import GRPOTrainer

    theirs, expected = trained(GRPOTrainer, folder, tmp_path / "trl", **ROWS[name])
    ours, got = trained(_local(), folder, tmp_path / "ratoon", **ROWS[name])
    assert got.completions == expected.completions
    assert got.losses == pytest.approx(expected.losses, rel=2e-6, abs=3e-7)
    assert got.norms == pytest.approx(expected.norms, rel=2e-6, abs=1e-7)
    assert max(got.norms) > 0.1

    def flat(weights: dict[str, Any]) -> torch.Tensor:
        return torch.cat([weights[key].flatten() for key in sorted(begun)])

    begun = load_file(folder / "model.safetensors")
    wanted = flat(theirs.model.state_dict())
    off = (flat(ours.model.state_dict()) - wanted).norm() / (wanted - flat(begun)).norm()
    assert off <= 2e-5


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


def test_what_has_no_counterpart_is_refused_by_name(tmp_path: Path) -> None:
    for name, changes in REFUSALS:
        with pytest.raises(InvalidArgumentError, match=f"^{name}: ") as caught:
            check_config(grpo_config(tmp_path, **changes), num_processes=1)
        assert caught.value.field == name
    check_config(grpo_config(tmp_path), num_processes=1)


def test_every_field_of_a_grpo_config_is_mapped_refused_or_trls_own() -> None:
    """A field of a newer TRL would be passed over."""
    from trl import GRPOConfig

    tables = [set(MAPPED), set(REFUSED), set(KEPT)]
    names = {one.name for one in fields(GRPOConfig) if one.init}
    assert set[str]().union(*tables) == names
    assert sum(map(len, tables)) == len(names)


def test_rows_are_what_trl_trains_of_each_completion() -> None:
    """Tools' tokens are masked, padding is gone, and a log-prob that vLLM has not weighs 1."""
    from ratoon_client.rollouts import groups_of
    from ratoon_client.trl import rows_of

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
