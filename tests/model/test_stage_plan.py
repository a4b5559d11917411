"""What stages keep beside each other: that all fit, and where what waits of them is."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.decoder_sizes import uniform_sizes
from ratoon.errors import ErrorCode, RatoonError
from ratoon.planner.activation_plan import (
    DecoderSizes,
    Kept,
    peak_bytes,
    plan_activations,
    streamed_tokens,
)
from ratoon.planner.layer_kinds import GatedDelta, Layer, Mlp
from ratoon.planner.stage_plan import HeldTokens, StreamTokens, least_plan, plan_forward
from ratoon.planner.waves import peak_tokens, resident_tokens
from ratoon.rollout.packed import Stage
from tests.model.test_activation_plan import QWEN3_8B
from tests.rollout.stages import held_tokens

GIB = 2**30
NUM_LAYERS = 5
# The layers' bytes decide, not the head's.
FLAT = {
    "num_layers": NUM_LAYERS, "hidden_size": 8, "mlp_size": 24, "num_heads": 2, "num_kv_heads": 1,
    "head_dim": 4, "vocab_size": 16, "element_bytes": 2, "head_is_trained": False,
}  # fmt: skip
SMALL = uniform_sizes(**FLAT)
# The backward of a layer takes little, so that what waits does.
NARROW = uniform_sizes(**{**FLAT, "mlp_size": 2})
HEAD = dataclasses.replace(SMALL, vocab_size=2000, head_is_trained=True)
CHECKED = settings(max_examples=120, deadline=None)


@st.composite
def trees(draw: st.DrawFn) -> list[Stage]:
    """Stages in packed order, each a child of one that is open then."""
    stages: list[Stage] = []
    still_open: list[int] = []
    stop = 0
    for index in range(draw(st.integers(2, 12))):
        depth = draw(st.integers(0, len(still_open)))
        del still_open[depth:]
        size = draw(st.sampled_from([1, 2, 7, 40, 300]))
        parent = still_open[-1] if still_open else -1
        stages.append(Stage(start=stop, stop=stop + size, parent=parent))
        still_open.append(index)
        stop += size
    return stages


def _device_bytes(sizes: DecoderSizes, stages: list[Stage], kept: tuple[Kept, ...]) -> int:
    """Enough for all that is held at a time to keep that."""
    tokens = peak_tokens(stages)
    return peak_bytes(sizes, kept, tokens, tokens) + tokens * sizes.stack_bytes


def _whole_host(sizes: DecoderSizes, tokens: int) -> int:
    """Room for all layers of so many."""
    return sizes.num_layers * tokens * sizes.kept_bytes(Kept.HOST)


def _bytes_by_place(sizes: DecoderSizes, tokens: int, kept: tuple[Kept, ...]) -> tuple[int, int]:
    """Device and host, while it waits."""
    on_device = sum(sizes.kept_bytes(kind) for kind in kept if not kind.is_on_host)
    on_host = sum(sizes.kept_bytes(kind) for kind in kept if kind.is_on_host)
    return tokens * (sizes.stay_bytes + on_device), tokens * on_host


def _check(sizes: DecoderSizes, stages: list[Stage], device_bytes: int, host_bytes: int) -> None:
    """Each stage's own peak with what the stages above really keep, by place, is within both."""
    held = held_tokens(stages)
    plans = [plan_forward(sizes, one, device_bytes, host_bytes) for one in held]
    waiting: dict[int, tuple[int, int]] = {-1: (peak_tokens(stages) * sizes.stack_bytes, 0)}
    for index, (stage, one, plan) in enumerate(zip(stages, held, plans, strict=True)):
        above, above_host = waiting[stage.parent]
        own, own_host = _bytes_by_place(sizes, one.tokens, plan.kept)
        peak = above + peak_bytes(sizes, plan.kept, one.tokens, one.tokens)
        assert peak <= plan.peak_bytes <= device_bytes
        assert above_host + own_host <= host_bytes
        waiting[index] = above + own, above_host + own_host


@CHECKED
@given(
    stages=trees(),
    sizes=st.sampled_from([SMALL, NARROW, HEAD, QWEN3_8B]),
    room=st.floats(0.0, 1.0),
    lent=st.floats(0.0, 1.4),
)
def test_stages_within_the_limit_fit_both_memories(
    stages: list[Stage], sizes: DecoderSizes, room: float, lent: float
) -> None:
    """The limit is the only thing that is asked for: any tree of so many tokens at a time."""
    tokens = peak_tokens(stages)
    host_bytes = int(lent * _whole_host(sizes, tokens))
    most = _device_bytes(sizes, stages, (Kept.PRODUCTS,) * sizes.num_layers)
    least, low = most, 0
    # Least bytes of the device of which the limit says that the stages fit.
    while low < least:
        middle = (low + least) // 2
        if streamed_tokens(sizes, middle, host_bytes) >= tokens:
            least = middle
        else:
            low = middle + 1
    _check(sizes, stages, least, host_bytes)
    _check(sizes, stages, least + int(room * (most - least)), host_bytes)
    # With less there may be room all the same, for this tree; what there is none for is refused.
    with suppress(RatoonError):
        _check(sizes, stages, int(least * (1 - room / 3)), host_bytes)


@pytest.mark.parametrize("host_gib", [0, 4, 30, 200])
def test_the_limit_rises_with_either_memory(host_gib: int) -> None:
    limits = [streamed_tokens(QWEN3_8B, gib * GIB, host_gib * GIB) for gib in (10, 40, 100)]
    assert limits == sorted(limits)
    assert limits[0] < limits[2]
    more = [streamed_tokens(QWEN3_8B, gib * GIB, (host_gib + 60) * GIB) for gib in (10, 40, 100)]
    assert all(a >= b for a, b in zip(more, limits, strict=True))


def test_all_on_the_host_leaves_stacks_and_two_layers() -> None:
    host_bytes = 300 * GIB
    tokens = streamed_tokens(QWEN3_8B, 100 * GIB, host_bytes)
    assert tokens > 1.8 * streamed_tokens(QWEN3_8B, 100 * GIB, 0)
    peak = peak_bytes(QWEN3_8B, (Kept.HOST,) * 36, tokens, tokens)
    assert 0 <= 100 * GIB - peak - tokens * QWEN3_8B.stack_bytes < 2**21


STAGES = [
    Stage(start=0, stop=30, parent=-1),
    Stage(start=30, stop=40, parent=0),
    Stage(start=40, stop=60, parent=1),
    Stage(start=60, stop=65, parent=0),
]


def _kinds(sizes: DecoderSizes, device_bytes: int, host_bytes: int) -> list[tuple[Kept, ...]]:
    return [
        plan_forward(sizes, held, device_bytes, host_bytes).kept for held in held_tokens(STAGES)
    ]


def test_without_the_host_all_stages_keep_the_same() -> None:
    for kind in (Kept.ATTENTION, Kept.NARROW, Kept.PRODUCTS):
        device_bytes = _device_bytes(NARROW, STAGES, (kind,) * NUM_LAYERS)
        left = device_bytes - 60 * NARROW.stack_bytes
        expected = plan_activations(NARROW, 60, 60, left)
        assert _kinds(NARROW, device_bytes, 0) == [expected] * len(STAGES)
        assert expected[0] is kind


def test_a_device_that_holds_everything_sends_nothing() -> None:
    everything = (Kept.PRODUCTS,) * NUM_LAYERS
    device_bytes = _device_bytes(NARROW, STAGES, everything)
    lent = _whole_host(NARROW, 60)
    assert _kinds(NARROW, device_bytes, lent) == [everything] * len(STAGES)
    assert _kinds(NARROW, device_bytes - 1, lent)[0] == (Kept.HOST,) * NUM_LAYERS


def test_what_waits_goes_and_what_runs_keeps_what_fits() -> None:
    device_bytes = _device_bytes(NARROW, STAGES, (Kept.ATTENTION,) * NUM_LAYERS)
    outer, inner, wave, small = _kinds(NARROW, device_bytes, _whole_host(NARROW, 40))
    assert outer == inner == (Kept.HOST,) * NUM_LAYERS
    assert Kept.HOST not in wave
    assert wave != (Kept.ATTENTION,) * NUM_LAYERS
    # It has more of the device to itself, a token.
    assert small == (Kept.PRODUCTS,) * NUM_LAYERS
    # Where not all can go, as many layers of what waits as can.
    for layers in range(NUM_LAYERS):
        lent = layers * 40 * NARROW.kept_bytes(Kept.HOST)
        expected = (Kept.HOST,) * layers + (Kept.ATTENTION,) * (NUM_LAYERS - layers)
        assert _kinds(NARROW, device_bytes, lent + 1)[:2] == [expected] * 2


def test_what_runs_takes_what_the_others_leave_of_the_host() -> None:
    """Where the device has no room for the least of it."""
    stages = [Stage(start=0, stop=5, parent=-1), Stage(start=5, stop=60, parent=0)]
    least = _device_bytes(NARROW, stages, (Kept.HOST,) * NUM_LAYERS)
    lent = _whole_host(NARROW, 60)
    prefix, wave = (plan_forward(NARROW, held, least, lent).kept for held in held_tokens(stages))
    assert prefix == (Kept.HOST,) * NUM_LAYERS
    assert wave.count(Kept.HOST) >= NUM_LAYERS - 1
    with pytest.raises(RatoonError) as caught:
        plan_forward(NARROW, held_tokens(stages)[1], least * 9 // 10, lent)
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert caught.value.got == "60"
    most = streamed_tokens(NARROW, least * 9 // 10, lent)
    assert caught.value.expected == f"at most {most}"
    assert most < 60


def test_more_of_either_memory_keeps_no_less() -> None:
    """A running stage recomputes no more."""
    rank = {kind: rank for rank, kind in enumerate(Kept)}
    held = held_tokens(STAGES)[2]
    low, middle, high = (
        _device_bytes(NARROW, STAGES, (kind,) * NUM_LAYERS)
        for kind in (Kept.HOST, Kept.ATTENTION, Kept.PRODUCTS)
    )
    lent = _whole_host(NARROW, 60)
    for budgets in (
        [(low + (high - low) * i // 50, lent) for i in range(51)],
        [(middle, lent * i // 50) for i in range(51)],
    ):
        plans = [plan_forward(NARROW, held, *both).kept for both in budgets]
        for less, more in pairwise(plans):
            assert all(rank[a] <= rank[b] for a, b in zip(less, more, strict=True))
        assert len(set(plans)) > 1


def test_the_least_is_that_of_the_benchmark() -> None:
    """Streamed in waves of 4 x 1024 below a prompt of 8192, by hand."""
    stream = StreamTokens(held=12_288, waiting=8192)
    prompt = HeldTokens(tokens=8192, above=0, waits=True, stream=stream)
    wave = HeldTokens(tokens=4096, above=8192, waits=False, stream=stream)
    lent = 80 * GIB
    assert least_plan(QWEN3_8B, prompt, lent).kept == (Kept.HOST,) * 36
    least = least_plan(QWEN3_8B, wave, lent)
    assert least.kept == (Kept.ATTENTION,) * 36
    stacks = 12_288 * 36 * 2 * 1024 * (2 + 4)
    own = peak_bytes(QWEN3_8B, least.kept, 4096, 4096)
    assert least.peak_bytes == stacks + 8192 * 4 * 4096 * 2 + own
    without = least_plan(QWEN3_8B, wave, 0)
    assert without.peak_bytes - least.peak_bytes == 8192 * 36 * (2 * 8192 + 4 * 32)
    at_once = HeldTokens(tokens=4096, above=0, waits=False, stream=None)
    assert least_plan(QWEN3_8B, at_once, lent).peak_bytes == own


def test_states_are_counted_beside_the_stacks() -> None:
    """Three heads of value states of 4 x 5, two rows of queries, keys and values, twice."""
    delta = GatedDelta(num_heads=3, num_key_heads=1, key_dim=4, value_dim=5, taps=3)
    sizes = dataclasses.replace(QWEN3_8B, layers=(Layer(mixer=delta, mlp=Mlp(size=8)),) * 2)
    assert sizes.state_bytes == 2 * (3 * 4 * 5 + 2 * (4 + 4 + 15)) * (4 + 4)
    assert sizes.stack_bytes == 0
    without = HeldTokens(tokens=8, above=8, waits=False, stream=StreamTokens(held=16, waiting=8))
    held = dataclasses.replace(without, stream=StreamTokens(held=16, waiting=8, states=7))
    for host_bytes in (0, 2**40):
        for plan in (
            lambda one, host=host_bytes: plan_forward(sizes, one, 2**40, host),
            lambda one, host=host_bytes: least_plan(sizes, one, host),
        ):
            assert plan(held).peak_bytes - plan(without).peak_bytes == 7 * sizes.state_bytes


def test_tokens_of_a_tree_are_those_of_its_paths() -> None:
    held = held_tokens(STAGES)
    assert [(one.tokens, one.above, one.waits) for one in held] == [
        *((30, 0, True), (10, 30, True), (20, 40, False), (5, 30, False)),
    ]
    assert held[0].stream == StreamTokens(held=60, waiting=max(resident_tokens(STAGES)))
