"""Equivalence, at the level of the forest: packed log-probs, entropies and their gradients.

A random weighting of every trained token's log-prob and entropy is the loss; it travels with the
rollouts (as their advantages and old log-probs), so that it stays the same in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ratoon.model.loader import read_model
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import FolderBase, ModelDtype, ModelSpec
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.forest import build_forest, pack
from ratoon.rollout.packed import Forest, PackedBatch
from ratoon.rollout.prefixes import sort_sequences
from ratoon.rollout.raw import RawGroup
from ratoon.rollout.validate import validate_groups
from ratoon.train.micro_batches import DeviceBatch, run_model, to_device
from ratoon_proto.types import FullTuning
from tests.builders import dressed, group, limits, random_groups, rollout
from tests.equivalence import (
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    assert_close,
    paths_of,
    relative_errors,
)
from tests.oracle import hf
from tests.plans import make_plan
from tests.tiny_models import ARCHITECTURES, WRAPPED, write_folder

CPU = torch.device("cpu")
WHOLE = 1 << 20
Results = dict[str, Tensor]
DeviceEdit = Callable[[DeviceBatch], DeviceBatch]


@functools.cache
def _folder(root: Path, architecture: str) -> Path:
    return write_folder(root / architecture, architecture)


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def _load(folder: Path, dtype: ModelDtype = ModelDtype.FLOAT64) -> PolicyModel:
    base = FolderBase(folder=str(folder))
    spec = ModelSpec(base=base, tuning=FullTuning(), dtype=dtype, seed=0)
    return read_model(spec).place(CPU)


def _groups(seed: int, **knobs: Any) -> list[RawGroup]:
    """Six groups: trees of depth 3, equal, prefix, empty and one-token responses, N = 1, P = 0."""
    knobs = {"num_groups": 6, "temperatures": (1.0, 0.7), "outcome": "advantages"} | knobs
    return random_groups(np.random.default_rng(seed), **knobs)


def _batch(groups: list[RawGroup]) -> RolloutBatch:
    return validate_groups(groups, limits(vocab_size=64))


def _packed_batches(batch: RolloutBatch, budget: int) -> list[PackedBatch]:
    prefixes = sort_sequences(batch)
    plan = make_plan(batch, prefixes, np.ones(batch.num_sequences, np.bool_), budget)
    forests = [
        build_forest(batch, prefixes, np.array(part.sequences)) for part in plan.micro_batches
    ]
    return [pack(batch, forest, batch.loss_mask) for forest in forests]


def _run(
    model: PolicyModel,
    batch: RolloutBatch,
    packed_batches: list[PackedBatch],
    edit: DeviceEdit = lambda batch: batch,
) -> Results:
    """Log-probs and entropies of trained tokens in request order, and gradients by name."""
    advantage_J, old_J = batch.advantages, batch.old_logprobs
    assert advantage_J is not None
    assert old_J is not None
    logprob_J = torch.zeros(len(batch.loss_mask), dtype=torch.float64)
    entropy_J = torch.zeros_like(logprob_J)
    model.module.zero_grad()
    for packed in packed_batches:
        device_batch = edit(to_device(packed, CPU))
        outputs = run_model(model, device_batch)
        logprob_L = outputs.logprob_M[device_batch.term_target_L]
        entropy_L = outputs.entropy_R[device_batch.term_row_L]
        weight_L = torch.as_tensor(advantage_J[packed.term_token])
        bonus_L = torch.as_tensor(old_J[packed.term_token])
        (weight_L * logprob_L + bonus_L * entropy_L).sum().backward()
        logprob_J[packed.term_token] = logprob_L.detach().double()
        entropy_J[packed.term_token] = entropy_L.detach().double()
    grads = {name: p.grad for name, p in model.named_trainable().items() if p.grad is not None}
    mask = torch.as_tensor(batch.loss_mask)
    return {"logprob": logprob_J[mask], "entropy": entropy_J[mask]} | grads


def _oracle(folder: Path, batch: RolloutBatch, dtype: torch.dtype = torch.float64) -> Results:
    model = hf.load(folder, dtype=dtype)
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for path in paths_of(batch):
        if not path.mask.any():
            continue
        mask = torch.as_tensor(path.mask)
        logprob, entropy = (values[mask] for values in hf.logprobs(model, path))
        assert path.advantages is not None
        assert path.old is not None
        weight, bonus = torch.as_tensor(path.advantages)[mask], torch.as_tensor(path.old)[mask]
        (weight * logprob + bonus * entropy).sum().backward()
        logprobs.append(logprob.detach())
        entropies.append(entropy.detach())
    # The decoder beside a tower has the names of its own model.
    grads = {
        name.replace("model.language_model.", "model.", 1): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {"logprob": torch.cat(logprobs), "entropy": torch.cat(entropies)} | grads


def _errors(got: Results, expected: Results) -> dict[str, float]:
    """Outputs and gradients have scales of their own."""
    outputs = ("logprob", "entropy")
    errors: dict[str, float] = {}
    for names in (set(outputs), set(expected) - set(outputs)):
        errors |= relative_errors(
            {name: got[name] for name in expected if name in names},
            {name: expected[name] for name in expected if name in names},
        )
    assert list(got) == list(expected)
    return errors


def _depth(forest: Forest) -> int:
    depths: list[int] = []
    for parent in forest.node_parent.tolist():
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)


def _split_nodes(forest: Forest, rng: np.random.Generator) -> Forest:
    """`forest` with longer nodes cut in two, a parent and its only child."""
    cuts: list[int] = []
    for start, stop in zip(forest.node_start.tolist(), forest.node_stop.tolist(), strict=True):
        cuts.append(int(rng.integers(start + 1, stop)) if stop - start > 1 else stop)
    parts = [
        (m, start, stop)
        for m, cut in enumerate(cuts)
        for start, stop in ((forest.node_start[m], cut), (cut, forest.node_stop[m]))
        if start < stop
    ]
    last_part = {m: index for index, (m, _, _) in enumerate(parts)}
    last_part[-1] = -1
    parents = [
        last_part[int(forest.node_parent[m])] if start == forest.node_start[m] else index - 1
        for index, (m, start, _) in enumerate(parts)
    ]
    return replace(
        forest,
        node_parent=np.array(parents, np.int32),
        node_start=np.array([start for _, start, _ in parts], np.int64),
        node_stop=np.array([stop for _, _, stop in parts], np.int64),
        node_end=np.array([forest.node_end[m] for m, _, _ in parts], np.int64),
        node_depth=np.array(
            [forest.node_depth[m] + start - forest.node_start[m] for m, start, _ in parts], np.int64
        ),
        sequence_node=np.array([last_part[m] for m in forest.sequence_node.tolist()], np.int32),
    )


@pytest.mark.parametrize(
    ("architecture", "budget"),
    [
        *((architecture, WHOLE) for architecture in (*ARCHITECTURES, *WRAPPED)),
        *(("qwen3", budget) for budget in (1, 24)),
        ("qwen3_moe", 24),
    ],
)
def test_forest_equals_each_rollout_alone(
    models_root: Path, architecture: str, budget: int
) -> None:
    """Whatever the budget: one sequence a micro-batch, some, or all."""
    folder, batch = _folder(models_root, architecture), _batch(_groups(budget))
    packed = _packed_batches(batch, budget)
    if budget == WHOLE:
        assert len(packed) == 1
        assert _depth(packed[0].forest) > 3
        assert packed[0].forest.num_tokens < packed[0].forest.sequence_length.sum()
    errors = _errors(_run(_load(folder), batch, packed), _oracle(folder, batch))
    assert_close(errors, FLOAT64_TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_random_forests_equal_each_rollout_alone(models_root: Path, seed: int) -> None:
    folder = _folder(models_root, "qwen3")
    batch = _batch(_groups(100 + seed, num_groups=8, max_prompt=12, max_response=20))
    got = _run(_load(folder), batch, _packed_batches(batch, WHOLE))
    assert_close(_errors(got, _oracle(folder, batch)), FLOAT64_TOLERANCE)


@pytest.mark.parametrize("seed", range(2))
def test_forests_of_two_letters_equal_each_rollout_alone(models_root: Path, seed: int) -> None:
    """With two token ids everything merges: groups with groups, prompts with responses. What one
    path trains is prompt or context in others."""
    folder = _folder(models_root, "qwen3")
    groups = random_groups(
        np.random.default_rng(seed),
        num_groups=8,
        vocab_size=2,
        max_prompt=4,
        temperatures=(1.0, 1.0, 0.7),
        outcome="advantages",
    )
    batch = _batch(groups)
    packed = _packed_batches(batch, WHOLE)
    assert packed[0].forest.num_tokens < packed[0].forest.sequence_length.sum() / 2
    got = _run(_load(folder), batch, packed)
    assert_close(_errors(got, _oracle(folder, batch)), FLOAT64_TOLERANCE)


@pytest.mark.parametrize("budget", [15, WHOLE])
def test_chain_of_strict_prefixes_equals_each_rollout_alone(models_root: Path, budget: int) -> None:
    """Responses of 0, 1, 2, .. tokens of one text, each twice: a node a token, each with a leaf."""
    rng = np.random.default_rng(12)
    text = rng.integers(0, 64, 24)
    lengths = [*range(len(text)), *range(len(text))]
    raws = [
        dressed(rollout(text[:n]), rng, outcome="advantages", with_logprobs=True)
        for n in rng.permutation(lengths)
    ]
    folder, batch = _folder(models_root, "llama"), _batch([group([5, 6, 7], raws)])
    packed = _packed_batches(batch, budget)
    if budget == WHOLE:
        assert _depth(packed[0].forest) == len(text)
    got = _run(_load(folder), batch, packed)
    assert_close(_errors(got, _oracle(folder, batch)), FLOAT64_TOLERANCE)


def test_float32_forest_equals_each_rollout_alone(models_root: Path) -> None:
    folder, batch = _folder(models_root, "qwen3"), _batch(_groups(7))
    got = _run(_load(folder, ModelDtype.FLOAT32), batch, _packed_batches(batch, WHOLE))
    assert_close(_errors(got, _oracle(folder, batch, torch.float32)), FLOAT32_TOLERANCE)


def test_order_of_groups_and_siblings_does_not_matter(models_root: Path) -> None:
    folder, groups, rng = _folder(models_root, "llama"), _groups(8), np.random.default_rng(0)
    shuffled = [
        replace(group, rollouts=tuple(group.rollouts[n] for n in rng.permutation(num_rollouts)))
        for group, num_rollouts in ((group, len(group.rollouts)) for group in groups)
    ]
    shuffled = [shuffled[g] for g in rng.permutation(len(groups))]
    batch, other = _batch(groups), _batch(shuffled)
    assert not np.array_equal(batch.response_tokens, other.response_tokens)
    got = _run(_load(folder), other, _packed_batches(other, WHOLE))
    assert_close(_errors(got, _oracle(folder, other)), FLOAT64_TOLERANCE)
    expected = _oracle(folder, batch)
    names = [name for name in expected if name not in ("logprob", "entropy")]
    errors = relative_errors({n: got[n] for n in names}, {n: expected[n] for n in names})
    assert_close(errors, FLOAT64_TOLERANCE)


def test_split_nodes_do_not_matter(models_root: Path) -> None:
    folder, batch = _folder(models_root, "qwen2"), _batch(_groups(9))
    forest = build_forest(batch, sort_sequences(batch), None)
    split = _split_nodes(forest, np.random.default_rng(0))
    assert len(split.node_parent) > len(forest.node_parent)
    got = _run(_load(folder), batch, [pack(batch, split, batch.loss_mask)])
    assert_close(_errors(got, _oracle(folder, batch)), FLOAT64_TOLERANCE)


def _mask_moved(by: int) -> DeviceEdit:
    def edit(batch: DeviceBatch) -> DeviceBatch:
        table_M4 = batch.layout.node_table_M4.clone()
        table_M4[:, 2] = (table_M4[:, 2] + by).clamp(max=batch.layout.num_tokens)
        end_T = (batch.layout.end_T + by).clamp(max=batch.layout.num_tokens)
        return replace(batch, layout=replace(batch.layout, end_T=end_T, node_table_M4=table_M4))

    return edit


def _packed_index_as_position(batch: DeviceBatch) -> DeviceBatch:
    return replace(batch, position_T=torch.arange(len(batch.tokens_T)))


def _previous_row_predicts(batch: DeviceBatch) -> DeviceBatch:
    return replace(batch, row_index_R=(batch.row_index_R - 1).clamp(min=0))


def _temperature_ignored(batch: DeviceBatch) -> DeviceBatch:
    return replace(batch, row_temperature_R=torch.ones_like(batch.row_temperature_R))


@pytest.mark.parametrize(
    "mutation",
    [
        _mask_moved(1),
        _packed_index_as_position,
        _previous_row_predicts,
        _temperature_ignored,
    ],
    ids=["mask_off_by_one", "packed_index_as_position", "rows_off_by_one", "no_temperature"],
)
def test_mutation_turns_the_comparison_red(models_root: Path, mutation: DeviceEdit) -> None:
    """The comparison would see each of these mistakes, by far."""
    folder, batch = _folder(models_root, "qwen3"), _batch(_groups(10))
    model, packed = _load(folder), _packed_batches(batch, WHOLE)
    expected = _oracle(folder, batch)
    assert_close(_errors(_run(model, batch, packed), expected), FLOAT64_TOLERANCE)
    errors = _errors(_run(model, batch, packed, mutation), expected)
    assert max(errors.values()) > 1e-3


class _BoundEarly(nn.Module):
    """Has float32 from when its function was made, which no later change of names reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 8.0))

    def forward(
        self, input_ids: Tensor, use_cache: bool, dtype: torch.dtype = torch.float32
    ) -> SimpleNamespace:
        return SimpleNamespace(logits=(1 / self.weight).to(dtype).double())


def test_an_oracle_that_would_round_to_float32_is_refused() -> None:
    with pytest.raises(AssertionError, match="not close"):
        hf.in_double(_BoundEarly())
