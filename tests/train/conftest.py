"""Fixtures of the trainer's tests: a small model folder, oracles, and trainers of two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratoon.model.spec import FolderBase
from ratoon.train.trainer import Trainer
from ratoon_proto.types import Shard
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import Pair, make_pair
from tests.train.rank_runs import alone_of, ranked
from tests.work_units import rows


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> FolderBase:
    return FolderBase(folder=str(write_folder(tmp_path_factory.mktemp("base"), "qwen3")))


# States alone are shared out in `test_three_updates_are_those_of_one_rank`, too.
@pytest.fixture(params=rows(Shard, now=(Shard.GRADIENTS,)))
def rank_pair(
    base: FolderBase, request: pytest.FixtureRequest
) -> Iterator[tuple[Trainer, Trainer]]:
    """A trainer of one rank and one of two, in float64, with value heads."""
    alone = alone_of(base, value_head=True)
    with ranked(alone.spec, 2, shard=request.param) as (two, _):
        yield alone, two


@pytest.fixture(scope="session")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    return make_pair(write_folder(root / "base", "qwen3"), scratch=root / "adapter")


@pytest.fixture
def pair(_pair: Pair) -> Iterator[Pair]:
    """A trainer and an oracle in float64, whose weights and version no test changes."""
    yield _pair
    _pair.discard()


@pytest.fixture(scope="session")
def _expert_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("experts")
    return make_pair(write_folder(root / "base", "qwen3_moe"), scratch=root / "adapter")


@pytest.fixture
def expert_pair(_expert_pair: Pair) -> Iterator[Pair]:
    """Pair for a model with experts."""
    yield _expert_pair
    _expert_pair.discard()
