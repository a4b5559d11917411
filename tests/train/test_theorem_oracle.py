"""The oracle against itself: torch against plain floats, and three tokens worked out by hand."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch

from tests.oracle.advantages import Counted, count, overlong_penalty, select
from tests.oracle.losses import path_loss
from tests.oracle.losses_numpy import path_value
from tests.oracle.paths import Correction, Overlong, Path, default_loss

_CORRECTIONS = (
    None,
    Correction(mode="truncate", level="token", low=0.0, high=1.1),
    Correction(mode="mask", level="token", low=0.7, high=1.3),
    Correction(mode="truncate", level="sequence", low=0.0, high=1.5),
    Correction(mode="mask", level="sequence", low=0.2, high=4.0),
)


def _path(seed: int, num_tokens: int, **changes: object) -> Path:
    rng = np.random.default_rng(seed)
    mask = rng.random(num_tokens) < 0.7
    mask[0] = True
    fields: dict[str, object] = {
        "group_id": "g",
        "prompt": rng.integers(0, 9, 3),
        "response": rng.integers(0, 9, num_tokens),
        "mask": mask,
        "temperature": 1.0,
        "reward": None,
        "advantages": rng.normal(size=num_tokens),
        "sampler": -rng.random(num_tokens) * 2,
        "old": -rng.random(num_tokens) * 2,
        "reference": -rng.random(num_tokens) * 2,
        "weights": rng.normal(size=num_tokens),
        "truncated": False,
        "version": -1,
    }
    return Path(**(fields | changes))  # type: ignore[arg-type]


def _three(advantage: float) -> tuple[Counted, torch.Tensor]:
    """Three trained tokens of ratios 1.5, 1 and 0.5 with log-probs -1, -2 and -3."""
    logp = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    old = logp.detach().numpy() - np.log([1.5, 1.0, 0.5])
    path = _path(0, 3, mask=np.ones(3, dtype=np.bool_), sampler=old)
    own = np.ones(3, dtype=np.bool_)
    return Counted(path=path, own=own, advantages=np.full(3, advantage)), logp


@pytest.mark.parametrize("correction", _CORRECTIONS)
@pytest.mark.parametrize(
    "kind",
    [
        "grpo",
        "ppo_clip",
        "dapo",
        "dr_grpo",
        "gspo",
        "cispo",
        "importance_sampling",
        "reinforce",
        "cross_entropy",
    ],
)
def test_losses_torch_equals_numpy(kind: str, correction: Correction | None) -> None:
    """Both writings of each loss give the same value, whatever the options."""
    for seed in range(8):
        loss = default_loss(
            kind,
            advantage="given",
            old="on_policy" if kind == "reinforce" else "given",
            kl=("k1", "k2", "k3", None, "k1_plus", "k3_plus")[seed % 6],
            kl_weighted=seed in (2, 6),
            kl_coefficient=0.3,
            entropy_coefficient=0.1,
            correction=correction,
            dual_clip=1.5 if seed % 2 else None,
        )
        (counted,) = select([_path(seed, 7)], loss)
        rng = np.random.default_rng(seed + 100)
        logp, entropy = -rng.random(7) * 2, rng.random(7)
        got = path_loss(counted, loss, torch.as_tensor(logp), torch.as_tensor(entropy)).total
        assert got.item() == pytest.approx(path_value(counted, loss, logp, entropy), rel=1e-13)


@pytest.mark.parametrize(
    ("advantage", "value", "gradient"),
    [
        # min(1.5, 1.2) + 1 + min(0.5, 0.8) = 2.7; the first is clipped away.
        (1.0, -2.7, [0.0, -1.0, -0.5]),
        # max(1.5, 1.2) + 1 + max(0.5, 0.8) = 3.3; the last is clipped away.
        (-1.0, 3.3, [1.5, 1.0, 0.0]),
    ],
)
def test_ppo_clip_three_tokens(advantage: float, value: float, gradient: list[float]) -> None:
    counted, logp = _three(advantage)
    total = path_loss(counted, default_loss("ppo_clip"), logp, torch.zeros(3)).total
    total.backward()
    assert logp.grad is not None
    assert total.item() == pytest.approx(value, rel=1e-12)
    assert logp.grad.tolist() == pytest.approx(gradient, rel=1e-12)


def test_dual_clip_three_tokens() -> None:
    """A < 0 and c = 1.3: the first term is bounded at 1.3 and loses its gradient."""
    counted, logp = _three(-1.0)
    loss = default_loss("ppo_clip", dual_clip=1.3)
    total = path_loss(counted, loss, logp, torch.zeros(3)).total
    total.backward()
    assert logp.grad is not None
    assert total.item() == pytest.approx(1.3 + 1.0 + 0.8, rel=1e-12)
    assert logp.grad.tolist() == pytest.approx([0.0, 1.0, 0.0], abs=1e-12)


def test_grpo_three_tokens_are_averaged_over_the_path() -> None:
    counted, logp = _three(1.0)
    total = path_loss(counted, default_loss("grpo"), logp, torch.zeros(3)).total
    assert total.item() == pytest.approx(-0.9, rel=1e-12)


def test_gspo_three_tokens() -> None:
    """s = (1.5 * 1 * 0.5)^(1/3); unclipped, every token's gradient is -s A / 3."""
    counted, logp = _three(1.0)
    loss = default_loss("gspo", clip_low=0.5, clip_high=0.5, old="sampler")
    total = path_loss(counted, loss, logp, torch.zeros(3)).total
    total.backward()
    s = 0.75 ** (1 / 3)
    assert logp.grad is not None
    assert total.item() == pytest.approx(-s, rel=1e-12)
    assert logp.grad.tolist() == pytest.approx([-s / 3] * 3, rel=1e-12)


def test_cispo_three_tokens() -> None:
    """The clipped ratio is a constant factor of the log-prob: gradient -clip(r) A."""
    counted, logp = _three(2.0)
    loss = default_loss("cispo", clip_low=0.0, clip_high=1.25)
    total = path_loss(counted, loss, logp, torch.zeros(3)).total
    total.backward()
    assert logp.grad is not None
    assert total.item() == pytest.approx(2 * (1.25 * 1 + 2 + 0.5 * 3), rel=1e-12)
    assert logp.grad.tolist() == pytest.approx([-2.5, -2.0, -1.0], rel=1e-12)


def _rewarded(rewards: list[float], **changes: object) -> list[Path]:
    return [_path(i, 2 + i, reward=reward, **changes) for i, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("group_mean_std", [-1 / (1 + 1e-6), 0.0, 1 / (1 + 1e-6)]),
        ("group_mean", [-1.0, 0.0, 1.0]),
        ("leave_one_out", [-1.5, 0.0, 1.5]),
        ("none", [1.0, 2.0, 3.0]),
    ],
)
def test_advantages_of_rewards_one_two_three(kind: str, expected: list[float]) -> None:
    remaining = select(_rewarded([1.0, 2.0, 3.0]), default_loss("grpo", advantage=kind))
    assert [counted.advantages[0] for counted in remaining] == pytest.approx(expected, abs=1e-12)


def test_group_of_one_has_mean_zero_and_std_one() -> None:
    (counted,) = select(_rewarded([3.0]), default_loss("dapo"))
    assert counted.advantages[0] == pytest.approx(3 / (1 + 1e-6), rel=1e-12)


def test_overlong_penalty_is_the_papers() -> None:
    rule = Overlong(max_tokens=10, buffer_tokens=4, scale=2.0)
    assert [overlong_penalty(n, rule) for n in (6, 8, 10, 11)] == [0.0, -1.0, -2.0, -2.0]


def test_drops_leave_counters_over_what_remains() -> None:
    flat = _rewarded([1.0, 1.0], group_id="flat")
    mixed = [
        *_rewarded([0.0, 1.0], group_id="mixed"),
        *_rewarded([5.0], group_id="mixed", truncated=True),
    ]
    remaining = select(flat + mixed, default_loss("dapo", filter_truncated=True))
    counters = count(remaining)
    assert [counted.path.group_id for counted in remaining] == ["mixed", "mixed"]
    assert remaining[0].advantages[0] == pytest.approx(-2 / (math.sqrt(7) + 1e-6), rel=1e-12)
    assert {group_id for group_id, _ in counters.groups} == {"mixed"}
    assert counters.sequences == 2
    assert counters.tokens == sum(int(counted.path.mask.sum()) for counted in remaining)


def test_once_is_paid_by_the_first_path_that_trains_the_token() -> None:
    shared = {"prompt": np.array([1]), "group_id": "g", "temperature": 1.0}
    first = _path(0, 3, response=np.array([2, 3, 4]), mask=np.array([True, False, True]), **shared)
    second = _path(1, 3, response=np.array([2, 3, 5]), mask=np.array([True, True, True]), **shared)
    third = _path(2, 2, response=np.array([2, 3]), mask=np.array([True, True]), **shared)
    loss = default_loss("grpo", advantage="given", shared="once")
    remaining = select([first, second, third], loss)
    assert [counted.own.tolist() for counted in remaining] == [
        [True, False, True],
        [False, True, True],
        [False, False],
    ]
    counters = count(remaining)
    assert (counters.tokens, counters.sequences) == (4, 2)


def test_the_oracle_imports_nothing_of_ours() -> None:
    allowed = {"torch", "transformers", "peft", "safetensors", "numpy", "tests.oracle"}
    allowed |= sys.stdlib_module_names
    for file in (FilePath(__file__).parents[1] / "oracle").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                root = "tests.oracle" if name.startswith("tests.oracle") else name.split(".")[0]
                assert root in allowed, f"{file.name} imports {name}"
