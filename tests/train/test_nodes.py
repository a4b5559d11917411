"""Ranks on several nodes that share weights within each: the bits of the same ranks on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model import safetensors_files
from ratoon.model.spec import FolderBase
from ratoon.shards.copies import Copies, by_name
from ratoon.shards.parts import parts_of, shared_on_node, shared_out
from ratoon.train.ranks.layout import load
from ratoon.train.trainer import Trainer
from ratoon_proto.types import LoraTuning, ParallelLayout, Shard
from tests.train.rank_runs import FILE_BYTES, alone_of, ranked, update_over, weights_of
from tests.train.trainer_runs import assert_close, assert_equal

_ALL = (0, 1, 2, 3)


@contextmanager
def _on_nodes(base: FolderBase, num_nodes: int) -> Iterator[Trainer]:
    with ranked(alone_of(base).spec, 4, 100, Shard.WEIGHTS, num_nodes=num_nodes) as (trainer, _):
        yield trainer


def _published(trainer: Trainer, folder: Path) -> dict[str, str]:
    """Digests of files that all ranks have written, each from what it reads on its node."""
    folder.mkdir()
    return trainer.copy_weights().write(folder)


def test_weights_that_every_node_has_take_the_steps_of_one_node(
    base: FolderBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_files, "_MIN_FILE_BYTES", FILE_BYTES)
    digests: list[str] = []
    with _on_nodes(base, 1) as one:
        for seed in range(2):
            update_over(one, seed, _ALL)
            digests.append(one.state_digest())
        one.snapshot().write(tmp_path / "checkpoint")
        files = _published(one, tmp_path / "one")
        assert one.model.shards is not None
        quarter = one.model.shards.owned_bytes
        assert len(files) >= 4
    with _on_nodes(base, 2) as two:
        for digest in digests:
            assert not update_over(two, digests.index(digest), _ALL).skipped
            assert two.state_digest() == digest
        assert _published(two, tmp_path / "two") == files
        # Half of the weights, where each of four ranks of a node has a quarter.
        assert two.model.shards is not None
        assert two.model.shards.owned_bytes == pytest.approx(2 * quarter, rel=0.1)
        trained = weights_of(two)
        update_over(two, 2, _ALL)
        two.load_checkpoint(tmp_path / "checkpoint")
        assert_equal(weights_of(two), trained)
        assert _published(two, tmp_path / "again") == files
        assert two.info().num_nodes == 2


@pytest.mark.more
def test_three_updates_on_nodes_are_those_of_one_rank(base: FolderBase) -> None:
    alone = alone_of(base)
    with ranked(alone.spec, 4, 100, Shard.WEIGHTS, num_nodes=2) as (trainer, _):
        for seed in range(3):
            one, many = update_over(alone, seed), update_over(trainer, seed, _ALL)
            assert many.loss == pytest.approx(one.loss, rel=1e-12)
            assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-10)
        assert_close(weights_of(trainer), weights_of(alone))


@pytest.mark.more
def test_an_adapter_over_a_base_that_every_node_has_is_that_of_one_rank(base: FolderBase) -> None:
    alone = alone_of(base, tuning=LoraTuning(rank=2, alpha=4.0))
    with ranked(alone.spec, 4, 100, Shard.WEIGHTS, num_nodes=2) as (trainer, _):
        for seed in range(2):
            update_over(alone, seed)
            assert not update_over(trainer, seed, _ALL).skipped
        assert_close(weights_of(trainer), weights_of(alone))


@pytest.mark.parametrize("nodes", [[[0], [1]], [[0, 1], [2]], [[0, 2], [1, 3]]])
def test_weights_are_shared_by_as_many_neighbours_on_each_node(
    base: FolderBase, monkeypatch: pytest.MonkeyPatch, nodes: list[list[int]]
) -> None:
    monkeypatch.setattr(Copies, "nodes", lambda _: nodes)
    parallel = ParallelLayout(num_workers=sum(map(len, nodes)), shard=Shard.WEIGHTS)
    sizes = ", ".join(str(len(ranks)) for ranks in nodes)
    with pytest.raises(RatoonError, match=f"this policy have {sizes}$") as caught:
        load(replace(alone_of(base).spec, parallel=parallel))
    assert (caught.value.code, caught.value.field) == (ErrorCode.UNSUPPORTED, "parallel.shard")


def test_ranks_are_grouped_by_the_names_of_their_nodes() -> None:
    assert by_name([b"b", b"b", b"a", b"b", b"a"]) == [[0, 1, 3], [2, 4]]


def test_ranks_of_a_node_have_all_parts_and_their_own_among_them() -> None:
    tensors = {name: torch.zeros(size) for name, size in (("a", 1000), ("b", 10), ("c", 2500))}
    parts = parts_of(tensors, 100)
    owned, kept = shared_out(parts, 6), shared_on_node(parts, 3, 2)
    assert sorted(part.name for own in kept for part in own) == sorted(p.name for p in parts)
    for rank, own in enumerate(owned):
        assert own
        assert {*own} < {*kept[rank % 3]}
    assert shared_on_node(parts, 6) == owned
