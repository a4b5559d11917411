"""Policies of several ranks: the updates of one, whoever runs what and keeps what."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ratoon.errors import ErrorCode, RatoonError
from ratoon.model import safetensors_files
from ratoon.model.export import export_weights
from ratoon.model.spec import FolderBase, LoraTuning, ModelDtype
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.costs import CostModel
from ratoon.rollout.packed import UpdatePlan
from ratoon.rollout.plan import make_plan
from ratoon.rollout.prefixes import SortedPrefixes, sort_sequences
from ratoon.stream.manifest import WeightKind
from ratoon.stream.versions import publish_version
from ratoon.train import prepare
from ratoon.train.config import LossKind, NumericsGuard, OptimizerStates, Shard
from ratoon.train.copies import Copies, CopyFailedError, open_meeting
from ratoon.train.gradient_window import WindowState
from ratoon.train.numerics import device_model
from ratoon.train.optim.parts import Part, parts_of, shared_out
from ratoon.train.planning import cpu_planner
from ratoon.train.report.step_report import SkipReason, StepReport
from ratoon.train.trainer import Trainer
from tests.train.rank_runs import FILE_BYTES, ranked
from tests.train.trainer_runs import (
    FROZEN,
    assert_close,
    assert_equal,
    make_batch,
    make_loss,
    make_step,
    make_trainer,
)

_LORA = LoraTuning(rank=2, alpha=4.0)
# Calls cost nothing: what does not fit is streamed.
_EAGER = CostModel(pair=1e-3, row=0.1, call=0.0, resident=0.0)
_SHARDS = pytest.mark.parametrize("shard", [Shard.STATES, Shard.GRADIENTS])


def _spread(plan: UpdatePlan, ranks: tuple[int, ...]) -> UpdatePlan:
    """The same cuts, in turn on these ranks: those of a plan of one rank, to compare with it."""
    parts = enumerate(plan.micro_batches)
    return replace(
        plan,
        micro_batches=tuple(replace(part, rank=ranks[index % len(ranks)]) for index, part in parts),
    )


def _update(
    trainer: Trainer, seed: int, ranks: tuple[int, ...] = (0,), **changes: Any
) -> StepReport:
    batch = make_batch(seed)
    loss = make_loss(batch)
    cuts = prepare.prepare(batch, loss, version=trainer.version, planner=cpu_planner(32)).plan
    plan = _spread(cuts, ranks)
    assert len(plan.micro_batches) >= len(ranks)
    return trainer.update(batch, loss, make_step(trainer, loss, **changes), plan)


def _sequences(batch: RolloutBatch) -> tuple[RolloutBatch, SortedPrefixes, NDArray[np.bool_]]:
    return batch, sort_sequences(batch), prepare.has_trained_tokens(batch)


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    parameters = trainer.model.named_trainable()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _alone(base: FolderBase, **options: object) -> Trainer:
    return make_trainer(base, tokens=32, **options)  # pyright: ignore[reportArgumentType]


@pytest.fixture(params=[Shard.STATES, Shard.GRADIENTS])
def pair(base: FolderBase, request: pytest.FixtureRequest) -> Iterator[tuple[Trainer, Trainer]]:
    """A trainer of one rank and one of two, in float64."""
    alone = _alone(base)
    with ranked(alone.spec, 2, shard=request.param) as (two, _):
        yield alone, two


@pytest.mark.parametrize("part_elements", [100, 1 << 25])
@pytest.mark.parametrize("num_ranks", [2, 4])
@_SHARDS
def test_three_updates_are_those_of_one_rank(
    base: FolderBase, num_ranks: int, part_elements: int, shard: Shard
) -> None:
    alone = _alone(base)
    with ranked(alone.spec, num_ranks, part_elements, shard) as (trainer, _):
        for seed in range(3):
            one = _update(alone, seed)
            many = _update(trainer, seed, tuple(range(num_ranks)))
            assert (one.skipped, many.skipped) == (False, False)
            assert many.loss == pytest.approx(one.loss, rel=1e-12)
            assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-10)
            assert one.trained_tokens == many.trained_tokens
            assert (len(one.rank_seconds), len(many.rank_seconds)) == (0, num_ranks)
        assert_close(_weights(trainer), _weights(alone))
        assert trainer.fingerprint()["num_devices"] == str(num_ranks)


def test_ranks_of_different_devices_are_refused(
    base: FolderBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratoon.train.rank.device_model", lambda _device: "NVIDIA H200")
    spec = _alone(base).spec
    with pytest.raises(RatoonError, match="different devices") as caught, ranked(spec, 2):
        pass
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert caught.value.expected == "NVIDIA H200"
    assert caught.value.got == device_model(torch.device("cpu"))


@_SHARDS
def test_three_updates_of_an_adapter_are_those_of_one_rank(base: FolderBase, shard: Shard) -> None:
    """Asked for by name, its gradients are sharded as any; left to choose, only states are."""
    alone = _alone(base, tuning=_LORA)
    with ranked(alone.spec, 2, 100, shard) as (two, _):
        for seed in range(3):
            _update(alone, seed)
            assert not _update(two, seed, (0, 1)).skipped
        assert_close(_weights(two), _weights(alone))
        assert bool(two.ranks.own.gradients.shards()) == (shard is Shard.GRADIENTS)


def test_its_own_plans_give_every_rank_work(base: FolderBase) -> None:
    alone = _alone(base)
    with ranked(alone.spec, 3) as (trainer, _):
        for seed in range(2):
            batch = make_batch(seed)
            loss = make_loss(batch)
            for one in (alone, trainer):
                plan = one.prepare(batch, loss).plan
                report = one.update(batch, loss, make_step(one, loss), plan)
            assert {part.rank for part in plan.micro_batches} == {0, 1, 2}
            assert report.rank_gap == plan.rank_gap
            assert min(report.rank_seconds) > 0
        assert_close(_weights(trainer), _weights(alone))


@pytest.mark.parametrize("kind", list(LossKind))
def test_every_loss_in_a_window_of_two_calls(
    pair: tuple[Trainer, Trainer], kind: LossKind, tmp_path: Path
) -> None:
    reports: list[StepReport] = []
    names: list[str] = []
    for trainer, ranks in zip(pair, ((0,), (0, 1)), strict=True):
        for seed in (3, 4):
            fields = {"outcome": "weights"} if kind is LossKind.CROSS_ENTROPY else {}
            batch = make_batch(seed, **fields)
            loss = make_loss(batch, kind)
            plan = _spread(trainer.prepare(batch, loss).plan, ranks)
            trainer.forward_backward(batch, loss, plan)
        names = list(trainer.model.named_trainable())
        trainer.write_gradients(tmp_path / str(len(ranks)), names[:3])
        divisor = {"divide_constant": 8.0} if kind is LossKind.DR_GRPO else {}
        step = make_step(trainer, loss, tensor_grad_norms=True, **divisor)
        reports.append(trainer.optim_step(step))
    one, two = reports
    assert two.loss == pytest.approx(one.loss, rel=1e-10, abs=1e-12)
    assert two.entropy == pytest.approx(one.entropy, rel=1e-10)
    assert [each.name for each in two.tensor_grad_norms] == names
    for mine, theirs in zip(two.tensor_grad_norms, one.tensor_grad_norms, strict=True):
        assert mine.norm == pytest.approx(theirs.norm, rel=1e-8)
    sums = [load_file(tmp_path / str(count)) for count in (1, 2)]
    assert_close(sums[1], sums[0])
    assert_close(_weights(pair[1]), _weights(pair[0]))


@pytest.mark.parametrize("kind", list(OptimizerStates))
@pytest.mark.parametrize("tuning", [None, _LORA])
@_SHARDS
def test_a_shared_out_step_has_the_bits_of_a_whole_one(
    base: FolderBase, kind: OptimizerStates, tuning: LoraTuning | None, shard: Shard
) -> None:
    """Rank 1 runs everything, and steps what is its own: the sums are those of one rank."""
    spec = replace(
        _alone(base, dtype=ModelDtype.BFLOAT16, tuning=tuning).spec, optimizer_states=kind
    )
    with ranked(spec, 1, 4096) as (alone, _), ranked(spec, 2, 4096, shard) as (two, _):
        assert len(two.ranks.own.shares.own(_weights(two))) > 1
        for seed in range(3):
            asked = {"tensor_grad_norms": True, "changed_share": True}
            one, many = _update(alone, seed, (0,), **asked), _update(two, seed, (1,), **asked)
            assert (many.grad_norm, many.changed_share) == (one.grad_norm, one.changed_share)
            assert many.tensor_grad_norms == one.tensor_grad_norms
            assert two.state_digest() == alone.state_digest()
        assert_equal(_weights(two), _weights(alone))


@_SHARDS
def test_the_same_again_has_the_same_bits(base: FolderBase, shard: Shard) -> None:
    spec = _alone(base, dtype=ModelDtype.BFLOAT16).spec
    digests: list[str] = []
    for _ in range(2):
        with ranked(spec, 4, shard=shard) as (trainer, _):
            for seed in range(2):
                _update(trainer, seed, (0, 1, 2, 3))
            digests.append(trainer.state_digest())
    assert digests[0] == digests[1]


def test_checkpoints_are_loaded_by_any_number_of_ranks(base: FolderBase, tmp_path: Path) -> None:
    """Of four, of two, of one, whatever is sharded: the same bits, and steps from there."""
    spec = replace(
        _alone(base, dtype=ModelDtype.BFLOAT16).spec, optimizer_states=OptimizerStates.BF16_SPLIT
    )
    digests: list[str] = []
    with ranked(spec, 4, shard=Shard.GRADIENTS) as (trainer, _):
        _update(trainer, 0, (0, 1, 2, 3))
        trainer.save_checkpoint(tmp_path / "four")
        assert len(list((tmp_path / "four").glob("states-*-of-00004.safetensors"))) == 4
        _update(trainer, 1, (3,))
        digests.append(trainer.state_digest())
    with ranked(spec, 2) as (trainer, _):
        trainer.load_checkpoint(tmp_path / "four")
        trainer.save_checkpoint(tmp_path / "two")
        _update(trainer, 1, (1,))
        digests.append(trainer.state_digest())
        # A file of the other rank is damaged: it says so, and nothing changes anywhere.
        path = sorted((tmp_path / "four").glob("states-*"))[3]
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(RatoonError, match=path.name):
            trainer.load_checkpoint(tmp_path / "four")
        assert trainer.state_digest() == digests[1]
    alone = Trainer.create(spec)
    alone.load_checkpoint(tmp_path / "two")
    assert alone.version == 1
    _update(alone, 1)
    assert digests == [alone.state_digest()] * 2


def test_a_forward_is_that_of_one_rank(pair: tuple[Trainer, Trainer]) -> None:
    alone, two = pair
    batch = make_batch(9)
    plan = _spread(alone.plan_forward(batch), (0, 1))
    mine, one = (
        two.forward(batch, plan, with_entropy=True, use_reference=True),
        alone.forward(batch, _spread(plan, (0,)), with_entropy=True, use_reference=True),
    )
    assert mine.entropy is not None
    assert one.entropy is not None
    assert np.array_equal(mine.logprobs, one.logprobs)
    assert np.array_equal(mine.entropy, one.entropy)
    assert np.count_nonzero(one.logprobs) > 10
    assert mine.report.entropy == one.report.entropy


@pytest.mark.parametrize("adds", [False, True])
def test_imported_weights_reach_every_rank(base: FolderBase, tmp_path: Path, adds: bool) -> None:
    spec = _alone(base, dtype=ModelDtype.BFLOAT16).spec
    alone = Trainer.create(spec)
    (tmp_path / "weights").mkdir()
    export_weights(alone.model, tmp_path / "weights", None)
    with ranked(spec, 2) as (two, _):
        for trainer, ranks in ((alone, (0,)), (two, (1,))):
            _update(trainer, 0, ranks)
            weights = trainer.read_weights(tmp_path / "weights", "")
            trainer.import_weights(weights, adds=adds, resets_optimizer=not adds)
            _update(trainer, 1, ranks)
        assert two.state_digest() == alone.state_digest()
        assert_equal(_weights(two), _weights(alone))


def test_an_import_that_one_rank_cannot_add_changes_none(base: FolderBase, tmp_path: Path) -> None:
    spec = _alone(base, dtype=ModelDtype.FLOAT32).spec
    (tmp_path / "weights").mkdir()
    far = Trainer.create(spec)
    last = list(far.model.named_trainable().values())[-1]
    last.data.fill_(1.2e38)
    export_weights(far.model, tmp_path / "weights", None)
    with ranked(spec, 2) as (two, _):
        two.import_weights(
            two.read_weights(tmp_path / "weights", ""), adds=False, resets_optimizer=False
        )
        before = two.state_digest()
        with pytest.raises(RatoonError, match="finite"):
            two.import_weights(
                two.read_weights(tmp_path / "weights", ""), adds=True, resets_optimizer=False
            )
        assert two.state_digest() == before


def test_a_step_that_is_skipped_changes_no_rank(pair: tuple[Trainer, Trainer]) -> None:
    _, two = pair
    before, spec = two.state_digest(), two.spec
    two.spec = replace(spec, guard=NumericsGuard(max_grad_norm_to_step=1e-9))
    report = _update(two, 5, (0, 1))
    two.spec = spec
    assert report.skip_reason is SkipReason.GRADIENT_NORM
    assert two.state_digest() == before
    assert _update(two, 5, (0, 1)).grad_norm == report.grad_norm


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_of_one_rank_is_the_callers_and_changes_nothing(
    pair: tuple[Trainer, Trainer], failing: int
) -> None:
    _, two = pair
    batch, before = make_batch(6), two.state_digest()
    loss = make_loss(batch)
    plan = _spread(two.prepare(batch, loss).plan, (0, 1))
    parts = [*plan.micro_batches]
    # The last of several: the others have begun to wait for what comes of it.
    last = max(index for index, part in enumerate(parts) if part.rank == failing)
    assert last > 1
    parts[last] = replace(parts[last], packed_tokens=parts[last].packed_tokens + 1)
    damaged = replace(plan, micro_batches=tuple(parts))
    with pytest.raises(RatoonError, match="of another batch"):
        two.update(batch, loss, make_step(two, loss), damaged)
    assert two.window_state is WindowState.EMPTY
    assert two.state_digest() == before
    report = two.update(batch, loss, make_step(two, loss), plan)
    assert not report.skipped


def test_a_pass_that_fails_on_one_rank_is_not_run_to_its_end_by_another(base: FolderBase) -> None:
    """Which hears of it with the gradients that it is not sent."""
    with ranked(_alone(base).spec, 2, 100, Shard.GRADIENTS) as (two, _):
        batch = make_batch(6, num_groups=16)
        loss = make_loss(batch)
        plan = _spread(cpu_planner(8).plan(*_sequences(batch)), (0, 1))
        parts = [*plan.micro_batches]
        second = [index for index, part in enumerate(parts) if part.rank == 1][1]
        parts[second] = replace(parts[second], packed_tokens=parts[second].packed_tokens + 1)
        done: list[int] = []
        with pytest.raises(RatoonError, match="of another batch"):
            two.forward_backward(
                batch,
                loss,
                replace(plan, micro_batches=tuple(parts)),
                on_progress=lambda number, _planned, _tokens: done.append(number),
            )
        assert len(parts) // 2 > 10
        assert max(done) <= 6


def test_a_cancelled_update_leaves_every_rank_as_it_was(pair: tuple[Trainer, Trainer]) -> None:
    _, two = pair
    batch, before = make_batch(7), two.state_digest()
    loss = make_loss(batch, kl=FROZEN)
    plan = _spread(two.prepare(batch, loss).plan, (0, 1))
    calls: list[int] = []

    def is_cancelled() -> bool:
        calls.append(1)
        return len(calls) > 1

    with pytest.raises(RatoonError) as caught:
        two.update(batch, loss, make_step(two, loss), plan, is_cancelled=is_cancelled)
    assert caught.value.code is ErrorCode.CANCELLED
    assert two.state_digest() == before
    assert not two.update(batch, loss, make_step(two, loss), plan).skipped


def test_a_rank_that_is_gone_is_an_error_and_no_wait(base: FolderBase) -> None:
    with ranked(_alone(base).spec, 2) as (two, (peer,)):
        _update(two, 0, (0, 1))
        peer.kill()
        with pytest.raises((RuntimeError, OSError)):
            _update(two, 1, (0, 1))


def test_a_late_rank_of_an_earlier_worker_does_not_join() -> None:
    """Its port may be the one that the next worker got: it must not be taken for its rank."""
    meeting, store = open_meeting("127.0.0.1", 2, timeout_s=0.5)
    late = replace(meeting, name="of an earlier worker")
    # As rank 0 does, for which nobody plays the rest.
    PrefixStore(meeting.name, store).set("here/0", "")
    with pytest.raises(CopyFailedError, match="rank 1 could not join"):
        Copies.join(late, 1, torch.device("cpu"))
    assert PrefixStore(meeting.name, store).check(["here/1"]) is False


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_dies_in_the_pass_is_waited_for_by_none(
    base: FolderBase, num_ranks: int
) -> None:
    """Of four, the two others do not wait for one another either."""
    with ranked(_alone(base).spec, num_ranks, 100, Shard.GRADIENTS) as (trainer, peers):
        batch = make_batch(1, num_groups=12)
        loss = make_loss(batch)
        plan = trainer.prepare(batch, loss).plan
        assert len(plan.of_rank(0).micro_batches) > 1

        def kill(done: int, _planned: int, _tokens: int) -> None:
            if done == 1:
                peers[-1].kill()

        with pytest.raises((RuntimeError, OSError, CopyFailedError)):
            trainer.forward_backward(batch, loss, plan, on_progress=kill)


def test_a_rank_that_hangs_in_a_pass_that_is_cancelled_ends_the_exchange(
    base: FolderBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing says that it is gone: its connections stay."""
    monkeypatch.setattr("ratoon.train.optim.layer_exchange._END_S", 1.0)
    with ranked(_alone(base).spec, 2, 100, Shard.GRADIENTS) as (two, (peer,)):
        batch = make_batch(1, num_groups=8)
        loss = make_loss(batch)
        assert peer.process.pid is not None
        os.kill(peer.process.pid, signal.SIGSTOP)
        # Rank 0 asks for its answer in the end.
        end = threading.Timer(4.0, peer.process.kill)
        end.start()
        started = time.monotonic()
        with pytest.raises(CopyFailedError, match="have not ended"):
            two.forward_backward(
                batch,
                loss,
                two.prepare(batch, loss).plan,
                is_cancelled=lambda: time.monotonic() > started + 1.0,
            )
        end.join()


def test_streamed_micro_batches_and_ranks_with_more_of_them_than_others(
    pair: tuple[Trainer, Trainer],
) -> None:
    """Rank 0 has three of four; of stages some are not predicted from, and have no backward."""
    for seed in range(3):
        batch = make_batch(seed, num_groups=8)
        loss = make_loss(batch, kind=(LossKind.GRPO, LossKind.GSPO)[seed % 2])
        cuts = make_plan(*_sequences(batch), 16, _EAGER)
        assert any(part.stages for part in cuts.micro_batches)
        for trainer, ranks in zip(pair, ((0,), (1, 0, 0, 0)), strict=True):
            step = make_step(trainer, loss)
            assert not trainer.update(batch, loss, step, _spread(cuts, ranks)).skipped
    assert_close(_weights(pair[1]), _weights(pair[0]))


def test_a_rank_keeps_the_sums_of_its_share_of_layers(base: FolderBase) -> None:
    spec = replace(_alone(base, dtype=ModelDtype.BFLOAT16).spec, optimizer_states=None)
    alone = Trainer.create(spec)
    with ranked(spec, 4, 100, Shard.GRADIENTS) as (four, _):
        assert four.info().shard == four.fingerprint()["layout"] == "gradients"
        whole = {name: 4 * p.numel() for name, p in alone.model.named_trainable().items()}
        layers = {name for layer in alone.model.named_layers() for name in layer}
        in_layers = sum(whole[name] for name in layers)
        outside = sum(whole.values()) - in_layers
        assert min(in_layers, outside) > 0
        _update(four, 0, (0, 1, 2, 3))
        kept = sum(each.nbytes for each in four.ranks.own.gradients.sums().values())
        assert kept - outside == pytest.approx(in_layers / 4, abs=4 * 100)


def test_the_self_check_has_the_sums_to_itself(base: FolderBase) -> None:
    """It compares what rank 0 keeps, and leaves the sums of the update as they are."""
    digests: list[str] = []
    for every in (0, 1):
        with ranked(_alone(base).spec, 2, 100, Shard.GRADIENTS) as (two, _):
            two.spec = replace(two.spec, self_check_every=every)
            report = _update(two, 0, (0, 1))
            digests.append(two.state_digest())
    assert digests[0] == digests[1]
    found = report.self_check
    assert found is not None
    assert found.gradient_difference is not None
    assert 0 < found.gradient_difference < 1e-12
    assert found.worst_parameter in two.model.named_trainable()


def test_a_checkpoint_that_fails_stops_no_pass_beside_it(base: FolderBase, tmp_path: Path) -> None:
    with ranked(_alone(base).spec, 2) as (two, (peer,)):
        snapshot = two.snapshot()
        two.ranks.own._held.clear()
        with pytest.raises(KeyError):
            snapshot.write(tmp_path / "two")
        assert not peer.is_stopped()
        assert not (tmp_path / "two").exists()
        assert not _update(two, 0, (0, 1)).skipped


@pytest.mark.parametrize("tuning", [None, _LORA])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_version_is_written_by_shares(
    base: FolderBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tuning: LoraTuning | None,
    num_ranks: int,
) -> None:
    """As the weights were when they were held, in the bytes that one rank writes."""
    monkeypatch.setattr(safetensors_files, "_MIN_FILE_BYTES", FILE_BYTES)
    for name in ("whole", "shared", "again"):
        (tmp_path / name).mkdir()
    options = {} if tuning is None else {"tuning": tuning}
    with ranked(_alone(base, **options).spec, num_ranks) as (trainer, _):
        _update(trainer, 0, tuple(range(num_ranks)))
        expected = export_weights(trainer.model, tmp_path / "whole", None)
        held = trainer.copy_weights()
        _update(trainer, 1, tuple(range(num_ranks)))
        assert held.write(tmp_path / "shared") == expected
        shares = trainer.ranks.all("write_weights", str(tmp_path / "again"))
    assert sum(len(share) for share in shares) == len(expected)
    assert all(shares) == (tuning is None)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "shared" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_version_of_which_a_share_is_lost_is_not_there(base: FolderBase, tmp_path: Path) -> None:
    with ranked(_alone(base).spec, 2) as (two, (peer,)):
        held = two.copy_weights()
        peer.kill()
        with pytest.raises((RuntimeError, OSError)):
            publish_version(tmp_path / "root", "p", 1, WeightKind.FULL, held.write, 0.0)
    assert list((tmp_path / "root").iterdir()) == []


def test_parts_are_shared_out_evenly_of_each_parameter_too() -> None:
    sizes = {"a": 1000, "b": 10, "c": 2500, "d": 400, "e": 90}
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    parts = parts_of(tensors, 100)
    assert [part.name for part in parts if part.parameter == "d"] == [
        "d@0",
        "d@100",
        "d@200",
        "d@300",
    ]
    assert parts[10] == Part(name="b", start=0, stop=10)
    for num_ranks in (1, 2, 3, 8, 100):
        shares = shared_out(parts, num_ranks)
        given = [part for share in shares for part in share]
        assert sorted(given, key=parts.index) == parts
        assert all(share == sorted(share, key=parts.index) for share in shares)
        elements = [sum(part.stop - part.start for part in share) for share in shares]
        assert max(elements) <= 4000 / num_ranks + 100
        of_c = [sum(part.parameter == "c" for part in share) for share in shares]
        assert max(of_c) <= 25 / num_ranks + 2


def test_a_part_is_a_view_of_its_parameter() -> None:
    parameter = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    first, second = parts_of({"p": parameter}, 8)
    second.of(parameter).fill_(-1.0)
    assert first.of(parameter).tolist() == list(range(8))
    assert parameter.flatten()[8:].tolist() == [-1.0] * 4
