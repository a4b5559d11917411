"""Versions that callers name: published in their turn, and kept for as long as the name is."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

import pytest

from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.types import Acknowledgement, NamedVersion
from ratoon.errors import ErrorCode, RatoonError
from ratoon.metrics import PUBLISHED_VERSION, SELF_CHECK_GAUGES, SELF_CHECKS
from ratoon.stream.manifest import WeightManifest
from ratoon.stream.versions import list_versions, version_folder
from ratoon_proto.types import (
    OperationState,
    PublishConfig,
    PublishKind,
    Recovery,
    SelfCheckReport,
)
from tests.engine.conftest import MakeMachine
from tests.engine.harness import Machine, code_of, load, publish, save
from tests.engine.local_ports import POLICY
from tests.engine.refusals import raises
from tests.engine.test_recovery import lose_worker
from tests.until import until

ON_REQUEST = PublishConfig(kind=PublishKind.ON_REQUEST, every_n=1)


@pytest.fixture
async def quiet(make_machine: MakeMachine) -> Machine:
    """A policy that publishes nothing by itself."""
    return await make_machine(publish=ON_REQUEST, recovery=Recovery.REPLAY).start()


async def published(machine: Machine, seq: int, name: str, **options: Any) -> NamedVersion:
    ended = await machine.end(await machine.submit(seq, publish(name, **options), 0))
    assert isinstance(ended.result, NamedVersion), ended
    return ended.result


async def read(machine: Machine, name: str) -> tuple[int, list[float]]:
    """The version of a name, and the numbers of the steps that its files have."""
    manifest = await machine.controller.weight_manifest(None, name=name)
    folder = version_folder(machine.paths.weights, manifest.version)
    weights, version = json.loads((folder / "model.json").read_text())
    assert version == manifest.version
    return version, [number for numbers, _ in weights for number in numbers]


def on_disk(machine: Machine) -> tuple[int, ...]:
    return list_versions(machine.paths.weights)


async def listed(machine: Machine) -> dict[int, list[str]]:
    """Names by version, as callers see them."""
    found = await machine.controller.versions()
    return {info.version: [named.name for named in info.names] for info in found.versions}


async def collected(machine: Machine, *versions: int) -> None:
    """Until the disk has no other versions."""
    await until(lambda: on_disk(machine) == versions)


async def test_a_pipelined_caller_publishes_what_was_at_its_place(quiet: Machine) -> None:
    calls = [await quiet.update(1, 1), await quiet.submit(2, publish("a"), 0)]
    calls += [await quiet.forward_backward(3, 3), await quiet.submit(4, publish("open"), 0)]
    calls += [await quiet.step(5), await quiet.update(6, 6)]
    calls += [await quiet.submit(7, publish("b", ttl_s=60.0), 0)]
    calls += [await quiet.submit(8, publish("c"), 0), await quiet.update(9, 9)]
    ended = [await quiet.end(call) for call in calls]
    assert {operation.state for operation in ended} == {OperationState.DONE}
    results = [each.result for each in ended if isinstance(each.result, NamedVersion)]
    assert [(each.name, each.version) for each in results] == [
        *(("a", 1), ("open", 1), ("b", 3), ("c", 3))
    ]
    size_bytes = (version_folder(quiet.paths.weights, 3) / "model.json").stat().st_size
    assert (results[2].size_bytes, results[3].expires_at) == (size_bytes, None)
    assert results[2].expires_at == results[2].created_at + 60.0
    assert await read(quiet, "a") == await read(quiet, "open") == (1, [1.0])
    assert await read(quiet, "b") == await read(quiet, "c") == (3, [1.0, 3.0, 6.0])
    # Nothing else was published, and one state is one version.
    assert on_disk(quiet) == (1, 3)
    assert await listed(quiet) == {1: ["a", "open"], 3: ["b", "c"]}
    (info,) = (await quiet.controller.versions()).versions[1:]
    assert [each.expires_at is None for each in info.names] == [False, True]
    assert (await quiet.controller.weight_manifest(None)).version == 4, "written for the reader"


async def test_the_verdict_of_a_self_check_is_there_before_the_version(quiet: Machine) -> None:
    """The check of a version that is due comes before its files; a second name asks for nothing."""
    check = SelfCheckReport(tokens=3, logprob_max_difference=0.5, exceeds_limits=True, seconds=2.0)
    quiet.faults.checks[1] = check
    counted = SELF_CHECKS.sample(1, POLICY, "exceeded")
    await quiet.end(await quiet.update(1, 1))
    assert counted not in quiet.metrics.changes
    await published(quiet, 2, "first")
    changes = quiet.metrics.changes
    assert changes.index(counted) < changes.index(PUBLISHED_VERSION.sample(1, POLICY))
    shown = SELF_CHECK_GAUGES["logprob_max_difference"].sample(0.5, POLICY)
    assert changes.index(counted) < changes.index(shown)
    await published(quiet, 3, "second")
    assert quiet.metrics.changes.count(counted) == 1


async def test_a_named_version_outlives_the_retention_of_versions(
    make_machine: MakeMachine,
) -> None:
    machine = await make_machine(keep_versions=1).start()
    await machine.updates(1)
    await published(machine, 2, "first")
    await published(machine, 3, "second")
    for seq in (4, 5, 6):
        await machine.updates(seq)
    await machine.landed()
    assert (on_disk(machine), machine.run.published) == ((1, 4), (4,))
    assert await listed(machine) == {1: ["first", "second"], 4: []}
    assert (await machine.controller.weight_manifest(1)).version == 1
    deleted = await machine.controller.delete_version("first")
    assert (deleted.name, deleted.version) == ("first", 1)
    with raises(ErrorCode.WEIGHTS_NOT_FOUND, match="no version has the name first"):
        await machine.controller.delete_version("first")
    with raises(ErrorCode.WEIGHTS_NOT_FOUND):
        await machine.controller.weight_manifest(None, name="first")
    assert await read(machine, "second") == (1, [1.0])
    hold = Acknowledgement(receiver_id="r", version=None, holds_version=1, hold_s=60.0)
    await machine.controller.ack_weights(hold)
    await machine.controller.delete_version("second")
    checkpointer = machine.controller._turns._checkpointer
    await until(lambda: not checkpointer.must_collect)
    await machine.updates(7)
    await machine.landed()
    assert on_disk(machine) == (1, 5), "it is read"
    release = Acknowledgement(receiver_id="r", version=1, holds_version=None, hold_s=0.0)
    await machine.controller.ack_weights(release)
    await machine.updates(8)
    await machine.landed()
    assert on_disk(machine) == (6,)


async def test_names_and_files_survive_worker_and_controller(quiet: Machine) -> None:
    await quiet.updates(1)
    named = await published(quiet, 2, "kept")
    await quiet.updates(3, 4)
    await lose_worker(quiet)
    assert quiet.weights == [([number], 0.5) for number in (1.0, 3.0, 4.0)]
    assert await read(quiet, "kept") == (1, [1.0])
    again = await quiet.submit(2, publish("kept"), 0)
    assert again.result == named, "a retry is the first operation"
    await quiet.controller.delete_version("kept")
    await quiet.restart_controller()
    with raises(ErrorCode.WEIGHTS_NOT_FOUND):
        await quiet.controller.weight_manifest(None, name="kept")
    assert await listed(quiet) == {1: []}, "it is among the newest"


async def test_a_publication_is_never_ahead_of_the_journal(quiet: Machine) -> None:
    """Red with a version that was written after the worker had counted the operation's seq: once
    both processes were lost, its files told of an operation that the journal had not ended."""
    await quiet.updates(1)
    quiet.crashes.armed[CrashPoint.ENGINE_BEFORE_END] = 1
    operation = await quiet.submit(2, publish("a"), 0)
    await until(lambda: quiet.crashes.hits)
    await lose_worker(quiet)
    assert (await quiet.end(operation)).state is OperationState.DONE
    assert await read(quiet, "a") == (1, [1.0])


async def test_a_name_expires(quiet: Machine) -> None:
    await quiet.updates(1)
    await published(quiet, 2, "brief", ttl_s=0.2)
    await quiet.updates(3)
    await published(quiet, 4, "long", ttl_s=3600.0)
    await quiet.updates(5, 6)
    for seq, version in ((7, 4), (8, 5)):  # The first two are published no longer.
        assert (await quiet.controller.weight_manifest(None)).version == version
        await quiet.updates(seq)
    await quiet.landed()
    assert on_disk(quiet) == (1, 2, 4, 5)
    # A lifetime may be changed until it is over, and outlives its controller.
    for ttl_s in (0.1, None):
        await quiet.controller.set_ttl("long", ttl_s, of_version=True)
    await quiet.controller.set_ttl("brief", 3600.0, of_version=True)
    await asyncio.sleep(0.2)
    await quiet.controller.sweep()
    assert await read(quiet, "brief") == (1, [1.0])
    with raises(ErrorCode.WEIGHTS_NOT_FOUND):
        await quiet.controller.set_ttl("none", 60.0, of_version=True)
    await quiet.controller.set_ttl("brief", 0.1, of_version=True)
    await quiet.restart_controller()
    position = quiet.journal.store.history("p").policy.position
    await asyncio.sleep(0.2)
    await quiet.controller.sweep()
    await collected(quiet, 2, 4, 5)
    with raises(ErrorCode.WEIGHTS_NOT_FOUND):
        await quiet.controller.weight_manifest(None, name="brief")
    assert await read(quiet, "long") == (2, [1.0, 3.0])
    assert quiet.journal.store.history("p").policy.position > position, "files went by it"


async def test_a_name_in_use_is_taken_over_only_on_request(
    quiet: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await quiet.updates(1)
    await published(quiet, 2, "best")
    await quiet.updates(3)
    refused = await quiet.end(await quiet.submit(4, publish("best"), 0))
    assert code_of(refused) == ErrorCode.INVALID_ARGUMENT
    assert refused.result.error["message"] == (  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        "name: the policy has a version best already, of version 1; take another name, or"
        " overwrite it"
    )
    assert on_disk(quiet) == (1,), "nothing was written for it"

    async def full(*_: Any) -> WeightManifest:
        raise RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "disk full")

    with monkeypatch.context() as patched:
        patched.setattr(quiet.worker, "publish", full)
        failed = await quiet.end(await quiet.submit(5, publish("best", overwrite=True), 0))
    assert code_of(failed) == ErrorCode.RESOURCE_EXHAUSTED
    assert await read(quiet, "best") == (1, [1.0])
    await published(quiet, 6, "best", overwrite=True)
    assert await read(quiet, "best") == (2, [1.0, 3.0])
    assert await listed(quiet) == {1: [], 2: ["best"]}


async def test_a_state_that_is_back_is_its_version_again(quiet: Machine) -> None:
    await quiet.updates(1)
    await quiet.end(await quiet.submit(2, save("mine"), 0))
    await published(quiet, 3, "before")
    await quiet.updates(4)
    await published(quiet, 5, "between")
    await quiet.end(await quiet.submit(6, load("mine"), 0))
    assert (await published(quiet, 7, "after")).version == 1
    await quiet.updates(8)
    assert (await published(quiet, 9, "later")).version == 3
    assert await read(quiet, "after") == (1, [1.0])
    assert await read(quiet, "later") == (3, [1.0, 8.0])
    assert on_disk(quiet) == (1, 2, 3)


async def test_a_rollback_leaves_named_versions(make_machine: MakeMachine) -> None:
    """Whoever follows the policy gets the state that it is at; the name keeps the other one."""
    machine = await make_machine().start()
    await machine.updates(1)
    await machine.end(await machine.submit(2, save("mine"), 0))
    await machine.updates(3)
    await published(machine, 4, "lost")
    await machine.updates(5)
    await lose_worker(machine)
    assert machine.weights == [([1.0], 0.5)]
    assert await read(machine, "lost") == (2, [1.0, 3.0])
    assert (await machine.controller.weight_manifest(None)).version == 1
    assert await listed(machine) == {2: ["lost"], 1: []}
    await machine.updates(6)
    assert (await machine.controller.weight_manifest(None)).version == 4
    assert await read(machine, "lost") == (2, [1.0, 3.0])


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_damaged_named_version_is_written_again_while_its_state_is_there(
    make_machine: MakeMachine, *, restarts: bool
) -> None:
    changes: dict[str, Any] = {"publish": ON_REQUEST, "keep_versions": 1}
    machine = await make_machine(recovery=Recovery.REPLAY, **changes).start()
    await machine.updates(1)
    await machine.end(await machine.submit(2, save("mine"), 0))
    await published(machine, 3, "a")
    await machine.updates(4)
    await published(machine, 5, "b")
    await machine.end(await machine.submit(6, load("mine"), 0))
    assert machine.run.published == (2,), "only its name keeps the other"
    shutil.rmtree(version_folder(machine.paths.weights, 1))
    if restarts:
        await machine.restart_controller()
    assert await read(machine, "a") == (1, [1.0])
    await machine.updates(7)
    (version_folder(machine.paths.weights, 1) / "model.json").write_text("short")
    if restarts:
        await machine.restart_controller()
    for _ in range(2):
        with raises(ErrorCode.WEIGHTS_NOT_FOUND, match="version 1"):
            await machine.controller.weight_manifest(None, name="a")
    await machine.controller.delete_version("a")
    assert (await published(machine, 8, "a")).version == 3
    assert await listed(machine) == {2: ["b"], 3: ["a"]}


async def test_a_named_version_counts_against_the_reserve_of_the_disk(
    make_machine: MakeMachine,
) -> None:
    limits = {"min_free_disk_bytes": 2**62}
    machine = await make_machine(publish=ON_REQUEST, limits=limits).start()
    refused = await machine.end(await machine.submit(1, publish("a"), 0))
    assert code_of(refused) == ErrorCode.RESOURCE_EXHAUSTED
    assert (on_disk(machine), await listed(machine)) == ((), {})
    with raises(ErrorCode.RESOURCE_EXHAUSTED):  # Its turn is not next, so it is not accepted.
        await machine.submit(3, publish("b"), 0)
    machine.limits = machine.run.limits = machine.limits.model_copy(
        update={"min_free_disk_bytes": 0}
    )
    assert (await published(machine, 2, "a")).version == 0
