"""The traps that other trainers fell into, each with a test; docs/traps.md lists all sixteen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ratoon.errors import RatoonError
from ratoon.model.spec import ModelDtype
from ratoon.planner.planning import cpu_planner
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.raw import RawGroup
from ratoon.rollout.validate import validate_groups
from ratoon.train import prepare
from ratoon.train.loss.resolve import resolve_loss
from ratoon.train.optim.resolve import resolve_optim
from ratoon.train.trainer import Trainer
from ratoon_proto.types import LossConfig, LossKind, OldLogprobs, OldLogprobsKind, OptimStepConfig
from tests.builders import group, limits, rollout
from tests.equivalence import assert_close, paths_of, relative_errors
from tests.oracle import hf
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import (
    ADAMW,
    VOCAB_SIZE,
    WHOLE,
    Pair,
    check_gradients,
    forward_backward,
    make_pair,
    random_batch_near,
)

FROM_FORWARD = OldLogprobs(kind=OldLogprobsKind.FROM_FORWARD, forward_operation_id="forward-1")
REINFORCE = LossConfig(kind=LossKind.REINFORCE)
TEXT = np.arange(10, 16)


def _validated(groups: list[RawGroup]) -> RolloutBatch:
    return validate_groups(groups, limits(vocab_size=VOCAB_SIZE))


def _ones(count: int) -> np.ndarray[Any, Any]:
    return np.ones(count, np.float32)


def _forward(trainer: Trainer, batch: RolloutBatch) -> np.ndarray[Any, Any]:
    return trainer.forward(
        trainer.prepare_forward(batch), with_entropy=False, use_reference=False
    ).logprobs


def _gradients(pair: Pair, batch: RolloutBatch, request: LossConfig) -> dict[str, Tensor]:
    """Gradient sums of one forward-backward, copied; the window is empty again."""
    loss = resolve_loss(request, batch, has_frozen_reference=True)
    pair.trainer.forward_backward(pair.trainer.prepare(batch, loss))
    copied = pair.gradients()
    pair.trainer.discard_gradients()
    return copied


def test_first_response_token_is_trained_from_the_last_prompt_token(pair: Pair) -> None:
    """Trap 1: the first token of every response is predicted by the last prompt token; one project
    leaves it untrained, one needed three tries. Here responses are nothing but a first token."""
    raws = [rollout([token], advantages=_ones(1) * (token - 2.5)) for token in (1, 2, 3, 3)]
    batch = _validated([group(TEXT, raws), group(TEXT[:1], raws, "short")])
    got = _forward(pair.trainer, batch)
    model = pair.oracle.model
    logits = model(input_ids=torch.as_tensor(TEXT)[None]).logits[0].double()
    for place, row in ((0, -1), (4, 0)):
        expected = torch.log_softmax(logits[row], dim=-1)[[1, 2, 3, 3]]
        # Stock float32 norms: near, not equal; the equivalence tests are exact.
        assert got[place : place + 4] == pytest.approx(expected.detach().numpy(), abs=1e-5)
    check_gradients(pair, batch, REINFORCE)


def test_every_first_token_moves_the_gradient(pair: Pair) -> None:
    """Trap 1, the other way: no first token's advantage is without effect."""
    raws = [rollout(TEXT[n:], advantages=_ones(6 - n)) for n in range(4)]
    batch = _validated([group([1, 2], raws)])
    assert batch.advantages is not None
    before = _gradients(pair, batch, REINFORCE)
    for first in batch.response_offsets[:-1]:
        advantages = batch.advantages.copy()
        advantages[first] = 3.0
        after = _gradients(pair, replace(batch, advantages=advantages), REINFORCE)
        assert min(relative_errors(after, before).values()) > 1e-3


def test_half_precision_logprobs_are_refused() -> None:
    """Trap 2: log-probs stored in bf16 make ratio noise of 0.4%. Two bytes are never accepted."""
    for name in ("sampler_logprobs", "old_logprobs", "reference_logprobs"):
        half = -np.ones(6, np.float16)
        raw = rollout(TEXT, advantages=_ones(6), **{name: half})
        with pytest.raises(RatoonError) as caught:
            _validated([group([1], [raw])])
        assert caught.value.field == f"groups[0].rollouts[0].{name}"


def test_logprobs_of_a_bfloat16_model_have_float32_precision(tmp_path: Path) -> None:
    """Trap 2: hidden states are bf16, the log-softmax and what Forward returns are not."""
    folder = write_folder(tmp_path / "base", "qwen3")
    pair = make_pair(folder, scratch=tmp_path, dtype=ModelDtype.BFLOAT16)
    got = _forward(pair.trainer, random_batch_near(pair, 0))
    assert got.dtype == np.float32
    values = torch.as_tensor(got[got != 0])
    rounded = values.to(torch.bfloat16).to(torch.float32)
    assert (rounded != values).float().mean() > 0.9
    # What is lost by it is what the trap is about.
    assert (rounded - values).abs().max() > 4e-3


def test_groups_keep_their_identity(pair: Pair) -> None:
    """Trap 3: a group identity lost on the way; several prompts silently trained as one. Equal
    responses and ids in turn, rewards on different scales: advantages are of each group alone."""
    responses = [TEXT[:3], TEXT[1:5]]
    groups = [
        group(
            [1, 2, number], [rollout(r, reward=10.0 * number + n) for n, r in enumerate(responses)]
        )
        for number in range(3)
    ]
    groups = [replace(g, group_id=f"g{n}") for n, g in enumerate(groups)]
    batch = _validated(groups)
    loss = resolve_loss(LossConfig(kind=LossKind.REINFORCE), batch, has_frozen_reference=False)
    prepared = prepare.prepare(batch, loss, version=0, plan=cpu_planner(WHOLE))
    advantage_S = prepared.columns.advantage_J[batch.response_offsets[:-1]]
    half = np.sqrt(0.5)
    assert advantage_S == pytest.approx([-half, half] * 3, rel=1e-5)
    assert prepared.counters.groups == 3
    check_gradients(pair, batch, REINFORCE)


def test_a_group_id_names_one_group() -> None:
    """Trap 3: two groups of one id in a batch are refused, not merged and not told apart."""
    raws = [rollout(TEXT, reward=1.0)]
    with pytest.raises(RatoonError) as caught:
        _validated([group([1], raws, "same"), group([2], raws, "same")])
    assert caught.value.field == "groups[1].group_id"


@pytest.mark.parametrize("dtype", [ModelDtype.FLOAT32, ModelDtype.BFLOAT16])
def test_ratio_is_one_at_the_first_step(tmp_path: Path, dtype: ModelDtype) -> None:
    """Trap 4: old and new log-probs from different attention paths; ratio != 1 at step 0. Forward
    and update run the same packed code: with the same cuts the ratio is 1 to the bit."""
    folder = write_folder(tmp_path / "base", "qwen3_moe")
    pair = make_pair(folder, scratch=tmp_path, dtype=dtype, micro_batch_tokens=40)
    batch = random_batch_near(pair, 1, kinds=("flat", "tree"))
    loss = resolve_loss(
        LossConfig(kind=LossKind.IMPORTANCE_SAMPLING, old_logprobs=FROM_FORWARD),
        batch,
        has_frozen_reference=True,
    )
    plan = pair.trainer.prepare_forward(batch).plan
    assert len(plan.micro_batches) > 1
    old = pair.trainer.forward(
        pair.trainer.prepare_forward(batch, plan), with_entropy=False, use_reference=False
    ).logprobs
    prepared = pair.trainer.prepare(batch, loss, old_logprobs_J=old)
    assert prepared.plan == plan
    report = pair.trainer.forward_backward(prepared)
    assert batch.advantages is not None
    counted = prepared.columns.counted_J
    assert report.ratio_max == 1.0
    # With all ratios 1 the loss is minus the sum of the advantages.
    expected = -batch.advantages[counted].astype(np.float64).sum()
    assert report.loss == pytest.approx(expected, rel=1e-12)


def test_ratio_is_near_one_under_other_cuts(tmp_path: Path) -> None:
    """Trap 4: under another plan float32 keeps |r - 1| <= 1e-5."""
    folder = write_folder(tmp_path / "base", "qwen3")
    pair = make_pair(folder, scratch=tmp_path, dtype=ModelDtype.FLOAT32)
    batch = random_batch_near(pair, 2)
    whole = _forward(pair.trainer, batch)
    request = LossConfig(kind=LossKind.IMPORTANCE_SAMPLING, old_logprobs=FROM_FORWARD)
    loss = resolve_loss(request, batch, has_frozen_reference=True)
    plan = prepare.prepare(batch, loss, version=0, plan=cpu_planner(1)).plan
    cut = pair.trainer.forward(
        pair.trainer.prepare_forward(batch, plan), with_entropy=False, use_reference=False
    ).logprobs
    assert np.abs(np.exp(cut.astype(np.float64) - whole) - 1).max() <= 1e-5


def test_tool_output_is_context_though_it_is_not_trained(pair: Pair) -> None:
    """Trap 5: tool-output tokens dropped from the context because the loss mask was used as the
    attention mask. Another tool output changes the log-probs after it, and none before it."""
    tools = ([20, 21, 22], [30, 31, 32])
    raws = [
        rollout([(TEXT[:2], True), (tool, False), (TEXT[2:], True)], advantages=_ones(9))
        for tool in tools
    ]
    batch = _validated([group([1, 2], raws)])
    first, second = _forward(pair.trainer, batch).reshape(2, 9)
    assert np.array_equal(first[:2], second[:2])
    assert (np.abs(first[5:] - second[5:]) > 1e-6).all()
    assert (first[2:5] == 0).all()
    check_gradients(pair, batch, REINFORCE)


def test_oracle_runs_each_rollout_alone_and_unpadded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 6: padded baselines that were themselves wrong. The oracle's calls are one sequence of
    its own length each, with no mask and no positions that anybody could get wrong."""
    batch = random_batch_near(pair, 3)
    calls: list[dict[str, Any]] = []
    forward = nn.Module.__call__

    def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is pair.oracle.model:
            assert args == ()
            calls.append(kwargs)
        return forward(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", recorded)
    paths = [path for path in paths_of(batch) if len(path.response)]
    hf.all_logprobs(pair.oracle.model, paths)
    assert all(call.keys() == {"input_ids", "use_cache"} for call in calls)
    tokens = [call["input_ids"].tolist() for call in calls]
    assert tokens == [[path.tokens.tolist()] for path in paths]


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_a_shared_token_counts_with_its_multiplicity(tmp_path: Path, coefficient: float) -> None:
    """Trap 7: N equal rollouts are packed as one and weigh N, in the router, its experts and its
    auxiliary loss too."""
    request = replace(REINFORCE, router_aux_loss_coefficient=coefficient)
    pair = make_pair(write_folder(tmp_path / "base", "qwen3_moe"), scratch=tmp_path)
    advantages = np.linspace(0.5, 2.0, 6).astype(np.float32)
    once = _validated([group([1, 2, 3], [rollout(TEXT, advantages=advantages)])])
    thrice = _validated([group([1, 2, 3], [rollout(TEXT, advantages=advantages)] * 3)])
    expected = {name: 3 * grad for name, grad in _gradients(pair, once, request).items()}
    assert any(".gate." in name for name in expected)
    got = _gradients(pair, thrice, request)
    assert_close(relative_errors(got, expected), pair.tolerance)
    check_gradients(pair, thrice, REINFORCE)


@pytest.mark.parametrize("kind", [LossKind.GRPO, LossKind.DAPO])
def test_normalisation_is_global(pair: Pair, kind: LossKind) -> None:
    """Trap 8: normalising per rank or per micro-batch instead of globally. Micro-batches of very
    different numbers of tokens give the gradient of one, and the same loss."""
    batch = random_batch_near(pair, 5)
    losses: list[float] = []
    request = LossConfig(kind=kind)
    for micro_batch_tokens in (WHOLE, 60, 1):
        report, _ = forward_backward(pair, batch, request, micro_batch_tokens=micro_batch_tokens)
        assert_close(pair.gradient_errors(), pair.tolerance)
        assert report.loss is not None
        losses.append(report.loss)
        pair.discard()
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


def test_moments_survive_a_resume(tmp_path: Path) -> None:
    """Trap 10: optimizer moments lost on resume. A resumed trainer's next step has the bits of the
    one that went on; without moments, step count and decay it would not."""
    folder = write_folder(tmp_path / "base", "qwen3")
    pair = make_pair(folder, scratch=tmp_path, dtype=ModelDtype.FLOAT32)
    trainer = pair.trainer
    batches = [random_batch_near(pair, seed) for seed in (6, 7)]

    def step(trainer: Trainer, batch: RolloutBatch) -> None:
        loss = resolve_loss(REINFORCE, batch, has_frozen_reference=True)
        optim = resolve_optim(OptimStepConfig(learning_rate=1e-2), loss.normalisation, ADAMW)
        trainer.update(trainer.prepare(batch, loss), optim)

    step(trainer, batches[0])
    trainer.snapshot().write(tmp_path / "checkpoint")
    resumed = Trainer.create(trainer.spec)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    forgetful = Trainer.create(trainer.spec)
    with torch.no_grad():
        for name, parameter in forgetful.model.named_trainable().items():
            parameter.copy_(trainer.model.named_trainable()[name])
    for other in (trainer, resumed, forgetful):
        step(other, batches[1])
    for name, parameter in trainer.model.named_trainable().items():
        assert torch.equal(resumed.model.named_trainable()[name], parameter), name
        assert not torch.equal(forgetful.model.named_trainable()[name], parameter), name


def test_documented_tests_exist() -> None:
    """docs/traps.md names sixteen traps, and only tests that there are."""
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "traps.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == [str(n) for n in range(1, 17)]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 16
    for file, test in named:
        assert f"def {test}(" in (root / file).read_text(encoding="utf-8"), f"{file}::{test}"
