"""Planted mistakes must turn the comparison of equivalence red, each by far.

Without these a comparison that compares nothing would pass. Each mutation replaces one function of
the code under test for the length of one forward-backward.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.planner.planning import cpu_planner
from ratoon.rollout.forest import pack
from ratoon.rollout.selection import trained_mask
from ratoon.train import prepare
from ratoon.train.loss import batch_loss
from ratoon.train.loss.compute import compute_loss
from ratoon.train.loss.resolve import resolve_loss
from ratoon_kernels import build_layout
from ratoon_proto.types import KlConfig, KlKind, LossKind, ReferenceKind
from tests.equivalence import assert_close
from tests.train.equivalence_runs import (
    Pair,
    forward_backward,
    make_request,
    random_batch_near,
)

Patch = pytest.MonkeyPatch
KL = KlConfig(kind=KlKind.K3, coefficient=0.3, reference=ReferenceKind.GIVEN)


def _mask_off_by_one(patch: Patch) -> None:
    """Every subtree reaches one token too far: siblings see each other."""

    def build_longer(**nodes: Any) -> Any:
        layout = build_layout(**nodes)
        table_M4 = layout.node_table_M4.clone()
        table_M4[:, 2] = (table_M4[:, 2] + 1).clamp(max=layout.num_tokens)
        end_T = (layout.end_T + 1).clamp(max=layout.num_tokens)
        return replace(layout, end_T=end_T, node_table_M4=table_M4)

    patch.setattr("ratoon.train.micro_batches.build_layout", build_longer)


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

    def compute_mean(loss: Any, columns: Any, logprob_L: Any, *others: Any) -> Any:
        output = compute_loss(loss, columns, logprob_L, *others)
        return replace(output, grad_logprob_L=output.grad_logprob_L * 10 / len(logprob_L))

    patch.setattr("ratoon.train.loss.batch_loss.compute_loss", compute_mean)


def _shared_tokens_counted_once(patch: Patch) -> None:
    """A shared token's gradient is that of the last path alone, not the sum over its paths."""

    def overwrite(sums: torch.Tensor, index_L: torch.Tensor, grad_L: torch.Tensor) -> None:
        sums.index_copy_(0, index_L, grad_L)

    patch.setattr(batch_loss, "_add_terms", overwrite)


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


def test_the_oracle_imports_nothing_of_ours() -> None:
    allowed = {"torch", "transformers", "peft", "safetensors", "numpy", "tests.oracle"}
    allowed |= sys.stdlib_module_names
    for file in (FilePath(__file__).parents[1] / "oracle").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                root = "tests.oracle" if name.startswith("tests.oracle") else name.split(".")[0]
                assert root in allowed, f"{file.name} imports {name}"
