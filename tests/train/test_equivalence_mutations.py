"""Planted mistakes must turn the comparison of equivalence red, each by far.

Without these a comparison that compares nothing would pass. Each mutation replaces one function of
the code under test for the length of one forward-backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.planner.planning import cpu_planner
from ratoon.rollout.forest import pack
from ratoon.rollout.selection import trained_mask
from ratoon.train import batch_loss, prepare
from ratoon.train.loss import row_loss
from ratoon.train.loss.compute import compute_loss
from ratoon.train.loss.resolve import resolve_loss
from ratoon_kernels import build_layout
from ratoon_proto.types import KlConfig, KlKind, LossKind, ReferenceKind
from tests.equivalence import assert_close
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import (
    Pair,
    forward_backward,
    make_pair,
    make_request,
    random_batch_near,
)

Patch = pytest.MonkeyPatch
KL = KlConfig(kind=KlKind.K3, coefficient=0.3, reference=ReferenceKind.GIVEN)


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("mutations")
    return make_pair(write_folder(root / "base", "qwen3"), scratch=root / "adapter")


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    yield shared_pair
    shared_pair.discard()


def _mask_off_by_one(patch: Patch) -> None:
    """Every subtree reaches one token too far: siblings see each other."""

    def build_longer(**nodes: Any) -> Any:
        layout = build_layout(**nodes)
        table_M4 = layout.node_table_M4.clone()
        table_M4[:, 2] = (table_M4[:, 2] + 1).clamp(max=layout.num_tokens)
        end_T = (layout.end_T + 1).clamp(max=layout.num_tokens)
        return replace(layout, end_T=end_T, node_table_M4=table_M4)

    patch.setattr("ratoon.train.device_batch.build_layout", build_longer)


def _first_response_token_dropped(patch: Patch) -> None:
    """Training starts at the second response token, as where logits and labels are cut alike."""

    def without_first(batch: Any, kept_S: Any) -> Any:
        mask_J = trained_mask(batch, kept_S)
        starts = batch.response_offsets[:-1]
        mask_J[starts[starts < batch.response_offsets[1:]]] = False
        return mask_J

    patch.setattr("ratoon.train.prepare.trained_mask", without_first)


def _packed_index_as_position(patch: Patch) -> None:
    def pack_flat(*args: Any) -> Any:
        packed = pack(*args)
        return replace(packed, position=np.arange(len(packed.position)))

    patch.setattr("ratoon.train.micro_batches.pack", pack_flat)


def _mean_of_each_micro_batch(patch: Patch) -> None:
    """Each micro-batch's terms are averaged, as if all had ten: trap 8."""

    def compute_mean(loss: Any, columns: Any, logprob_L: Any, entropy_L: Any) -> Any:
        output = compute_loss(loss, columns, logprob_L, entropy_L)
        return replace(output, grad_logprob_L=output.grad_logprob_L * 10 / len(logprob_L))

    patch.setattr("ratoon.train.batch_loss.compute_loss", compute_mean)


def _shared_tokens_counted_once(patch: Patch) -> None:
    """A shared token's gradient is that of the last path alone, not the sum over its paths."""

    def overwrite(sums: torch.Tensor, index_L: torch.Tensor, grad_L: torch.Tensor) -> None:
        sums.index_copy_(0, index_L, grad_L)

    patch.setattr(row_loss, "_add_terms", overwrite)


def _temperature_of_one(patch: Patch) -> None:
    def pack_warm(*args: Any) -> Any:
        packed = pack(*args)
        return replace(packed, row_temperature=np.ones_like(packed.row_temperature))

    patch.setattr("ratoon.train.micro_batches.pack", pack_warm)


def _one_sequence_a_micro_batch(patch: Patch) -> None:
    """Sequence ratios over the micro-batch as if it were one sequence."""
    term_columns = batch_loss._columns

    def one_sequence(*args: Any) -> Any:
        columns = term_columns(*args)
        return replace(columns, sequence_L=torch.zeros_like(columns.sequence_L), num_sequences=1)

    patch.setattr(batch_loss, "_columns", one_sequence)


@pytest.mark.more
@pytest.mark.parametrize(
    ("mutate", "kind"),
    [
        (_mask_off_by_one, LossKind.GRPO),
        (_first_response_token_dropped, LossKind.PPO_CLIP),
        (_packed_index_as_position, LossKind.GRPO),
        (_mean_of_each_micro_batch, LossKind.PPO_CLIP),
        (_shared_tokens_counted_once, LossKind.REINFORCE),
        (_temperature_of_one, LossKind.CISPO),
        (_one_sequence_a_micro_batch, LossKind.GSPO),
    ],
)
def test_mutation_turns_the_comparison_red(
    pair: Pair, monkeypatch: Patch, mutate: Callable[[Patch], None], kind: LossKind
) -> None:
    batch = random_batch_near(pair, 50)
    request = make_request(kind, kl=KL)
    forward_backward(pair, batch, request, micro_batch_tokens=40)
    assert_close(pair.gradient_errors(), pair.tolerance)
    pair.trainer.discard_gradients()
    mutate(monkeypatch)
    loss = resolve_loss(request, batch, has_frozen_reference=True)
    prepared = prepare.prepare(batch, loss, version=0, plan=cpu_planner(40))
    assert len(prepared.plan.micro_batches) > 1
    pair.trainer.forward_backward(prepared)
    assert max(pair.gradient_errors().values()) > 1e-2
