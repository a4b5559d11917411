"""Versions into engines: the new one whole, or the one before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratoon_client import (
    EngineError,
    InvalidArgumentError,
    SglangAdapter,
    VllmAdapter,
)
from ratoon_client.weights.folder import COMMITTED_NAME
from ratoon_proto.types import WeightKind, WeightManifest
from tests.client.conftest import versions
from tests.client.fake_engine import FILE, ROOT, START, FakeEngine, HangError, serving_engine
from tests.client.receiver.conftest import WAIT_S, Rig, model
from tests.client.samples import manifest


async def test_an_engine_gets_the_version_in_one_pause(rig: Rig):
    receiver = rig.receiver()
    received = await receiver.sync_once()
    assert received is not None
    assert received.pause_s > 0
    assert rig.engine.sample() == model(1)
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(rig.root / "version-1")}}
    reads = ("/metrics", "/v1/models", "/is_paused")
    assert [call for call in rig.engine.calls if call[0] not in reads] == [
        ("/pause?mode=wait", None),
        ("/collective_rpc", load),
        ("/reset_prefix_cache", None),
        ("/resume", None),
    ]


@pytest.mark.parametrize(("path", "times"), [("/collective_rpc", 1), ("/reset_prefix_cache", 4)])
async def test_a_load_that_fails_is_undone(rig: Rig, path: str, times: int):
    """The engine has half of the new weights then."""
    receiver = rig.receiver()
    await receiver.sync_once()
    rig.publish(2)
    rig.engine.faults[path] = [500] * times
    with pytest.raises(EngineError, match=r"answered 500: .*version-1 is loaded again"):
        await receiver.sync_once()
    assert rig.engine.sample() == model(1)
    assert (rig.root / "latest" / FILE).read_bytes() == model(1)
    again = await receiver.sync_once()
    assert again is not None
    assert again.fetched_bytes == 0
    assert rig.engine.sample() == model(2)
    assert rig.engine.sampled == {model(1), model(2)}


async def test_a_first_load_that_fails_gives_back_the_engines_own_model(rig: Rig):
    rig.engine.faults["/collective_rpc"] = [500]
    with pytest.raises(EngineError, match=f"{ROOT} is loaded again"):
        await rig.receiver().sync_once()
    assert rig.engine.sample() == START


async def test_an_engine_that_takes_neither_version_stays_paused(rig: Rig):
    receiver = rig.receiver()
    await receiver.sync_once()
    rig.publish(2)
    rig.engine.faults["/collective_rpc"] = [500, 500]
    with pytest.raises(EngineError, match="the engine is left paused"):
        await receiver.sync_once()
    assert rig.engine.sample() is None
    # It has half of a version: a pause that fails does not end it.
    rig.engine.faults["/pause?mode=wait"] = [500]
    with pytest.raises(EngineError, match="/pause"):
        await receiver.sync_once()
    assert rig.engine.sample() is None
    await receiver.sync_once()
    assert rig.engine.sample() == model(2)


async def test_an_engine_whose_commit_failed_gets_the_old_version_where_it_is_the_newest(rig: Rig):
    """As after a LoadCheckpoint: what was committed last is no longer what the engine has."""
    receiver = rig.receiver()
    await receiver.sync_once()
    rig.publish(2)
    rig.engine.faults["/collective_rpc"] = [500, 500]
    with pytest.raises(EngineError, match="left paused"):
        await receiver.sync_once()
    rig.publish(1)
    assert await receiver.sync_once() is not None
    assert rig.engine.sample() == model(1)


async def test_a_reset_or_resume_that_fails_at_first_is_sent_again(rig: Rig):
    rig.engine.faults["/reset_prefix_cache"] = [503]
    rig.engine.faults["/resume"] = [500, ConnectionError()]
    await rig.receiver().sync_once()
    assert rig.engine.sample() == model(1)


@pytest.mark.parametrize("path", ["/pause?mode=wait", "/collective_rpc"])
async def test_an_engine_that_never_answers_is_given_up(rig: Rig, engine_url: str, path: str):
    with VllmAdapter(engine_url, drain_s=0.2, load_s=0.2, call_s=WAIT_S) as vllm:
        receiver = rig.client.weight_receiver("p", rig.root, vllm)
        await receiver.sync_once()
        rig.publish(2)
        rig.engine.faults[path] = [HangError()]
        with pytest.raises(EngineError, match=r"no answer to .*ReadTimeout"):
            await receiver.sync_once()
        assert rig.engine.sample() == model(1)
        await receiver.sync_once()
    assert rig.engine.sample() == model(2)


async def test_an_engine_that_dies_gets_the_version_when_it_is_back(rig: Rig):
    with serving_engine(rig.engine) as url:
        vllm = VllmAdapter(url, call_s=WAIT_S)
        receiver = rig.client.weight_receiver("p", rig.root, vllm)
        rig.engine.faults["/collective_rpc"] = [ConnectionError(), ConnectionError()]
        with pytest.raises(EngineError, match="left paused"):
            await receiver.sync_once()
    with pytest.raises(EngineError, match="no answer to /metrics"):
        await receiver.sync_once()
    rig.engine.start()
    with serving_engine(rig.engine, int(url.rpartition(":")[2])), vllm:
        await receiver.sync_once()
        assert rig.engine.sample() == model(1)


async def test_an_engine_that_restarted_gets_the_version_again(rig: Rig):
    receiver = rig.receiver()
    await receiver.sync_once()
    rig.engine.start()
    again = await receiver.sync_once()
    assert again is not None
    assert (again.version, again.fetched_bytes) == (1, 0)
    assert rig.engine.sample() == model(1)


async def test_a_receiver_that_restarted_commits_where_it_has_to(rig: Rig):
    await rig.receiver().sync_once()
    assert await rig.receiver().sync_once() is None
    # An engine whose metrics are off cannot tell.
    rig.engine.has_metrics = False
    assert await rig.receiver().sync_once() is not None
    rig.engine.has_metrics = True
    (rig.root / COMMITTED_NAME).write_text("[]")
    assert await rig.receiver().sync_once() is not None


async def test_refused_versions_do_not_push_out_the_served_one(rig: Rig):
    receiver = rig.receiver()
    await receiver.sync_once()
    for version in (2, 3, 4):
        rig.publish(version)
        rig.engine.faults["/collective_rpc"] = [500]
        with pytest.raises(EngineError, match="version-1 is loaded again"):
            await receiver.sync_once()
    assert versions(rig.root) == {"version-1", "version-4"}
    assert rig.engine.sample() == model(1)


def test_two_receivers_on_one_engine_are_refused(engine_url: str):
    port = engine_url.rpartition(":")[2]
    with VllmAdapter(engine_url):
        for url in (engine_url, f"http://localhost:{port}/", f"http://0.0.0.0:{port}"):
            with pytest.raises(EngineError, match="another receiver"):
                VllmAdapter(url)
        with pytest.raises(EngineError, match="another receiver"):
            SglangAdapter(engine_url)
    SglangAdapter(engine_url).close()


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:1", "127.0.0.1:1", "http://"])
def test_an_engine_needs_an_address(url: str):
    with pytest.raises(InvalidArgumentError, match="http://host:port"):
        VllmAdapter(url)


async def test_lora_versions_have_a_name_each(
    engine: FakeEngine, vllm: VllmAdapter, tmp_path: Path
):
    def lora(version: int, policy_id: str = "p") -> WeightManifest:
        return manifest(version, kind=WeightKind.ADAPTER, policy_id=policy_id)

    for policy_id in ("p-v1", "p"):
        for version in (1, 2):
            folder = tmp_path / f"version-{version}"
            assert await vllm.commit(folder, lora(version, policy_id), previous=None) == 0.0
    assert engine.loras == {
        "p-v1-v2": str(tmp_path / "version-2"),
        "p-v2": str(tmp_path / "version-2"),
    }
    # Again, as after a restart of the receiver: what was cached under the name goes too.
    await vllm.commit(tmp_path / "again", lora(2), previous=None)
    assert engine.loras["p-v2"] == str(tmp_path / "again")
    assert "/reset_prefix_cache" in engine.paths()
    assert "/pause?mode=wait" not in engine.paths()
    # One that is not taken leaves the one before it.
    engine.faults["/v1/load_lora_adapter"] = [500]
    with pytest.raises(EngineError, match="answered 500"):
        await vllm.commit(tmp_path / "bad", lora(3), previous=None)
    assert engine.loras["p-v2"] == str(tmp_path / "again")


async def test_sglang_is_told_of_the_folder_and_says_success(rig: Rig, sglang: SglangAdapter):
    receiver = rig.client.weight_receiver("p", rig.root, sglang)
    await receiver.sync_once()
    body = {"model_path": str(rig.root / "version-1"), "weight_version": "1"}
    assert ("/update_weights_from_disk", body) in rig.engine.calls
    assert await receiver.sync_once() is None
    rig.publish(2)
    rig.engine.faults["/update_weights_from_disk"] = [400]
    with pytest.raises(EngineError, match=r"answered 400: .*version-1 is loaded again"):
        await receiver.sync_once()
    assert (rig.engine.sample(), rig.engine.weight_version) == (model(1), "1")
    # 200 is not enough: the body tells.
    rig.engine.faults["/update_weights_from_disk"] = [200, 200]
    with pytest.raises(EngineError, match="what the engine serves is unknown"):
        await receiver.sync_once()
    await receiver.sync_once()
    assert rig.engine.sample() == model(2)
    rig.engine.start()
    await receiver.sync_once()
    assert rig.engine.sample() == model(2)
