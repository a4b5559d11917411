"""The loop with vLLM, against the real service and a stand-in of the engine that samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from examples import vllm_loop
from ratoon_client import EngineError, RatoonClient, WeightManifest
from ratoon_proto.types import WeightKind
from tests.client.fake_engine import FILE, serving_engine
from tests.running_service import Service
from tests.sampling_engine import SamplingEngine

Rows = dict[str, list[dict[str, Any]]]


@contextmanager
def vllm_serving(service: Service, policy_id: str, folder: Path) -> Iterator[SamplingEngine]:
    """A stand-in of vLLM on version 0 of a new policy; its address is `url`."""
    with RatoonClient(f"grpc://{service.addresses.grpc}") as client:
        client.create_policy(policy_id, preset="tiny", seed=7).result()
        engine = SamplingEngine(client.pull_weights(policy_id, folder / "start").folder)
    with serving_engine(engine) as engine.url:
        yield engine


def run_vllm_loop(service: Service, engine: SamplingEngine, policy_id: str, *flags: str) -> Rows:
    """What it wrote, by event."""
    folder = engine.folder.parent
    out = folder / "out.jsonl"
    vllm_loop.main(
        [
            f"--url=grpc://{service.addresses.grpc}",
            f"--vllm={engine.url}",
            f"--policy={policy_id}",
            f"--root={folder}",
            f"--out={out}",
            *flags,
        ]
    )
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    events = ("update", "served", "evaluation", "failure")
    return {event: [row for row in rows if row["event"] == event] for event in events}


@pytest.mark.e2e
def test_vllm_follows_while_it_samples(service: Service, tmp_path: Path) -> None:
    flags = ["--versions=4", "--prompts=4", "--responses=4", "--evaluate-every=2", "--held-out=8"]
    with vllm_serving(service, "vllm-loop", tmp_path) as engine:
        # Steps so large that two versions can be told apart.
        rows = run_vllm_loop(service, engine, "vllm-loop", *flags, "--learning-rate=1e-3")
    with RatoonClient(f"grpc://{service.addresses.grpc}") as client:
        newest = client.pull_weights("vllm-loop", tmp_path / "newest")
    assert newest.version == 4
    assert engine.weights == (newest.folder / FILE).read_bytes()
    assert not engine.is_paused
    assert rows["failure"] == []

    updates = rows["update"]
    assert [row["version"] for row in updates] == [1, 2, 3, 4]
    # Each batch but the first was asked for before the version that it trains was made.
    assert updates[0]["staleness_max"] == 0
    assert all(1 <= row["staleness_max"] <= 4 for row in updates[1:])
    assert all(row["trained_tokens"] == 4 * 4 * 2 for row in updates)

    evaluations = rows["evaluation"]
    assert [row["version"] for row in evaluations] == [0, 2, 4]
    assert [row["other_version"] for row in evaluations] == [None, 0, 0]
    assert all(row["distance"] < 1e-4 for row in evaluations)
    assert all(row["other_distance"] > 1e-2 for row in evaluations[1:])

    served = [row["version"] for row in rows["served"]]
    assert served == sorted(set(served))
    assert {0, 2, 4} <= set(served)
    for row in rows["served"][1:]:
        assert row["first_token_s"] >= row["commit_s"] >= row["pause_s"] > 0


@pytest.mark.e2e
@pytest.mark.more
def test_samples_that_are_too_old_are_dropped_and_told(service: Service, tmp_path: Path) -> None:
    flags = ["--versions=3", "--prompts=2", "--responses=4", "--evaluate-every=1", "--held-out=4"]
    with vllm_serving(service, "vllm-strict", tmp_path) as engine:
        rows = run_vllm_loop(service, engine, "vllm-strict", *flags, "--max-staleness=0")
    # Each second batch is of the version before; a step that is skipped leaves the next one fresh.
    updates = rows["update"]
    assert [row["dropped_stale"] for row in updates] == [0, 8, 0, 8, 0]
    assert [row["skipped"] for row in updates] == [False, True, False, True, False]
    assert [row["version"] for row in updates] == [1, 1, 2, 2, 3]
    # After a step that was skipped nothing is new.
    assert [row["version"] for row in rows["evaluation"]] == [0, 1, 2, 3]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("control", [False, True], ids=["rewards", "shuffled"])
def test_it_learns_from_rewards_and_not_from_shuffled_ones(
    service: Service, tmp_path: Path, control: bool
) -> None:
    policy_id = f"vllm-{'control' if control else 'learns'}"
    flags = ["--versions=40", "--held-out=128", "--evaluate-every=40", "--learning-rate=2e-3"]
    with vllm_serving(service, policy_id, tmp_path) as engine:
        if control:
            flags.append("--shuffled-rewards")
        rows = run_vllm_loop(service, engine, policy_id, *flags)
    first, *_, last = (row["reward"] for row in rows["evaluation"])
    assert first < 0.06
    assert last < 0.06 if control else last > 0.15


class AdapterStub:
    """What is served while it commits; ends in `error`, if there is one."""

    def __init__(self) -> None:
        self.timed = vllm_loop.TimedAdapter(self, lambda: None)
        self.seen: list[vllm_loop.Served] = []
        self.error: Exception | None = None

    async def tag(self) -> str | None:
        return "stub"

    async def commit(
        self, folder: Path, manifest: WeightManifest, *, previous: Path | None
    ) -> float:
        self.seen.append(self.timed.served)
        if self.error is not None:
            raise self.error
        return 0.25


async def test_a_version_counts_as_served_once_its_commit_has_ended(tmp_path: Path) -> None:
    stub = AdapterStub()
    manifests = [
        WeightManifest(
            policy_id="p",
            version=version,
            kind=WeightKind.FULL,
            files=(),
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
            deltas=(),
        )
        for version in (3, 4)
    ]
    assert await stub.timed.commit(tmp_path, manifests[0], previous=None) == 0.25
    assert stub.timed.served == (3, 2)
    stub.error = EngineError("as told")
    with pytest.raises(EngineError, match="as told"):
        await stub.timed.commit(tmp_path, manifests[1], previous=None)
    assert stub.timed.served == (3, 4)
    assert stub.seen == [(-1, 1), (3, 3)]
    assert set(stub.timed.commits) == {3}


def test_a_sample_has_the_oldest_version_that_may_have_made_it() -> None:
    timed = AdapterStub().timed
    timed.served = vllm_loop.Served(3, 2)

    def answered_as(version: int, changes: int) -> str:
        timed.served = vllm_loop.Served(version, changes)
        return "answer"

    assert timed.versioned(lambda: "answer") == ("answer", 3, False)
    # A commit began, and went on: it may have ended between the engine and us.
    assert timed.versioned(lambda: answered_as(3, 3)) == ("answer", 3, True)
    assert timed.versioned(lambda: "answer") == ("answer", 3, True)
    assert timed.versioned(lambda: answered_as(4, 4)) == ("answer", 3, True)
    assert timed.versioned(lambda: "answer") == ("answer", 4, False)
