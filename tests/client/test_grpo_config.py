"""TRL's configuration as a loss and a step; `tests/e2e/test_trl.py` compares what they do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ratoon_client import InvalidArgumentError
from ratoon_client.grpo_config import (
    KEPT,
    MAPPED,
    REFUSED,
    check_config,
    optim_of,
    table,
)

DOCS = Path(__file__).parents[2] / "docs"


def _config(**changes: Any) -> SimpleNamespace:
    """What the functions read of a GRPOConfig that says nothing."""
    defaults = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "beta": 0.0,
        "use_bias_correction_kl": True,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 2,
        "max_completion_length": 12,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    }
    return SimpleNamespace(**{**defaults, **changes})


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("vllm_importance_sampling_mode", {"vllm_importance_sampling_mode": "token"}),
        ("vllm_importance_sampling_clip_max", {"vllm_importance_sampling_clip_max": None}),
        ("vllm_importance_sampling_clip_max", {"vllm_importance_sampling_clip_max": 0.9}),
        (
            "vllm_importance_sampling_clip_min",
            {
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_min": 0.5,
            },
        ),
        ("vllm_importance_sampling_clip_min", {"vllm_importance_sampling_clip_min": 1.5}),
    ],
)
def test_a_correction_without_a_counterpart_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_config(_config(use_vllm=True, **changes), num_processes=1)
    assert caught.value.field == field
    check_config(_config(**changes), num_processes=1)


def test_bnpo_is_refused_for_a_window_of_several_micro_batches() -> None:
    alone = _config(loss_type="bnpo", gradient_accumulation_steps=1)
    check_config(alone, num_processes=1)
    for config, num_processes in ((alone, 2), (_config(loss_type="bnpo"), 1)):
        with pytest.raises(InvalidArgumentError, match=r"^loss_type: "):
            check_config(config, num_processes=num_processes)


def test_tokens_are_counted_as_trl_counts_them() -> None:
    """Over the batch that was generated, by the window's share of it."""
    step = {"learning_rate": 1e-3, "num_micro_batches": 2, "num_rows": 16, "num_items": 400.0}
    made = optim_of(_config(steps_per_generation=4), **step)
    assert (made.divide_by, made.divide_constant) == ("constant", 400.0 * 2 / 4 / 16)
    assert optim_of(_config(loss_type="bnpo"), **step).divide_by == "tokens"
    assert optim_of(_config(loss_type="grpo"), **step).divide_by == "sequences"
    made = optim_of(_config(loss_type="dr_grpo"), **step)
    assert (made.divide_by, made.divide_constant) == ("constant", 12.0)


def test_the_page_says_what_the_table_says() -> None:
    assert table() in (DOCS / "trl.md").read_text(encoding="utf-8")
    assert not MAPPED & set(REFUSED) | (MAPPED | set(REFUSED)) & KEPT
