"""Optimizer steps on a GPU: those of kernels against those of the CPU, and their bits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ratoon.train.optim import bf16_state
from ratoon.train.optim.adamw import Optimizer
from ratoon.train.optim.bf16_adamw import Bf16AdamW, make_optimizer
from ratoon.train.optim.gradients import add_terms
from ratoon.train.optim.rounding import decode_positive, decode_signed, join_float32
from ratoon.train.spec import OptimizerStates
from tests.train.optimizer_runs import (
    CONFIG,
    SPLIT,
    WITHOUT_MASTERS,
    changed_bits,
    copied,
    global_norm,
    make_gradients,
    make_optimizer_of,
    make_parameters,
    optim_step,
    take_step,
)

pytestmark = pytest.mark.gpu

_DEVICE = torch.device("cuda")


def _optimizer(
    kind: OptimizerStates, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> Optimizer:
    return make_optimizer_of(dtype, kind, device)


def _run(optimizer: Optimizer, device: torch.device, steps: range) -> dict[str, Tensor]:
    for number in steps:
        sums = {name: gradient.to(device) for name, gradient in make_gradients(number).items()}
        assert not take_step(optimizer, sums, 2.0, optim_step()).skipped
    return copied(optimizer.state())


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_steps_repeat_their_bits(kind: OptimizerStates) -> None:
    runs = [_run(_optimizer(kind, _DEVICE), _DEVICE, range(3)) for _ in range(2)]
    for name, tensor in runs[0].items():
        assert torch.equal(tensor, runs[1][name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_terms", [1, 2, 4])
@pytest.mark.parametrize("num_elements", [1, 4096, 100_003])
def test_terms_are_added_one_after_the_other(
    num_elements: int, num_terms: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    total = torch.randn(num_elements, device=_DEVICE)
    terms = [torch.randn(num_elements, device=_DEVICE).to(dtype) for _ in range(num_terms)]
    expected = total.clone()
    for term in terms:
        expected += term
    add_terms(total, terms)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_gradients_of_an_only_backward_step_as_their_float32_sums(kind: OptimizerStates) -> None:
    """The norm too, bit for bit: ranks that have added theirs up take the same steps."""
    narrow, wide = (_optimizer(kind, _DEVICE) for _ in range(2))
    for number in range(3):
        gradients = {name: g.cuda().bfloat16() for name, g in make_gradients(number).items()}
        sums = {name: gradient.float() for name, gradient in gradients.items()}
        outcomes = [
            take_step(o, g, 2.0, optim_step()) for o, g in ((narrow, gradients), (wide, sums))
        ]
        assert outcomes[0].grad_norm == outcomes[1].grad_norm
    theirs = copied(wide.state())
    for name, tensor in copied(narrow.state()).items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_norm_of_a_large_bfloat16_gradient_is_that_of_its_float32_copy() -> None:
    gradients = [_GRADIENTS["bfloat16"](), torch.randn(4097, device=_DEVICE).bfloat16()]
    assert global_norm(gradients) == global_norm([gradient.float() for gradient in gradients])


@pytest.mark.parametrize("kind", list(OptimizerStates))
@pytest.mark.parametrize("adds", [False, True])
def test_weights_that_are_set_are_those_of_the_cpu(kind: OptimizerStates, adds: bool) -> None:
    """Bit for bit, rounding too: a policy may be replayed elsewhere."""
    one, two = (_optimizer(kind, device) for device in (_DEVICE, torch.device("cpu")))
    values = make_gradients(7)
    for optimizer in (one, two):
        optimizer.set_weights(values, adds=adds, key="import 1")
    theirs = copied(two.state())
    for name, tensor in copied(one.state()).items():
        assert torch.equal(tensor.cpu(), theirs[name]), name
    one.reset()
    _run(one, _DEVICE, range(1))


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_weights_that_change_are_counted(kind: OptimizerStates) -> None:
    parameters = {n: nn.Parameter(p.detach().cuda()) for n, p in make_parameters().items()}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    sums = {name: gradient.cuda() for name, gradient in make_gradients(0).items()}
    asked = replace(optim_step(1e-5), changed_share=True)
    outcome = take_step(make_optimizer(parameters, CONFIG, kind, 0), sums, 2.0, asked)
    assert outcome.changed is not None
    assert 0 < int(outcome.changed) == changed_bits(before, parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_step_of_masters_equals_that_of_the_cpu(dtype: torch.dtype) -> None:
    """Ours for bfloat16 parameters, torch's fused one for those that are their own masters."""
    cpu = torch.device("cpu")
    one, two = (
        _run(_optimizer(OptimizerStates.FP32, device, dtype), device, range(4))
        for device in (_DEVICE, cpu)
    )
    for name, tensor in one.items():
        torch.testing.assert_close(tensor.cpu(), two[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", SPLIT)
def test_split_masters_step_as_float32_ones_bit_for_bit(
    kind: OptimizerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kernels of one formula, under the same moments."""
    split = _optimizer(kind, _DEVICE)
    _run(split, _DEVICE, range(6))
    other = OptimizerStates.FP32
    if kind is OptimizerStates.BF16_SPLIT_8BIT:
        other = kind
        monkeypatch.setitem(bf16_state._KEPT, kind, (torch.float32, torch.uint8))
    masters = _optimizer(other, _DEVICE)
    _run(masters, _DEVICE, range(6))
    mine, theirs = split.state(), masters.state()
    for name, master in theirs.weights.items():
        joined = join_float32(mine.weights[name].view(torch.int16), mine.weight_remainder[name])
        assert torch.equal(joined, master), name
        for field in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(mine.tensors()[field][name], theirs.tensors()[field][name]), name


@pytest.mark.parametrize("kind", [*WITHOUT_MASTERS, OptimizerStates.BF16_SPLIT_8BIT])
def test_a_step_takes_the_roundings_of_the_cpu(kind: OptimizerStates) -> None:
    """Words are equal, except where float32 results differ in their last bits."""
    gpu = _run(_optimizer(kind, _DEVICE), _DEVICE, range(1))
    cpu = _run(_optimizer(kind, torch.device("cpu")), torch.device("cpu"), range(1))
    for name, tensor in gpu.items():
        if tensor.dtype is torch.float32:
            torch.testing.assert_close(tensor.cpu(), cpu[name], rtol=1e-5, atol=0)
            continue
        if tensor.dtype is torch.int16:
            # Where a master differs in its last bits, or is across a tie.
            off = (tensor.cpu().int() - cpu[name].int()).abs() & 0xFFFF
            assert (torch.minimum(off, 0x10000 - off) > 64).double().mean().item() <= 0.01, name
            continue
        difference = (tensor.cpu().double() - cpu[name].double()).abs()
        assert (difference > 0).double().mean().item() <= 0.01, name
        if tensor.dtype is torch.uint8:
            # The neighbouring code, or the other sign of a zero.
            assert set(difference.unique().tolist()) <= {0.0, 1.0, 128.0}, name
        else:
            assert (difference <= 2.0**-7 * cpu[name].double().abs()).all(), name


def test_8bit_moments_decode_alike_on_both_devices() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.tensor([3.7])
    for decode in (decode_signed, decode_positive):
        assert torch.equal(decode(codes.cuda(), scales.cuda()).cpu(), decode(codes, scales))


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_a_step_waits_for_the_device_once(kind: OptimizerStates) -> None:
    """For the norm, which decides whether there is a step."""
    optimizer = _optimizer(kind, _DEVICE)
    _run(optimizer, _DEVICE, range(1))
    sums = {name: gradient.cuda() for name, gradient in make_gradients(1).items()}
    assert _num_waits(lambda: take_step(optimizer, sums, 2.0, optim_step())) == 1


def _num_waits(work: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(str(w.message).startswith("called a synchronizing") for w in caught)


def _heavy_tailed(count: int) -> Tensor:
    generator = torch.Generator(_DEVICE).manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(count, generator=generator, device=_DEVICE)

    return normal() * torch.exp(3 * normal())


_COUNT = (1 << 25) + 1027
_GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(_COUNT, device=_DEVICE),
    "heavy-tailed": lambda: _heavy_tailed(_COUNT),
    # Roundings of equal terms go in one direction.
    "constant": lambda: torch.full((_COUNT,), 0.1, device=_DEVICE),
    "bfloat16": lambda: torch.randn(_COUNT, device=_DEVICE).bfloat16(),
}


@pytest.mark.parametrize("name", _GRADIENTS)
def test_norm_in_float32_blocks_is_that_of_float64(name: str) -> None:
    gradients = [_GRADIENTS[name](), torch.full((3, 5), 2.0, device=_DEVICE)]
    exact = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
    norms: list[float] = []
    assert _num_waits(lambda: norms.append(global_norm(gradients))) == 1
    assert norms[0] == pytest.approx(exact, rel=1e-6)
    assert global_norm(gradients) == norms[0]


@pytest.mark.parametrize("size", [1e30, 1e-25, 0.0])
def test_norm_is_read_again_where_squares_have_no_float32(size: float) -> None:
    gradients = [torch.full((70_000,), size, device=_DEVICE)]
    exact = math.sqrt(gradients[0].double().square().sum().item())
    norms: list[float] = []
    assert _num_waits(lambda: norms.append(global_norm(gradients))) == 2
    assert norms[0] == pytest.approx(exact, rel=1e-6, abs=0)


_EXTREMES = [(kind, size, 1.0) for kind in OptimizerStates for size in (1e30, 1e-38)]


# In the last the scale of the gradients has no float32.
@pytest.mark.parametrize(
    ("kind", "size", "limit"), [*_EXTREMES, (OptimizerStates.FP32, 1e33, 1e-6)]
)
def test_extreme_gradients_step_as_on_the_cpu(
    kind: OptimizerStates, size: float, limit: float
) -> None:
    states: list[dict[str, Tensor]] = []
    for device in (_DEVICE, torch.device("cpu")):
        optimizer = _optimizer(kind, device)
        sums = {name: (size * g).to(device) for name, g in make_gradients(0).items()}
        assert not take_step(optimizer, sums, 2.0, optim_step(max_grad_norm=limit)).skipped
        states.append({name: t.cpu() for name, t in optimizer.state().weights.items()})
    for name, weight in states[0].items():
        # Where the low-precision states differ it is by an ulp, in few places.
        difference = (weight.double() - states[1][name].double()).abs()
        differs = difference > 1e-6 + 1e-5 * weight.abs().double()
        assert differs.double().mean().item() <= (0.0 if kind is OptimizerStates.FP32 else 0.01)


@pytest.mark.parametrize("kind", list(OptimizerStates))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_touches_nothing(kind: OptimizerStates, bad: float) -> None:
    optimizer = _optimizer(kind, _DEVICE)
    before = _run(optimizer, _DEVICE, range(1))
    sums = {name: gradient.to(_DEVICE) for name, gradient in make_gradients(1).items()}
    sums["few"][3] = bad
    assert take_step(optimizer, sums, 2.0, optim_step()).skipped
    for name, tensor in copied(optimizer.state()).items():
        assert torch.equal(tensor, before[name]), name


_STATES = [
    *((torch.bfloat16, kind) for kind in OptimizerStates),
    (torch.float32, OptimizerStates.FP32),
    (torch.float64, OptimizerStates.FP32),
]


def _filled(optimizer: Optimizer, value: float) -> dict[str, Tensor]:
    state = optimizer.state().weights
    wide = {name: torch.promote_types(w.dtype, torch.float32) for name, w in state.items()}
    return {name: torch.full_like(w, value, dtype=wide[name]) for name, w in state.items()}


@pytest.mark.parametrize(("dtype", "kind"), _STATES)
def test_a_step_that_would_not_be_finite_touches_nothing(
    dtype: torch.dtype, kind: OptimizerStates
) -> None:
    """Moments over epsilon alone, all within what a caller may ask for."""
    optimizer = make_optimizer_of(dtype, kind, _DEVICE)
    step = optim_step(0.0, max_grad_norm=math.inf)
    assert not take_step(optimizer, _filled(optimizer, 1e6), 1.0, step).skipped
    before = copied(optimizer.state())
    far = replace(step, learning_rate=1e4, weight_decay=0.0, beta2=0.0, eps=1e-30)
    assert take_step(optimizer, _filled(optimizer, 0.0), 1.0, far).skipped
    assert optimizer.state().num_steps == 1
    for name, tensor in copied(optimizer.state()).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(("dtype", "kind"), _STATES)
def test_a_finite_step_that_no_bound_proves_has_its_bits(
    dtype: torch.dtype, kind: OptimizerStates
) -> None:
    """The step is tried on copies, and then taken as if nobody had asked."""
    judged, asked = (make_optimizer_of(dtype, kind, _DEVICE) for _ in range(2))
    step = replace(optim_step(1e4, max_grad_norm=math.inf), weight_decay=0.0, eps=1e-30)
    norm = global_norm(_filled(judged, 1e5).values())
    assert judged.bounds_after(judged.bounds(), norm, step) is None
    outcome = take_step(judged, _filled(judged, 1e5), 1.0, step)
    assert (outcome.skipped, outcome.grad_norm) == (False, norm)
    asked.apply(_filled(asked, 1e5), 1.0, norm, step)
    theirs = copied(asked.state())
    for name, tensor in copied(judged.state()).items():
        assert torch.equal(tensor, theirs[name]), name
    assert judged.state().is_finite()


@pytest.mark.parametrize(
    "kind", [OptimizerStates.BF16_8BIT, OptimizerStates.BF16_SPLIT_8BIT, OptimizerStates.BF16_SPLIT]
)
def test_a_step_needs_little_memory_beside_its_states(kind: OptimizerStates) -> None:
    """A float32 copy of 2**27 weights is 512 MiB."""
    count = 1 << 27
    weight = nn.Parameter(torch.ones(count, dtype=torch.bfloat16, device=_DEVICE))
    sums = {"a": torch.full((count,), 0.1, device=_DEVICE)}
    optimizer = Bf16AdamW({"a": weight}, CONFIG, kind, 0)
    for _ in range(3):
        # The first ones compile, and time their kernels on copies.
        take_step(optimizer, sums, 1.0, optim_step())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    take_step(optimizer, sums, 1.0, optim_step())
    assert torch.cuda.max_memory_allocated() - before <= 320 * 2**20
