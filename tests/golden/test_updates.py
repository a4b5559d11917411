"""Plans of batches, and what three updates of each kind of trainer leave and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec, PresetBase
from ratoon.planner.costs import DEFAULT_COSTS
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.prefixes import sort_sequences
from ratoon.train.prepare import has_trained_tokens
from ratoon.train.spec import OptimizerStates, TrainerSpec
from ratoon.train.trainer import Trainer
from ratoon_proto.types import AdamWConfig, FullTuning, LoraTuning, LossKind
from tests import builders
from tests.golden.conftest import Golden
from tests.plans import make_plan
from tests.tiny_models import write_folder
from tests.train.trainer_runs import make_loss, make_step

LORA = LoraTuning(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj", "down_proj"))
# Name -> states, dtype, tuning, architecture.
KINDS: Mapping[str, tuple[OptimizerStates, ModelDtype, FullTuning | LoraTuning, str]] = {
    **{
        states.value: (states, ModelDtype.BFLOAT16, FullTuning(), "tiny")
        for states in OptimizerStates
    },
    "float32": (OptimizerStates.FP32, ModelDtype.FLOAT32, FullTuning(), "tiny"),
    "lora": (OptimizerStates.FP32, ModelDtype.FLOAT32, LORA, "qwen3"),
    "experts": (OptimizerStates.FP32, ModelDtype.FLOAT32, FullTuning(), "qwen3_moe"),
    "expert_lora": (
        OptimizerStates.FP32,
        ModelDtype.FLOAT32,
        LoraTuning(rank=4, alpha=8.0, target_modules=()),
        "qwen3_moe",
    ),
}
LOSSES = (LossKind.GRPO, LossKind.DAPO, LossKind.REINFORCE)
# They depend on the clock and on the machine.
UNREPEATED = {
    *("seconds", "tokens_per_second", "hardware_mfu", "logical_mfu"),
    *("peak_memory_bytes", "planned_memory_bytes", "rank_seconds"),
}


def batch_of(seed: int, **knobs: Any) -> RolloutBatch:
    return builders.random_batch(np.random.default_rng(seed), num_groups=6, **knobs)


@pytest.mark.parametrize("budget", [16, 48, 4096])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_plans(golden: Golden, budget: int, num_ranks: int) -> None:
    """How batches are cut: whole, into subtrees, into stages, over ranks."""
    plans: list[dict[str, Any]] = []
    for seed in range(4):
        batch = batch_of(seed, max_prompt=24, max_response=12)
        plan = make_plan(
            batch,
            sort_sequences(batch),
            has_trained_tokens(batch),
            budget,
            DEFAULT_COSTS,
            num_ranks=num_ranks,
        )
        plans.append(asdict(plan))
    golden.check(f"plans_{budget}_{num_ranks}", plans)


def made(kind: str, root: Path) -> Trainer:
    states, dtype, tuning, name = KINDS[kind]
    base = (
        PresetBase(name="tiny")
        if name == "tiny"
        else FolderBase(folder=str(write_folder(root, name, seed=1)))
    )
    return Trainer.create(
        TrainerSpec(
            model=ModelSpec(base=base, tuning=tuning, dtype=dtype, seed=3),
            optimizer=AdamWConfig(),
            deterministic=True,
            micro_batch_tokens=48,
            keep_reference=isinstance(tuning, FullTuning),
            attention_backend="",
            device="cpu",
            num_threads=1,
            optimizer_states=states,
        )
    )


@pytest.mark.parametrize("kind", KINDS)
def test_three_updates(golden: Golden, kind: str, tmp_path: Path) -> None:
    """Digests are compared on a machine like the one that recorded them, figures on every one; in
    bfloat16, which CPUs round in different orders, on those of the kinds that have a record."""
    trainer = made(kind, tmp_path / "base")
    digests, reports = [trainer.state_digest()], list[dict[str, Any]]()
    for seed, loss_kind in enumerate(LOSSES):
        batch = batch_of(seed, outcome="reward")
        loss = make_loss(batch, loss_kind)
        report = trainer.update(
            trainer.prepare(batch, loss), make_step(trainer, loss, tensor_grad_norms=True)
        )
        trainer.version += 1
        digests.append(trainer.state_digest())
        reports.append({k: v for k, v in asdict(report).items() if k not in UNREPEATED})
    numerics = {k: v for k, v in trainer.fingerprint().items() if k not in ("ratoon", "kernels")}
    found = {"digests": digests, "reports": reports, "numerics": numerics}
    name = f"updates_{kind}"
    if KINDS[kind][1] is ModelDtype.BFLOAT16:
        name += f"_{numerics['device_model'].split()[1].lower()}"
    if not golden.has(name):
        pytest.skip(f"nothing is recorded of {numerics['device_model']}")
    recorded = cast("dict[str, Any]", golden.recorded(name, found))
    # Records of CPUs with AVX2 do not say whose they are.
    device, of_record = numerics["device_model"], recorded["numerics"]["device_model"]
    if (
        device.startswith(of_record)
        and {**recorded["numerics"], "device_model": device} == numerics
    ):
        assert digests == recorded["digests"]
    # A kind that was not at hand when reports changed has digests alone.
    if "reports" in recorded:
        _same_figures(reports, recorded["reports"], kind)


def _same_figures(found: Any, recorded: Any, place: str) -> None:
    if isinstance(recorded, float) and isinstance(found, float):
        assert found == pytest.approx(recorded, rel=1e-3, abs=1e-6), place
    elif isinstance(recorded, dict):
        assert {*found} == {*recorded}, place
        for name, value in cast("dict[str, Any]", recorded).items():
            _same_figures(found[name], value, f"{place}.{name}")
    elif isinstance(recorded, list):
        assert len(found) == len(recorded), place
        for index, value in enumerate(cast("list[Any]", recorded)):
            _same_figures(found[index], value, f"{place}[{index}]")
    else:
        assert found == recorded, place
