"""The fused causal convolution against the reference in float64, from the same inputs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ratoon_kernels import Handover
from ratoon_kernels.gated_delta import convolution_fused, convolution_reference
from ratoon_kernels.gated_delta.operands import ConvolutionGradients, ConvolutionOperands
from tests.kernels.forests import Forest, binary, chain, forest_from, random_forests, star

pytestmark = pytest.mark.gpu

# One rounding of the result, and one of the gradients of sums before it.
BOUNDS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}
FORESTS = {
    "one_token": forest_from([-1], [1]),
    "tokens": chain(30, 1),
    "within_taps": forest_from([-1, 0, 1, 2, 1, 0, 5], [1, 1, 1, 4, 2, 1, 3]),
    "long": forest_from([-1, 0, 0, -1], [1000, 2, 700, 301]),
    "wide": star(50, 1000, 5),
    "binary": binary(6, 2),
    **{f"random_{i}": f for i, f in enumerate(random_forests(5, 4, 14, 60))},
}


def make_operands(
    forest: Forest, dtype: torch.dtype, channels: int = 520
) -> tuple[ConvolutionOperands, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    # Rows as a model has them: columns of a wider tensor.
    operands = ConvolutionOperands(
        x_TC=draw(forest.num_tokens, channels + 24)[:, :channels],
        weight_CW=draw(channels, 4),
        plan=convolution_fused.plan(forest.layout("cuda")),
    )
    return operands, draw(forest.num_tokens, channels)


def results(operands: ConvolutionOperands, dout: Tensor, dlast: Tensor | None) -> dict[str, Tensor]:
    out, last = convolution_fused.forward(operands)
    return named(out, last, convolution_fused.backward(operands, dout, dlast))


def expected(
    operands: ConvolutionOperands, dout: Tensor, dlast: Tensor | None
) -> dict[str, Tensor]:
    first = operands.first_SRC
    wide = replace(
        operands,
        x_TC=operands.x_TC.double(),
        weight_CW=operands.weight_CW.double(),
        first_SRC=None if first is None else first.double(),
    )
    out, last = convolution_reference.forward(wide)
    dlast = None if dlast is None else dlast.double()
    return named(out, last, convolution_reference.backward(wide, dout.double(), dlast))


def named(out: Tensor, last: Tensor, grads: ConvolutionGradients) -> dict[str, Tensor]:
    all_of = {"out": out, "dx_TC": grads.dx_TC, "dweight_CW": grads.dweight_CW}
    if grads.dfirst_SRC is not None:
        all_of |= {"last": last, "dfirst_SRC": grads.dfirst_SRC}
    return all_of


def assert_close(got: dict[str, Tensor], exact: dict[str, Tensor], bound: float) -> None:
    errors = {
        name: float((got[name].double() - x).norm()) / max(float(x.norm()), 1e-30)
        for name, x in exact.items()
    }
    assert all(error <= bound for error in errors.values()), errors


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", FORESTS)
def test_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    operands, dout = make_operands(FORESTS[name], dtype)
    assert_close(results(operands, dout, None), expected(operands, dout, None), BOUNDS[dtype])


@pytest.mark.parametrize("channels", [1, 256, 257])
def test_channels(channels: int) -> None:
    operands, dout = make_operands(FORESTS["within_taps"], torch.float32, channels)
    assert_close(results(operands, dout, None), expected(operands, dout, None), 1e-6)


def test_parts_begin_and_end_with_rows() -> None:
    """Roots that continue given rows, two of them the same ones; handed nodes of few tokens."""
    forest = forest_from([-1, 0, 1, 1, 0, 4, -1, -1], [2, 1, 2, 5, 1, 7, 1, 9])
    operands, dout = make_operands(forest, torch.bfloat16)
    handover = Handover(
        first_M=torch.tensor([1, -1, -1, -1, -1, -1, 0, 1]), handed_E=torch.tensor([0, 2, 6, 7])
    )
    first = torch.randn(2, 3, 520, device="cuda").bfloat16()
    dlast = torch.randn(4, 3, 520, device="cuda")
    operands = replace(operands, handover=handover, first_SRC=first)
    got, right = results(operands, dout, dlast), expected(operands, dout, dlast)
    assert torch.equal(got["last"].double(), right["last"])
    assert_close(got, right, 2**-8)


@pytest.mark.parametrize("name", ["wide", "long"])
def test_equal_bits_on_repeat(name: str) -> None:
    operands, dout = make_operands(FORESTS[name], torch.bfloat16)
    first = results(operands, dout, None)
    for _ in range(4):
        again = results(operands, dout, None)
        assert all(torch.equal(again[key], value) for key, value in first.items())


def test_taps_cut_at_a_fork_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    operands, dout = make_operands(FORESTS["wide"], torch.bfloat16)
    right = expected(operands, dout, None)
    tables = convolution_fused._tables(operands)
    before = torch.where(tables.before_TR < 50, -1, tables.before_TR)
    monkeypatch.setattr(convolution_fused, "_tables", lambda _: replace(tables, before_TR=before))
    with pytest.raises(AssertionError):
        assert_close(results(operands, dout, None), right, 2**-8)
