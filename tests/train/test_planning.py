"""Plans of a device: the cheapest number of tokens, and prefixes that do not pay, unshared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.policy_model import PolicyModel
from ratoon.model.spec import FolderBase
from ratoon.planner.activation_plan import NO_LOAD, HeadLoad, Kept, most_tokens
from ratoon.planner.costs import CostModel, SequenceSizes, measure
from ratoon.planner.device_costs import H100_RATES, H200_RATES
from ratoon.planner.plan import Devices, draft_plan, share_as_planned
from ratoon.planner.planning import (
    CPU_TOKENS,
    Planner,
    cpu_planner,
    device_planner,
    group_sizes,
    head_load,
)
from ratoon.planner.stage_plan import HeldTokens
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.prefixes import SortedPrefixes, sort_sequences
from ratoon.rollout.validate import validate_groups
from ratoon.train import prepare
from ratoon.train.loss.resolve import resolve_loss
from ratoon_proto.types import (
    DistillationConfig,
    Divergence,
    LossConfig,
    LossKind,
    ParallelLayout,
    SharedTokens,
)
from tests.builders import group, limits, rollout
from tests.model.test_activation_plan import QWEN3_8B
from tests.plans import journaled
from tests.train.trainer_runs import (
    FROZEN,
    assert_close,
    gradients_of,
    make_batch,
    make_loss,
    make_trainer,
)

GIB = 2**30
SHARES = CostModel(pair=0.01, row=0.1, call=2.0, resident=0.0)
# Most of the small batch's prefixes do not pay, the longer ones do.
GATED = replace(SHARES, fork=300.0)


@pytest.mark.parametrize(
    ("kind", "shared", "tokens"),
    [
        (LossKind.GRPO, SharedTokens.SUM, 25),
        (LossKind.GRPO, SharedTokens.ONCE, 10**6),
        (LossKind.GSPO, SharedTokens.ONCE, 25),
    ],
)
def test_unshared_prefixes_change_nothing(
    base: FolderBase, kind: LossKind, shared: SharedTokens, tokens: int
) -> None:
    """In float64; and what the journal has of the plan is run as it was made."""
    trainer, batch = make_trainer(base), make_batch(3, num_groups=6)
    loss = make_loss(batch, kind, shared_tokens=shared, kl=FROZEN)
    found: list[tuple[UpdatePlan, Any, Any]] = []
    for costs in (SHARES, GATED):
        planner = Planner(devices=(Devices(candidates=(tokens,), costs=costs),))
        prepared = prepare.prepare(batch, loss, version=0, plan=planner)
        plan = journaled(prepared.plan)
        assert plan == prepared.plan
        again = prepare.prepare(batch, loss, version=0, plan=plan)
        np.testing.assert_array_equal(again.prefixes.lcp, prepared.prefixes.lcp)
        np.testing.assert_array_equal(again.columns.counted_J, prepared.columns.counted_J)
        assert again.counters == prepared.counters
        forward = trainer.forward(
            trainer.prepare_forward(batch, plan), with_entropy=False, use_reference=False
        )
        report = trainer.forward_backward(trainer.prepare(batch, loss, plan))
        found.append((plan, forward.logprobs, (report, gradients_of(trainer))))
        trainer.discard_gradients()
    (whole, logprobs, (report, gradients)), (gated, others, (other, gated_gradients)) = found
    assert gated.unshared
    assert not whole.unshared
    assert 1.2 * whole.packed_tokens < gated.packed_tokens < gated.unshared_tokens
    np.testing.assert_allclose(others, logprobs, rtol=0, atol=1e-12)
    assert other.loss == pytest.approx(report.loss, rel=1e-10)
    assert_close(gated_gradients, gradients)


def test_a_plan_of_more_sequences_is_an_error(base: FolderBase) -> None:
    trainer, batch = make_trainer(base), make_batch(3, num_groups=2)
    other = make_batch(3, num_groups=6)
    plan, loss = trainer.prepare_forward(other).plan, make_loss(batch)
    for run in (
        lambda: trainer.forward(
            trainer.prepare_forward(batch, plan), with_entropy=False, use_reference=False
        ),
        lambda: trainer.forward_backward(trainer.prepare(batch, loss, plan)),
    ):
        with pytest.raises(RatoonError) as caught:
            run()
        assert caught.value.code is ErrorCode.INTERNAL


def test_a_cpu_has_its_tokens_unless_others_are_asked_for() -> None:
    assert _of_one(cpu_planner(None)).candidates == (CPU_TOKENS,) == (16_384,)
    assert _of_one(cpu_planner(77)).candidates == (77,)


def _of_one(planner: Planner) -> Devices:
    """What one device alone holds and costs."""
    return planner.devices[0]


def _with(planner: Planner, tokens: int) -> Planner:
    """A planner of micro-batches of so many tokens."""
    return replace(planner, devices=(replace(_of_one(planner), candidates=(tokens,)),))


def _device(tokens: int | None, gib: int) -> Planner:
    return device_planner(tokens, QWEN3_8B, gib * GIB, 0, rates=H200_RATES, layers_are_trained=True)


def _groups(num_groups: int, prompt: int, count: int, length: int) -> RolloutBatch:
    rng = np.random.default_rng(0)
    groups = [
        group(
            rng.integers(0, 1000, prompt),
            [rollout(rng.integers(0, 1000, length)) for _ in range(count)],
            f"g{g}",
        )
        for g in range(num_groups)
    ]
    return validate_groups(groups, limits(vocab_size=1000, max_sequence_tokens=10**6))


def _seconds(plan: UpdatePlan, planner: Planner, batch: RolloutBatch) -> float:
    prefixes: SortedPrefixes = share_as_planned(sort_sequences(batch), plan.unshared)
    sizes: SequenceSizes = measure(batch, prefixes)
    total = 0.0
    for part in plan.micro_batches:
        work = sizes.work(np.sort(prefixes.rank[list(part.sequences)]))
        costs = _of_one(planner).costs
        total += costs.streamed(work, part.stages) if part.stages else costs.packed(work)
    return total


@pytest.mark.parametrize(
    ("shape", "gib"),
    [((1, 5059, 32, 1133), 60), ((8, 1000, 8, 700), 60), ((1, 5059, 32, 1133), 20)],
)
def test_an_automatic_plan_is_the_cheapest(shape: tuple[int, int, int, int], gib: int) -> None:
    planner, batch = _device(None, gib), _groups(*shape)
    kept_S = np.ones(batch.num_sequences, np.bool_)
    plan = planner.plan(batch, sort_sequences(batch), kept_S)
    assert len(_of_one(planner).candidates) > 2
    assert plan.micro_batch_tokens in _of_one(planner).candidates
    seconds = [
        _seconds(
            _with(planner, tokens).plan(batch, sort_sequences(batch), kept_S),
            planner,
            batch,
        )
        for tokens in _of_one(planner).candidates
    ]
    assert _seconds(plan, planner, batch) == min(seconds) < max(seconds)


@pytest.mark.parametrize(
    ("shape", "gib", "host_gib"),
    [
        ((1, 5059, 32, 1133), 14, 24),
        ((1, 5059, 32, 1133), 68, 0),
        ((16, 2000, 8, 850), 30, 0),
        ((1, 16_384, 8, 1024), 14, 0),
    ],
)
def test_no_budget_between_the_candidates_is_much_cheaper(
    shape: tuple[int, int, int, int], gib: int, host_gib: int
) -> None:
    sizes = gib * GIB, host_gib * GIB
    planner = device_planner(None, QWEN3_8B, *sizes, rates=H100_RATES, layers_are_trained=True)
    batch = _groups(*shape)
    prefixes, kept_S = sort_sequences(batch), np.ones(batch.num_sequences, np.bool_)
    steps = np.geomspace(_of_one(planner).candidates[0], _of_one(planner).candidates[-1], 20)
    least = min(
        _seconds(
            _with(planner, int(tokens)).plan(batch, prefixes, kept_S),
            planner,
            batch,
        )
        for tokens in steps
    )
    assert _seconds(planner.plan(batch, prefixes, kept_S), planner, batch) < 1.015 * least


def test_no_micro_batch_has_more_tokens_than_attention_serves() -> None:
    batch = _groups(4, 3000, 8, 1000)
    prefixes, kept_S = sort_sequences(batch), np.ones(batch.num_sequences, np.bool_)
    sizes = None, QWEN3_8B, 100 * GIB, 0
    found: list[int] = []
    for most in (None, 16_000):
        planner = device_planner(*sizes, rates=H200_RATES, layers_are_trained=True, max_tokens=most)
        plan = planner.plan(batch, prefixes, kept_S)
        found.append(max(part.packed_tokens for part in plan.micro_batches))
    assert found[0] > 16_000 >= found[1]


def test_planners_spread_over_their_ranks() -> None:
    batch = _groups(6, 100, 4, 300)
    kept_S = np.ones(batch.num_sequences, np.bool_)
    of_device = device_planner(
        None, QWEN3_8B, 60 * GIB, 0, rates=H200_RATES, layers_are_trained=True, num_ranks=3
    )
    for planner in (of_device, cpu_planner(None, num_ranks=3)):
        plan = planner.plan(batch, sort_sequences(batch), kept_S)
        seconds = [_seconds(plan.of_rank(rank), planner, batch) for rank in range(3)]
        assert seconds == pytest.approx([sum(seconds) / 3] * 3)
    assert {part.rank for part in _cpu_plan(batch).micro_batches} == {0}


def _joint_planner(num_ranks: int, gib: int, parallel: ParallelLayout | None = None) -> Planner:
    parallel = parallel or ParallelLayout(num_workers=num_ranks)
    return device_planner(
        None,
        QWEN3_8B,
        gib * GIB,
        0,
        rates=H200_RATES,
        layers_are_trained=True,
        num_ranks=num_ranks,
        group_sizes=group_sizes(parallel, QWEN3_8B.num_heads),
    )


def _plan_of(planner: Planner, batch: RolloutBatch) -> UpdatePlan:
    kept_S = np.ones(batch.num_sequences, np.bool_)
    return planner.plan(batch, sort_sequences(batch), kept_S)


def test_ranks_are_put_together_where_a_path_fits_none_of_them_alone() -> None:
    most = _of_one(_joint_planner(1, 10)).limits.at_once
    wider = {each.sequence_ranks: each.limits.at_once for each in _joint_planner(8, 10).devices[1:]}
    assert wider == {2: 2 * most, 4: 4 * most, 8: 8 * most}
    # Other ranks have work enough, so that nothing but its size speaks for it.
    rng = np.random.default_rng(0)
    long = rollout(rng.integers(0, 1000, 100))
    groups = [group(rng.integers(0, 1000, 3 * most // 2), [long], f"g{g}") for g in range(4)]
    batch = validate_groups(groups, limits(vocab_size=1000, max_sequence_tokens=10**6))
    plan = _plan_of(_joint_planner(4, 10), batch)
    assert (plan.sequence_ranks, plan.rank_gap) == (2, 0.0)
    assert [part.packed_tokens > most for part in plan.micro_batches] == [True] * 4


def test_ranks_are_put_together_for_fewer_groups_than_ranks() -> None:
    long, many = _groups(1, 30_000, 1, 100), _groups(16, 1000, 8, 700)
    planner = _joint_planner(4, 60)
    assert [each.sequence_ranks for each in planner.devices] == [1, 2, 4]
    assert _plan_of(planner, long).sequence_ranks == 4
    assert _plan_of(planner, many).sequence_ranks == 1
    costs = [
        draft_plan(long, sort_sequences(long), np.ones(1, np.bool_), each, num_ranks=4).cost
        for each in planner.devices
    ]
    # What is exchanged costs less than it saves, but not nothing.
    assert costs[0] / 4 < costs[2] < costs[1] < costs[0] < 4.5 * costs[2]


def test_ranks_that_run_a_group_together_have_the_room_of_sums_that_they_do_not_need() -> None:
    batch = _groups(1, 60_000, 2, 100)
    small, large = _joint_planner(2, 15), _joint_planner(2, 40)
    cut, whole = _plan_of(small, batch), _plan_of(small.with_only(large), batch)
    assert (cut.sequence_ranks, cut.is_one_backward) == (2, False)
    assert (whole.sequence_ranks, whole.is_one_backward) == (2, True)
    assert whole == _plan_of(large, batch)
    assert _plan_of(small.with_only(large).beside_sums(), batch) == cut


def test_ranks_that_are_to_run_together_always_do() -> None:
    parallel = ParallelLayout(num_workers=4, sequence_ranks=2)
    planner = _joint_planner(4, 60, parallel)
    plan = _plan_of(planner, _groups(16, 1000, 8, 700))
    assert plan.sequence_ranks == 2
    assert {part.rank for part in plan.micro_batches} == {0, 2}
    sequences = [part.sequences for part in plan.micro_batches]
    for rank in range(4):
        own = [part.sequences for part in plan.of_rank(rank).micro_batches]
        others = [part.sequences for part in plan.of_rank(rank ^ 1).micro_batches]
        assert own == others
        assert 0 < len(own) < len(sequences)
    assert journaled(plan) == plan


def test_groups_of_ranks_divide_the_ranks_and_the_heads() -> None:
    assert group_sizes(ParallelLayout(num_workers=12), 32) == (1, 2, 4)
    assert group_sizes(ParallelLayout(num_workers=8, sequence_ranks=8), 32) == (8,)
    with pytest.raises(RatoonError, match=r"28 query heads: 28 / 8 = 3\.5 on each rank"):
        group_sizes(ParallelLayout(num_workers=8, sequence_ranks=8), 28)


def _cpu_plan(batch: RolloutBatch) -> UpdatePlan:
    kept_S = np.ones(batch.num_sequences, np.bool_)
    return cpu_planner(None).plan(batch, sort_sequences(batch), kept_S)


def test_what_is_asked_for_is_taken_as_far_as_it_fits() -> None:
    automatic = _of_one(_device(None, 60))
    assert automatic.candidates[1] == most_tokens(QWEN3_8B, 60 * GIB, Kept.PRODUCTS)
    assert automatic.candidates[-1] == automatic.limits.at_once
    assert _of_one(_device(5000, 60)).candidates == (5000,)
    assert _of_one(_device(10**9, 60)).candidates == (automatic.limits.at_once,)
    assert _of_one(_device(10**9, 0)).candidates == (1,)


def test_short_prompts_of_long_responses_are_run_alone_on_a_device() -> None:
    batch = _groups(2, 8, 4, 4096)
    kept_S = np.ones(batch.num_sequences, np.bool_)
    plan = _device(None, 100).plan(batch, sort_sequences(batch), kept_S)
    assert len(plan.unshared) == 6
    assert plan.packed_tokens == plan.unshared_tokens
    usual = _groups(2, 64, 4, 2048)
    assert not _device(None, 100).plan(usual, sort_sequences(usual), kept_S).unshared


def _load_of(*responses: list[int], num_targets: int = 0) -> HeadLoad:
    """The load of a group of each of these responses, twice."""
    groups = [
        group([7], [rollout(response) for _ in range(2)], f"g{g}")
        for g, response in enumerate(responses)
    ]
    batch = validate_groups(groups, limits(vocab_size=1000))
    return head_load(batch, sort_sequences(batch), num_targets=num_targets)


def test_the_load_is_that_of_the_group_that_shares_most() -> None:
    assert _load_of([1, 2]) == NO_LOAD
    assert _load_of([1, 2], [3], num_targets=5) == HeadLoad(targets=10.0)
    apart = validate_groups(
        [
            group([7], [rollout([1, 2, 3]), rollout([1, 2, 4])], "a"),
            group([7], [rollout([9])], "b"),
        ],
        limits(vocab_size=1000),
    )
    # Six paths' tokens in four rows.
    load = head_load(apart, sort_sequences(apart), num_targets=4)
    assert load == HeadLoad(targets=6.0)


def test_rows_of_masks_are_counted_as_if_none_were_alike() -> None:
    batch = validate_groups(
        [group([7], [rollout([1, 2]), rollout([1, 2])], "a")], limits(vocab_size=1000)
    )
    masks = replace(
        batch,
        sampling_mask=np.array([1, 2, 1, 5, 2], np.int32),
        mask_offsets=np.array([0, 1, 2, 4, 5]),
    )
    assert head_load(masks, sort_sequences(masks)) == HeadLoad(rows=2.0)


def test_a_planner_leaves_room_for_what_a_batch_carries() -> None:
    def of(load: HeadLoad) -> Planner:
        sizes = replace(QWEN3_8B, load=load)
        return device_planner(None, sizes, 60 * GIB, 0, rates=H200_RATES, layers_are_trained=True)

    planner = replace(of(NO_LOAD), of_load=of)
    assert planner.carrying(NO_LOAD) is planner
    taught = planner.carrying(HeadLoad(targets=64.0))
    most, fewer = (max(_of_one(each).candidates) for each in (planner, taught))
    # 3.8 KB a token beside the 590 KB and more that it takes.
    assert 0.98 * most < fewer < most
    assert planner.with_only(planner).carrying(HeadLoad(targets=64.0)).only == ()
    assert cpu_planner(None).carrying(HeadLoad(targets=64.0)) == cpu_planner(None)


def test_a_pass_keeps_what_leaves_room_for_its_load(
    base: FolderBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(base)
    batch = make_batch(3, num_groups=2, num_teacher_tokens=3)
    distillation = DistillationConfig(Divergence.REVERSE_KL)
    loss = resolve_loss(
        LossConfig(kind=LossKind.DISTILLATION, distillation=distillation),
        replace(batch, rewards=None, advantages=None),
        has_frozen_reference=False,
    )
    loads: list[HeadLoad] = []
    plan = PolicyModel._plan_activations

    def planned(self: PolicyModel, held: HeldTokens) -> tuple[Kept, ...] | None:
        loads.append(self.sizes.load)
        return plan(self, held)

    monkeypatch.setattr(PolicyModel, "_plan_activations", planned)
    prepared = trainer.prepare(batch, loss)
    trainer.forward_backward(prepared)
    assert prepared.load.targets >= 3.0
    assert {*loads} == {prepared.load}
    assert trainer.model.sizes.load == NO_LOAD
