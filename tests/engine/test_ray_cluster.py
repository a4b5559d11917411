"""What an engine on Ray makes of its settings, and how long it waits for its database."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
import ray
from pydantic import ValidationError
from sqlalchemy.exc import OperationalError

from ratoon.cluster import placement
from ratoon.cluster.placement import seen_by_ranks
from ratoon.cluster.ray_cluster import RayCluster, open_engine
from ratoon.config import RatoonConfig, load_config
from ratoon.engine.files.paths import make_policy_folders
from ratoon.engine.journal import tables
from ratoon.engine.refusals import is_waited_for
from ratoon.engine.settings import EngineSettings
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import ModelDtype
from ratoon.stream.files import remove_folder
from ratoon.train.spec import OptimizerStates
from ratoon_proto.types import ParallelLayout, Shard
from tests.engine.harness import policy_spec
from tests.engine.local_ports import Crash


@pytest.mark.parametrize("kind", list(OptimizerStates))
def test_optimizer_states_of_the_config_reach_bfloat16_policies_alone(
    kind: OptimizerStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are wider are their own masters."""
    monkeypatch.setenv("RATOON_WORKER__OPTIMIZER_STATES", kind.value)
    monkeypatch.setenv("RATOON_WORKER__DEVICE", "cpu")
    cluster = RayCluster(EngineSettings.from_config(load_config(None)))
    spec = policy_spec("p")
    for dtype, expected in (
        (ModelDtype.BFLOAT16, kind),
        (ModelDtype.FLOAT32, OptimizerStates.FP32),
    ):
        trainer = cluster.trainer(replace(spec, model=replace(spec.model, dtype=dtype)))
        assert trainer.optimizer_states is expected


async def test_sharded_weights_want_as_many_gpus_of_each_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "free_gpus_by_node", lambda: {"a": 2.0, "b": 1.0})
    monkeypatch.setattr(placement, "_RELEASE_S", 0.0)
    settings = EngineSettings.from_config(load_config(None))
    cluster, spec = RayCluster(replace(settings, device="cuda")), policy_spec("p")
    for shard in (None, *Shard):
        await cluster.check(replace(spec, parallel=ParallelLayout(num_workers=2, shard=shard)))
    three = replace(spec, parallel=ParallelLayout(num_workers=3, shard=Shard.GRADIENTS))
    await cluster.check(three)
    with pytest.raises(RatoonError, match=r"3 of one node, as.*by node: 2, 1") as caught:
        await cluster.check(replace(three, parallel=replace(three.parallel, shard=Shard.WEIGHTS)))
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    free = {"a": 3.0, "b": 2.0, "c": 0.0}
    monkeypatch.setattr(placement, "free_gpus_by_node", lambda: free)
    four = ParallelLayout(num_workers=4, shard=Shard.WEIGHTS)
    await cluster.check(replace(spec, parallel=four))
    with pytest.raises(RatoonError) as caught:
        await cluster.check(replace(spec, parallel=replace(four, num_workers=8)))
    assert caught.value.message == (
        "the policy wants 8 GPUs, 8 of one node or 4 of each of 2 nodes or 2 of each of 4 nodes, as"
        " ranks of a node share weights, 5 are free (by node: 3, 2, 0)"
    )


async def test_ranks_on_cpus_are_as_many_as_the_cluster_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ratoon.cluster.ray_cluster.cpus_by_node", lambda: {"a": 2, "b": 300})
    settings = EngineSettings.from_config(load_config(None))
    cluster, spec = RayCluster(replace(settings, device="cpu")), policy_spec("p")
    await cluster.check(replace(spec, parallel=ParallelLayout(num_workers=302)))
    with pytest.raises(RatoonError, match=r"at most 302, .*by node: 300, 2") as caught:
        await cluster.check(replace(spec, parallel=ParallelLayout(num_workers=303)))
    assert caught.value.field == "parallel.num_workers"


def test_what_an_interrupted_delete_left_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed DeletePolicy left all files under a temporary name, for ever."""
    settings = EngineSettings.from_config(RatoonConfig(data_root=tmp_path))
    paths = settings.paths("p")
    make_policy_folders(paths)

    def killed(_folder: Path) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(Crash):
            remove_folder(paths.root)
    (left,) = (tmp_path / "policies").iterdir()
    assert (left / "checkpoints").is_dir()
    open_engine(settings)
    assert list((tmp_path / "policies").iterdir()) == []


def test_a_cluster_whose_gpus_are_not_up_is_none_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes a CPU then, which a policy of a GPU must not come back on."""
    settings, free = EngineSettings.from_config(load_config(None)), {"GPU": 1.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: free)
    for device in ("auto", "cpu", "cuda"):
        RayCluster(replace(settings, device=device)).require_gpu()
    free.clear()
    for device in ("cpu", "cuda"):  # As the operator says; a lack of GPUs is told later.
        RayCluster(replace(settings, device=device)).require_gpu()
    with pytest.raises(RatoonError) as caught:
        RayCluster(replace(settings, device="auto")).require_gpu()
    assert is_waited_for(caught.value)


def test_a_rank_sees_its_own_gpu_first_and_those_of_its_node() -> None:
    assert seen_by_ranks([("a", "0"), ("a", "2"), ("a", "5")]) == ["0,2,5", "2,0,5", "5,0,2"]
    # Numbers are of a node.
    places = [("a", "0"), ("a", "1"), ("b", "0"), ("b", "3"), ("c", "1")]
    assert seen_by_ranks(places) == ["0,1", "1,0", "0,3", "3,0", "1"]


def test_memory_of_the_host_reaches_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_WORKER__HOST_ACTIVATION_BYTES", str(7 * 2**30))
    monkeypatch.setenv("RATOON_WORKER__DEVICE", "cpu")
    cluster = RayCluster(EngineSettings.from_config(load_config(None)))
    assert cluster.trainer(policy_spec("p")).host_activation_bytes == 7 * 2**30


def test_the_models_root_reaches_the_trainer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without it a cache of Hugging Face, whose files are links, would be refused."""
    monkeypatch.setenv("RATOON_MODELS_ROOT", str(tmp_path))
    monkeypatch.setenv("RATOON_WORKER__DEVICE", "cpu")
    cluster = RayCluster(EngineSettings.from_config(load_config(None)))
    assert cluster.trainer(policy_spec("p")).models_root == tmp_path


def test_unknown_optimizer_states_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_WORKER__OPTIMIZER_STATES", "fp8")
    with pytest.raises(ValidationError, match="optimizer_states"):
        load_config(None)


def test_what_fits_is_chosen_where_the_server_says_nothing() -> None:
    """The trainer chooses the states of bfloat16 policies."""
    settings = EngineSettings.from_config(load_config(None))
    assert settings.optimizer_states is None
    cluster, spec = RayCluster(replace(settings, device="cpu")), policy_spec("p")
    for dtype, expected in (
        (ModelDtype.BFLOAT16, None),
        (ModelDtype.FLOAT32, OptimizerStates.FP32),
    ):
        trainer = cluster.trainer(replace(spec, model=replace(spec.model, dtype=dtype)))
        assert trainer.optimizer_states is expected


@pytest.mark.parametrize(
    ("reason", "is_waited_for"),
    [
        ("connection refused", True),
        ("FATAL: the database system is starting up", True),
        ('FATAL: password authentication failed for user "r"', False),
    ],
)
def test_a_database_server_that_is_away_at_start_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, reason: str, is_waited_for: bool
) -> None:
    """The engine ended after a minute, and nothing started it again."""
    away = OperationalError("connect", {}, psycopg.OperationalError(reason))
    answers: list[object] = [away, away, "engine"]

    def open_database(_url: str) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(tables, "open_database", open_database)
    if is_waited_for:
        assert tables.await_database("postgresql://h/d") == "engine"
    else:
        with pytest.raises(OperationalError):
            tables.await_database("postgresql://h/d")
