"""What a policy's trainer gets of the server's settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from ratoon.config import load_config
from ratoon.engine.fleet import RayFleet
from ratoon.engine.settings import EngineSettings
from ratoon.model.spec import ModelDtype
from ratoon.train.config import OptimizerStates
from tests.engine.harness import policy_spec


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_optimizer_states_of_the_config_reach_bfloat16_policies_alone(
    kind: OptimizerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are wider are their own masters."""
    monkeypatch.setenv("RATOON_WORKER__OPTIMIZER_STATES", kind.value)
    monkeypatch.setenv("RATOON_WORKER__DEVICE", "cpu")
    fleet = RayFleet(EngineSettings.from_config(load_config(None)))
    spec = policy_spec("p")
    for dtype, expected in (
        (ModelDtype.BFLOAT16, kind),
        (ModelDtype.FLOAT32, OptimizerStates.FP32),
    ):
        trainer = fleet._trainer(replace(spec, model=replace(spec.model, dtype=dtype)))
        assert trainer.optimizer_states is expected


def test_memory_of_the_host_reaches_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_WORKER__HOST_ACTIVATION_BYTES", str(7 * 2**30))
    monkeypatch.setenv("RATOON_WORKER__DEVICE", "cpu")
    fleet = RayFleet(EngineSettings.from_config(load_config(None)))
    assert fleet._trainer(policy_spec("p")).host_activation_bytes == 7 * 2**30


def test_unknown_optimizer_states_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_WORKER__OPTIMIZER_STATES", "fp8")
    with pytest.raises(ValidationError, match="optimizer_states"):
        load_config(None)


def test_what_fits_is_chosen_where_the_server_says_nothing() -> None:
    """Of bfloat16 policies, by their trainer."""
    settings = EngineSettings.from_config(load_config(None))
    assert settings.optimizer_states is None
    fleet, spec = RayFleet(replace(settings, device="cpu")), policy_spec("p")
    for dtype, expected in (
        (ModelDtype.BFLOAT16, None),
        (ModelDtype.FLOAT32, OptimizerStates.FP32),
    ):
        trainer = fleet._trainer(replace(spec, model=replace(spec.model, dtype=dtype)))
        assert trainer.optimizer_states is expected
