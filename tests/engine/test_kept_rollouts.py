"""Rollouts that a policy keeps of each step: what is chosen, read back, bounded and refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ratoon.engine.commands import ForwardBackwardCommand
from ratoon.engine.files import rollouts
from ratoon.engine.files.paths import PolicyPaths, make_policy_folders, policy_paths
from ratoon.engine.files.rollouts import read_rollout, read_rollouts, write_rollouts
from ratoon.engine.worker.runner import TaskRunner
from ratoon.engine.worker.tasks import Choices, Task
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import PresetBase
from ratoon.rollout.batch import RolloutBatch
from ratoon.rollout.serial import batch_to_bytes
from ratoon.train.rollout_figures import FoundRollouts
from ratoon.train.spec import NO_HOOKS
from ratoon.train.trainer import Trainer
from ratoon_proto.types import KeepRollouts, LossConfig, LossKind, StepResult
from tests.train.trainer_runs import forward_backward, make_batch, make_loss, make_trainer

# An id that is HTML and a terminal's escape, and longer than answers have it.
NASTY = "<script>\x1b[31m" + "x" * 2**20
WHOLE = 2**30


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return make_trainer(PresetBase(name="tiny"), tokens=60)


def _batch(**knobs: object) -> RolloutBatch:
    """Rewards, with a reward of its own for each rollout and an outlier among log-probs."""
    batch = make_batch(3, outcome="reward", vocab_size=200, policy_version=0, **knobs)
    assert batch.sampler_logprobs is not None
    logprobs = batch.sampler_logprobs.copy()
    logprobs[batch.response_offsets[1]] = -60.0
    return replace(
        batch,
        group_ids=(NASTY, *batch.group_ids[1:]),
        sampler_logprobs=logprobs,
        truncated=np.arange(batch.num_sequences) % 3 == 1,
    )


@pytest.fixture
def found(trainer: Trainer) -> Iterator[FoundRollouts]:
    batch = _batch(num_groups=4)
    forward_backward(trainer, batch, make_loss(batch, LossKind.GRPO, old_logprobs=None))
    assert trainer.found is not None
    yield trainer.found
    trainer.discard_gradients()


def _write(folder: Path, found: FoundRollouts, seq: int = 1, **changes: object) -> None:
    options: dict[str, object] = {"keep": KeepRollouts.ALL, "max_bytes": WHOLE}
    write_rollouts(folder, seq, found, frozenset(), **(options | changes))  # type: ignore[arg-type]


def test_a_kept_rollout_is_what_was_sent_and_found(tmp_path: Path, found: FoundRollouts) -> None:
    _write(tmp_path, found)
    batch, figures = found.prepared.batch, found.figures
    step = read_rollouts(tmp_path, 1)
    assert len(step.rollouts) == batch.num_sequences
    gaps, ratios = found.gaps().astype(np.float32), found.ratios().astype(np.float32)
    assert np.nanmax(np.abs(gaps)) > 50
    for s, listed in enumerate(step.rollouts):
        group, rollout = int(figures.group_S[s]), int(figures.rollout_S[s])
        assert (listed.group, listed.rollout) == (group, rollout)
        assert listed.group_id == batch.group_ids[group][:256]
        assert (len(listed.tokens), len(listed.gaps)) == (0, 0)
        whole = read_rollout(tmp_path, 1, group, rollout)
        own = slice(int(batch.response_offsets[s]), int(batch.response_offsets[s + 1]))
        assert whole.tokens == batch.sequence_tokens(s).tolist()
        assert batch.rewards is not None
        assert (whole.reward, whole.truncated) == (batch.rewards[s], bool(batch.truncated[s]))
        for name, column in (("gaps", gaps), ("ratios", ratios)):
            np.testing.assert_array_equal(getattr(whole, name), column[own])
        assert whole.trained == batch.loss_mask[own].tolist()
        assert whole.clipped == found.clipped()[own].tolist()
        advantages = found.prepared.columns.advantage_J[own].astype(np.float32)
        assert whole.advantages == advantages.tolist()
        if whole.HasField("gap_max"):
            # The file's floats are narrower than the figure.
            assert abs(whole.gaps[whole.gap_max_token]) == pytest.approx(whole.gap_max, rel=1e-6)
        assert whole.policy_version == 0
        assert not whole.dropped


def test_the_forest_is_that_of_all_rollouts(tmp_path: Path, found: FoundRollouts) -> None:
    """Also where few are kept: a leaf's path has the tokens of its rollout."""
    _write(tmp_path, found, keep=KeepRollouts.WORST)
    batch, step = found.prepared.batch, read_rollouts(tmp_path, 1)
    forest = step.forest
    assert batch.rewards is not None
    through: dict[int, list[float]] = {node: [] for node in range(len(forest.parent))}
    lengths = {(r.group, r.rollout): r.prompt_tokens + r.response_tokens for r in step.rollouts}
    _write(tmp_path, found, seq=2)
    for s, kept in enumerate(read_rollouts(tmp_path, 2).rollouts):
        node, length = kept.leaf, 0
        while node >= 0:
            through[node].append(batch.rewards[s])
            length += forest.num_tokens[node]
            assert forest.parent[node] < node
            node = forest.parent[node]
        assert length == kept.prompt_tokens + kept.response_tokens
        assert lengths.get((kept.group, kept.rollout), length) == length
    assert list(forest.num_rollouts) == [len(rewards) for rewards in through.values()]
    means = [float(np.mean(rewards)) for rewards in through.values()]
    assert list(forest.reward_mean) == pytest.approx(means)


def test_the_worst_are_those_that_anybody_would_look_for(
    tmp_path: Path, found: FoundRollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that a warning names, alone or with their group."""
    monkeypatch.setattr(rollouts, "NUM_WORST", 2)
    named = frozenset({(1, 0), (2, -1)})
    write_rollouts(tmp_path, 1, found, named, keep=KeepRollouts.WORST, max_bytes=WHOLE)
    kept = {(each.group, each.rollout) for each in read_rollouts(tmp_path, 1).rollouts}
    figures = found.figures
    places = list(zip(figures.group_S.tolist(), figures.rollout_S.tolist(), strict=True))
    wanted = {(1, 0), *(place for place in places if place[0] == 2)}
    for value_S in (
        figures.gap_max_S,
        np.abs(figures.advantage_S) * figures.length_S,
        figures.reward_S,
        -figures.reward_S,
    ):
        worst = sorted(
            (s for s in range(len(places)) if not np.isnan(value_S[s])), key=lambda s: -value_S[s]
        )
        wanted |= {places[s] for s in worst[:2]}
    assert kept == wanted
    assert len(kept) < len(places)


def test_bytes_are_bounded_and_the_oldest_go_first(tmp_path: Path, found: FoundRollouts) -> None:
    _write(tmp_path, found)
    size = (tmp_path / "1").stat().st_size
    for seq in (2, 3, 4):
        _write(tmp_path, found, seq, max_bytes=int(2.5 * size))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2.5 * size
    assert {path.name for path in tmp_path.iterdir()} == {"3", "4"}
    # A replay of what went comes too late, and changes nothing.
    _write(tmp_path, found, 2, max_bytes=int(2.5 * size))
    assert {path.name for path in tmp_path.iterdir()} == {"3", "4"}
    _write(tmp_path, found, 5, max_bytes=size // 2)
    assert {path.name for path in tmp_path.iterdir()} == {"5"}
    assert size // 4 < (tmp_path / "5").stat().st_size <= size // 2
    kept = read_rollouts(tmp_path, 5).rollouts
    assert 0 < len(kept) < found.prepared.batch.num_sequences
    worst = int(np.nanargmax(found.figures.gap_max_S))
    assert int(found.figures.group_S[worst]) in {each.group for each in kept}
    assert read_rollout(tmp_path, 5, kept[-1].group, kept[-1].rollout).tokens


@pytest.mark.parametrize("damage", [b"", b"\xff" * 99, "head", "block"])
def test_what_is_gone_or_damaged_is_refused_by_name(
    tmp_path: Path, found: FoundRollouts, damage: bytes | str
) -> None:
    with pytest.raises(RatoonError) as refused:
        read_rollouts(tmp_path, 7)
    assert (refused.value.code, refused.value.field) == (ErrorCode.ROLLOUTS_NOT_FOUND, "seq")
    _write(tmp_path, found, 7)
    with pytest.raises(RatoonError) as refused:
        read_rollout(tmp_path, 7, 2**31 - 1, 0)
    assert (refused.value.code, refused.value.field) == (ErrorCode.ROLLOUTS_NOT_FOUND, "rollout")
    path = tmp_path / "7"
    data = path.read_bytes()
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        place = 20 if damage == "head" else len(data) - 20
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    last = (int(found.figures.group_S[-1]), int(found.figures.rollout_S[-1]))
    with pytest.raises(RatoonError, match="damaged") as refused:
        read_rollout(tmp_path, 7, *last)
    assert refused.value.code is ErrorCode.ROLLOUTS_NOT_FOUND


def _run(trainer: Trainer, paths: PolicyPaths, keep: KeepRollouts) -> StepResult:
    """A ForwardBackward of seq 5 by the worker's runner."""
    data = batch_to_bytes(_batch(num_groups=2))
    digest = hashlib.sha256(data).hexdigest()
    paths.body(digest).write_bytes(data)
    loss = LossConfig(kind=LossKind.GRPO, report_groups=True)
    task = Task(
        operation_id="p.1",
        seq=5,
        command=ForwardBackwardCommand(loss=loss, expected_version=None, body_digest=digest),
        choices=Choices(),
        paths=paths,
        started_at=None,
    )
    spec = replace(trainer.spec, keep_rollouts=keep, keep_rollouts_bytes=WHOLE)
    runner = TaskRunner(spec, trainer)
    result = runner.plan(task).run(NO_HOOKS)
    trainer.discard_gradients()
    assert isinstance(result, StepResult)
    return result


def test_a_step_is_told_after_its_rollouts_are_kept(tmp_path: Path, trainer: Trainer) -> None:
    """A replay writes the same bytes again. A disk that fails costs the rollouts, not the step."""
    paths = policy_paths(tmp_path, "p")
    make_policy_folders(paths)
    _run(trainer, paths, KeepRollouts.NONE)
    assert list(paths.rollouts.iterdir()) == []
    report = _run(trainer, paths, KeepRollouts.WORST).report
    (path,) = paths.rollouts.iterdir()
    assert path.name == "5"
    data = path.read_bytes()
    path.unlink()
    assert _run(trainer, paths, KeepRollouts.WORST).report.loss == report.loss
    assert path.read_bytes() == data
    path.unlink()
    paths.rollouts.rmdir()
    paths.rollouts.write_bytes(b"no folder")
    assert _run(trainer, paths, KeepRollouts.WORST).report.loss == report.loss


def test_groups_are_reported_on_request(tmp_path: Path, trainer: Trainer) -> None:
    paths = policy_paths(tmp_path, "p")
    make_policy_folders(paths)
    groups = _run(trainer, paths, KeepRollouts.NONE).report.groups
    batch = _batch(num_groups=2)
    assert batch.rewards is not None
    assert [each.group_id for each in groups] == [name[:256] for name in batch.group_ids]
    for g, each in enumerate(groups):
        own = slice(int(batch.group_offsets[g]), int(batch.group_offsets[g + 1]))
        rewards, lengths = batch.rewards[own], np.diff(batch.response_offsets)[own]
        assert each.num_rollouts == len(rewards)
        assert each.reward_mean == pytest.approx(rewards.mean())
        assert each.reward_std == pytest.approx(rewards.std())
        assert (each.reward_min, each.reward_max) == (rewards.min(), rewards.max())
        assert each.response_length_mean == pytest.approx(lengths.mean())
        assert each.zero_variance == (len(rewards) > 1 and rewards.min() == rewards.max())
    batch = make_batch(3)
    assert forward_backward(trainer, batch, make_loss(batch)).groups == ()
    trainer.discard_gradients()
