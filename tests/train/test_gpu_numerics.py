"""bfloat16 on the `cuda` backend: as near to float32 as replicated runs, and a quiet self-check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ratoon.rollout.validate import validate_groups
from ratoon_proto.types import LossKind
from tests import builders
from tests.train.bf16_runs import (
    FORESTS,
    SEEDS,
    Forest,
    Pair,
    assert_as_near_as_replicated,
    compare,
    make_pair,
)
from tests.train.trainer_runs import make_loss

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pairs() -> Iterator[list[Pair]]:
    """Deterministic trainers; cuBLAS repeats its bits with a fixed workspace alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield [make_pair("small", seed, device="cuda:0", backend="cuda") for seed in SEEDS]


@pytest.mark.parametrize("forest", FORESTS)
def test_packed_error_is_that_of_replicated_runs(pairs: list[Pair], forest: Forest) -> None:
    found = [compare(pair, forest, seed) for seed, pair in zip(SEEDS, pairs, strict=True)]
    assert_as_near_as_replicated(found)


@pytest.mark.parametrize("forest", FORESTS)
def test_the_self_check_is_quiet_and_leaves_the_bits(pairs: list[Pair], forest: Forest) -> None:
    """In both dtypes: the window's sums after it are those of a run without it."""
    batch = validate_groups(forest(np.random.default_rng(7)), builders.limits())
    for trainer in (pairs[0].low_precision, pairs[0].wide):
        loss = make_loss(batch, LossKind.GRPO)
        plan = trainer.prepare(batch, loss).plan
        plain_spec, sums = trainer.spec, []
        for every in (0, 1):
            trainer.spec = replace(plain_spec, self_check_every=every)
            report = trainer.forward_backward(batch, loss, plan)
            sums.append({name: x.clone() for name, x in trainer.ranks.own.gradients.sums().items()})
            trainer.discard_gradients()
        trainer.spec = plain_spec
        assert report.self_check is not None
        assert not report.self_check.exceeds_limits, report.self_check
        assert report.self_check.gradient_difference
        for name, tensor in sums[0].items():
            assert tensor.equal(sums[1][name]), name
