"""Policies of several ranks: the updates of one, whoever runs what and keeps what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ratoon.errors import ErrorCode, RatoonError
from ratoon.method_call import MethodCall
from ratoon.model import safetensors_files
from ratoon.model.export import export_weights
from ratoon.model.spec import FolderBase, ModelDtype, PresetBase
from ratoon.shards.layer_shards import RING, LayerShards
from ratoon.shards.parts import Part, parts_of, shared_out
from ratoon.stream import deltas, versions
from ratoon.stream.versions import announce_version, publish_version
from ratoon.train.numerics import device_model
from ratoon.train.ranks.rank import Rank
from ratoon.train.spec import OptimizerStates
from ratoon.train.trainer import Trainer
from ratoon_proto.types import (
    LoraTuning,
    LossKind,
    NumericsGuard,
    Shard,
    SkipReason,
    StepReport,
    WeightKind,
)
from tests.plans import make_plan
from tests.tiny_models import write_folder
from tests.train.equivalence_runs import EAGER
from tests.train.rank_runs import (
    FILE_BYTES,
    alone_of,
    ranked,
    sequences_of,
    spread_over,
    update_over,
    weights_of,
)
from tests.train.trainer_runs import (
    OUTCOMES,
    assert_close,
    assert_equal,
    assert_same_found,
    make_batch,
    make_loss,
    make_step,
)
from tests.work_units import rows

_LORA = LoraTuning(rank=2, alpha=4.0)
_HEADS = ("q_proj", "embed_tokens", "lm_head")


@pytest.mark.parametrize(
    ("num_ranks", "part_elements", "shard"),
    [
        (2, 1 << 25, Shard.STATES),
        (4, 100, Shard.GRADIENTS),
        pytest.param(4, 100, Shard.STATES, marks=pytest.mark.more),
        pytest.param(2, 1 << 25, Shard.GRADIENTS, marks=pytest.mark.more),
        pytest.param(4, 100, Shard.WEIGHTS, marks=pytest.mark.more),
    ],
)
def test_three_updates_are_those_of_one_rank(
    base: FolderBase, num_ranks: int, part_elements: int, shard: Shard
) -> None:
    alone = alone_of(base)
    with ranked(alone.spec, num_ranks, part_elements, shard) as (trainer, _):
        for seed in range(3):
            one = update_over(alone, seed)
            many = update_over(trainer, seed, tuple(range(num_ranks)))
            assert (one.skipped, many.skipped) == (False, False)
            assert many.loss == pytest.approx(one.loss, rel=1e-12)
            assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-10)
            assert one.trained_tokens == many.trained_tokens
            assert (len(one.rank_seconds), len(many.rank_seconds)) == (0, num_ranks)
        assert_close(weights_of(trainer), weights_of(alone))
        assert trainer.fingerprint()["num_devices"] == str(num_ranks)


def test_ranks_of_different_devices_are_refused(
    base: FolderBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratoon.train.ranks.rank.device_model", lambda _device: "NVIDIA H200")
    spec = alone_of(base).spec
    with pytest.raises(RatoonError, match="different devices") as caught, ranked(spec, 2):
        pass
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert caught.value.expected == "NVIDIA H200"
    assert caught.value.got == device_model(torch.device("cpu"))


@pytest.mark.parametrize(
    ("architecture", "shard", "targets"),
    [
        ("qwen3_moe", Shard.STATES, ()),
        # Maps of the decoder are among them.
        ("qwen3", Shard.GRADIENTS, _HEADS),
        pytest.param("qwen3", Shard.GRADIENTS, (), marks=pytest.mark.more),
        pytest.param("qwen3_moe", Shard.GRADIENTS, (), marks=pytest.mark.more),
        pytest.param("qwen3_moe", Shard.WEIGHTS, (), marks=pytest.mark.more),
        pytest.param("llama", Shard.WEIGHTS, _HEADS, marks=pytest.mark.more),
    ],
)
def test_three_updates_of_an_adapter_are_those_of_one_rank(
    tmp_path: Path, architecture: str, shard: Shard, targets: tuple[str, ...]
) -> None:
    """Asked for by name, its gradients are sharded as any; left to choose, only states are."""
    base = FolderBase(folder=str(write_folder(tmp_path / "base", architecture)))
    alone = alone_of(base, tuning=replace(_LORA, target_modules=targets))
    with ranked(alone.spec, 2, 100, shard) as (two, _):
        for seed in range(3):
            update_over(alone, seed)
            assert not update_over(two, seed, (0, 1)).skipped
        assert_close(weights_of(two), weights_of(alone))
        assert bool(two.ranks.own.gradients.shards()) == (shard is Shard.GRADIENTS)
        assert (two.model.shards is not None) == (shard is Shard.WEIGHTS)


def test_its_own_plans_give_every_rank_work(base: FolderBase) -> None:
    alone = alone_of(base)
    with ranked(alone.spec, 3) as (trainer, _):
        assert [one.model.sizes.num_on_host for one in (alone, trainer)] == [1, 3]
        for seed in range(2):
            batch = make_batch(seed)
            loss = make_loss(batch)
            for one in (alone, trainer):
                plan = one.prepare(batch, loss).plan
                report = one.update(one.prepare(batch, loss, plan), make_step(one, loss))
            assert {part.rank for part in plan.micro_batches} == {0, 1, 2}
            assert report.rank_gap == plan.rank_gap
            assert min(report.rank_seconds) > 0
            assert_same_found(trainer.found, alone.found)
        assert_close(weights_of(trainer), weights_of(alone))


@pytest.mark.parametrize("rank_pair", rows(Shard, now=(Shard.GRADIENTS,)), indirect=True)
def test_every_loss_in_a_window_of_two_calls(
    rank_pair: tuple[Trainer, Trainer], tmp_path: Path
) -> None:
    """One step of each loss after the other: weights and moments go on."""
    for kind in LossKind:
        reports: list[StepReport] = []
        names: list[str] = []
        for trainer, ranks in zip(rank_pair, ((0,), (0, 1)), strict=True):
            for seed in (3, 4):
                batch = make_batch(seed, **OUTCOMES.get(kind, {}))
                loss = make_loss(batch, kind)
                plan = spread_over(trainer.prepare(batch, loss).plan, ranks)
                trainer.forward_backward(trainer.prepare(batch, loss, plan))
            names = list(trainer.model.named_trainable())
            written = [*names[:3], names[-1]]
            trainer.write_gradients(tmp_path / f"{kind} {len(ranks)}", written)
            divisor = {"divide_constant": 8.0} if kind is LossKind.DR_GRPO else {}
            step = make_step(trainer, loss, tensor_grad_norms=True, **divisor)
            reports.append(trainer.optim_step(step))
        one, two = reports
        assert two.loss == pytest.approx(one.loss, rel=1e-10, abs=1e-12), kind
        assert two.entropy == pytest.approx(one.entropy, rel=1e-10), kind
        assert [each.name for each in two.tensor_grad_norms] == names
        for mine, theirs in zip(two.tensor_grad_norms, one.tensor_grad_norms, strict=True):
            assert mine.norm == pytest.approx(theirs.norm, rel=1e-8), kind
        sums = [load_file(tmp_path / f"{kind} {count}") for count in (1, 2)]
        assert_close(sums[1], sums[0])
        assert_close(weights_of(rank_pair[1]), weights_of(rank_pair[0]))


@pytest.mark.parametrize("tuning", [None, pytest.param(_LORA, marks=pytest.mark.more)])
@pytest.mark.parametrize(
    ("kind", "shard"),
    [
        *((kind, Shard.GRADIENTS) for kind in OptimizerStates),
        (OptimizerStates.BF16_SPLIT_8BIT, Shard.STATES),
        *(pytest.param(kind, Shard.WEIGHTS, marks=pytest.mark.more) for kind in OptimizerStates),
    ],
)
def test_a_shared_out_step_has_the_bits_of_a_whole_one(
    base: FolderBase, kind: OptimizerStates, tuning: LoraTuning | None, shard: Shard
) -> None:
    """Rank 1 runs everything, and steps what is its own: the sums are those of one rank."""
    spec = replace(
        alone_of(base, dtype=ModelDtype.BFLOAT16, tuning=tuning).spec, optimizer_states=kind
    )
    with ranked(spec, 1, 4096) as (alone, _), ranked(spec, 2, 4096, shard) as (two, _):
        assert len(two.ranks.own.shares.own(weights_of(two))) > 1
        for seed in range(3):
            asked = {"tensor_grad_norms": True, "changed_share": True}
            one, many = (
                update_over(alone, seed, (0,), **asked),
                update_over(two, seed, (1,), **asked),
            )
            assert (many.grad_norm, many.changed_share) == (one.grad_norm, one.changed_share)
            assert many.tensor_grad_norms == one.tensor_grad_norms
            assert two.state_digest() == alone.state_digest()
        assert_equal(weights_of(two), weights_of(alone))


@pytest.mark.parametrize(
    "shard", [Shard.GRADIENTS, pytest.param(Shard.WEIGHTS, marks=pytest.mark.more)]
)
def test_the_same_again_has_the_same_bits(base: FolderBase, shard: Shard) -> None:
    spec = alone_of(base, dtype=ModelDtype.BFLOAT16).spec
    digests: list[str] = []
    for _ in range(2):
        with ranked(spec, 4, shard=shard) as (trainer, _):
            for seed in range(2):
                update_over(trainer, seed, (0, 1, 2, 3))
            digests.append(trainer.state_digest())
    assert digests[0] == digests[1]


def test_checkpoints_are_loaded_by_any_number_of_ranks(base: FolderBase, tmp_path: Path) -> None:
    """Four ranks, two or one load equal bits, whatever is sharded, and step from there."""
    spec = replace(
        alone_of(base, dtype=ModelDtype.BFLOAT16).spec, optimizer_states=OptimizerStates.BF16_SPLIT
    )
    digests: list[str] = []
    with ranked(spec, 4, shard=Shard.GRADIENTS) as (trainer, _):
        update_over(trainer, 0, (0, 1, 2, 3))
        trainer.snapshot().write(tmp_path / "four")
        assert len(list((tmp_path / "four").glob("states-*-of-00004.safetensors"))) == 4
        update_over(trainer, 1, (3,))
        digests.append(trainer.state_digest())
    with ranked(spec, 2, shard=Shard.WEIGHTS) as (trainer, _):
        trainer.load_checkpoint(tmp_path / "four")
        trainer.snapshot().write(tmp_path / "two")
        update_over(trainer, 1, (1,))
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
    update_over(alone, 1)
    assert digests == [alone.state_digest()] * 2


def test_a_forward_is_that_of_one_rank(rank_pair: tuple[Trainer, Trainer]) -> None:
    alone, two = rank_pair
    batch = make_batch(9)
    plan = spread_over(alone.prepare_forward(batch).plan, (0, 1))
    mine, one = (
        two.forward(two.prepare_forward(batch, plan), with_entropy=True, use_reference=True),
        alone.forward(
            alone.prepare_forward(batch, spread_over(plan, (0,))),
            with_entropy=True,
            use_reference=True,
        ),
    )
    assert mine.entropy is not None
    assert one.entropy is not None
    assert np.array_equal(mine.logprobs, one.logprobs)
    assert np.array_equal(mine.entropy, one.entropy)
    assert np.count_nonzero(one.logprobs) > 10
    assert mine.report.entropy == one.report.entropy


@pytest.mark.parametrize(
    ("adds", "shard"),
    [
        (False, Shard.STATES),
        (True, Shard.WEIGHTS),
        pytest.param(True, Shard.STATES, marks=pytest.mark.more),
    ],
)
def test_imported_weights_reach_every_rank(
    base: FolderBase, tmp_path: Path, adds: bool, shard: Shard
) -> None:
    spec = alone_of(base, dtype=ModelDtype.BFLOAT16).spec
    alone = Trainer.create(spec)
    (tmp_path / "weights").mkdir()
    export_weights(alone.model, tmp_path / "weights")
    with ranked(spec, 2, shard=shard) as (two, _):
        for trainer, ranks in ((alone, (0,)), (two, (1,))):
            update_over(trainer, 0, ranks)
            weights = trainer.read_weights(tmp_path / "weights", "")
            trainer.import_weights(weights, adds=adds, resets_optimizer=not adds)
            update_over(trainer, 1, ranks)
        assert two.state_digest() == alone.state_digest()
        assert_equal(weights_of(two), weights_of(alone))


def test_an_import_that_one_rank_cannot_add_changes_none(base: FolderBase, tmp_path: Path) -> None:
    spec = alone_of(base, dtype=ModelDtype.FLOAT32).spec
    (tmp_path / "weights").mkdir()
    far = Trainer.create(spec)
    last = list(far.model.named_trainable().values())[-1]
    last.data.fill_(1.2e38)
    export_weights(far.model, tmp_path / "weights")
    with ranked(spec, 2) as (two, (peer,)):
        two.import_weights(
            two.read_weights(tmp_path / "weights", ""), adds=False, resets_optimizer=False
        )
        before = two.state_digest()
        with pytest.raises(RatoonError, match="finite"):
            two.import_weights(
                two.read_weights(tmp_path / "weights", ""), adds=True, resets_optimizer=False
            )
        assert two.state_digest() == before
        # Nor does memory of it stay, on any rank.
        staged: MethodCall[object] = MethodCall("__getattribute__", ("_values",), {})
        assert [staged.on(two.ranks.own), peer.start(staged).result()] == [{}, {}]


def test_a_step_that_is_skipped_changes_no_rank(rank_pair: tuple[Trainer, Trainer]) -> None:
    _, two = rank_pair
    before, spec = two.state_digest(), two.spec
    two.spec = replace(spec, guard=NumericsGuard(max_grad_norm_to_step=1e-9))
    report = update_over(two, 5, (0, 1))
    two.spec = spec
    assert report.skip_reason is SkipReason.GRADIENT_NORM
    assert two.state_digest() == before
    assert update_over(two, 5, (0, 1)).grad_norm == report.grad_norm


@pytest.mark.parametrize(
    ("owner", "shard"),
    [
        (0, Shard.STATES),
        (1, Shard.GRADIENTS),
        pytest.param(1, Shard.WEIGHTS, marks=pytest.mark.more),
    ],
)
def test_a_step_that_is_not_finite_on_one_rank_changes_none(
    base: FolderBase, tmp_path: Path, shard: Shard, owner: int
) -> None:
    """The moments of one part are such; the other rank's share of the step would be sound."""
    spec = alone_of(base, dtype=ModelDtype.FLOAT32).spec
    with ranked(spec, 1, 100) as (alone, _):
        part = shared_out(parts_of(alone.model.named_trainable(), 100), 2)[owner][-1]
        alone.ranks.own.optimizer.state().exp_avg[part.name].fill_(3e38)
        alone.snapshot().write(tmp_path / "far")
    with ranked(spec, 2, 100, shard) as (two, _):
        assert not update_over(two, 1, (0, 1)).skipped
        two.snapshot().write(tmp_path / "sound")
        two.load_checkpoint(tmp_path / "far")
        before, weights = two.state_digest(), weights_of(two)
        report = update_over(two, 0, (0, 1), learning_rate=10.0)
        assert report.skip_reason is SkipReason.NON_FINITE_STEP
        assert report.grad_norm is not None
        assert (two.version, two.state_digest()) == (0, before)
        assert_equal(weights_of(two), weights)
        two.load_checkpoint(tmp_path / "sound")
        assert not update_over(two, 0, (0, 1)).skipped


def test_streamed_micro_batches_and_ranks_with_more_of_them_than_others(
    rank_pair: tuple[Trainer, Trainer],
) -> None:
    """Rank 0 has three of four; of stages some are not predicted from, and have no backward."""
    for seed in range(3):
        batch = make_batch(seed, num_groups=8)
        loss = make_loss(batch, kind=(LossKind.GRPO, LossKind.GSPO)[seed % 2])
        cuts = make_plan(*sequences_of(batch), 16, EAGER)
        assert any(part.stages for part in cuts.micro_batches)
        for trainer, ranks in zip(rank_pair, ((0,), (1, 0, 0, 0)), strict=True):
            step = make_step(trainer, loss)
            assert not trainer.update(
                trainer.prepare(batch, loss, spread_over(cuts, ranks)), step
            ).skipped
    assert_close(weights_of(rank_pair[1]), weights_of(rank_pair[0]))


def test_a_rank_keeps_the_sums_of_its_share_of_layers(base: FolderBase) -> None:
    spec = replace(alone_of(base, dtype=ModelDtype.BFLOAT16).spec, optimizer_states=None)
    alone = Trainer.create(spec)
    with ranked(spec, 4, 100, Shard.GRADIENTS) as (four, _):
        assert four.info().shard == four.fingerprint()["layout"] == "gradients"
        whole = {name: 4 * p.numel() for name, p in alone.model.named_trainable().items()}
        layers = {name for layer in alone.model.named_layers() for name in layer}
        in_layers = sum(whole[name] for name in layers)
        outside = sum(whole.values()) - in_layers
        assert min(in_layers, outside) > 0
        update_over(four, 0, (0, 1, 2, 3))
        kept = sum(each.nbytes for each in four.ranks.own.gradients.sums().values())
        assert kept - outside == pytest.approx(in_layers / 4, abs=4 * 100)


def test_a_rank_keeps_its_share_of_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And two layers at most beside it, while a pass runs; of the reference the same again."""
    spec = alone_of(PresetBase(name="tiny"), dtype=ModelDtype.BFLOAT16).spec
    alone = Trainer.create(spec)
    named = alone.model.named_trainable()
    layers = [sum(named[name].nbytes for name in names) for names in alone.model.named_layers()]
    seen: list[int] = []
    enter = LayerShards.enter

    def watched(shards: LayerShards, number: int, ahead: int | None) -> None:
        enter(shards, number, ahead)
        seen.append(shards.present_bytes)

    monkeypatch.setattr(LayerShards, "enter", watched)
    with ranked(spec, 4, 1024, Shard.WEIGHTS) as (four, _):
        shards = four.model.shards
        assert shards is not None
        assert shards.owned_bytes == pytest.approx(2 * sum(layers) / 4, rel=0.02)
        assert not update_over(four, 0, (0, 1, 2, 3)).skipped
        assert max(seen) == shards.ring_bytes == RING * max(layers) < sum(layers)
        kept = [p.untyped_storage().nbytes() for p in four.model.named_trainable().values()]
        assert sum(kept) == sum(p.nbytes for p in named.values()) - sum(layers)


def test_the_self_check_has_the_sums_to_itself(base: FolderBase) -> None:
    """It compares what rank 0 keeps, and leaves the sums of the update as they are."""
    digests: list[str] = []
    for every in (0, 1):
        with ranked(alone_of(base).spec, 2, 100, Shard.GRADIENTS) as (two, _):
            two.spec = replace(two.spec, self_check_every=every)
            report = update_over(two, 0, (0, 1))
            digests.append(two.state_digest())
    assert digests[0] == digests[1]
    found = report.self_check
    assert found is not None
    assert found.gradient_difference is not None
    assert 0 < found.gradient_difference < 1e-12
    assert found.worst_parameter in two.model.named_trainable()


def test_a_checkpoint_that_fails_stops_no_pass_beside_it(base: FolderBase, tmp_path: Path) -> None:
    with ranked(alone_of(base).spec, 2) as (two, (peer,)):
        snapshot = two.snapshot()
        two.ranks.own._held.clear()
        with pytest.raises(KeyError):
            snapshot.write(tmp_path / "two")
        assert not peer.is_stopped()
        assert not (tmp_path / "two").exists()
        assert not update_over(two, 0, (0, 1)).skipped


@pytest.mark.parametrize(
    ("tuning", "num_ranks", "shard", "is_merged"),
    [
        (None, 2, Shard.STATES, False),
        (None, 3, Shard.WEIGHTS, False),
        (_LORA, 2, Shard.STATES, False),
        (_LORA, 2, Shard.STATES, True),
        pytest.param(_LORA, 2, Shard.WEIGHTS, True, marks=pytest.mark.more),
    ],
)
def test_a_version_is_written_by_shares(
    base: FolderBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tuning: LoraTuning | None,
    num_ranks: int,
    shard: Shard,
    is_merged: bool,
) -> None:
    """As the weights were when they were held, in the bytes that one rank writes."""
    monkeypatch.setattr(safetensors_files, "_MIN_FILE_BYTES", FILE_BYTES)
    for name in ("whole", "shared", "again"):
        (tmp_path / name).mkdir()
    options = {} if tuning is None else {"tuning": tuning}
    spec = replace(alone_of(base, **options).spec, publishes_merged=is_merged)
    with ranked(spec, num_ranks, 100, shard) as (trainer, _):
        update_over(trainer, 0, tuple(range(num_ranks)))
        expected = export_weights(trainer.model, tmp_path / "whole", is_merged=is_merged)
        held = trainer.copy_weights()
        update_over(trainer, 1, tuple(range(num_ranks)))
        assert held.write(tmp_path / "shared") == expected
        shares = trainer.ranks.all(Rank.write_weights, str(tmp_path / "again"))
    assert sum(len(share) for share in shares) == len(expected)
    assert all(shares) == (tuning is None or is_merged)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "shared" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    ("num_ranks", "shard"), [(2, Shard.STATES), (3, Shard.GRADIENTS), (3, Shard.WEIGHTS)]
)
def test_ranks_make_a_delta_by_shares(
    base: FolderBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, shard: Shard
) -> None:
    """The bytes that the files give, before the files are there; whole parameters too that other
    ranks have parts of."""
    monkeypatch.setattr(safetensors_files, "_MIN_FILE_BYTES", FILE_BYTES)
    monkeypatch.setattr(deltas, "_MAX_SHARE", 1e9)
    monkeypatch.setattr(versions, "write_delta_apart", deltas.write_delta)
    spec = replace(alone_of(base).spec, compares_versions=True)
    roots = [tmp_path / "root", tmp_path / "files"]
    with ranked(spec, num_ranks, 100, shard) as (trainer, _):
        for version in range(3):
            held = trainer.copy_weights()
            names = "p", version, WeightKind.FULL
            announced = announce_version(roots[0], *names, held, 0.0)
            assert (announced is None) == (version == 0)
            manifest = publish_version(roots[0], *names, held.write, 0.0, announced=announced)
            by_files = publish_version(roots[1], *names, held.write, 0.0, deltas=True)
            assert manifest == by_files
            assert len(manifest.deltas) == (version > 0)
            update_over(trainer, version, tuple(range(num_ranks)))


def test_a_version_of_which_a_share_is_lost_is_not_there(base: FolderBase, tmp_path: Path) -> None:
    with ranked(alone_of(base).spec, 2) as (two, (peer,)):
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
