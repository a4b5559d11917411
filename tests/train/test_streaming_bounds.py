"""What a streamed update holds and runs: memory, tokens, cancellation; and that errors would show.

The batch is one group: a prompt of 60 tokens, eight responses of 20; 100 tokens are held at a time,
in four waves. A second one has two levels of prefixes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.attention import PathAttention
from ratoon.model.loader import read_model
from ratoon.model.offload import HostOffload
from ratoon.model.policy_model import PolicyModel
from ratoon.model.router import RoutedTokens
from ratoon.model.spec import FolderBase, ModelDtype
from ratoon.model.streamed_attention import LayerStage, PathStacks
from ratoon.planner.activation_plan import Kept, peak_bytes
from ratoon.planner.costs import CostModel
from ratoon.planner.stage_plan import HeldTokens, least_plan
from ratoon.planner.waves import peak_tokens
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.validate import validate_groups
from ratoon.train.gradient_window import WindowState
from ratoon.train.spec import PassHooks
from ratoon.train.stage_heads import RowHead, StageRun
from ratoon.train.trainer import Trainer
from ratoon_proto.types import LossKind
from tests.builders import group, limits, rollout
from tests.equivalence import relative_errors
from tests.model.compiled import eager_graphs
from tests.plans import make_plan
from tests.rollout.stages import held_tokens, num_ancestors
from tests.tiny_models import write_folder
from tests.train.trainer_runs import make_loss, make_step, make_trainer

FREE_CALLS = CostModel(pair=0.0, row=0.0, call=0.0, resident=0.0)
WHOLE = 1 << 20


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return make_trainer(FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3"))))


def _batch(num_responses: int = 8, *, seed: int = 0, is_deep: bool = False) -> RolloutBatch:
    """Deep: each half of the responses begins with 12 tokens of its own."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 64, 60)
    turns = [rng.integers(0, 64, 12) for _ in range(2)]
    raws = []
    for n in range(num_responses):
        head = turns[2 * n // num_responses] if is_deep else []
        # First tokens differ, so that nothing else is shared.
        tokens = np.concatenate([head, [n], rng.integers(0, 64, 19)]).astype(np.int32)
        raws.append(rollout(tokens, reward=float(rng.normal())))
    return validate_groups([group(prompt, raws)], limits(vocab_size=64))


def _plan(batch: RolloutBatch, budget: int) -> UpdatePlan:
    kept_S = np.ones(batch.num_sequences, np.bool_)
    return make_plan(batch, sort_sequences(batch), kept_S, budget, FREE_CALLS)


def _gradients(trainer: Trainer, batch: RolloutBatch, budget: int) -> dict[str, Tensor]:
    trainer.forward_backward(trainer.prepare(batch, make_loss(batch), _plan(batch, budget)))
    grads = {
        name: p.grad.clone()
        for name, p in trainer.model.named_trainable().items()
        if p.grad is not None
    }
    trainer.discard_gradients()
    return grads


class _Held:
    """What autograd saved for a backward, as long as it holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def _peak_saved(model: PolicyModel) -> Iterator[list[int]]:
    """One number inside: most bytes that autograd held so far for backwards, weights apart."""
    weights = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    live, peak = [0], [0]

    def add(size_bytes: int) -> None:
        live[0] += size_bytes
        peak[0] = max(peak[0], live[0])

    def hold(tensor: Tensor) -> _Held:
        held = _Held(tensor)
        if tensor.untyped_storage().data_ptr() not in weights:
            size_bytes = tensor.numel() * tensor.element_size()
            add(size_bytes)
            weakref.finalize(held, add, -size_bytes)
        return held

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda held: held.tensor):
        yield peak


def _peak(trainer: Trainer, batch: RolloutBatch, budget: int) -> int:
    with _peak_saved(trainer.model) as peak:
        _gradients(trainer, batch, budget)
    return peak[0]


@pytest.mark.parametrize("num_responses", [8, 24])
def test_activations_are_those_of_the_prefix_and_one_wave(
    trainer: Trainer, num_responses: int
) -> None:
    """As many as of the prompt with two responses alone, however many there are."""
    streamed = _peak(trainer, _batch(num_responses), 100)
    alone = _peak(trainer, _batch(2), WHOLE)
    whole = _peak(trainer, _batch(num_responses), WHOLE)
    assert streamed <= 1.05 * alone
    assert streamed < 0.55 * whole


def test_activations_of_a_deep_tree_follow_the_plan(trainer: Trainer) -> None:
    """A path at a time: two prefixes and a response."""
    batch = _batch(is_deep=True)
    (part,) = _plan(batch, 92).micro_batches
    assert peak_tokens(part.stages) == 60 + 12 + 20
    assert max(num_ancestors(part.stages)) == 2
    alone = _peak(trainer, _batch(1, is_deep=True), WHOLE)
    assert _peak(trainer, batch, 92) <= 1.05 * alone


def test_each_packed_token_is_computed_once(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    held: list[HeldTokens] = []
    attend_hidden = PolicyModel.attend_hidden

    def counted(
        model: PolicyModel,
        tokens_T: Tensor,
        position_T: Tensor,
        attention: PathAttention,
        routed: RoutedTokens | None,
    ) -> Tensor:
        counts.append(len(tokens_T))
        held.append(attention.held)
        return attend_hidden(model, tokens_T, position_T, attention, routed)

    monkeypatch.setattr(PolicyModel, "attend_hidden", counted)
    batch = _batch()
    plan = _plan(batch, 100)
    _gradients(trainer, batch, 100)
    assert counts == [60, 40, 40, 40, 40]
    (part,) = plan.micro_batches
    # The prompt's end would hand on a state if a layer had one.
    assert held == held_tokens(part.stages, states=1)
    assert [(one.tokens, one.above, one.waits) for one in held] == [
        *((60, 0, True), *[(40, 60, False)] * 4),
    ]
    counts.clear()
    trainer.forward(trainer.prepare_forward(batch, plan), with_entropy=False, use_reference=False)
    assert sum(counts) == plan.packed_tokens == 220


def test_a_cancel_ends_a_streamed_group_between_stages(trainer: Trainer) -> None:
    batch = _batch()
    asked: list[bool] = []

    def is_cancelled() -> bool:
        asked.append(True)
        return len(asked) > 3

    loss = make_loss(batch)
    with pytest.raises(RatoonError) as caught:
        trainer.forward_backward(
            trainer.prepare(batch, loss, _plan(batch, 100)), PassHooks(is_cancelled=is_cancelled)
        )
    assert caught.value.code is ErrorCode.CANCELLED
    # Once before the micro-batch, and before the third of its five stages.
    assert len(asked) == 4
    assert trainer.window_state is WindowState.TORN


def test_stacks_go_with_the_stages_and_wait_for_no_collector(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cycle would keep gigabytes of a GPU until Python happens to look."""
    made: list[weakref.ref[PathStacks]] = []
    create = PathStacks.__init__

    def recorded(stacks: PathStacks, num_tokens: int) -> None:
        create(stacks, num_tokens)
        made.append(weakref.ref(stacks))

    monkeypatch.setattr(PathStacks, "__init__", recorded)
    batch = _batch(is_deep=True)
    gc.collect()
    gc.disable()
    try:
        trainer.forward_backward(trainer.prepare(batch, make_loss(batch), _plan(batch, 100)))
        assert made
        assert all(stacks() is None for stacks in made)
    finally:
        gc.enable()


@contextmanager
def _lent(
    trainer: Trainer, batch: RolloutBatch, budget: int, share: float
) -> Iterator[HostOffload]:
    """The least of the device in which a plan fits that has its prefixes on the host.

    `share` of what these need of the host is lent; where that is nothing, all stages are alike.
    """
    model, (part,) = trainer.model, _plan(batch, budget).micro_batches
    sizes, held, tokens = model.sizes, held_tokens(part.stages), peak_tokens(part.stages)
    waiting = max(one.above for one in held)
    lent = int(share * waiting * sizes.num_layers * sizes.kept_bytes(Kept.HOST))
    least = max(least_plan(sizes, one, lent).peak_bytes for one in held)
    if not lent:
        alike = peak_bytes(sizes, (Kept.ATTENTION,) * sizes.num_layers, tokens, tokens)
        least = alike + tokens * sizes.stack_bytes
    model.limit_activations(least, host_bytes=lent)
    # What is run here is too small to be worth a copy.
    model._layers._offload = offload = HostOffload(model.device, min_bytes=1, chunk_bytes=999)
    yield offload
    model.limit_activations(None)


def _watch(offload: HostOffload, patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes on the host at the end of each stage, as they come."""
    held: list[int] = []
    close = RowHead.close

    def watched(head: RowHead, run: StageRun) -> None:
        held.append(offload.held_bytes)
        close(head, run)

    patch.setattr(RowHead, "close", watched)
    return held


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_prefixes_wait_on_the_host_and_change_no_bit(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Prefixes have two levels: the test checks which of the layers' inputs are there while a wave
    runs, and after."""
    batch, sizes = _batch(is_deep=True), trainer.model.sizes
    expected = _gradients(trainer, batch, 92)
    layers_there = int(share * sizes.num_layers)
    with _lent(trainer, batch, 92, share) as offload:
        held = _watch(offload, monkeypatch)
        found = _gradients(trainer, batch, 92)
        assert offload.held_bytes == 0
    of_token = layers_there * sizes.hidden_size * sizes.element_bytes
    # Four waves below each turn, which then is closed itself; and the prompt.
    assert held == [72 * of_token] * 10 + [60 * of_token]
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name


@pytest.mark.more
def test_compiled_layers_leave_all_that_waits_on_the_host(tmp_path: Path) -> None:
    """And nothing of a wave; the same bits as where the host has no room and all is kept alike."""
    base = FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3")))
    plain, batch = make_trainer(base, dtype=ModelDtype.FLOAT32), _batch(is_deep=True)
    with eager_graphs() as graphs, pytest.MonkeyPatch.context() as patch:
        model = read_model(plain.spec.model).place(plain.model.device, compile_layers=True)
        trainer, sizes = Trainer(plain.spec, model), model.sizes
        with _lent(trainer, batch, 92, 0.0) as offload:
            expected = _gradients(trainer, batch, 92)
            assert offload.room_bytes == 0
        with _lent(trainer, batch, 92, 1.0) as offload:
            held = _watch(offload, patch)
            found = _gradients(trainer, batch, 92)
            assert offload.held_bytes == 0
        assert graphs
    of_token = sizes.num_layers * sizes.kept_bytes(Kept.HOST)
    # And tables of the layout.
    assert all(0 <= bytes_ / of_token - 72 < 3 for bytes_ in held[:10])
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
    errors = relative_errors(found, _gradients(plain, batch, WHOLE))
    assert max(errors.values()) < 1e-5


def test_what_an_abandoned_stream_left_on_the_host_is_let_go(trainer: Trainer) -> None:
    batch, asked = _batch(is_deep=True), list[int]()
    expected = _gradients(trainer, batch, 92)
    with _lent(trainer, batch, 92, 1.0) as offload:

        def is_cancelled() -> bool:
            asked.append(offload.held_bytes)
            return len(asked) > 4

        with pytest.raises(RatoonError):
            trainer.forward_backward(
                trainer.prepare(batch, make_loss(batch), _plan(batch, 92)),
                PassHooks(is_cancelled=is_cancelled),
            )
        assert max(asked) > 0
        trainer.discard_gradients()
        assert offload.held_bytes == 0
        found = _gradients(trainer, batch, 92)
        for name, grad in expected.items():
            assert torch.equal(found[name], grad), name


def test_streamed_updates_repeat_their_bits(tmp_path: Path) -> None:
    folder = FolderBase(folder=str(write_folder(tmp_path / "base", "qwen3")))
    batch = _batch(is_deep=True)
    states: list[dict[str, Tensor]] = []
    for _ in range(2):
        trainer = make_trainer(folder)
        loss = make_loss(batch, LossKind.GRPO)
        trainer.update(trainer.prepare(batch, loss, _plan(batch, 92)), make_step(trainer, loss))
        states.append({name: p.clone() for name, p in trainer.model.named_trainable().items()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def _drop_sums(patch: pytest.MonkeyPatch) -> None:
    """Gradients that reach a prefix's keys are lost."""
    backward = LayerStage.backward

    def forgetful(stage: LayerStage, *args: Any) -> Any:
        stage._has_sums = False
        return backward(stage, *args)

    patch.setattr(LayerStage, "backward", forgetful)


def _drop_seeds(patch: pytest.MonkeyPatch) -> None:
    """The gradient of the row that predicts the responses' first tokens is lost."""
    close = RowHead.close

    def seedless(head: RowHead, run: StageRun) -> None:
        if run.has_gradient:
            head._rows[run.index].seeds[0].zero_()
        close(head, run)

    patch.setattr(RowHead, "close", seedless)


def _attend_wave_only(patch: pytest.MonkeyPatch) -> None:
    """A wave does not see the keys of its prefix."""
    forward = LayerStage.forward

    def blind(stage: LayerStage, *args: Any) -> Any:
        if stage._ancestors:
            stage._path.keys(stage._place.own.start).k_SKH.zero_()
        return forward(stage, *args)

    patch.setattr(LayerStage, "forward", blind)


@pytest.mark.more
@pytest.mark.parametrize("mutate", [_drop_sums, _drop_seeds, _attend_wave_only])
def test_mutations_turn_the_comparison_red(
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
) -> None:
    batch = _batch(is_deep=True)
    expected = _gradients(trainer, batch, WHOLE)
    assert max(relative_errors(_gradients(trainer, batch, 92), expected).values()) <= 1e-10
    mutate(monkeypatch)
    assert max(relative_errors(_gradients(trainer, batch, 92), expected).values()) > 1e-3
