"""Groups that are streamed on a GPU, through compiled layers: gradients, memory, and bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ratoon.model.offload import CHUNK_BYTES, HostOffload
from ratoon.model.policy_model import PolicyModel
from ratoon.planner.activation_plan import Kept, peak_bytes
from ratoon.planner.stage_plan import least_plan, plan_forward
from ratoon.planner.waves import peak_tokens
from ratoon.rollout.packed import PackedBatch, Stage
from ratoon_proto.types import LoraTuning
from tests.model.gpu_policies import DEVICE, make_policy
from tests.rollout.stages import held_tokens
from tests.train.gpu_streams import cut_stages, make_batch, pack_batch, stream_gradients

pytestmark = pytest.mark.gpu


def _budget(policy: PolicyModel, kept: Kept, tokens: int) -> int:
    """Bytes in which every layer of a stream keeps that, and no more."""
    sizes = policy.sizes
    plan = (kept,) * sizes.num_layers
    return peak_bytes(sizes, plan, tokens, tokens) + tokens * sizes.stack_bytes


def _error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    squares = [(found[name].float() - truth[name]).square().sum() for name in truth]
    norm = sum(float(value.square().sum()) for value in truth.values()) ** 0.5
    return float(sum(squares)) ** 0.5 / norm


def test_streamed_gradients_are_as_near_to_float32_as_packed_ones() -> None:
    """Through two prefixes, one below the other, and compiled layers that keep what fits."""
    packed = pack_batch(make_batch(700, 8, 150))
    stages = cut_stages(packed, wave=2)
    exact = make_policy(is_compiled=False, dtype=torch.float32, backend="reference")
    truth = stream_gradients(exact, packed, ())
    policy = make_policy(is_compiled=True)
    at_once = _error(stream_gradients(policy, packed, ()), truth)
    for kept in (Kept.PRODUCTS, Kept.NARROW, Kept.ATTENTION):
        policy.limit_activations(_budget(policy, kept, peak_tokens(stages)))
        for is_of_rows in (True, False):
            found = stream_gradients(policy, packed, stages, is_of_rows=is_of_rows)
            error = _error(found, truth)
            assert 0 < error <= 1.25 * at_once, (kept, is_of_rows, error, at_once)


def test_adapters_of_head_and_embedding_are_as_near_to_float32_streamed_as_packed() -> None:
    """By the fused head in one pass and in two, and the same bits each time."""
    targets = ("q_proj", "embed_tokens", "lm_head")
    tuning = LoraTuning(rank=16, alpha=16.0, target_modules=targets)
    packed = pack_batch(make_batch(700, 8, 150))
    stages = cut_stages(packed, wave=2)
    exact = make_policy(is_compiled=False, dtype=torch.float32, backend="reference", tuning=tuning)
    truth = stream_gradients(exact, packed, ())
    assert truth
    assert all(gradient.any() for gradient in truth.values())
    policy = make_policy(is_compiled=True, is_deterministic=True, tuning=tuning)
    at_once = _error(stream_gradients(policy, packed, ()), truth)
    for is_of_rows in (True, False):
        found = stream_gradients(policy, packed, stages, is_of_rows=is_of_rows)
        assert found.keys() == truth.keys()
        error = _error(found, truth)
        assert 0 < error <= 1.25 * at_once, (is_of_rows, error, at_once)
        again = stream_gradients(policy, packed, stages, is_of_rows=is_of_rows)
        assert all(torch.equal(again[name], gradient) for name, gradient in found.items())


def test_a_streamed_peak_is_as_predicted_and_leaves_nothing() -> None:
    """Within a tenth: activations and stacks of the widest moment, on top of the gradients."""
    policy = make_policy(is_compiled=True, layers=12, hidden=1024)
    packed = pack_batch(make_batch(400, 16, 700))
    stages = cut_stages(packed, wave=8)
    budget = _budget(policy, Kept.ATTENTION, peak_tokens(stages))
    policy.limit_activations(budget)
    # Gradients of all layers stay from one stage to the next.
    layers = [p for name, p in policy.named_trainable().items() if ".layers." in name]
    gradients = sum(p.numel() * p.element_size() for p in layers)
    assert _measured(policy, packed, stages) == pytest.approx(budget + gradients, rel=0.1)


def _measured(policy: PolicyModel, packed: PackedBatch, stages: tuple[Stage, ...]) -> int:
    """Most bytes of the device in a step, beyond weights; nothing is to be left."""
    stream_gradients(policy, packed, stages)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stream_gradients(policy, packed, stages)
    assert torch.cuda.memory_allocated() - before < 2**20
    return torch.cuda.max_memory_allocated() - before


def test_prefixes_on_the_host_leave_the_device_to_the_waves() -> None:
    """The peak is as predicted, up to the share that the service does not plan; and lower than
    without the host by what waits while the widest wave runs."""
    policy = make_policy(is_compiled=True, layers=12, hidden=1024)
    sizes, packed = policy.sizes, pack_batch(make_batch(8000, 16, 850))
    stages = cut_stages(packed, wave=8)
    held = held_tokens(stages)
    waiting = max(one.above for one in held)
    lent = waiting * sizes.num_layers * sizes.kept_bytes(Kept.HOST)
    budget = max(least_plan(sizes, one, lent).peak_bytes for one in held)
    policy.limit_activations(budget, host_bytes=lent)
    # The offload takes the turns' tensors too, which are small.
    policy._layers._offload = offload = HostOffload(DEVICE, min_bytes=2**12)
    plans = [plan_forward(sizes, one, budget, lent) for one in held]
    assert [plan.kept[0] is Kept.HOST for plan in plans] == [one.waits for one in held]
    layers = [p for name, p in policy.named_trainable().items() if ".layers." in name]
    gradients = sum(p.numel() * p.element_size() for p in layers)
    predicted = max(plan.peak_bytes for plan in plans) + gradients
    measured = _measured(policy, packed, stages)
    assert 0.9 * predicted <= measured <= 1.04 * predicted
    assert offload.held_bytes == 0
    # A chunk that is partly empty in each layer of the prompt and of a turn, and a slab.
    rounding = 2 * (sizes.num_layers + 1) * CHUNK_BYTES + 2**26
    assert lent <= offload.room_bytes <= lent + rounding
    _keep_the_least(policy, 0)
    assert _measured(policy, packed, stages) - measured > 0.9 * lent


def _keep_the_least(policy: PolicyModel, lent: int) -> None:
    """In every stage, on the host or the device where it waits."""
    vars(policy)["_plan_activations"] = lambda held: least_plan(policy.sizes, held, lent).kept


def test_where_prefixes_wait_changes_no_bit() -> None:
    policy = make_policy(is_compiled=True, is_deterministic=True)
    policy._layers._offload = offload = HostOffload(DEVICE, min_bytes=1)
    packed = pack_batch(make_batch(3000, 8, 300))
    stages = cut_stages(packed, wave=2)
    runs: list[dict[str, Tensor]] = []
    with _deterministic():
        for lent in (0, 2**40, 2**40):
            _keep_the_least(policy, lent)
            runs.append(stream_gradients(policy, packed, stages))
            assert bool(offload.room_bytes) == bool(lent)
            assert offload.held_bytes == 0
    for name, grad in runs[0].items():
        assert grad.count_nonzero() > 0
        assert torch.equal(grad, runs[1][name]), name
        assert torch.equal(grad, runs[2][name]), name


@contextmanager
def _deterministic() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def test_streams_repeat_their_bits_in_deterministic_mode() -> None:
    policy = make_policy(is_compiled=True, is_deterministic=True)
    packed = pack_batch(make_batch(300, 6, 90))
    stages = cut_stages(packed, wave=1)
    with _deterministic():
        runs = [stream_gradients(policy, packed, stages) for _ in range(2)]
    for name, grad in runs[0].items():
        assert torch.equal(grad, runs[1][name]), name
