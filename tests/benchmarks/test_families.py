"""The benchmark of families on a CPU: what it measures and merges, and libraries' recurrences."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from benchmarks.common.forests import Tree, pack
from benchmarks.families import recurrences
from benchmarks.families.main import main
from benchmarks.families.models import CASES
from benchmarks.kernels.attention_inputs import layout_of
from benchmarks.step.workload import FamilySize, StepWork, step_flops
from harness.released_models import RELEASED, released
from ratoon.model.families import family_of
from ratoon_kernels import TreeLayout, gated_delta_rule
from tests.benchmarks.result_checks import families_problems

CPU = ("--device", "cpu", "--samples", "1")
# A level is not one range of rows, and the third has one node of each tree.
TREE = Tree([-1, 0, 0, 1, 1, -1, 5, 6, 6], [5, 3, 4, 1, 70, 2, 3, 1, 2])


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Measured in two calls into one file."""
    path = tmp_path_factory.mktemp("families") / "families.json"
    main([*CPU, "--out", str(path), "--only", "attention", "--cases", "256 causal 16K"])
    only = ("--only", "layers,delta,precision", "--layers", "4", "--without", "fla,flash-qla")
    main([*CPU, "--out", str(path), *only, "--cases", "qwen3.5,deep,flat"])
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.more
def test_sections_of_two_calls_are_one_result(result: dict[str, Any]) -> None:
    assert list(families_problems(result)) == []
    assert len(result["runs"]) == 2
    assert {row["how"] for row in result["attention"]} == {"ours", "cudnn", "fa2"}
    assert all(error < 1e-5 for row in result["attention"] for error in row.get("errors", ()))
    for kind in ("over_replicated", "hardware_mfu", "deep_over_flat", "bf16_distance"):
        assert result[kind].keys() == {"qwen3.5"}
    assert result["d256"].keys() == {"causal 16K"}
    ours, replicated = result["layers"]
    assert ours["against"] == replicated["how"] == "reference-replicated"
    assert max(ours["errors"].values()) < 1e-5


def _to_half(found: dict[str, Any]) -> None:
    found["over_replicated"]["qwen3.5"] /= 2


def _slower(found: dict[str, Any]) -> None:
    found["layers"][0]["seconds"] *= 2


def _twice(found: dict[str, Any]) -> None:
    found["delta"].append(found["delta"][0])


def _failed(found: dict[str, Any]) -> None:
    found["attention"][0]["error"] = "no memory"


@pytest.mark.more
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_to_half, "over_replicated: not that of the rows"),
        (_slower, "seconds is not the median"),
        (_twice, "2 rows"),
        (_failed, "error: no memory"),
    ],
)
def test_checks_see_what_is_wrong(
    result: dict[str, Any], change: Callable[[dict[str, Any]], None], problem: str
) -> None:
    changed = copy.deepcopy(result)
    change(changed)
    assert any(problem in line for line in families_problems(changed))


@pytest.mark.more
def test_a_result_of_another_seed_is_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "families.json"
    only = ("--only", "attention", "--cases", "256 causal 16K", "--out", str(path))
    main([*CPU, *only])
    with pytest.raises(SystemExit, match="another seed"):
        main([*CPU, *only, "--seed", "1"])


def _one_by_one(
    rows: tuple[Tensor, ...],
    offsets: Tensor,
    first: Tensor | None,
    *,
    scale: float,
    has_ends: bool,
) -> tuple[Tensor, Tensor | None]:
    """A library's call, token by token."""
    q, k, v, g, beta = (x[0] for x in rows)
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    outs, ends = list[Tensor](), list[Tensor]()
    bounds = offsets.tolist()
    for index, (start, stop) in enumerate(pairwise(bounds)):
        state = q.new_zeros((*k.shape[1:], v.shape[-1])) if first is None else first[index]
        for t in range(start, stop):
            state = state * g[t].exp()[:, None, None]
            told = beta[t][:, None] * (v[t] - (state * k[t][..., None]).sum(1))
            state = state + k[t][..., None] * told[:, None]
            outs.append(scale * (state * q[t][..., None]).sum(1))
        ends.append(state)
    return torch.stack(outs)[None], torch.stack(ends) if has_ends else None


def _inputs(layout: TreeLayout) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn((layout.num_tokens, *shape), generator=rng, dtype=torch.float64)

    rows = draw(2, 6), draw(2, 6), draw(4, 5), -draw(4).abs() / 10, draw(4).sigmoid()
    return tuple(x.requires_grad_() for x in rows)


def test_a_library_level_by_level_gives_our_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the switch our op runs the library, and after it ours again."""
    monkeypatch.setattr(recurrences, "library", lambda _name: _one_by_one)
    layout = layout_of(pack(TREE), torch.device("cpu"))
    rows = _inputs(layout)

    def results(*, is_memory_used_again: bool = False) -> list[Tensor]:
        given = tuple(x.detach().clone().requires_grad_() for x in rows)
        out = cast("Any", gated_delta_rule)(*given, layout, 0.5)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        if is_memory_used_again:
            for x in given:
                x.detach().numpy()[:] = 0
        return [out.detach(), *torch.autograd.grad(out, given, weights)]

    ours = results()
    with recurrences.switches() as choose:
        choose("fla")
        by_library = results(is_memory_used_again=True)
        choose("")
        again = results()
    after = results()
    for a, b, c, d in zip(ours, by_library, again, after, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)
        assert not torch.equal(a, b) or a.numel() == 0
        assert torch.equal(a, c)
        assert torch.equal(a, d)


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_the_parameters_of_their_cards(name: str) -> None:
    """Weights that a token passes, in billions: all but embedding, head and norms."""
    billions = {
        "Qwen3.5-4B": 3.57, "Qwen3.5-9B": 6.92, "Qwen3.5-35B-A3B": 2.44, "gpt-oss-20b": 3.03,
        "Gemma-3-12B": 10.76, "GLM-4.5-Air": 12.18,
    }  # fmt: skip
    config = released(name)
    size = FamilySize(name=name, config=config)
    assert size.geometry.layer_parameters / 1e9 == pytest.approx(billions[name], abs=0.006)
    assert len(family_of(config).layers(config)) == config.num_hidden_layers


def test_work_of_windows_is_counted_within_them() -> None:
    """Half of gpt-oss' layers have 14 operations a head dimension and pair within the window."""
    size = FamilySize(name="two layers", config=released("gpt-oss-20b", 2))
    assert size.window == 128
    near, far = (
        step_flops(size, StepWork(tokens=0, rows=0, pairs=pairs, near_pairs=near_pairs))
        for pairs, near_pairs in ((0, 1000), (1000, 0))
    )
    assert near == far == 14 * 64 * 64 * 1000


def test_cases_are_released_models() -> None:
    assert {case.model for case in CASES.values()} <= RELEASED.keys()
