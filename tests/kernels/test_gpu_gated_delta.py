"""The fused gated delta rule against the reference in float64, from the same bfloat16 inputs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon_kernels import Handover, select_backend
from ratoon_kernels.gated_delta import forest_tables, fused, reference
from ratoon_kernels.gated_delta.operands import Gradients, Operands
from tests.kernels.forests import Forest, binary, chain, forest_from, random_forests, star

pytestmark = pytest.mark.gpu

CHUNK = reference.CHUNK_TOKENS
GRADIENTS = ("dq_TKD", "dk_TKD", "dv_TNV", "dg_TN", "dbeta_TN")
# A result passes through some ten roundings to bfloat16, each 2^-9 of it at most, most of them of
# parts of it.
BOUND = 1e-2
FORESTS = {
    "one_token": forest_from([-1], [1]),
    "tokens": chain(20, 1),
    "edges": forest_from([-1, 0, 0, 2, 2], [CHUNK, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 5, 1]),
    "roots": forest_from([-1, 0, -1, -1, 3], [70, 200, 1, 129, 64]),
    "deep": chain(64, 33),
    "turns": forest_from([-1, *(2 * (n // 2) for n in range(63))], [90] * 64),
    "wide": star(300, 1000, 7),
    "binary": binary(5, 40),
    **{f"random_{i}": f for i, f in enumerate(random_forests(3, 4, 12, 200))},
}


def make_operands(
    forest: Forest, *, heads: tuple[int, int] = (2, 4), sizes: tuple[int, int] = (128, 128)
) -> tuple[Operands, Tensor]:
    """Inputs, strided as a model's are: queries, keys and values are columns of one tensor."""
    generator = torch.Generator("cuda").manual_seed(0)
    (num_key_heads, num_heads), (key_dim, value_dim) = heads, sizes
    num_tokens = forest.num_tokens

    def draw(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, device="cuda")

    widths = [num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim]
    q, k, v = draw(sum(widths)).bfloat16().split(widths, dim=1)
    layout = forest.layout("cuda")
    operands = Operands(
        q_TKD=q.unflatten(1, (num_key_heads, key_dim)),
        k_TKD=k.unflatten(1, (num_key_heads, key_dim)),
        v_TNV=v.unflatten(1, (num_heads, value_dim)),
        g_TN=-torch.nn.functional.softplus(draw(num_heads)) / 8,
        beta_TN=draw(num_heads).sigmoid().bfloat16(),
        plan=fused.plan(layout),
        scale=key_dim**-0.5,
        is_deterministic=True,
    )
    return operands, draw(num_heads, value_dim).bfloat16()


def exact(operands: Operands) -> Operands:
    """Equal numbers in float64."""
    first = operands.first_SNDV
    return replace(
        operands,
        q_TKD=operands.q_TKD.double(),
        k_TKD=operands.k_TKD.double(),
        v_TNV=operands.v_TNV.double(),
        g_TN=operands.g_TN.double(),
        beta_TN=operands.beta_TN.double(),
        first_SNDV=None if first is None else first.double(),
    )


def results(operands: Operands, dout_TNV: Tensor, dend: Tensor | None = None) -> dict[str, Tensor]:
    out, end = fused.forward(operands)
    return named(out, end, fused.backward(operands, dout_TNV, dend))


def expected(operands: Operands, dout_TNV: Tensor, dend: Tensor | None = None) -> dict[str, Tensor]:
    wide = exact(operands)
    out, end = reference.forward(wide)
    dend = None if dend is None else dend.double()
    return named(out, end, reference.backward(wide, dout_TNV.double(), dend))


def named(out: Tensor, end: Tensor, grads: Gradients) -> dict[str, Tensor]:
    all_of = {"out": out, **{name: getattr(grads, name) for name in GRADIENTS}}
    if grads.dfirst_SNDV is not None:
        all_of |= {"end": end, "dfirst": grads.dfirst_SNDV}
    return all_of


def assert_close(
    got: dict[str, Tensor],
    exact: dict[str, Tensor],
    bound: float = BOUND,
    *,
    dg_size: float = 0.0,
) -> None:
    """Relative distances; `dg_size`, what dg is a difference of where it is almost nothing."""
    size = max(float(x.norm()) for x in exact.values())
    floors = {"dg_TN": dg_size}
    errors = {
        name: float((got[name].double() - x).norm())
        / max(float(x.norm()), 1e-4 * size, floors.get(name, 0.0))
        for name, x in exact.items()
    }
    assert not {name: error for name, error in errors.items() if not error <= bound}


def decay_shares(exact: dict[str, Tensor], dout_TNV: Tensor, num_terms: int) -> float:
    """Norm of sums of as many shares that outputs give to decays, were they of random signs."""
    shares_TN = (exact["out"] * dout_TNV.double()).sum(2)
    return float(shares_TN.norm()) * num_terms**0.5


@pytest.mark.parametrize("name", FORESTS)
def test_equals_the_reference(name: str) -> None:
    operands, dout = make_operands(FORESTS[name])
    right = expected(operands, dout)
    # One token decays nothing: its dg is 0.
    dg_size = decay_shares(right, dout, 1) if name == "one_token" else 0.0
    assert_close(results(operands, dout), right, dg_size=dg_size)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (1, 4), (16, 32)])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 64), (64, 128), (32, 32)])
def test_heads_and_sizes(heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    operands, dout = make_operands(FORESTS["edges"], heads=heads, sizes=sizes)
    assert_close(results(operands, dout), expected(operands, dout))


@pytest.mark.parametrize("name", ["turns", "wide", "roots"])
def test_equal_bits_on_repeat(name: str) -> None:
    """Over many tasks that wait for one another."""
    operands, dout = make_operands(FORESTS[name], heads=(4, 8))
    first = results(operands, dout)
    for _ in range(4):
        again = results(operands, dout)
        assert all(torch.equal(again[key], value) for key, value in first.items())


def test_every_result_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated holds NaNs, so that a part that no kernel wrote would show."""
    operands, dout = make_operands(FORESTS["edges"])
    right = results(operands, dout)
    empty = Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return empty(self, *args, **kwargs).fill_(float("nan"))

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    got = results(operands, dout)
    assert all(torch.equal(got[key], value) for key, value in right.items())


def test_alike_keys_and_strong_updates() -> None:
    """Keys of one direction, strengths of 1 and no decay: the worst triangle to invert."""
    operands, _ = make_operands(FORESTS["roots"])
    keys = operands.k_TKD[:1] + 0.05 * operands.k_TKD
    operands = replace(
        operands,
        k_TKD=keys.contiguous(),
        g_TN=torch.zeros_like(operands.g_TN),
        beta_TN=torch.ones_like(operands.beta_TN),
    )
    out = fused.forward(operands)[0]
    assert_close({"out": out}, {"out": reference.forward(exact(operands))[0]}, 3e-2)


def test_no_decay_overflows() -> None:
    operands, dout = make_operands(FORESTS["edges"])
    operands = replace(operands, g_TN=operands.g_TN * 1000)
    got = results(operands, dout)
    assert all(bool(x.isfinite().all()) for x in got.values())
    right = expected(operands, dout)
    # Nothing is left to decay: dg is the rounding of sums of a chunk.
    assert_close(got, right, dg_size=decay_shares(right, dout, CHUNK))


def test_parts_begin_and_end_with_states() -> None:
    """Roots that begin from given states, two of them from one; and ends with gradients."""
    forest = forest_from([-1, 0, 0, -1, -1, 4, -1], [70, 3, 130, 64, 65, 1, 20])
    operands, dout = make_operands(forest)
    first = torch.randn(2, 4, 128, 128, device="cuda") / 8
    handover = Handover(
        first_M=torch.tensor([1, -1, -1, 0, -1, -1, 1]), handed_E=torch.tensor([0, 3, 5])
    )
    operands = replace(operands, handover=handover, first_SNDV=first)
    dend = torch.randn(3, 4, 128, 128, device="cuda") / 8
    got = results(operands, dout, dend)
    assert_close(got, expected(operands, dout, dend))


def test_split_form_has_the_bits_of_the_whole() -> None:
    """A prompt and its responses in two calls, joined by the prompt's end."""
    lengths = [200, 90, 64, 1, 130]
    whole, dout = make_operands(forest_from([-1, 0, 0, 0, 0], lengths))
    out, _ = fused.forward(whole)
    no_state = torch.zeros(0, 4, 128, 128, device="cuda")
    prompt = replace(
        rows_of(whole, slice(0, 200)),
        plan=fused.plan(forest_from([-1], lengths[:1]).layout("cuda")),
        handover=Handover(first_M=torch.tensor([-1]), handed_E=torch.tensor([0])),
        first_SNDV=no_state,
    )
    first_out, end = fused.forward(prompt)
    responses = replace(
        rows_of(whole, slice(200, None)),
        plan=fused.plan(forest_from([-1] * 4, lengths[1:]).layout("cuda")),
        handover=Handover(
            first_M=torch.zeros(4, dtype=torch.int64), handed_E=torch.zeros(0, dtype=torch.int64)
        ),
        first_SNDV=end,
    )
    last_out, none = fused.forward(responses)
    assert none.shape == no_state.shape
    assert torch.equal(torch.cat([first_out, last_out]), out)
    grads = fused.backward(responses, dout[200:], None)
    assert grads.dfirst_SNDV is not None
    first_grads = fused.backward(prompt, dout[:200], grads.dfirst_SNDV)
    joined = {
        name: torch.cat([getattr(first_grads, name), getattr(grads, name)]) for name in GRADIENTS
    }
    right = fused.backward(whole, dout, None)
    # The children's gradients are added in one order here, in another there.
    assert_close(joined, {name: getattr(right, name).double() for name in GRADIENTS}, 2e-3)


def rows_of(operands: Operands, rows: slice) -> Operands:
    return replace(
        operands,
        q_TKD=operands.q_TKD[rows],
        k_TKD=operands.k_TKD[rows],
        v_TNV=operands.v_TNV[rows],
        g_TN=operands.g_TN[rows],
        beta_TN=operands.beta_TN[rows],
    )


def test_no_tokens() -> None:
    operands, dout = make_operands(forest_from([], []))
    got = results(operands, dout)
    assert all(x.shape[0] == 0 for x in got.values())


def test_it_is_the_backend_of_bfloat16() -> None:
    device = torch.device("cuda")
    assert select_backend("gated_delta", None, device, torch.bfloat16, 128) == "fused"
    assert select_backend("gated_delta", None, device, torch.float32, 128) == "reference"


@pytest.mark.parametrize("fault", ["parent", "order"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that begin from zeros, and children whose gradients go to another parent."""
    operands, dout = make_operands(FORESTS["edges"])
    right = expected(operands, dout)
    tables = forest_tables.forest_tables(operands.plan[0], None, torch.device("cuda"))
    field = {"parent": "parent_M", "order": "child_M1"}[fault]
    wrong = torch.full_like(getattr(tables, field), -1 if fault == "parent" else 0)
    monkeypatch.setattr(fused, "forest_tables", lambda *_: replace(tables, **{field: wrong}))
    with pytest.raises(AssertionError):
        assert_close(results(operands, dout), right)


def test_orders_end_whatever_the_grid() -> None:
    """Far more tasks than fit on the GPU at once, every one but the roots' waiting."""
    forest = forest_from([-1, *range(499)], np.full(500, 3).tolist())
    operands, dout = make_operands(forest, heads=(16, 32))
    small = make_operands(forest, heads=(16, 32))[0]
    assert torch.equal(fused.forward(operands)[0], fused.forward(small)[0])
    assert bool(fused.backward(operands, dout, None).dq_TKD.isfinite().all())
